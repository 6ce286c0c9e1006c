"""LoRA on the built-in transformer: what it leaves as it was, and what it adds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from pichak_core.workload.batches import mean_token_loss
from pichak_core.workload.lora import add_lora
from pichak_core.workload.transformer import Shape, Transformer, build_transformer

torch = pytest.importorskip("torch")

SMALL = Shape(vocabulary=61, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
RANK = 4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small lose by threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(dtype: Any = None) -> Transformer:
    return build_transformer(SMALL, seed=1, device="cpu", dtype=dtype or torch.float32)


def some_ids() -> Any:
    return torch.randint(61, (2, 15), generator=torch.Generator().manual_seed(2))


def test_it_starts_as_the_base_and_trains_the_factors_alone() -> None:
    base, adapted = model(), model()
    add_lora(adapted, RANK, seed=9)
    ids = some_ids()
    assert torch.equal(adapted.logits(ids), base.logits(ids))
    trained = dict(adapted.trained())
    assert len(trained) == 2 * 7 * SMALL.layers
    assert not any(weight.requires_grad for weight in adapted.weights.values())
    # rank × Σ(in + out) over the query, key, value, output, gate, up and down of each layer.
    sums = 64 + 48 + 48 + 64 + 80 + 80 + 80
    assert sum(t.numel() for t in trained.values()) == RANK * sums * SMALL.layers
    mean_token_loss(adapted.logits(ids), ids).backward()
    for name, tensor in trained.items():
        # With B = 0 nothing reaches A; B itself has a gradient.
        assert bool(tensor.grad.any()) == name.endswith("lora_b"), name
    assert all(weight.grad is None for weight in adapted.weights.values())


def test_factors_start_as_they_are_said_to() -> None:
    adapted = model()
    add_lora(adapted, RANK, seed=9)
    for name, (a, b) in adapted.adapters.items():
        out_features, in_features = SMALL.linears()[name]
        assert a.shape == (RANK, in_features)
        assert b.shape == (out_features, RANK)
        assert not b.any()
        bound = 1 / math.sqrt(in_features)
        assert 0.8 * bound < float(a.detach().abs().max()) <= bound


def test_an_adapted_linear_is_the_sum_of_base_and_product() -> None:
    adapted, merged = model(), model()
    add_lora(adapted, RANK, seed=9)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, (a, b) in adapted.adapters.items():
            b.normal_(0.0, 0.1, generator=generator)
            merged.weights[name] += b @ a
    ids = some_ids()
    torch.testing.assert_close(adapted.logits(ids), merged.logits(ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted.logits(ids), model().logits(ids), atol=1e-3)


def test_a_seed_is_the_same_factors_and_the_global_generator_stays() -> None:
    state = torch.get_rng_state()
    one, same = model(), model()
    add_lora(one, RANK, seed=9)
    add_lora(same, RANK, seed=9)
    assert torch.equal(torch.get_rng_state(), state)
    for (_, first), (_, second) in zip(one.trained(), same.trained(), strict=True):
        assert torch.equal(first, second)


def test_factors_over_a_bfloat16_base_are_float32() -> None:
    adapted = model(torch.bfloat16)
    add_lora(adapted, RANK, seed=9)
    assert {weight.dtype for weight in adapted.weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor in adapted.trained()} == {torch.float32}


def test_what_makes_no_adapter_is_refused() -> None:
    adapted = model()
    with pytest.raises(ValueError, match="at least 1, not 0"):
        add_lora(adapted, 0, seed=1)
    add_lora(adapted, 1, seed=1)
    with pytest.raises(ValueError, match="already has"):
        add_lora(adapted, 1, seed=1)
