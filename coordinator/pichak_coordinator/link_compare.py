"""One value against others that should be alike, for links and for nodes. Pure.

Median and MAD with a floor, the judged one left out; fewer than two others compare with nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pichak_coordinator.links import Pair
from pichak_coordinator.records import Confidence
from pichak_core.measurement import MAD_TO_SIGMA

#: A rate below the others' by less than this accuses nobody: TCP over one kind of link scatters.
RATE_FLOOR = 0.25
#: A round trip above the others' by less than this many ms (or this share) accuses nobody.
DELAY_FLOOR_MS = 1.0
DELAY_FLOOR_SHARE = 0.5
SIGMAS = 3.0
WHOLE_GROUP = 40
#: Fewer others than this are few to compare with.
_FEW = 5

Key = TypeVar("Key", str, Pair)


@dataclass(frozen=True)
class Against:
    """A value against others: how much worse it is than their median, and the limit of that."""

    value: float
    median: float
    others: int
    excess: float
    limit: float

    @property
    def bad(self) -> bool:
        return self.excess > self.limit

    @property
    def confidence(self) -> Confidence:
        return "normal" if self.others >= _FEW else "low"

    def evidence(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "median_of_others": self.median,
            "others": self.others,
            "excess": self.excess,
            "limit": self.limit,
        }


class Others(Generic[Key]):
    """Values by what they are of, each to be held against the others.

    From `WHOLE_GROUP` on, one value moves neither median nor MAD, and all of them are used.
    """

    def __init__(self, values: Mapping[Key, float]) -> None:
        self._values: Mapping[Key, float] = values
        large = len(values) >= WHOLE_GROUP
        self._whole = median_and_sigma(list(values.values())) if large else None

    def rate(self, key: Key) -> Against | None:
        """By which share of the others' median this value is below it; None for fewer than two
        others."""
        found = self._median_and_sigma(key)
        if found is None or found[0] <= 0:
            return None
        (middle, sigma), value = found, self._values[key]
        limit = max(RATE_FLOOR, SIGMAS * sigma / middle)
        return Against(value, middle, len(self._values) - 1, (middle - value) / middle, limit)

    def delay(self, key: Key, base: float = 0.0) -> Against | None:
        """By how many ms this value is above the others' median; `base` is what the share of the
        floor is taken of, where that is more than the median."""
        found = self._median_and_sigma(key)
        if found is None:
            return None
        (middle, sigma), value = found, self._values[key]
        limit = max(DELAY_FLOOR_MS, DELAY_FLOOR_SHARE * max(base, middle), SIGMAS * sigma)
        return Against(value, middle, len(self._values) - 1, value - middle, limit)

    def _median_and_sigma(self, key: Key) -> tuple[float, float] | None:
        if self._whole is not None:
            return self._whole
        others = [value for other, value in self._values.items() if other != key]
        return median_and_sigma(others) if len(others) > 1 else None


def median_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the MAD as a normal distribution's sigma."""
    middle = statistics.median(values)
    return middle, MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def best_of(
    values: Mapping[Pair, float],
    nodes_of: Callable[[Pair], tuple[str, ...]],
    better: Callable[[float, float], float],
) -> dict[str, float]:
    """Node -> the best value among those that count for it."""
    made: dict[str, float] = {}
    for pair, value in values.items():
        for node in nodes_of(pair):
            made[node] = better(made[node], value) if node in made else value
    return made


def at_side(side: int) -> Callable[[Pair], tuple[str, ...]]:
    """The node at one side of a direction: 0 sends, 1 receives."""
    return lambda direction: (direction[side],)


def links_of(node: str, values: Mapping[Pair, float]) -> int:
    return sum(node in pair for pair in values)
