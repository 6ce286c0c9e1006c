"""Bias, spread and coverage of the noise scale's estimates against a truth known in closed form.

The gradients are simulated and only their inner products handed to the code under test:
g_i = G + e_i with Var(e_i) = v_i Σ, Σ diagonal with a power-law spectrum and tr(Σ) = 1.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pichak_core.tune.noise import NoiseAccumulator
from pichak_core.tune.noise_estimators import (
    effective_count,
    estimate_from_gram,
    jackknife,
    ratio_interval,
    student_t_quantile,
)

SPECTRUM = 1.0 / np.arange(1, 65)
SPECTRUM /= SPECTRUM.sum()
MEAN_TOKENS = 100.0


def token_counts(rng, n, k, cv, mean=MEAN_TOKENS):
    """Log-normal counts of mean `mean` and coefficient of variation `cv`."""
    if cv == 0:
        return np.full((n, k), mean)
    s2 = math.log(1 + cv * cv)
    return np.exp(rng.normal(math.log(mean) - s2 / 2, math.sqrt(s2), (n, k)))


def signal(b_noise, along="spectrum"):
    """G with |G|² = tr(Σ) / B_noise, spread like the noise or along its largest direction."""
    shape = np.sqrt(SPECTRUM) if along == "spectrum" else np.eye(1, len(SPECTRUM))[0]
    return shape / math.sqrt(b_noise)


def grams(rng, variances, mean):
    """One k × k matrix of inner products for each row of `variances` (v_i)."""
    for v in variances:
        e = rng.standard_normal((len(v), len(mean))) * np.sqrt(SPECTRUM)
        g = mean + e * np.sqrt(v)[:, None]
        yield (g @ g.T).tolist()


def estimates(rng, tokens, variances, mean):
    pairs = zip(tokens, grams(rng, variances, mean), strict=True)
    return [estimate_from_gram(t.tolist(), gram) for t, gram in pairs]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_s_and_g2_are_unbiased_within_2_percent_for_unequal_micro_batches(cv):
    rng = np.random.default_rng(1)
    tokens = token_counts(rng, 2500, 16, cv)
    found = estimates(rng, tokens, 1 / tokens, signal(b_noise=200.0))
    # standard errors: 0.3 % of S, 0.4 % of |G|²
    assert np.mean([e.s_rob for e in found]) == pytest.approx(1.0, rel=0.02)
    assert np.mean([e.s_tok for e in found]) == pytest.approx(1.0, rel=0.02)
    assert np.mean([e.g2 for e in found]) == pytest.approx(1 / 200.0, rel=0.02)


def test_log_normal_counts_do_not_bend_the_median():
    # the equal-size formula with the mean count, on the same draws, reads several times too much
    rng = np.random.default_rng(2)
    s2 = 1.0  # σ = 1 of the logarithm
    tokens = token_counts(rng, 400, 64, math.sqrt(math.exp(s2) - 1), mean=500.0)
    ours, equal_size = [], []
    for t, gram in zip(tokens, grams(rng, 1 / tokens, signal(b_noise=4000.0)), strict=True):
        found = estimate_from_gram(t.tolist(), gram)
        ours.append(found.s_rob / found.g2)
        small, big, b = np.trace(gram) / 64, found.mean_sq, t.mean()
        equal_size.append((small - big) / (1 / b - 1 / t.sum()) / ((64 * big - small) / 63))
    assert np.median(ours) == pytest.approx(4000, rel=0.05)
    assert np.median(equal_size) > 8000


def correlated_rows(rng, n, k, rows, cv, rho):
    """Scored tokens and v_i of micro-batches of `rows` rows whose tokens share a row effect.

    A row of L tokens adds L G + L a + noise with Var(a) = rho Σ and token noise (1 − rho) Σ.
    """
    lengths = token_counts(rng, n, k * rows, cv).reshape(n, k, rows)
    tokens = lengths.sum(2)
    return tokens, ((1 - rho) * lengths + rho * lengths**2).sum(2) / tokens**2


@pytest.mark.parametrize("rho", [0.02, 0.3])
def test_correlation_inside_rows_is_part_of_s_and_of_the_design_effect(rho):
    # field case 61: the tokens of a sequence are not independent samples
    rng = np.random.default_rng(3)
    tokens, v = correlated_rows(rng, 600, 48, rows=4, cv=1.0, rho=rho)
    truth = (tokens**2 * v).sum(1) / tokens.sum(1)  # T·Var(Ĝ), in units of tr(Σ)
    g2 = float(truth.mean()) / 2400.0  # T = 8 × B_noise
    found = estimates(rng, tokens, v, signal(1 / g2))
    assert truth.mean() > 3  # the premise: the rows matter
    ratio = np.array([e.s_rob for e in found]) / truth
    assert ratio.mean() == pytest.approx(1.0, abs=0.02)
    as_if_independent = np.array([e.s_tok for e in found]) / truth
    assert as_if_independent.mean() < 0.9
    assert np.mean([e.g2 for e in found]) == pytest.approx(g2, rel=0.03)


def test_spread_of_the_token_form_is_the_least_and_of_the_row_form_what_its_weights_cost():
    rng = np.random.default_rng(4)
    tokens = token_counts(rng, 2500, 32, 1.0)
    gram_of = grams(rng, 1 / tokens, signal(b_noise=400.0))
    tok, rob, unweighted = [], [], []
    for t, gram in zip(tokens, gram_of, strict=True):
        found = estimate_from_gram(t.tolist(), gram)
        tok.append(found.s_tok)
        rob.append(found.s_rob)
        small = np.trace(gram) / 32  # mean |g|² with the harmonic mean of the counts
        unweighted.append((small - found.mean_sq) / ((1 / t).mean() - 1 / t.sum()))
    assert np.std(tok) < 0.9 * np.std(unweighted)
    # Σ t_i s_i / T with Var(s_i) alike: √(1 + cv²) = √2 of the equally weighted mean, or less
    assert np.std(rob) < math.sqrt(2.0) * 1.05 * np.std(tok)


def covered(rng, tokens, variances, mean, truths, confidence=0.9):
    """Of the intervals, the share that holds its truth, and the share unbounded above."""
    hits = unbounded = 0
    draws = zip(tokens, grams(rng, variances, mean), truths, strict=True)
    for t, gram, truth in draws:
        counts = t.tolist()
        freedom = max(1.0, math.floor(10 * (effective_count(counts) - 1)) / 10)
        quantile = student_t_quantile(confidence, freedom)
        low, high = ratio_interval(
            estimate_from_gram(counts, gram), jackknife(counts, gram), quantile
        )
        hits += low <= truth <= high
        unbounded += math.isinf(high)
    return hits / len(tokens), unbounded / len(tokens)


@pytest.mark.parametrize("ratio", [2.0, 4.0, 8.0])
def test_nominal_90_percent_covers_88_to_97(ratio):
    # pooled over the spread of the counts and the direction of the signal: 1,440 intervals, so a
    # standard error of 0.8 %; each case alone stands in validation/noise_estimators
    rng = np.random.default_rng(5)
    k = 24
    b_noise = k * MEAN_TOKENS / ratio
    shares = []
    for cv in (0.0, 0.5, 1.0, 2.0):
        for along in ("spectrum", "top"):
            tokens = token_counts(rng, 180, k, cv)
            mean = signal(b_noise, along)
            shares.append(covered(rng, tokens, 1 / tokens, mean, [b_noise] * 180)[0])
    assert 0.88 <= np.mean(shares) <= 0.97


def test_coverage_with_correlated_rows():
    rng = np.random.default_rng(6)
    tokens, v = correlated_rows(rng, 800, 24, rows=4, cv=0.7, rho=0.2)
    truth = (tokens**2 * v).sum(1) / tokens.sum(1)
    g2 = truth.mean() / (24 * 4 * MEAN_TOKENS / 4)
    share, _ = covered(rng, tokens, v, signal(1 / g2), truth / g2)
    assert 0.88 <= share <= 0.97


def test_a_higher_confidence_covers_more():
    rng = np.random.default_rng(7)
    tokens = token_counts(rng, 400, 16, 0.5)
    share, _ = covered(rng, tokens, 1 / tokens, signal(400.0), [400.0] * 400, confidence=0.99)
    assert share >= 0.96


def test_no_signal_is_unbounded_above_nine_times_in_ten_or_more():
    # a finite upper end would be a false claim to have seen a signal; one-sided 95 %
    rng = np.random.default_rng(8)
    tokens = token_counts(rng, 600, 16, 0.5)
    _, unbounded = covered(rng, tokens, 1 / tokens, np.zeros(64), [math.inf] * 600)
    assert unbounded >= 0.93


# float32's whole range of sizes; the fourth power of a float64 below 1e-77 is zero
numbers = st.one_of(st.just(0.0), st.floats(1e-45, 1e6), st.floats(-1e6, -1e-45))


@settings(max_examples=200)
@given(
    st.integers(1, 4).flatmap(
        lambda d: st.lists(
            st.tuples(st.lists(numbers, min_size=d, max_size=d), st.floats(1, 1e6)),
            min_size=2,
            max_size=8,
        )
    )
)
def test_whatever_the_gradients_the_batch_is_finite_and_positive_and_inside_its_interval(rows):
    kept = NoiseAccumulator()
    for grad, tokens in rows:
        kept.add(grad, tokens)
    if not any(any(g) for g, _ in rows):
        with pytest.raises(ValueError, match="exactly zero"):
            kept.result()
        return
    got = kept.result()
    assert math.isfinite(got.b_noise_tokens)
    assert got.b_noise_tokens > 0
    assert 0 <= got.low <= got.high
    assert got.trace_sigma >= 0
    assert got.low <= got.b_noise_tokens * (1 + 1e-9)
    assert got.b_noise_tokens <= got.high * (1 + 1e-9)
