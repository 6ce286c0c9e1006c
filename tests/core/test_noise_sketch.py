"""The count-sketch: inner products kept, nothing remembered of how tensors are cut."""

from __future__ import annotations

import math

import pytest
import torch

from pichak_core.tune.noise import NoiseAccumulator
from pichak_core.tune.noise_sketch import CountSketch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_short_vector_keeps_its_inner_products_exactly():
    # below one row every coordinate has a bucket of its own
    x, y = normal(1, 1000), normal(2, 1000)
    sketch = CountSketch(1024, seed=3)
    assert float(sketch.of([x]) @ sketch.of([y])) == pytest.approx(float(x @ y), rel=1e-4)


def test_sketches_are_linear_and_the_same_every_time():
    parts = [normal(1, 40, 100), None, normal(2, 5000)]
    others = [normal(3, 40, 100), None, normal(4, 5000)]
    sketch = CountSketch(1024, seed=3)
    total = [None if p is None else 2 * p + q for p, q in zip(parts, others, strict=True)]
    assert torch.allclose(sketch.of(total), 2 * sketch.of(parts) + sketch.of(others), atol=1e-4)
    assert torch.equal(sketch.of(parts), CountSketch(1024, seed=3).of(parts))
    assert not torch.equal(sketch.of(parts), CountSketch(1024, seed=4).of(parts))


@pytest.mark.parametrize("kind", ["normal", "one column of each row", "all ones"])
def test_inner_products_are_unbiased_with_the_variance_of_a_count_sketch(kind):
    buckets, size = 1024, 64 * 1024
    x, y = normal(1, size), normal(2, size) + 0.5 * normal(1, size)
    if kind == "one column of each row":  # aligned with the rows that the sketch cuts
        mask = torch.zeros(64, buckets)
        mask[:, 7] = 1.0
        x, y = x * mask.reshape(-1), y * mask.reshape(-1)
    elif kind == "all ones":
        x, y = torch.ones(size), torch.ones(size)
    exact = float(x @ y)
    spread = math.sqrt((float(x @ x) * float(y @ y) + exact**2) / buckets)
    errors = []
    for seed in range(200):
        sketch = CountSketch(buckets, seed)
        errors.append((float(sketch.of([x]) @ sketch.of([y])) - exact) / spread)
    errors = torch.tensor(errors)
    assert abs(float(errors.mean())) < 4 / math.sqrt(200)
    assert 0.3 < float(errors.pow(2).mean()) < 1.5  # 1, or less where coordinates cannot collide


def test_where_tensors_are_cut_does_not_matter_for_the_quality():
    x, y = normal(1, 100_000), normal(2, 100_000)
    cuts = [10, 999, 1, 5000, 93_990]
    sketch = CountSketch(4096, seed=0)
    got = float(sketch.of(list(x.split(cuts))) @ sketch.of(list(y.split(cuts))))
    spread = math.sqrt(float(x @ x) * float(y @ y) / 4096)
    assert abs(got - float(x @ y)) < 4 * spread


def test_half_precision_and_empty_tensors():
    x = normal(1, 3000)
    sketch = CountSketch(1024, seed=0)
    rounded = sketch.of([x.bfloat16().float()])
    assert torch.allclose(sketch.of([x.bfloat16(), torch.empty(0)]), rounded, atol=1e-5)


def test_too_few_buckets_are_refused():
    with pytest.raises(ValueError, match="at least 1,024 buckets"):
        CountSketch(512)


def trial(seed, spectrum, tokens, ratio, **options):
    """A noise scale from gradients with tr(Σ) = 1 and T = `ratio` × B_noise."""
    deviation = (spectrum / spectrum.sum()).sqrt()
    generator = torch.Generator().manual_seed(seed)
    signal = deviation * math.sqrt(ratio / sum(tokens))
    kept = NoiseAccumulator(**options)
    for t in tokens:
        noise = torch.randn(len(spectrum), generator=generator)
        kept.add(signal + deviation * noise / math.sqrt(t), t)
    return kept.result()


TOKENS = [20.0, 90.0, 300.0, 45.0, 60.0, 130.0, 75.0, 220.0, 30.0, 150.0, 110.0, 55.0]


@pytest.mark.parametrize("seed", range(3))
def test_at_a_hundred_thousand_dimensions_value_and_interval_are_those_of_the_whole(seed):
    spectrum = 1.0 / torch.arange(1, 100_001)
    whole = trial(seed, spectrum, TOKENS, 8.0)
    sketched = trial(seed, spectrum, TOKENS, 8.0, exact_elements=0)
    assert sketched.trace_sigma == pytest.approx(whole.trace_sigma, rel=1e-3)
    assert sketched.b_noise_tokens == pytest.approx(whole.b_noise_tokens, rel=1e-3)
    assert sketched.low == pytest.approx(whole.low, rel=0.05)
    assert sketched.high == pytest.approx(whole.high, rel=0.05)
    assert any("sketches of 16,384" in note for note in sketched.notes)


def test_noise_in_more_directions_than_buckets_gives_a_wider_interval_never_a_narrower_one():
    whole = trial(0, torch.ones(100_000), TOKENS, 4.0)
    sketched = trial(0, torch.ones(100_000), TOKENS, 4.0, exact_elements=0)
    assert sketched.low < whole.low < whole.high < sketched.high
    assert sketched.high < 1.1 * sketched.low  # and still narrow enough for any use


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [2.0, 4.0, 8.0])
def test_nominal_90_percent_covers_88_to_97_at_a_hundred_thousand_dimensions(ratio):
    spectrum = 1.0 / torch.arange(1, 100_001)
    truth, hits, n = sum(TOKENS) / ratio, 0, 300
    for seed in range(n):
        got = trial(seed, spectrum, TOKENS, ratio, exact_elements=0)
        assert got.b_noise_tokens > 0
        hits += got.low <= truth <= got.high
    assert 0.88 <= hits / n <= 0.97
