"""One value against others that should be alike: the arithmetic behind an accusation. Pure.

The rule is "worse than the median by more than max(3 × 1.4826 × MAD, 5 %)", with two additions
without which it accuses healthy machines of small fleets too often, and a second look:

- *Scale.* The MAD of five or eight values is itself uncertain by about half. It is pooled with what
  the values' own spreads predict, counted as `PRIOR_PEERS` further peers:
  s² = (n · MADσ² + 8 · e²) / (n + 8), all relative to the median. e is the root of the squares of
  the peers' standard error of a median (1.2533 · spread / √samples, the median of it) and of
  `BETWEEN`, by which healthy machines of one model differ; where no spread is known it is
  `speed.UNKNOWN_NOISE`. A node whose own standard error is larger is judged by its own.
- *Leave one out.* A value is compared with the others only, so that a slow node neither moves the
  median nor widens the limit that it is judged by. From `WHOLE_GROUP` values on, one of them does
  neither, and the whole group is used.
- *Second look.* Suspected again, a node is confirmed when the mean of its k deviations also exceeds
  max(5 %, z · √(s²/k + BETWEEN²·(1 − 1/k) + 1.57 · s²/n)): the noise of a mean of k probes plus
  that of the median of n peers (π/2 · s²/n). z is the normal quantile at which `FALSE_SHARE` of
  healthy nodes would pass, shared by all the metrics judged of a node.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pichak_coordinator.speed import UNKNOWN_NOISE
from pichak_core.measurement import MAD_TO_SIGMA

#: The floor of SPEC's rule: less than this accuses nobody.
FLOOR = 0.05
SIGMAS = 3.0
BETWEEN = 0.01
PRIOR_PEERS = 8
FALSE_SHARE = 1e-4
WHOLE_GROUP = 40


class Reading(Protocol):
    """What has a value and its relative standard error; see `Sample`."""

    value: float
    noise: float | None


@dataclass(slots=True)
class Sample:
    """One value and its relative standard error, None where no spread was measured."""

    value: float
    noise: float | None = None


@dataclass(frozen=True)
class Verdict:
    """How far a value is on the bad side of the others' median; shares of that median.

    `deviation` is positive when it is worse. `mad_sigma` is 1.4826 × MAD, `expected` is e and
    `scale` is s of the module's formula.
    """

    value: float
    median: float
    others: int
    deviation: float
    mad_sigma: float
    expected: float
    scale: float

    @property
    def limit(self) -> float:
        """Beyond it a single probe is suspicious."""
        return max(FLOOR, SIGMAS * self.scale)

    @property
    def suspicious(self) -> bool:
        return self.deviation > self.limit

    def mean_limit(self, probes: int, judged: int) -> float:
        """Beyond it the mean over `probes` suspicious probes confirms; `judged` metrics share the
        false alarms."""
        z = statistics.NormalDist().inv_cdf(1 - FALSE_SHARE / max(1, judged))
        noise = self.scale**2 / probes + BETWEEN**2 * (1 - 1 / probes)
        return max(FLOOR, z * math.sqrt(noise + math.pi / 2 * self.scale**2 / self.others))


class Group:
    """Values that should be alike; built once, it judges each of them against the others."""

    def __init__(self, samples: Collection[Reading], *, higher_is_better: bool) -> None:
        values, noises = [s.value for s in samples], [s.noise for s in samples]
        self._build(values, noises, higher_is_better)

    @classmethod
    def of(
        cls, values: Sequence[float], noises: Sequence[float | None], *, higher_is_better: bool
    ) -> Group:
        """The same from the samples' parts."""
        made = cls.__new__(cls)
        made._build(values, noises, higher_is_better)
        return made

    def _build(
        self, values: Sequence[float], noises: Sequence[float | None], higher_is_better: bool
    ) -> None:
        self._better_high = higher_is_better
        self._sorted = sorted(values)
        known = [noise for noise in noises if noise is not None]
        self._expected = math.hypot(statistics.median(known), BETWEEN) if known else UNKNOWN_NOISE
        self._whole: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def doubtful(self, values: Sequence[float]) -> Sequence[int]:
        """Which of these members (by their places) take a verdict: of a whole group those that are
        more than the floor worse than its median; the others are certainly not suspicious."""
        if len(self._sorted) < WHOLE_GROUP:
            return range(len(values))
        self._whole = self._whole or _median_and_mad(self._sorted)
        middle = self._whole[0]
        if middle <= 0:
            return range(len(values))
        most = FLOOR * middle
        if self._better_high:
            return [at for at, value in enumerate(values) if middle - value > most]
        return [at for at, value in enumerate(values) if value - middle > most]

    def judge_member(self, sample: Reading) -> Verdict | None:
        """`sample`, one of the group, against the others; None where a share makes no sense."""
        if len(self) < 2:
            return None
        if len(self) < WHOLE_GROUP:
            at = bisect.bisect_left(self._sorted, sample.value)
            middle, spread = _median_and_mad(self._sorted[:at] + self._sorted[at + 1 :])
        else:
            self._whole = self._whole or _median_and_mad(self._sorted)
            middle, spread = self._whole
        return self._verdict(sample, middle, spread, len(self) - 1)

    def judge_stranger(self, sample: Reading) -> Verdict | None:
        """`sample`, not one of the group, against all of it."""
        if not self._sorted:
            return None
        return self._verdict(sample, *_median_and_mad(self._sorted), len(self))

    def _verdict(
        self, sample: Reading, middle: float, spread: float, others: int
    ) -> Verdict | None:
        if middle <= 0:
            return None
        difference = middle - sample.value if self._better_high else sample.value - middle
        mad_sigma = MAD_TO_SIGMA * spread / middle
        pooled = others * mad_sigma**2 + PRIOR_PEERS * self._expected**2
        scale = math.sqrt(pooled / (others + PRIOR_PEERS))
        scale = max(scale, sample.noise or 0.0)
        return Verdict(
            sample.value,
            middle,
            others,
            difference / middle,
            mad_sigma,
            self._expected,
            scale,
        )


def _median_and_mad(ordered: Sequence[float]) -> tuple[float, float]:
    middle = statistics.median(ordered)
    return middle, statistics.median(abs(value - middle) for value in ordered)
