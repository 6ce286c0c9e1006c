"""NoiseAccumulator, measure_noise_scale and NoiseScale: what they take, refuse, keep and say."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from pichak_core.tune.noise import (
    DEFAULT_K,
    NoiseAccumulator,
    NoiseScale,
    measure_noise_scale,
    noise_scale_from_norms,
)


def by_definition(g, t):
    total = t.sum()
    mean = t @ g / total
    s_rob = (t**2 * ((g - mean) ** 2).sum(1) / (1 - t / total)).sum() / total
    return s_rob, mean @ mean - s_rob / total


def gradients(seed=0, k=12, d=300, signal=0.3):
    rng = np.random.default_rng(seed)
    t = rng.integers(5, 60, k).astype(float)
    return signal + rng.standard_normal((k, d)) * 3 / np.sqrt(t)[:, None], t


def accumulated(g, t, wrap=lambda row: row.tolist(), **options):
    kept = NoiseAccumulator(**options)
    for row, tokens in zip(g, t, strict=True):
        kept.add(wrap(row), tokens)
    return kept.result()


def split(row, dtype=torch.float64):
    x = torch.tensor(row, dtype=dtype)
    return [x[:60].reshape(6, 10), None, x[60:61], x[61:].clone()]


WRAPS = {
    "list of floats": lambda row: row.tolist(),
    "tuple of lists": lambda row: (row[:7].tolist(), row[7:].reshape(1, -1).tolist()),
    "numpy": lambda row: row,
    "list of numpy": lambda row: [row[:7], row[7:]],
    "generator": lambda row: (part for part in (row[:7], row[7:])),
    "tensor": torch.tensor,
    "tensors and None": split,
    "transposed": lambda row: torch.tensor(row).reshape(10, 30).t(),
    "sparse": lambda row: [torch.tensor(row).to_sparse()],
    "mapping": lambda row: {"a": torch.tensor(row[:9]), "b": torch.tensor(row[9:])},
    "requires grad": lambda row: torch.tensor(row, requires_grad=True) * 1.0,
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_every_form_of_gradient_gives_the_estimate_of_the_definition(wrap):
    g, t = gradients()
    s, g2 = by_definition(g, t)
    got = accumulated(g, t, wrap)
    assert got.trace_sigma == pytest.approx(s, rel=1e-9)
    assert got.g2 == pytest.approx(g2, rel=1e-9)
    assert got.b_noise_tokens == pytest.approx(s / g2, rel=1e-9)
    assert (got.k, got.tokens, got.micro_tokens) == (12, t.sum(), t.mean())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exact_elements", [0, 1000, 1 << 20])  # all, some, none streamed
def test_streaming_and_keeping_whole_agree_in_every_dtype(dtype, exact_elements):
    g, t = gradients()
    stored = torch.tensor(g).to(dtype).double().numpy()  # what the dtype keeps of them
    s, g2 = by_definition(stored, t)
    got = accumulated(stored, t, lambda row: split(row, dtype), exact_elements=exact_elements)
    assert got.trace_sigma == pytest.approx(s, rel=1e-5)
    assert got.g2 == pytest.approx(g2, rel=1e-5)
    whole = accumulated(stored, t, lambda row: split(row, dtype))
    # 300 coordinates in 16,384 buckets: the sketch is almost free of collisions
    assert got.low == pytest.approx(whole.low, rel=0.05)
    assert got.high == pytest.approx(whole.high, rel=0.05)


def test_small_noise_beside_a_large_gradient_survives_streaming():
    rng = np.random.default_rng(0)
    t = rng.integers(5, 60, 16).astype(float)
    noise = (rng.standard_normal((16, 4000)) * 1e-2 / np.sqrt(t)[:, None]).astype(np.float32)
    g = (1.0 + noise).astype(np.float32)
    s, _ = by_definition(g.astype(float), t)
    got = accumulated(g, t, torch.tensor, exact_elements=0)
    assert got.trace_sigma == pytest.approx(s, rel=0.02)  # |g|² is 10^5 × the noise in it


def test_sum_device_holds_the_sums():
    g, t = gradients()
    got = accumulated(g, t, split, sum_device="cpu", exact_elements=0)
    assert got.trace_sigma == pytest.approx(by_definition(g, t)[0], rel=1e-5)


def test_the_callers_tensors_are_neither_changed_nor_kept():
    g, t = gradients(k=4)
    for exact_elements in (0, 1 << 20):
        kept = NoiseAccumulator(exact_elements=exact_elements)
        buffer = torch.zeros(300, dtype=torch.float64)
        for row, tokens in zip(g, t, strict=True):
            buffer.copy_(torch.tensor(row))
            kept.add([buffer], tokens)
            assert torch.equal(buffer, torch.tensor(row))
            buffer.fill_(1e9)  # the training loop reuses its .grad
        assert kept.result().trace_sigma == pytest.approx(by_definition(g, t)[0], rel=1e-5)


def test_plain_lists_need_no_torch():
    program = """
