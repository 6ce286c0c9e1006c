"""What changed on a node since the last run that measured it: before, after, and whether it is
more than noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pichak_coordinator.disturbance import disturbing_cores
from pichak_coordinator.records import NodeRecord, Row, json_safe
from pichak_coordinator.speed import processed_speed, scored_speed
from pichak_core.measurement import Measurement, Reading
from pichak_core.plan import Plan, Scalar, Value, format_number

#: A change is more than noise beyond this many combined spreads √(before² + after²).
SIGMAS = 3.0
#: Where no spread is known, what is worth showing: this share, or this many percentage points.
NOTABLE_SHARE = 0.05
NOTABLE_POINTS = 5.0

#: Conditions of the moment and no property of the machine.
_PASSING = ("cpu.load_others_cores", "cpu.pressure_some_percent")
#: Step times and rates share the noise of the timed steps.
#: What follows from the micro-batch: with another one it is another thing, and no change of a rate.
_OF_THE_BATCH = (
    "micro_batch_max",
    "seconds_per_step",
    "grad_accum",
    "effective_batch_rows",
    "effective_batch_tokens",
)
_TIMED = ("seconds_per_step", "tokens_per_second", "scored_tokens_per_second")
#: What a ramp brings; the rest of a plan is of the task, whichever device counted it.
_OF_THE_DEVICE = (*_TIMED, "micro_batch", "micro_batch_max")


@dataclass(frozen=True)
class Change:
    """One value that is not what it was. `before` or `after` is None where it was not measured,
    and `reason` then says why. `share` is the relative change (0.1 = 10 % more), None for text and
    where it was 0 before.

    `disturbed` tells of others who used the machine during one of the two readings. `exceeds` says
    whether the change is larger than the measured spreads explain; None where no spread is known.
    """

    node: NodeRecord
    metric: str
    before: Scalar | None
    after: Scalar | None
    unit: str = ""
    share: float | None = None
    spread: float | None = None
    exceeds: bool | None = None
    reason: str = ""
    disturbed: str = ""

    @property
    def notable(self) -> bool:
        """Worth a line: more than noise, or, where the noise is unknown, more than a little."""
        if self.exceeds is not None:
            return self.exceeds
        before, after = _number(self.before), _number(self.after)
        if before is not None and after is not None and self.unit == "%":
            return abs(after - before) >= NOTABLE_POINTS
        return self.share is None or abs(self.share) >= NOTABLE_SHARE

    @property
    def sentence(self) -> str:
        """``metric: before → after unit (+12.0 %, more than the spread of 3 MB/s)``."""
        shown = [
            "not measured" if value is None else format_number(value)
            for value in (self.before, self.after)
        ]
        text = f"{self.metric}: {shown[0]} → {shown[1]} {self.unit}".rstrip()
        if self.reason:
            return f"{text} ({self.reason})"
        told = f"; {self.disturbed}" if self.disturbed else ""
        if self.share is None:
            return text
        if self.exceeds is None:
            return f"{text} ({_share_text(self.share)}{told})"
        word = "more than" if self.exceeds else "within"
        known = f" of {format_number(self.spread)}" if self.spread is not None else ""
        return f"{text} ({_share_text(self.share)}, {word} the measured spread{known}{told})"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        record: dict[str, Any] = json_safe(
            {
                "node": self.node.node,
                "device": self.node.device,
                "host": self.node.host,
                "metric": self.metric,
                "before": self.before,
                "after": self.after,
                "unit": self.unit,
                "change": self.share,
                "spread": self.spread,
                "exceeds_spread": self.exceeds,
                "notable": self.notable,
                "reason": self.reason,
                "disturbed": self.disturbed,
            }
        )
        return record


def changes(
    rows: Sequence[Row], before: Mapping[tuple[str, str], Row], *, notable: bool = True
) -> list[Change]:
    """What differs between `rows` and the earlier rows of the same devices, in the rows' order.

    With `notable` the changes that noise explains are left out. Values of a plan are compared only
    where model and data are the same; what was suspect then or is now is not compared.
    """
    found: list[Change] = []
    for row in rows:
        old = before.get(row.key)
        if old is not None:
            found += [*_of_fingerprints(old, row), *_of_plans(old, row)]
    return [change for change in found if change.notable or not notable]


def comparable(row: Row, old: Row | None) -> bool:
    """Whether anything at all was measured of a device both now and in `old`, so that no change
    means that nothing changed."""
    if old is None:
        return False
    if _measured(old) & _measured(row):
        return True
    if old.plan is None or row.plan is None or not _same_task(old.plan, row.plan):
        return False
    return any(name in old.plan and name in row.plan for name in _OF_THE_DEVICE)


def _measured(row: Row) -> set[str]:
    found = row.fingerprint.items()
    return {name for name, r in found if isinstance(r, Measurement) and not r.suspect}


def _share_text(share: float) -> str:
    """``+12.0%``; a number that more than doubled as ``×3.1``."""
    return f"{share:+.1%}" if share < 1 else f"×{1 + share:.2g}"


def _of_fingerprints(old: Row, new: Row) -> Iterator[Change]:
    depths = [row.fingerprint.number("disk.read_best_depth") for row in (old, new)]
    other_depth = depths[0] != depths[1]
    for metric, now in new.fingerprint.items():
        then = old.fingerprint.get(metric)
        if other_depth and metric == "disk.read_p99_ms":
            continue  # the latency of another number of reads in flight is another thing
        if then is not None and metric not in _PASSING:
            yield from _of_readings(new.node, metric, then, now)


def _of_readings(node: NodeRecord, metric: str, then: Reading, now: Reading) -> Iterator[Change]:
    measured = [r for r in (then, now) if isinstance(r, Measurement)]
    if any(r.suspect for r in measured) or not measured:
        return
    unit = measured[0].unit
    if not isinstance(then, Measurement):
        yield Change(node, metric, None, measured[0].value, unit, reason=then.describe())
    elif not isinstance(now, Measurement):
        yield Change(node, metric, then.value, None, unit, reason=now.describe())
    elif then.unit == now.unit:
        spread = None
        if then.spread is not None and now.spread is not None:
            spread = math.hypot(then.spread, now.spread)
        when = _when_disturbed(then.conditions, now.conditions)
        yield from _of_values(node, metric, then.value, now.value, unit, spread, when)


def _of_plans(old: Row, new: Row) -> Iterator[Change]:
    if old.plan is None or new.plan is None or not _same_task(old.plan, new.plan):
        return
    other_batch = old.plan.as_dict().get("micro_batch") != new.plan.as_dict().get("micro_batch")
    scored = "scored_tokens_per_second" in old.plan and "scored_tokens_per_second" in new.plan
    for name, now in new.plan.values.items():
        if (other_batch and name in _OF_THE_BATCH) or (scored and name == "tokens_per_second"):
            continue
        then = old.plan.values.get(name)
        if then is None or not (then.measured and now.measured) or then.unit != now.unit:
            continue
        metric = f"plan.{name}"
        if name in _TIMED:
            spread = _timed_spread((old, then), (new, now))
            when = _when_disturbed(_ramp_conditions(old), _ramp_conditions(new))
            yield from _of_values(
                *(new.node, metric, then.value, now.value, now.unit, spread, when)
            )
        else:
            apart = _apart(then, now)
            for change in _of_values(new.node, metric, then.value, now.value, now.unit, None):
                yield replace(change, exceeds=apart)


def _ramp_conditions(row: Row) -> Mapping[str, Any]:
    found = (row.ramp or {}).get("conditions")
    return found if isinstance(found, Mapping) else {}


def _when_disturbed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which of two readings was that of a busy machine, and how busy it was."""
    sides = (("before", disturbing_cores(then)), ("now", disturbing_cores(now)))
    told = [f"{cores:.2f} cores {when}" for when, cores in sides if cores is not None]
    return f"others used {' and '.join(told)}" if told else ""


