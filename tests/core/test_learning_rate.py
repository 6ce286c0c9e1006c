"""The learning rate from the smallest trained tensor and the batch."""

from __future__ import annotations

import math

import pytest
import torch

from pichak_core.plan import CONSTANT
from pichak_core.tune.learning_rate import (
    DEFAULT_DIVISOR,
    FULL_FINETUNE_DIVISOR,
    batch_factor,
    derive_lr,
    measure_rewrite,
    rewrite_scale,
)


def constant(value, *shape, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


WEIGHTS = [
    ("large", constant(2.0, 10, 10)),
    ("small", constant(-0.02, 40, 5)),  # ‖W‖/√numel of a constant is its size
    ("middle", constant(0.3, 7)),
]


def test_the_smallest_rms_binds():
    scale, binding, count = rewrite_scale(WEIGHTS)
    assert scale == pytest.approx(0.02, rel=1e-6)
    assert (binding, count) == ("small", 3)


def test_rate_for_adapters_and_for_a_models_own_weights():
    adapter = derive_lr(WEIGHTS)
    assert adapter.learning_rate == pytest.approx(0.02 / 32, rel=1e-6)
    assert (adapter.divisor, adapter.batch_factor, adapter.matrices) == (DEFAULT_DIVISOR, 1.0, 3)
    full = derive_lr(WEIGHTS, full_finetune=True)
    assert full.learning_rate == pytest.approx(0.02 / 320, rel=1e-6)
    assert full.divisor == FULL_FINETUNE_DIVISOR
    assert full.divisor_source.startswith(CONSTANT)  # listed as not measured
    assert "small" in full.source
    assert derive_lr(WEIGHTS, divisor=64).learning_rate == pytest.approx(0.02 / 64, rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "noise", "factor"),
    [
        (400, 1600, 0.5),
        (1600, 1600, 1.0),
        (10**6, 1600, 1.0),
        (1, 4, 0.5),
        (None, 5, 1.0),
        (5, None, 1.0),
    ],
)
def test_batches_below_the_scale_cut_and_larger_ones_never_raise(batch, noise, factor):
    got, why = batch_factor(batch, noise)
    assert got == pytest.approx(factor)
    assert why
    rate = derive_lr(WEIGHTS, batch_tokens=batch, noise_tokens=noise).learning_rate
    assert rate == pytest.approx(0.02 / 32 * factor, rel=1e-6)


@pytest.mark.parametrize("bad", [(0, 5), (5, -1), (math.inf, 5), (5, math.nan)])
def test_impossible_batches_are_refused(bad):
    with pytest.raises(ValueError, match="has to be a positive number"):
        batch_factor(*bad)


@pytest.mark.parametrize("divisor", [0, -1, math.nan])
def test_impossible_divisors_are_refused(divisor):
    with pytest.raises(ValueError, match="divisor"):
        derive_lr(WEIGHTS, divisor=divisor)


def test_all_zero_tensors_are_skipped_and_said():
    got = derive_lr([*WEIGHTS, ("q.lora_B", constant(0.0, 4, 4)), ("empty", torch.empty(0))])
    assert got.matrices == 3
    assert got.rewrite_scale == pytest.approx(0.02, rel=1e-6)
    assert any("2 trained tensors" in note and "q.lora_B" in note for note in got.notes)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_tensors_that_are_not_finite_are_skipped_and_said(bad):
    broken = constant(1e-6, 4, 4)
    broken[0, 0] = bad
    got = derive_lr([*WEIGHTS, ("broken", broken)])
    assert got.binding == "small"
    assert any("broken" in note for note in got.notes)


@pytest.mark.parametrize(
    "weights", [[], [("b", torch.zeros(3, 3))], [("n", torch.full((2,), math.nan))]]
)
def test_nothing_with_a_size_is_an_error(weights):
    with pytest.raises(ValueError, match="finite, non-zero norm"):
        derive_lr(weights)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 300.0),  # its square overflows float16
        (torch.float16, 1e-5),  # its square underflows float16
        (torch.bfloat16, 0.5),
        (torch.float32, 1e-30),  # its square underflows float32
        (torch.float64, 1e-3),
    ],
)
def test_norms_of_low_precision_tensors_are_taken_in_high_precision(dtype, value):
    weight = constant(value, 500, 700, dtype=dtype)
    kept = float(weight[0, 0].double())
    assert rewrite_scale([("w", weight)])[0] == pytest.approx(kept, rel=1e-6)


def test_a_generator_is_consumed_once():
    assert derive_lr((name, w) for name, w in WEIGHTS).matrices == 3


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.empty(3, 3, device="meta"), "w is on the meta device"),
        (torch.zeros(3, 3, dtype=torch.uint8), "w is quantised or not real"),
        (torch.zeros(3, 3, dtype=torch.int8), "w is quantised"),
        ("not a tensor", "w: str is not a tensor"),
    ],
)
def test_tensors_without_readable_values_are_refused_by_name(weight, message):
    with pytest.raises(ValueError, match=message):
        derive_lr([*WEIGHTS, ("w", weight)])


def test_frozen_tensors_beside_trained_ones_are_left_out():
    # PEFT: model.named_parameters() holds the frozen, quantised base as well
    adapter = torch.nn.Parameter(constant(0.5, 4, 8))
    base = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    tiny = torch.nn.Parameter(constant(1e-9, 8, 8), requires_grad=False)
    got = derive_lr([("base", base), ("tiny", tiny), ("lora_A", adapter)])
    assert (got.binding, got.matrices) == ("lora_A", 1)
    assert any("2 tensors do not require gradients" in note for note in got.notes)


class Weight:
    """Anything with a norm and a number of elements."""

    def norm(self):
        return 6.0

    def numel(self):
        return 9


def test_other_objects_with_norm_and_numel():
    assert rewrite_scale([("w", Weight())]) == (2.0, "w", 1)


def test_a_binding_vector_is_said_with_what_the_matrices_would_allow():
    got = measure_rewrite([("bias", constant(0.001, 64)), ("w", constant(0.1, 8, 8))])
    assert got.binding == "bias"
    assert any("100 times as much (w)" in note for note in got.notes)
    assert measure_rewrite(WEIGHTS).notes == ()


def test_a_linear_layer_as_torch_initialises_it():
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, bias=False)
    torch.set_rng_state(torch_state)
    # uniform in ±1/√256: rms = 1/(16 √3)
    want = 1 / (16 * math.sqrt(3))
    assert rewrite_scale(layer.named_parameters())[0] == pytest.approx(want, rel=0.01)


class TestNames:
    @pytest.mark.parametrize("measure", [derive_lr, rewrite_scale])
    @pytest.mark.parametrize(
        "weights",
        [
            [torch.ones(2, 2)],
            torch.ones(2, 2),
            torch.ones(()),
            [("w", torch.ones(2), 3)],
            ["ab"],
            [(torch.ones(2), torch.ones(2))],
            3,
        ],
    )
    def test_tensors_without_names_are_refused_in_a_sentence(self, measure, weights):
        with pytest.raises(TypeError, match=r"model\.named_parameters\(\)"):
            measure(weights)

    def test_a_dict_is_its_items(self):
        weights = {"a": torch.full((3, 3), 2.0), "b": torch.full((2, 2), 0.5)}
        assert rewrite_scale(weights) == (0.5, "b", 2)
        assert derive_lr(weights) == derive_lr(weights.items())