import sys
sys.modules["torch"] = None  # an import of it fails
import random
from pichak_core.tune.noise import measure_noise_scale
rng = random.Random(0)
print(measure_noise_scale(lambda i: ([1 + rng.gauss(0, 1) for _ in range(30)], 10)).kind)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "value"


def test_no_global_random_state_is_used():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    g, t = gradients()
    accumulated(g, t, split, exact_elements=0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_a_tensor_without_gradient_counts_as_zeros_wherever_it_appears():
    g, t = gradients(k=6, d=10)
    g[1, 4:] = g[0, 4:] = 0.0

    def wrap(row):
        x = torch.tensor(row)
        return [x[:4], x[4:] if row[4:].any() else None]

    for exact_elements in (0, 40, 1 << 20):
        got = accumulated(g, t, wrap, exact_elements=exact_elements)
        assert got.trace_sigma == pytest.approx(by_definition(g, t)[0], rel=1e-5)


def test_micro_batches_without_scored_tokens_are_skipped_and_counted():
    g, t = gradients()
    kept = NoiseAccumulator()
    kept.add([float("nan")] * 300, 0)  # the mean over no token
    for row, tokens in zip(g, t, strict=True):
        kept.add(row, tokens)
    kept.add(None, 0)
    got = kept.result()
    assert got.trace_sigma == pytest.approx(by_definition(g, t)[0], rel=1e-9)
    assert got.k == 12
    assert any("2 micro-batches scored no token" in note for note in got.notes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("exact_elements", [0, 1 << 20])
def test_a_gradient_that_is_not_finite_is_named_and_leaves_no_trace(bad, exact_elements):
    g, t = gradients()
    kept = NoiseAccumulator(exact_elements=exact_elements, names=["w", "gate", "one", "rest"])
    for row, tokens in zip(g, t, strict=True):
        broken = split(row)
        broken[3][5] = bad
        with pytest.raises(ValueError, match=rf"micro-batch {kept.k}: the gradient of rest is not"):
            kept.add(broken, tokens)
        kept.add(split(row), tokens)
    assert kept.result().trace_sigma == pytest.approx(by_definition(g, t)[0], rel=1e-5)


@pytest.mark.parametrize(
    ("grad", "tokens", "message"),
    [
        ([1.0, 2.0], -1, "micro-batch 1: -1 scored tokens"),
        ([1.0, 2.0], float("nan"), "micro-batch 1: nan scored tokens"),
        ([[1.0], [2.0]], 3, "micro-batch 1: 2 gradient tensors where there were 1"),
        ([1.0, 2.0, 3.0], 3, "micro-batch 1: tensor 0 has 3 elements where it had 2"),
        (torch.ones(2), 3, "or of another kind"),
        ([None, None], 3, "the gradient is empty"),
        ([], 3, "the gradient is empty"),
        (7, 3, "a gradient is a tensor or a list of tensors, not int"),
        ([torch.ones(2), [1.0]], 3, "torch tensors or plain numbers"),
        ([["x"]], 3, "str where a number was expected"),
        (torch.ones(2, dtype=torch.int64), 3, "torch.int64"),
        (torch.ones(2, device="meta"), 3, "meta device"),
    ],
)
def test_what_is_no_gradient_is_refused_with_its_reason(grad, tokens, message):
    kept = NoiseAccumulator()
    kept.add([1.0, 2.0], 5)
    with pytest.raises(ValueError, match=message):
        kept.add(grad, tokens)
    assert kept.k == 1


def test_fewer_than_two_micro_batches_are_no_measurement():
    kept = NoiseAccumulator()
    kept.add([1.0], 5)
    kept.add([1.0], 0)
    with pytest.raises(ValueError, match=r"at least 2 micro-batches, not 1 \(1 scored no token\)"):
        kept.result()


def test_gradients_that_are_all_zero_are_no_measurement():
    kept = NoiseAccumulator()
    kept.add([0.0, 0.0], 5)
    kept.add([0.0, 0.0], 5)
    with pytest.raises(ValueError, match="exactly zero"):
        kept.result()


def test_tensors_that_never_have_a_gradient_are_named():
    g, t = gradients(d=8)
    kept = NoiseAccumulator(names=["q.lora_A", "q.lora_B", "v.lora_A", "v.lora_B"])
    for row, tokens in zip(g, t, strict=True):
        zeros = torch.zeros(4)
        kept.add([zeros, torch.tensor(row[:4]), None, torch.tensor(row[4:])], tokens)
    notes = " ".join(kept.result().notes)
    assert "2 of 4 trained tensors have no gradient" in notes
    assert "q.lora_A, v.lora_A" in notes
    assert "q.lora_B" not in notes


def test_the_same_rows_twice_are_noticed():
    g, t = gradients()
    twice = accumulated(np.vstack([g, g[:3]]), np.append(t, t[:3]))
    assert any("3 micro-batches have exactly the gradient norm" in note for note in twice.notes)
    assert not any("exactly the gradient norm" in note for note in accumulated(g, t).notes)


def test_tokens_in_few_micro_batches_are_noticed():
    g, t = gradients()
    t[0] = 100 * t[1:].sum()
    notes = " ".join(accumulated(g, t).notes)
    assert "the 12 are worth 1.0 equal ones" in notes


# kinds


def test_micro_batches_that_do_not_differ_give_an_upper_bound():
    for exact_elements in (0, 1 << 20):
        kept = NoiseAccumulator(exact_elements=exact_elements)
        for tokens in (10, 20, 30, 25):
            kept.add([torch.full((500,), 0.1)], tokens)
        got = kept.result()
        assert (got.kind, got.b_noise_tokens, got.trace_sigma) == ("upper_bound", 21.25, 0.0)
        assert (got.low, got.high) == (0.0, 21.25)
        assert not got.resolved


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_gradients_that_cancel_give_a_lower_bound_and_never_a_negative_batch(pairs):
    # field case 61: the squared-norm estimate is negative
    rng = np.random.default_rng(1)
    kept = NoiseAccumulator()
    for _ in range(pairs):
        row = rng.standard_normal(40)
        kept.add(row, 10)
        kept.add(-row, 10)
    got = kept.result()
    assert got.g2 < 0
    assert (got.kind, got.b_noise_tokens) == ("lower_bound", 20.0 * pairs)
    assert 0 <= got.low <= got.b_noise_tokens
    assert math.isinf(got.high)
    assert "at least about T" in got.source


def test_a_total_below_twice_the_scale_is_coarse():
    g, t = gradients(signal=0.03, seed=3, k=40)
    s, g2 = by_definition(g, t)
    assert 0 < t.sum() < 2 * s / g2  # the premise
    got = accumulated(g, t)
    assert got.kind == "coarse"
    assert not got.resolved
    assert f"T is {t.sum() / (s / g2):.2g} × B_noise" in got.source


def test_two_micro_batches_say_nothing_of_the_spread():
    g, t = gradients(k=2, signal=2.0)
    got = accumulated(g, t)
    assert (got.low, got.high) == (0.0, math.inf)


def test_source_holds_the_numbers_and_the_interval():
    g, t = gradients()
    got = accumulated(g, t)
    assert got.kind == "value"
    assert got.low < got.b_noise_tokens < got.high
    for part in ("12 micro-batches", f"T = {t.sum():.0f}", "90 % interval", "design effect"):
        assert part in got.source


def made_in_every_kind():
    g, t = gradients()
    mirrored = accumulated(np.vstack([g, -g]), np.tile(t, 2))  # high = inf
    return [accumulated(g, t), mirrored, noise_scale_from_norms(2.0, 1.0, 10, 4)]


def test_json_round_trip():
    for made in made_in_every_kind():
        text = json.dumps(made.as_dict(), allow_nan=False)
        assert NoiseScale.from_dict(json.loads(text)) == made


@pytest.mark.parametrize(
    "record", [{}, {"b_noise_tokens": "x"}, {"kind": "perhaps"}, {"k": None}, {"low": "wide"}]
)
def test_records_that_are_no_noise_scale_are_refused(record):
    whole = noise_scale_from_norms(2.0, 1.0, 10, 4).as_dict()
    with pytest.raises(ValueError, match="not a noise scale"):
        NoiseScale.from_dict({**whole, **record} if record else record)


def test_as_value_carries_interval_unit_and_sentence():
    g, t = gradients()
    made = accumulated(g, t)
    value = made.as_value()
    assert (value.value, value.low, value.high) == (made.b_noise_tokens, made.low, made.high)
    assert value.unit == "scored tokens"
    assert value.measured


# two norms


def test_two_norms_with_equal_sizes_are_the_closed_form():
    g, _ = gradients(k=8)
    t = np.full(8, 25.0)
    s, g2 = by_definition(g, t)
    got = noise_scale_from_norms((g**2).sum(1).mean(), (g.mean(0) ** 2).sum(), 25, 8)
    assert (got.trace_sigma, got.g2) == pytest.approx((s, g2), rel=1e-9)
    assert (got.low, got.high) == (None, None)


@pytest.mark.parametrize(
    ("small", "big", "kind", "tokens"),
    [
        (2.0, 1.0, "value", 10 * (1.0 / (1 - 1 / 8)) / (6 / 7)),  # S/G² by hand
        (9.0, 1.0, "lower_bound", 80),  # below |g|²/k: G² < 0
        (8.0, 1.0, "lower_bound", 80),  # G² exactly 0
        (1.0, 1.0, "upper_bound", 10),  # S exactly 0
        (0.9, 1.0, "upper_bound", 10),
    ],
)
def test_two_norms_never_give_a_negative_or_infinite_batch(small, big, kind, tokens):
    # field case 61
    got = noise_scale_from_norms(small, big, 10, 8)
    assert got.kind == kind
    assert got.b_noise_tokens == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2.0, 1.0, 10, 1), "two batch sizes"),  # field case 61: it needs two different sizes
        ((2.0, 1.0, 0, 4), "two batch sizes"),
        ((float("nan"), 1.0, 10, 4), "g_small_sq"),
        ((2.0, -1.0, 10, 4), "g_big_sq"),
        ((0.0, 0.0, 10, 4), "both norms are zero"),
    ],
)
def test_two_norms_refuse_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        noise_scale_from_norms(*arguments)


