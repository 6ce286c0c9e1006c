"""Micro-batches per optimizer step, and the batch that will really run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_core.plan import CONSTANT
from pichak_core.tune.accumulation import (
    DEFAULT_TARGET_TOKENS,
    MIN_UPDATES,
    grad_accum_for,
    plan_accumulation,
)


@pytest.mark.parametrize(
    ("target", "micro_batch", "per_row", "n"),
    [
        (65_536, 8, 512, 16),
        (64, 64, 1, 1),
        (64, 24, 1, 3),  # field case 57: 64 rows at 24 are 3 micro-batches, not 2
        (65_537, 8, 512, 17),
        (1, 8, 512, 1),
        (0.3, 1, 0.1, 3),
        (1000, 3, 33.4, 10),
    ],
)
def test_rounded_up_in_whole_micro_batches(target, micro_batch, per_row, n):
    got, source = grad_accum_for(target, micro_batch, per_row)
    assert got == n
    assert "whole micro-batches" in source


@given(target=st.floats(1, 1e7), micro_batch=st.integers(1, 512), per_row=st.floats(0.01, 16384))
def test_the_batch_never_shrinks_below_its_target_nor_grows_by_a_whole_micro_batch(
    target, micro_batch, per_row
):
    n, _ = grad_accum_for(target, micro_batch, per_row)
    assert n >= 1
    assert n * micro_batch * per_row >= target * (1 - 1e-9)
    if n > 1:
        assert (n - 1) * micro_batch * per_row < target


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 8, 512), "target_tokens"),
        ((100, 0, 512), "micro_batch"),
        ((100, 8, 0), "scored tokens per row"),
        ((math.inf, 8, 512), "target_tokens"),
        ((100, 8, math.nan), "scored tokens per row"),
    ],
)
def test_what_is_not_positive_is_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        grad_accum_for(*arguments)


def test_a_measured_scale_is_the_target():
    got = plan_accumulation(micro_batch=4, supervised_per_row=50.0, noise_tokens=1550.0)
    assert (got.grad_accum, got.rows, got.tokens) == (8, 32, 1600.0)
    assert got.target_tokens == 1550.0
    values = got.values()
    assert values["target_tokens"].measured
    assert "1,550" in values["target_tokens"].source
    assert values["effective_batch_rows"] == 32
    assert values["effective_batch_tokens"] == 1600.0
    assert not got.cut_for_updates
    assert got.notes == ()


@pytest.mark.parametrize(
    ("kind", "word"),
    [("coarse", "coarsely"), ("lower_bound", "a lower bound"), ("upper_bound", "an upper bound")],
)
def test_the_sentence_says_how_good_the_scale_is(kind, word):
    got = plan_accumulation(
        micro_batch=4, supervised_per_row=50.0, noise_tokens=1550.0, noise_kind=kind
    )
    assert word in got.target_source


def test_without_a_scale_the_constant_is_the_target_and_is_listed():
    got = plan_accumulation(micro_batch=8, supervised_per_row=512.0)
    assert (got.grad_accum, got.tokens) == (16, DEFAULT_TARGET_TOKENS)
    value = got.values()["target_tokens"]
    assert not value.measured
    assert value == 65_536
    assert value.source == CONSTANT


def test_a_small_corpus_cuts_the_target_for_its_updates():
    # 9,000 rows / 300 updates = 30 rows a step: 7 micro-batches of 4
    got = plan_accumulation(
        micro_batch=4, supervised_per_row=50.0, noise_tokens=100_000.0, rows_total=9000
    )
    assert (got.grad_accum, got.rows, got.tokens) == (7, 28, 1400.0)
    assert got.cut_for_updates
    assert got.updates == 9000 // 28 >= MIN_UPDATES
    assert "cut from 100,000" in got.target_source
    assert got.target_tokens == 1400.0


def test_a_corpus_large_enough_cuts_nothing():
    got = plan_accumulation(
        micro_batch=4, supervised_per_row=50.0, noise_tokens=1550.0, rows_total=32 * 300
    )
    assert (got.grad_accum, got.updates, got.cut_for_updates) == (8, 300, False)


def test_a_tiny_corpus_says_that_even_one_micro_batch_is_too_much():
    got = plan_accumulation(
        micro_batch=8, supervised_per_row=50.0, noise_tokens=1550.0, rows_total=100
    )
    assert (got.grad_accum, got.rows, got.updates) == (1, 8, 12)
    assert got.cut_for_updates
    assert any("only 12 full optimizer steps" in note for note in got.notes)
    got = plan_accumulation(
        micro_batch=8, supervised_per_row=50.0, noise_tokens=1550.0, rows_total=10
    )
    assert got.source.endswith("one pass over 10 rows is 1 update of 8 rows")


def test_a_micro_batch_far_above_the_target_is_said():
    # one-token labels: a noise scale of a few tokens
    got = plan_accumulation(micro_batch=64, supervised_per_row=1.0, noise_tokens=2.0)
    assert (got.grad_accum, got.tokens) == (1, 64.0)
    assert any("32.0 times the target" in note for note in got.notes)


@given(
    micro_batch=st.integers(1, 128),
    per_row=st.floats(0.5, 4096),
    noise=st.one_of(st.none(), st.floats(1, 1e6)),
    rows=st.integers(1, 10**6),
)
def test_the_printed_batch_is_the_one_that_runs(micro_batch, per_row, noise, rows):
    got = plan_accumulation(
        micro_batch=micro_batch, supervised_per_row=per_row, noise_tokens=noise, rows_total=rows
    )
    assert got.grad_accum >= 1
    assert got.rows == got.grad_accum * micro_batch
    assert got.tokens == pytest.approx(got.rows * per_row)
    assert got.updates == rows // got.rows
    if got.cut_for_updates and got.grad_accum > 1:
        assert got.updates >= MIN_UPDATES
        # one more micro-batch would have been too many
        assert rows // ((got.grad_accum + 1) * micro_batch) < MIN_UPDATES
    if got.updates < MIN_UPDATES:
        assert got.grad_accum == 1
        assert got.notes


@pytest.mark.parametrize("bad", [{"rows_total": 0}, {"min_updates": 0}, {"noise_tokens": 0.0}])
def test_plans_refuse_what_cannot_be(bad):
    with pytest.raises(ValueError, match=r"positive|at least 1"):
        plan_accumulation(**{"micro_batch": 4, "supervised_per_row": 50.0, **bad})
