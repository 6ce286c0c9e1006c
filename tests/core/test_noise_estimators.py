"""The noise scale's arithmetic against brute force, closed forms and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pichak_core.tune.noise_estimators import (
    Covariance,
    Estimates,
    calibrate_dots,
    effective_count,
    estimate,
    estimate_from_gram,
    jackknife,
    ratio_interval,
    student_t_quantile,
)


def by_definition(g, t):
    """S_rob, S_tok and G² from the gradients themselves, as the formulas are written."""
    total = t.sum()
    mean = t @ g / total
    s_rob = (t**2 * ((g - mean) ** 2).sum(1) / (1 - t / total)).sum() / total
    s_tok = (t @ (g**2).sum(1) - total * mean @ mean) / (len(t) - 1)
    return s_rob, s_tok, mean @ mean - s_rob / total


def draw(seed, k=9, d=7, high=60):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((k, d)) + 0.5, rng.integers(1, high, k).astype(float)


@pytest.mark.parametrize("seed", range(5))
def test_estimates_follow_the_definition(seed):
    g, t = draw(seed)
    got = estimate_from_gram(t.tolist(), (g @ g.T).tolist())
    assert (got.s_rob, got.s_tok, got.g2) == pytest.approx(by_definition(g, t), rel=1e-12)


def test_both_forms_agree_with_the_sample_variance_when_sizes_are_equal():
    g, _ = draw(3)
    k, b = len(g), 12.0
    got = estimate_from_gram([b] * k, (g @ g.T).tolist())
    variance = g.var(axis=0, ddof=1).sum()  # Var of one micro-batch mean; S = b · Var
    assert got.s_rob == pytest.approx(b * variance, rel=1e-12)
    assert got.s_tok == pytest.approx(b * variance, rel=1e-12)
    assert got.g2 == pytest.approx((g.mean(0) ** 2).sum() - variance / k, rel=1e-12)


def test_a_micro_batch_split_in_two_equal_halves_of_the_same_gradient_keeps_the_mean():
    g, t = draw(4)
    whole = estimate_from_gram(t.tolist(), (g @ g.T).tolist())
    halves, split = np.vstack([g, g[-1:]]), np.append(t, t[-1] / 2)
    split[-2] /= 2
    got = estimate_from_gram(split.tolist(), (halves @ halves.T).tolist())
    assert got.mean_sq == pytest.approx(whole.mean_sq, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_jackknife_is_the_deletion_of_each_micro_batch(seed):
    g, t = draw(seed, k=6)
    left = []
    for i in range(len(t)):
        s, _, g2 = by_definition(np.delete(g, i, 0), np.delete(t, i))
        left.append((s, g2))
    d = np.array(left) - np.mean(left, axis=0)
    want = (len(t) - 1) / len(t) * d.T @ d
    got = jackknife(t.tolist(), (g @ g.T).tolist())
    assert [got.ss, got.sg, got.gg] == pytest.approx([want[0, 0], want[0, 1], want[1, 1]], rel=1e-9)


def test_small_noise_beside_a_large_gradient_is_not_lost_to_rounding():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((8, 50)) * 1e-5
    t = rng.integers(5, 50, 8).astype(float)
    g = 1.0 + noise
    want, _, _ = by_definition(noise, t)  # S does not depend on the mean
    got = estimate_from_gram(t.tolist(), (g @ g.T).tolist())
    assert got.s_rob == pytest.approx(want, rel=1e-4)


def test_dots_already_exact_are_left_alone_and_wrong_ones_are_moved_onto_both_sums():
    t = [3.0, 8.0, 1.0, 20.0]
    exact = [0.4, -0.3, 0.9, 0.013]
    first = sum(a * b for a, b in zip(t, exact, strict=True))
    second = sum(a * a * b for a, b in zip(t, exact, strict=True))
    assert calibrate_dots(t, exact, first, second) == pytest.approx(exact, rel=1e-12)
    moved = calibrate_dots(t, [0.5, -0.2, 0.7, 0.1], first, second)
    assert sum(a * b for a, b in zip(t, moved, strict=True)) == pytest.approx(first)
    assert sum(a * a * b for a, b in zip(t, moved, strict=True)) == pytest.approx(second)
    # λ + μ t restores an error of that very form completely
    off = [c + 0.1 - 0.02 * a for a, c in zip(t, exact, strict=True)]
    assert calibrate_dots(t, off, first, second) == pytest.approx(exact, rel=1e-9)


def test_dots_with_equal_sizes_use_the_one_condition_there_is():
    got = calibrate_dots([5.0] * 4, [1.0, 2.0, 3.0, 4.0], 0.0, 0.0)
    assert got == pytest.approx([-1.5, -0.5, 0.5, 1.5])


@pytest.mark.parametrize(
    ("tokens", "count"), [([7.0] * 5, 5.0), ([1.0, 1.0, 2.0], 16 / 6), ([1e9, 1.0], 1.0)]
)
def test_effective_count(tokens, count):
    assert effective_count(tokens) == pytest.approx(count, rel=1e-6)


@pytest.mark.parametrize("freedom", [0.7, 1.0, 2.0, 3.3, 14.5, 250.0])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_student_quantile_against_scipy(confidence, freedom):
    want = stats.t.ppf(0.5 + confidence / 2, freedom)
    assert student_t_quantile(confidence, freedom) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 3.0), (1.0, 3.0), (0.9, 0.0)])
def test_student_quantile_refuses_what_has_none(confidence, freedom):
    with pytest.raises(ValueError, match="no Student quantile"):
        student_t_quantile(confidence, freedom)


def estimates(s, g2, total):
    return Estimates(s, s, g2, g2 + s / total, total)


def test_interval_ends_are_where_the_hypothesis_is_just_rejected():
    est, cov, q = estimates(40.0, 2.0, 100.0), Covariance(9.0, -0.2, 0.09), 1.7
    low, high = ratio_interval(est, cov, q)
    assert low < 20.0 < high
    v_a = (cov.gg + 2 * cov.sg / 100 + cov.ss / 100**2) / est.mean_sq**2
    v_s = cov.ss / 40.0**2
    c = (cov.sg + cov.ss / 100) / (est.mean_sq * 40.0)
    for b in (low, high):
        y = 40.0 * (1 / b + 1 / 100.0) / est.mean_sq
        assert (1 - y) ** 2 == pytest.approx(q * q * (y * (v_a - c) + y * y * (v_s - c)), rel=1e-9)


def test_interval_shrinks_onto_the_ratio_as_the_variance_goes():
    est = estimates(40.0, 2.0, 100.0)
    for scale in (1e-2, 1e-4, 1e-6):
        low, high = ratio_interval(est, Covariance(9.0 * scale, 0.0, 0.09 * scale), 1.7)
        # delta method: relative variance of S/G² with independent S and G²
        width = 1.7 * 20.0 * math.sqrt(9.0 * scale / 1600 + 0.09 * scale / 4)
        assert high - low == pytest.approx(2 * width, rel=0.05)


def test_interval_says_unbounded_when_the_signal_may_be_zero():
    low, high = ratio_interval(estimates(40.0, 0.05, 100.0), Covariance(1.0, 0.0, 0.04), 1.7)
    assert math.isinf(high)
    assert 0 < low < 800


def test_interval_reaches_down_to_zero_when_s_may_be_zero():
    low, _ = ratio_interval(estimates(1.0, 2.0, 100.0), Covariance(4.0, 0.0, 1e-4), 1.7)
    assert low == 0.0


def test_interval_is_finite_and_not_negative_for_a_hopelessly_negative_signal():
    low, high = ratio_interval(estimates(40.0, -0.39, 100.0), Covariance(0.01, 0.0, 1e-6), 1.7)
    assert low == 100.0
    assert math.isinf(high)


def test_streamed_dots_give_the_same_estimates_as_the_gram():
    g, t = draw(11)
    mean = t @ g / t.sum()
    dots = (g @ mean - mean @ mean).tolist()
    streamed = estimate(t.tolist(), (g**2).sum(1).tolist(), float(mean @ mean), dots)
    whole = estimate_from_gram(t.tolist(), (g @ g.T).tolist())
    assert streamed.s_rob == pytest.approx(whole.s_rob, rel=1e-12)
    assert streamed.g2 == pytest.approx(whole.g2, rel=1e-9)