# collecting


def stream(signal, seed=0, rows=10**6):
    rng = np.random.default_rng(seed)
    calls = []

    def grad_fn(i):
        if i >= rows:
            raise StopIteration
        calls.append(i)
        return (signal + rng.standard_normal(200)).tolist(), 10

    return grad_fn, calls


def test_a_clear_signal_ends_after_the_first_k():
    grad_fn, calls = stream(signal=1.0)
    got = measure_noise_scale(grad_fn)
    assert calls == list(range(DEFAULT_K))
    assert got.resolved
    assert "ended at 16 micro-batches" in got.notes[-1]


def test_a_weak_signal_is_collected_until_it_is_seen():
    grad_fn, calls = stream(signal=0.2)  # B_noise = 200·10/(200·0.04) = 250 tokens
    got = measure_noise_scale(grad_fn)
    assert len(calls) > DEFAULT_K
    assert got.resolved
    assert got.tokens >= 2 * got.b_noise_tokens
    assert got.high <= 4 * got.low


def test_no_signal_ends_at_the_limit_and_is_a_bound():
    grad_fn, calls = stream(signal=0.0)
    got = measure_noise_scale(grad_fn, max_micro_batches=40)
    assert len(calls) == got.k == 40
    assert not got.resolved
    assert math.isinf(got.high)
    assert "the limit of 40 micro-batches" in got.notes[-1]


