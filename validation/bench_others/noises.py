"""Each tool's gradient noise scale on simulated gradients whose own is known.

A row of t tokens has the mean gradient G + e, Var(e) = v Σ with tr(Σ) = 1 and
v = (1 − rho)/t + rho: tokens are independent, or share `rho` of their variance within the row.
The noise scale of batches made of such rows is T·Var(Ĝ)/|G|² with T·Var(Ĝ) = Σ t_i² v_i / T.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

SEED, DIMENSION, MEAN_TOKENS, TRUTH, TRIALS = 20261130, 64, 250.0, 4000.0, 400
#: (rows, coefficient of variation of their tokens, share of the variance within rows).
CASES = [(64, 0.0, 0.0), (64, 0.5, 0.0), (64, 1.0, 0.0), (64, 2.0, 0.0), (16, 1.0, 0.0)]
CASES += [(64, 1.0, 0.01)]
OURS = "Pichak Fleet"

#: (B_noise in tokens, S where the tool gives it, whether the tool says it is only a bound).
Reading = tuple[float, float | None, bool]
Read = Callable[[torch.Tensor, list[float]], Reading]


def ours(gradients: torch.Tensor, tokens: list[float]) -> Reading:
    from pichak_core.tune import NoiseAccumulator

    kept = NoiseAccumulator()
    for gradient, count in zip(gradients, tokens, strict=True):
        kept.add(gradient, count)
    made = kept.result()
    return made.b_noise_tokens, made.trace_sigma, made.kind in ("lower_bound", "upper_bound")


def earlier(gradients: torch.Tensor, tokens: list[float]) -> Reading:
    from pichak.tune import NoiseAccumulator  # type: ignore[import-not-found]

    kept = NoiseAccumulator()
    for gradient, count in zip(gradients, tokens, strict=True):
        kept.add(gradient, count)
    made = kept.result()
    return made.b_noise_tokens, made.trace_sigma, made.kind != "value"


def gns(*, summed: bool, **options: Any) -> Read:
    """`compute_gns` on rows whose loss is their mean over tokens, or their sum."""

    def read(gradients: torch.Tensor, tokens: list[float]) -> Reading:
        from gns_pytorch import compute_gns  # type: ignore[import-not-found]

        mean = statistics.fmean(tokens)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(gradients.shape[1]))
        scale = torch.tensor(tokens) / mean if summed else torch.ones(len(tokens))
        losses = scale * (gradients @ model.weight)
        return compute_gns(losses, model, **options) * mean, None, False

    return read


TOOLS: dict[str, Read] = {
    OURS: ours,
    "pichak 0.4.1": earlier,
    "gns-pytorch, mean loss": gns(summed=False, batch_percentage=1.0),
    "gns-pytorch, summed loss": gns(summed=True, batch_percentage=1.0),
    "gns-pytorch, summed, default": gns(summed=True),
}


def draws(rows: int, cv: float, rho: float) -> Iterator[tuple[torch.Tensor, list[float], float]]:
    """(gradients, token counts, T·Var(Ĝ)) of each trial; the same for every tool."""
    generator = torch.Generator().manual_seed(SEED)
    eigenvalues = 1.0 / torch.arange(1, DIMENSION + 1, dtype=torch.float64)
    deviation = (eigenvalues / eigenvalues.sum()).sqrt()
    population = rho * MEAN_TOKENS * (1 + cv * cv) + 1 - rho
    signal = deviation * math.sqrt(population / TRUTH)
    s2 = math.log1p(cv * cv)
    for _ in range(TRIALS):
        normal = torch.randn(rows, generator=generator, dtype=torch.float64)
        tokens = torch.exp(math.log(MEAN_TOKENS) - s2 / 2 + math.sqrt(s2) * normal)
        variance = (1 - rho) / tokens + rho
        noise = torch.randn(rows, DIMENSION, generator=generator, dtype=torch.float64)
        gradients = signal + variance.sqrt()[:, None] * noise * deviation
        total = float((tokens**2 * variance).sum() / tokens.sum())
        yield gradients.float(), tokens.tolist(), total


def case(tool: str, rows: int, cv: float, rho: float) -> dict[str, Any]:
    """What `tool` reads over all trials of one case, as ratios to the truth."""
    # Two of the tools collect garbage at each call; what is loaded already need not be walked.
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    population = rho * MEAN_TOKENS * (1 + cv * cv) + 1 - rho
    made: dict[str, Any] = {"tool": tool, "rows": rows, "cv": cv, "rho": rho, "trials": TRIALS}
    ratios, sizes, bounds, bad = [], [], 0, {"negative": 0, "zero": 0, "infinite": 0}
    try:
        for gradients, tokens, total in draws(rows, cv, rho):
            number, s, bound = TOOLS[tool](gradients, tokens)
            ratios.append(number / (TRUTH * total / population))
            bounds += bound
            bad["negative"] += number < 0
            bad["zero"] += number == 0
            bad["infinite"] += not math.isfinite(number)
            if s is not None:
                sizes.append(s / total)
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is its result
        return {**made, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    at = statistics.quantiles(ratios, n=20)
    made.update(median=statistics.median(ratios), p5=at[0], p95=at[-1], said_bound=bounds, **bad)
    if sizes:
        made["s_mean"] = statistics.fmean(sizes)
        made["s_standard_error"] = statistics.stdev(sizes) / math.sqrt(len(sizes))
    return made
