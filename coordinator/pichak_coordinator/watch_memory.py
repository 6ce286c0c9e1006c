"""What one device's probes said so far, and what a new one adds to it: drift, and findings that
begin, are confirmed or end. Pure.

"Before" is not the last reading, which noise may have moved, and not a running mean, which would
follow a slow drift: it is the median of the first `KEPT` readings since the last change that was
told. A number has changed when it is off by more than 3 spreads and by 5 % or more, in the same
direction, in two probes in a row; a text when two probes in a row read the same new one.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from pichak_coordinator.changes import NOTABLE_POINTS, NOTABLE_SHARE, Change, changes
from pichak_coordinator.disturbance import disturbed
from pichak_coordinator.records import Finding, Row
from pichak_coordinator.speed import processed_speed
from pichak_core.measurement import Fingerprint, Measurement, Reading, median_and_spread
from pichak_core.plan import Scalar

KEPT = 8
#: Numbers whose noise nothing tells are compared from so many readings on.
_ENOUGH = 5
_SPEED = "plan.tokens_per_second"


@dataclass(frozen=True)
class Before:
    """What stands for "before" of one metric. `pending` is what the last probe saw instead: 1 or -1
    for a number that was higher or lower, the new text for a text, None for nothing."""

    unit: str = ""
    values: tuple[Scalar, ...] = ()
    spreads: tuple[float, ...] = ()
    pending: Scalar | None = None

    @property
    def numeric(self) -> bool:
        """Whether it is a number, and not a text or a yes-or-no."""
        return not isinstance(self.values[-1], (str, bool))

    def reading(self, metric: str) -> Measurement | None:
        """ "Before" as one reading; None where too little is known."""
        if not self.values:
            return None
        if not self.numeric:
            return Measurement(metric, self.values[-1], self.unit, "read before")
        count = len(self.values)
        if not self.spreads and count < _ENOUGH:
            return None
        source = f"the median of {count} earlier probes"
        middle, spread = self._middle_and_spread
        return Measurement(metric, middle, self.unit, source, count, spread)

    @cached_property
    def _middle_and_spread(self) -> tuple[float, float]:
        middle, apart = median_and_spread([float(v) for v in self.values])
        inside = statistics.median(self.spreads) if self.spreads else 0.0
        return middle, max(apart or 0.0, inside)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def with_reading(self, reading: Measurement) -> Before:
        """One more of the same."""
        if not self.values or self.unit != reading.unit:
            return _fresh(reading)
        if not self.numeric or len(self.values) >= KEPT:
            return self if self.pending is None else replace(self, pending=None)
        spreads = self.spreads if reading.spread is None else (*self.spreads, reading.spread)
        return replace(self, values=(*self.values, reading.value), spreads=spreads, pending=None)


def _fresh(reading: Measurement) -> Before:
    spreads = () if reading.spread is None else (reading.spread,)
    return Before(reading.unit, (reading.value,), spreads)


@dataclass(frozen=True)
class Memory:
    """All of one device: metric -> before, and the findings that are open."""

    before: Mapping[str, Before] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "before": {metric: b.as_dict() for metric, b in self.before.items()},
            "findings": [finding.as_dict() for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Memory:
        """The inverse of `as_dict`."""
        before = {
            metric: Before(b["unit"], tuple(b["values"]), tuple(b["spreads"]), b["pending"])
            for metric, b in record["before"].items()
        }
        return cls(before, tuple(Finding.from_dict(f) for f in record["findings"]))


@dataclass(frozen=True)
class Drift:
    """What a probe says against the memory: `changed` in two probes in a row, every difference by
    metric, and `noise`: the median relative deviation of what was timed, None when unknown."""

    memory: Memory
    changed: tuple[Change, ...]
    differences: Mapping[str, Change]
    noise: float | None


def drift(memory: Memory, row: Row) -> Drift:
    """Hold a device's new readings against its memory.

    What others disturbed, was suspect or was not measured is neither compared nor remembered.
    """
    readings = {
        name: reading
        for name, reading in _readings(row).items()
        if isinstance(reading, Measurement)
        and not reading.suspect
        and not disturbed(reading.conditions)
    }
    old, new = Fingerprint(), Fingerprint()
    for metric, reading in readings.items():
        before = memory.before.get(metric)
        was = before.reading(metric) if before else None
        if was is not None and before is not None and before.unit == reading.unit:
            old.add(was)
            # A number that was timed once is as noisy as its earlier ones differed.
            once = before.numeric and reading.spread is None
            new.add(replace(reading, spread=0.0) if once else reading)
    found = changes(
        [Row(row.node, new)],
        {row.key: Row(row.node, old)},
        notable=False,
    )
    differences = {change.metric: change for change in found}
    made = dict(memory.before)
    told: list[Change] = []
    for metric, reading in readings.items():
        before = memory.before.get(metric, Before())
        change = differences.get(metric)
        if change is None or not _matters(change):
            made[metric] = before.with_reading(reading)
            continue
        seen = _seen(change)
        if before.pending == seen:
            told.append(change)
            made[metric] = _fresh(reading)
        else:
            made[metric] = replace(before, pending=seen)
    return Drift(replace(memory, before=made), tuple(told), differences, _noise(old, new))


def begun_anew(memory: Memory, row: Row, metrics: Collection[str]) -> Memory:
    """What the row read of these metrics stands for "before" from now on."""
    if not metrics:
        return memory
    readings = _readings(row)
    made = dict(memory.before)
    for metric in metrics:
        reading = readings.get(metric)
        if isinstance(reading, Measurement) and not reading.suspect:
            made[metric] = _fresh(reading)
    return replace(memory, before=made)


def _readings(row: Row) -> Mapping[str, Reading]:
    speed = processed_speed(row)
    if speed is None:
        return row.fingerprint
    spread = None if speed.noise is None else speed.noise * speed.tokens_per_second
    conditions = (row.ramp or {}).get("conditions")
    made = Measurement(
        *(_SPEED, speed.tokens_per_second, speed.unit, "the ramp's repeated steps"),
        samples=3,
        spread=spread,
        conditions=conditions if isinstance(conditions, Mapping) else {},
    )
    return {**row.fingerprint, _SPEED: made}


def _matters(change: Change) -> bool:
    if isinstance(change.before, (str, bool)) or isinstance(change.after, (str, bool)):
        return True
    if not change.notable or change.before is None or change.after is None:
        return False
    if change.unit == "%":
        return abs(float(change.after) - float(change.before)) >= NOTABLE_POINTS
    return change.share is None or abs(change.share) >= NOTABLE_SHARE


def _seen(change: Change) -> Scalar:
    if isinstance(change.after, (str, bool)) or isinstance(change.before, (str, bool)):
        return str(change.after)
    assert change.before is not None  # noqa: S101 - `_matters` has seen to it
    assert change.after is not None  # noqa: S101
    return 1 if change.after > change.before else -1


def _noise(old: Fingerprint, new: Fingerprint) -> float | None:
    shares = [
        abs(now - was) / abs(was)
        for metric in old
        if _timed(old[metric])
        and (was := old.number(metric))
        and (now := new.number(metric)) is not None
    ]
    return statistics.median(shares) if shares else None


def _timed(reading: Reading) -> bool:
    if not isinstance(reading, Measurement):
        return False
    return reading.unit.endswith("/s") or reading.unit in ("us", "ms")


def still_open(
    earlier: Sequence[Finding], found: Sequence[Finding], row: Row
) -> tuple[Finding, ...]:
    """The findings of a probe, and those of earlier ones about what this one did not read."""
    known = {finding.key for finding in found}
    kept = [f for f in earlier if f.key not in known and not _judged_anew(f, row)]
    return tuple(sorted([*found, *kept], key=lambda f: f.order))


def _judged_anew(finding: Finding, row: Row) -> bool:
    if finding.metric == _SPEED or finding.metric.startswith("plan."):
        return row.plan is not None
    return not finding.metric or isinstance(row.fingerprint.get(finding.metric), Measurement)