def test_the_end_of_the_rows_ends_it():
    grad_fn, _ = stream(signal=0.0, rows=5)
    got = measure_noise_scale(grad_fn)
    assert got.k == 5
    assert "the rows ended after 5" in got.notes[-1]


def test_no_rows_at_all_are_no_measurement():
    grad_fn, _ = stream(signal=0.0, rows=0)
    with pytest.raises(ValueError, match="at least 2 micro-batches, not 0"):
        measure_noise_scale(grad_fn)


def test_the_budget_ends_it_and_its_cost_is_told():
    grad_fn, calls = stream(signal=0.0)
    now = iter(range(0, 1000, 10))
    got = measure_noise_scale(grad_fn, budget_seconds=60, clock=lambda: float(next(now)))
    assert 2 <= len(calls) <= 8
    assert got.seconds >= 60
    assert "the budget of 60 s" in got.notes[-1]


def test_the_budget_leaves_two_micro_batches():
    grad_fn, calls = stream(signal=0.0)
    measure_noise_scale(grad_fn, budget_seconds=0.0)
    assert len(calls) == 2


def test_identical_micro_batches_end_it():
    calls = []

    def grad_fn(i):
        calls.append(i)
        return [0.5, 0.25], 8

    got = measure_noise_scale(grad_fn)
    assert len(calls) == DEFAULT_K
    assert got.kind == "upper_bound"


