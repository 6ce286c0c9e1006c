"""When to stop repeating a timing: at a narrow interval or at the budget, whichever is first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pichak_core.measurement import median_and_spread

#: The standard error of a median is 1.2533 sigma / sqrt(n) for normal samples; 1.96 of those are
#: half of a 95 % interval.
_HALF_WIDTH = 1.96 * 1.2533


def half_width(samples: Sequence[float]) -> float:
    """Half of the median's 95 % interval, in the samples' unit; infinite below three samples."""
    _, spread = median_and_spread(samples)
    return math.inf if spread is None else _HALF_WIDTH * spread / math.sqrt(len(samples))


def collect(
    sample: Callable[[], float],
    *,
    budget_seconds: float,
    clock: Callable[[], float],
    minimum: int = 7,
    relative: float = 0.005,
) -> list[float]:
    """Call `sample` until the median is known to ± `relative`, or the budget is spent.

    At least `minimum` samples are taken unless three times the budget is over first: a machine
    that is that slow gives what it has. One sample always is.
    """
    started = clock()
    samples: list[float] = []
    while True:
        samples.append(sample())
        spent = clock() - started
        if spent >= budget_seconds * (1 if len(samples) >= minimum else 3):
            return samples
        if len(samples) >= minimum:
            middle, _ = median_and_spread(samples)
            if half_width(samples) <= relative * abs(middle):
                return samples


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed (nearest rank)."""
    if not samples or not 0 < share <= 1:
        raise ValueError(f"no percentile {share} of {len(samples)} samples")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]
