"""The LoRA rank that the memory left allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pichak_core.tune.rank import RANK_LADDER, adapter_bytes_per_rank, auto_rank

SHAPES = [(1024, 1024), (4096, 1024), (1024, 4096)]
PER_RANK = 16 * (2048 + 5120 + 5120)


def test_bytes_are_those_of_real_adapters_with_adam():
    rank = 8
    parameters = []
    for out_features, in_features in SHAPES:
        parameters.append(torch.nn.Parameter(torch.zeros(rank, in_features)))
        parameters.append(torch.nn.Parameter(torch.zeros(out_features, rank)))
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    tensors = list(parameters) + [p.grad for p in parameters]
    tensors += [s for state in optimizer.state.values() for s in state.values() if s.ndim]
    assert sum(t.nbytes for t in tensors) == rank * adapter_bytes_per_rank(SHAPES)
    assert adapter_bytes_per_rank(SHAPES) == PER_RANK


def test_other_optimizers_keep_other_amounts():
    got = adapter_bytes_per_rank(SHAPES, bytes_per_param=2, optimizer_copies=3)
    assert got == PER_RANK // 16 * 6


@pytest.mark.parametrize("rank", RANK_LADDER)
def test_the_largest_that_fits_to_the_byte(rank):
    assert auto_rank(SHAPES, rank * PER_RANK)[0] == rank
    assert auto_rank(SHAPES, 2 * rank * PER_RANK - 1)[0] == rank


def test_the_sentence_says_what_the_next_would_need():
    rank, source = auto_rank(SHAPES, 20 * PER_RANK)
    assert rank == 16
    assert "rank 16 needs 3 of 4 MiB left" in source
    assert "32 would need 6 MiB" in source


def test_plenty_of_memory_is_bound_by_the_ladder_and_says_so():
    rank, source = auto_rank(SHAPES, 10**15)
    assert rank == 64
    assert "ladder" in source


@pytest.mark.parametrize("budget", [0, -5, 4 * PER_RANK - 1])
def test_too_little_for_the_smallest_expects_an_oom(budget):
    rank, source = auto_rank(SHAPES, budget)
    assert rank == 4
    assert source.startswith("does not fit, expect an OOM")


@given(budget=st.integers(0, 10**9), ladder=st.lists(st.integers(1, 256), min_size=1))
def test_any_ladder_in_any_order(budget, ladder):
    rank, _ = auto_rank(SHAPES, budget, ladder=ladder)
    fitting = [r for r in ladder if r * PER_RANK <= budget]
    assert rank == (max(fitting) if fitting else min(ladder))


def test_shapes_may_be_a_generator():
    assert auto_rank((s for s in SHAPES), 16 * PER_RANK)[0] == 16


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([], {}, "no adapted matrices"),
        ([(0, 5)], {}, "positive shape"),
        (SHAPES, {"ladder": ()}, "ladder"),
        (SHAPES, {"ladder": (4, 0)}, "ladder"),
        (SHAPES, {"optimizer_copies": 0}, "at least 1"),
    ],
)
def test_what_has_no_rank_is_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        auto_rank(shapes, 10**9, **options)