def test_progress_is_told_for_each_micro_batch():
    grad_fn, _ = stream(signal=1.0)
    said = []
    measure_noise_scale(grad_fn, k=4, max_micro_batches=4, on_progress=said.append)
    assert said[-1] == "noise scale: micro-batch 4, 40 tokens"
    assert len(said) == 4


def test_an_error_of_the_users_passes_through():
    def grad_fn(i):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        measure_noise_scale(grad_fn)


def test_impossible_arguments():
    grad_fn, _ = stream(signal=1.0)
    with pytest.raises(ValueError, match="at least 2 micro-batches"):
        measure_noise_scale(grad_fn, k=1)
    with pytest.raises(ValueError, match="confidence"):
        measure_noise_scale(grad_fn, confidence=90)
    with pytest.raises(ValueError, match="buckets"):
        NoiseAccumulator(buckets=16)


def test_two_micro_batches_are_never_more_than_coarse() -> None:
    """Their own spread is unknown, whatever T is."""
    noise = NoiseAccumulator()
    for gradient in ([2.0, 0.1], [2.0, -0.1]):
        noise.add(gradient, 1000)
    found = noise.result()
    assert found.tokens > 2 * found.b_noise_tokens
    assert (found.kind, found.resolved) == ("coarse", False)
    assert "say nothing of their own spread" in found.source
    noise.add([2.0, 0.05], 1000)
    assert noise.result().kind == "value"