def _same_task(one: Plan, other: Plan) -> bool:
    return one.model == other.model and one.data == other.data


def _timed_spread(*sides: tuple[Row, Value]) -> float | None:
    """The combined spread of two timed values, from each ramp's relative step noise."""
    parts: list[float] = []
    for row, value in sides:
        speed = scored_speed(row) or processed_speed(row)
        number = _number(value.value)
        if speed is None or speed.noise is None or number is None:
            return None
        parts.append(speed.noise * number)
    return math.hypot(*parts)


def _apart(one: Value, other: Value) -> bool | None:
    """Whether two intervals do not overlap; None where one of them is unknown."""
    bounds = (one.low, one.high, other.low, other.high)
    low1, high1, low2, high2 = bounds
    if low1 is None or high1 is None or low2 is None or high2 is None:
        return None
    return low1 > high2 or low2 > high1


def _of_values(
    node: NodeRecord,
    metric: str,
    then: Scalar,
    now: Scalar,
    unit: str,
    spread: float | None,
    disturbed: str = "",
) -> Iterator[Change]:
    if then == now:
        return
    before, after = _number(then), _number(now)
    if before is None or after is None:
        yield Change(node, metric, then, now, unit, disturbed=disturbed)
        return
    share = (after - before) / abs(before) if before else None
    exceeds = None if spread is None else abs(after - before) > SIGMAS * spread
    yield Change(
        *(node, metric, then, now, unit, share, spread, exceeds),
        disturbed=disturbed,
    )


def _number(value: Scalar | None) -> float | None:
    return None if value is None or isinstance(value, (bool, str)) else float(value)


def by_node(found: Iterable[Change]) -> dict[str, list[Change]]:
    """Label -> its changes, in the order given."""
    grouped: dict[str, list[Change]] = {}
    for change in found:
        grouped.setdefault(change.node.label, []).append(change)
    return grouped
