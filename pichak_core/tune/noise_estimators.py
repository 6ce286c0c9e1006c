"""The arithmetic of the gradient noise scale, on inner products alone.

k micro-batches with t_i scored tokens and mean gradients g_i; T = Σ t_i, Ĝ = Σ t_i g_i / T,
h_i = t_i / T. Everything here needs only the numbers |g_i|², g_i·g_j and |Ĝ|²:

    S_rob = (1/T) Σ t_i² |g_i − Ĝ|² / (1 − h_i)       T·Var(Ĝ), micro-batches independent
    S_tok = (Σ t_i |g_i|² − T |Ĝ|²) / (k − 1)         the same if all tokens were independent
    G²    = |Ĝ|² − S / T,   B_noise = S / G²

The formulas extend McCandlish et al. 2018 (arXiv:1812.06162, appendix A) to unequal t_i;
1/(1 − h_i) is the leverage correction known as HC2 (MacKinnon & White 1985).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Estimates:
    """S (row-robust and token form) and |G|² of one set of micro-batches.

    `s_rob` and `s_tok` are |gradient|² × tokens, `g2` and `mean_sq` (= |Ĝ|²) are |gradient|².
    `g2` is unbiased and may be negative. `tokens` is T.
    """

    s_rob: float
    s_tok: float
    g2: float
    mean_sq: float
    tokens: float


@dataclass(frozen=True)
class Covariance:
    """Variances and covariance of the estimates (S_rob, G²)."""

    ss: float
    sg: float
    gg: float


def estimate(
    tokens: Sequence[float], norms_sq: Sequence[float], mean_sq: float, dots: Sequence[float]
) -> Estimates:
    """S and G² from |g_i|², |Ĝ|² and `dots` = (g_i − Ĝ)·Ĝ. Needs k ≥ 2 and every t_i > 0."""
    total = math.fsum(tokens)
    weights = [t * t / (total - t) for t in tokens]
    deviations = [n - mean_sq - 2.0 * c for n, c in zip(norms_sq, dots, strict=True)]
    s_rob = math.fsum(map(mul, weights, deviations))
    s_tok = (math.fsum(map(mul, tokens, norms_sq)) - total * mean_sq) / (len(tokens) - 1)
    return Estimates(s_rob, s_tok, mean_sq - s_rob / total, mean_sq, total)


def estimate_from_gram(tokens: Sequence[float], gram: Matrix) -> Estimates:
    """S and G² from all inner products, `gram[i][j]` = g_i·g_j (k × k)."""
    total = math.fsum(tokens)
    with_sum = [math.fsum(map(mul, row, tokens)) for row in gram]
    mean_sq = math.fsum(map(mul, with_sum, tokens)) / total**2
    norms_sq = [gram[i][i] for i in range(len(tokens))]
    return estimate(tokens, norms_sq, mean_sq, [p / total - mean_sq for p in with_sum])


def calibrate_dots(
    tokens: Sequence[float], dots: Sequence[float], weighted: float, squared: float
) -> list[float]:
    """`dots` moved as little as possible so that Σ t_i c_i and Σ t_i² c_i are the exact ones.

    `dots` come from a sketch; `weighted` and `squared` from the two running sums. The change
    λ + μ t_i is the least-squares one when the error of c_i is proportional to 1/√t_i.
    """
    m1, m2, m3 = (math.fsum(t**p for t in tokens) for p in (1, 2, 3))
    short1 = weighted - math.fsum(map(mul, tokens, dots))
    short2 = squared - math.fsum(t * t * c for t, c in zip(tokens, dots, strict=True))
    det = m1 * m3 - m2 * m2
    if det <= 1e-12 * m1 * m3:  # equal t: both conditions are the same one
        return [c + short1 / m1 for c in dots]
    shift = (short1 * m3 - short2 * m2) / det
    slope = (short2 * m1 - short1 * m2) / det
    return [c + shift + slope * t for c, t in zip(dots, tokens, strict=True)]


def jackknife(tokens: Sequence[float], gram: Matrix) -> Covariance:
    """Delete-one jackknife covariance of (S_rob, G²) from all inner products; needs k ≥ 3.

    O(k²). With unequal t_i it errs on the wide side: the deletion of a large micro-batch also
    moves T.
    """
    k = len(tokens)
    total = math.fsum(tokens)
    with_sum = [math.fsum(map(mul, row, tokens)) for row in gram]
    sum_sq = math.fsum(map(mul, with_sum, tokens))
    norms_sq = [gram[i][i] for i in range(k)]
    squares = [t * t for t in tokens]
    s_left, g_left = [], []
    for i, t in enumerate(tokens):
        rest = total - t
        mean_sq = (sum_sq - 2.0 * t * with_sum[i] + t * t * norms_sq[i]) / rest**2
        # the deleted one's own denominator can be zero or negative, and its weight is 0
        weights = [q / (rest - u or 1.0) for q, u in zip(squares, tokens, strict=True)]
        weights[i] = 0.0
        cross = sum(map(mul, weights, with_sum)) - t * sum(map(mul, weights, gram[i]))
        s = sum(map(mul, weights, norms_sq)) + mean_sq * sum(weights) - 2.0 * cross / rest
        s_left.append(s)
        g_left.append(mean_sq - s / rest)
    s_mean, g_mean = math.fsum(s_left) / k, math.fsum(g_left) / k
    ds, dg = [s - s_mean for s in s_left], [g - g_mean for g in g_left]
    scale = (k - 1) / k
    return Covariance(
        scale * math.fsum(map(mul, ds, ds)),
        scale * math.fsum(map(mul, ds, dg)),
        scale * math.fsum(map(mul, dg, dg)),
    )


def effective_count(tokens: Sequence[float]) -> float:
    """T² / Σ t_i²: how many equal micro-batches the unequal ones are worth (Kish)."""
    return math.fsum(tokens) ** 2 / math.fsum(map(mul, tokens, tokens))


def ratio_interval(est: Estimates, cov: Covariance, quantile: float) -> tuple[float, float]:
    """The interval of B_noise, `high` being `math.inf` when it is unbounded above.

    Fieller's theorem: keep every B for which |Ĝ|² − S (1/B + 1/T), whose mean is zero at the true
    B, is within `quantile` standard errors of zero. The variance of |Ĝ|² is scaled to the value
    that B implies, for it grows with |Ĝ|²; with the variance at the estimate, a |Ĝ|² that came out
    small by chance would also seem precise, and a nominal 90 % interval covers 84 % when the
    gradient lies along the largest noise direction. With y = S (1/B + 1/T) / |Ĝ|²:

        (1 − y)² ≤ q² (y (v_a − c) + y² (v_s − c))

    v_a, v_s, c: relative variances of |Ĝ|² and S and their covariance. Needs S > 0.
    """
    a, s, total = est.mean_sq, est.s_rob, est.tokens
    if a <= 0.0:
        return total, math.inf
    v_a = (cov.gg + 2.0 * cov.sg / total + cov.ss / total**2) / (a * a)
    v_s = cov.ss / (s * s)
    c = (cov.sg + cov.ss / total) / (a * s)
    q2 = quantile * quantile
    square, linear = 1.0 - q2 * (v_s - c), 2.0 + q2 * (v_a - c)
    root = math.sqrt(max(0.0, linear * linear - 4.0 * square))
    y_low = 2.0 / (linear + root)
    y_high = (linear + root) / (2.0 * square) if square > 0.0 else math.inf
    inverse_high = y_low * a / s - 1.0 / total
    inverse_low = y_high * a / s - 1.0 / total
    high = 1.0 / inverse_high if inverse_high > 0.0 else math.inf
    if inverse_low <= 0.0:
        # |Ĝ|² is below what noise alone would give: no B is credible, the least wrong are large
        return total, math.inf
    return 1.0 / inverse_low, high


@lru_cache(maxsize=4096)
def student_t_quantile(confidence: float, freedom: float) -> float:
    """The t with P(|X| ≤ t) = `confidence` for `freedom` > 0 degrees of freedom (any real)."""
    if not 0.0 < confidence < 1.0 or not freedom > 0.0:
        raise ValueError(f"no Student quantile for confidence {confidence}, freedom {freedom}")
    low, high = 0.0, 1.0
    while _t_tails(high, freedom) > 1.0 - confidence:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _t_tails(middle, freedom) > 1.0 - confidence:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _t_tails(t: float, freedom: float) -> float:
    """P(|X| > t) = I_x(freedom/2, 1/2) at x = freedom / (freedom + t²)."""
    x = freedom / (freedom + t * t)
    a, b = 0.5 * freedom, 0.5
    if x < (a + 1.0) / (a + b + 2.0):
        return _beta_fraction(a, b, x)
    return 1.0 - _beta_fraction(b, a, 1.0 - x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta by its continued fraction (DLMF 8.17.22), Lentz's method."""
    if x <= 0.0:
        return 0.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1.0 / ((1.0 - (a + b) * x / (a + 1.0)) or tiny)
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or tiny)
            c = (1.0 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return math.exp(log_front) * value / a
