"""Simulated gradients g_i = G + e_i with Var(e_i) = v_i Σ and tr(Σ) = 1, and what the library
makes of them. Each case returns its settings and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pichak_core.tune.noise import NoiseAccumulator, measure_noise_scale
from pichak_core.tune.noise_estimators import (
    effective_count,
    estimate_from_gram,
    jackknife,
    ratio_interval,
    student_t_quantile,
)

Array = np.ndarray[Any, np.dtype[np.float64]]

SEED = 20261130
CONFIDENCE = 0.9
MEAN_TOKENS = 100.0
DIMENSION = 64


def spectrum(name: str, dimension: int = DIMENSION) -> Array:
    """Eigenvalues of Σ, summing to 1."""
    values: Array = np.ones(dimension) if name == "flat" else 1.0 / np.arange(1, dimension + 1)
    values /= values.sum()
    return values


def direction(name: str, eigenvalues: Array) -> Array:
    """The unit vector of G: spread like the noise, or along its largest direction."""
    return np.sqrt(eigenvalues) if name == "like noise" else np.eye(1, len(eigenvalues))[0]


def token_counts(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> Array:
    """Log-normal counts with mean `MEAN_TOKENS` and coefficient of variation `cv`."""
    s2 = math.log1p(cv * cv)
    counts: Array = np.exp(rng.normal(math.log(MEAN_TOKENS) - s2 / 2, math.sqrt(s2), shape))
    return counts


@dataclass(frozen=True)
class Trial:
    """One measurement, as `NoiseAccumulator.result` makes it, and S from unweighted norms."""

    s_rob: float
    s_tok: float
    g2: float
    low: float
    high: float
    s_unweighted: float

    def holds(self, truth: float) -> bool:
        return self.low <= truth <= self.high


def measured(tokens: Array, gram: Array) -> Trial:
    """The shipped estimates and interval from all inner products."""
    counts, products = tokens.tolist(), gram.tolist()
    found = estimate_from_gram(counts, products)
    freedom = max(1.0, math.floor(10 * (effective_count(counts) - 1)) / 10)
    quantile = student_t_quantile(CONFIDENCE, freedom)
    low, high = ratio_interval(found, jackknife(counts, products), quantile)
    # E|g_i|² = |G|² + S/t_i, all micro-batches alike
    plain = (np.trace(gram) / len(tokens) - found.mean_sq) / (
        (1 / tokens).mean() - 1 / tokens.sum()
    )
    return Trial(found.s_rob, found.s_tok, found.g2, low, high, float(plain))


def simulate(
    rng: np.random.Generator, tokens: Array, variances: Array, eigenvalues: Array, mean: Array
) -> Iterator[Trial]:
    """One measurement for each row of `tokens`."""
    for t, v in zip(tokens, variances, strict=True):
        noise = rng.standard_normal((len(t), len(mean))) * np.sqrt(eigenvalues)
        g = mean + noise * np.sqrt(v)[:, None]
        yield measured(t, g @ g.T)


def case(
    rng: np.random.Generator,
    trials: int,
    *,
    k: int,
    cv: float,
    ratio: float,
    shape: str,
    along: str,
) -> dict[str, Any]:
    """Tokens independent: S = tr(Σ) = 1 and B_noise = k · MEAN_TOKENS / ratio, exactly."""
    eigenvalues = spectrum(shape)
    truth = k * MEAN_TOKENS / ratio
    tokens = token_counts(rng, (trials, k), cv)
    mean = direction(along, eigenvalues) / math.sqrt(truth)
    found = list(simulate(rng, tokens, 1 / tokens, eigenvalues, mean))
    s = np.array([f.s_rob for f in found])
    s_tok = np.array([f.s_tok for f in found])
    g2 = np.array([f.g2 for f in found]) * truth
    return {
        "trials": trials,
        "k": k,
        "cv": cv,
        "T/B": ratio,
        "noise": shape,
        "signal": along,
        "bias_s_rob": s.mean() - 1,
        "bias_s_tok": s_tok.mean() - 1,
        "bias_g2": g2.mean() - 1,
        "spread_s_rob": s.std(),
        "spread_s_tok": s_tok.std(),
        "spread_s_unweighted": np.std([f.s_unweighted for f in found]),
        "spread_g2": g2.std(),
        "g2_not_positive": float((g2 <= 0).mean()),
        "coverage": float(np.mean([f.holds(truth) for f in found])),
        "unbounded": float(np.mean([math.isinf(f.high) for f in found])),
    }


def row_case(
    rng: np.random.Generator, trials: int, *, k: int, rows: int, cv: float, rho: float
) -> dict[str, Any]:
    """Micro-batches of `rows` rows; a row of L tokens adds L G + L a + noise, Var(a) = rho Σ.

    Truth given the counts: T·Var(Ĝ) = Σ_rows (rho L² + (1 − rho) L) / T; in the population the same
    with expectations. T is 4 × the population's B_noise.
    """
    eigenvalues = spectrum("power law")
    lengths = token_counts(rng, (trials, k, rows), cv)
    tokens = lengths.sum(2)
    sums = (rho * lengths**2 + (1 - rho) * lengths).sum(2)
    given_counts = sums.sum(1) / tokens.sum(1)
    population = rho * MEAN_TOKENS * (1 + cv * cv) + 1 - rho
    g2 = population * 4 / (k * rows * MEAN_TOKENS)
    mean = direction("like noise", eigenvalues) * math.sqrt(g2)
    found = list(simulate(rng, tokens, sums / tokens**2, eigenvalues, mean))
    s = np.array([f.s_rob for f in found])
    s_tok = np.array([f.s_tok for f in found])
    pairs = list(zip(found, given_counts / g2, strict=True))
    return {
        "trials": trials,
        "k": k,
        "rows": rows,
        "row_cv": cv,
        "rho": rho,
        "s_rob_over_truth": float((s / given_counts).mean()),
        "s_rob_standard_error": float((s / given_counts).std() / math.sqrt(trials)),
        "s_tok_over_truth": float((s_tok / given_counts).mean()),
        "s_rob_over_population": float(s.mean() / population),
        "design_effect_median": float(np.median(s / s_tok)),
        "coverage": float(np.mean([f.holds(b) for f, b in pairs])),
        "coverage_of_population": float(np.mean([f.holds(population / g2) for f in found])),
    }


def sketch_case(
    trials: int, *, ratio: float, shape: str, dimension: int = 100_000
) -> dict[str, Any]:
    """Dimension 100,000, never kept whole: sums and sketches in `NoiseAccumulator`."""
    deviation = torch.tensor(np.sqrt(spectrum(shape, dimension)), dtype=torch.float32)
    rng = np.random.default_rng(SEED)
    generator = torch.Generator().manual_seed(SEED)
    hits, width = 0, []
    for _ in range(trials):
        tokens = token_counts(rng, (16,), 0.7)
        truth = float(tokens.sum()) / ratio
        kept = NoiseAccumulator(confidence=CONFIDENCE, exact_elements=0)
        for t in tokens.tolist():
            noise = torch.randn(dimension, generator=generator)
            kept.add(deviation * (noise / math.sqrt(t) + 1 / math.sqrt(truth)), t)
        got = kept.result()
        assert got.low is not None and got.high is not None
        hits += got.low <= truth <= got.high
        width.append(got.high / got.low if got.low > 0 else math.inf)
    return {
        "dimension": dimension,
        "noise": shape,
        "T/B": ratio,
        "k": 16,
        "cv": 0.7,
        "trials": trials,
        "coverage": hits / trials,
        "high_over_low_median": float(np.median(width)),
    }


def stopping_case(
    rng: np.random.Generator, trials: int, *, truth: float, cv: float, along: str
) -> dict[str, Any]:
    """`measure_noise_scale` decides itself how many micro-batches it takes."""
    eigenvalues = spectrum("power law", 16)
    mean = direction(along, eigenvalues) / math.sqrt(truth)

    def grad_fn(_: int) -> tuple[list[float], float]:
        t = float(token_counts(rng, (), cv))
        return (mean + rng.standard_normal(16) * np.sqrt(eigenvalues / t)).tolist(), t

    found = [measure_noise_scale(grad_fn, confidence=CONFIDENCE) for _ in range(trials)]
    held = [f.low is not None and f.high is not None and f.low <= truth <= f.high for f in found]
    return {
        "B_noise": truth,
        "cv": cv,
        "signal": along,
        "trials": trials,
        "coverage": float(np.mean(held)),
        "micro_batches_median": float(np.median([f.k for f in found])),
        "value_share": float(np.mean([f.kind == "value" for f in found])),
        "estimate_over_truth_5_50_95": [
            float(q) for q in np.percentile([f.b_noise_tokens / truth for f in found], [5, 50, 95])
        ],
        "least": min(f.b_noise_tokens for f in found),
        "largest": max(f.b_noise_tokens for f in found),
    }
