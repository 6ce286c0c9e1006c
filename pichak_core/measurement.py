"""What one reading of a machine is: a `Measurement`, or `Unmeasured` with the reason.

"Not measured" is neither zero nor a pass nor a failure: it is its own thing, with a name.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pichak_core.plan import Scalar, format_number

#: Scales a median absolute deviation to the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826


class Reason(str, Enum):
    """Why there is no number."""

    NOT_SUPPORTED = "not supported"
    NO_PERMISSION = "no permission"
    NO_DEVICE = "no such device"
    NOT_INSTALLED = "package not installed"
    TIMED_OUT = "timed out"
    LOST = "lost"
    BUSY = "skipped: device busy"
    NOT_ASKED = "not asked for"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value of one metric, with everything needed to believe or explain it.

    `name` carries the unit (``disk.read_mb_s``). `value` is the median of `samples` readings and
    `spread` their scaled MAD, both in `unit`; `spread` is None for what does not vary.
    `conditions` is what was true while it ran. `suspect` is non-empty when the result is
    impossible (rule 6): such a value never ranks a node. `detail` holds curves and raw parts.
    """

    name: str
    value: Scalar
    unit: str
    source: str
    samples: int = 1
    spread: float | None = None
    seconds: float = 0.0
    suspect: str = ""
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_value(self.name, self.value, self.source)

    def describe(self) -> str:
        """``value unit (± spread, n samples)``, with the suspicion where there is one."""
        text = f"{format_number(self.value)} {self.unit}".rstrip()
        if self.spread is not None and self.samples > 1:
            text += f" (± {format_number(self.spread)}, n = {self.samples})"
        return f"{text} SUSPECT: {self.suspect}" if self.suspect else text

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form (SPEC 8); empty parts are left out."""
        record: dict[str, Any] = {
            "value": self.value,
            "unit": self.unit,
            "source": self.source,
            "samples": self.samples,
            "spread": self.spread,
            "seconds": self.seconds,
            "conditions": dict(self.conditions),
        }
        if self.suspect:
            record["suspect"] = self.suspect
        if self.detail:
            record["detail"] = dict(self.detail)
        return record


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """No number for `name`, and why; `detail` says it to a person (the error, what would help)."""

    name: str
    reason: Reason
    detail: str = ""

    def describe(self) -> str:
        """One line for a table or a page."""
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form (SPEC 8)."""
        record: dict[str, Any] = {"unmeasured": self.reason.value}
        if self.detail:
            record["detail"] = self.detail
        return record


Reading = Measurement | Unmeasured


class Fingerprint(dict[str, Reading]):
    """Metric name to reading, for one machine and at most one GPU of it."""

    def add(self, reading: Reading) -> None:
        """Keep a reading under its own name."""
        self[reading.name] = reading

    def number(self, name: str) -> float | None:
        """The metric as a number that may rank a node: measured, numeric and not suspect."""
        reading = self.get(name)
        if not isinstance(reading, Measurement) or reading.suspect:
            return None
        value = reading.value
        return None if isinstance(value, (str, bool)) else float(value)

    def text(self, name: str) -> str | None:
        """The metric as text, None when it was not measured."""
        reading = self.get(name)
        return str(reading.value) if isinstance(reading, Measurement) else None

    def to_dict(self) -> dict[str, Any]:
        """``{metric: {...} | {"unmeasured": reason}}``."""
        return {name: reading.as_dict() for name, reading in self.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fingerprint:
        """The inverse of `to_dict`; `ValueError` names the metric that is malformed."""
        made = cls()
        before: Measurement | None = None
        for name, entry in record.items():
            reading = reading_from_dict(str(name), entry, before)
            made[name] = reading
            if isinstance(reading, Measurement):
                before = reading
        return made


def reading_from_dict(name: str, entry: Any, before: Measurement | None = None) -> Reading:
    """One reading from its `as_dict` form; `ValueError` when it is not one. What is as in `before`
    is shared with it, see `reading_of`."""
    return reading_of(reading_parts(name, entry), before)


#: A reading's parts, in the order of its class's fields: ten of a `Measurement`, three of an
#: `Unmeasured`.
ReadingParts = tuple[Any, ...]


def reading_parts(name: str, entry: Any) -> ReadingParts:
    """The parts of a reading in its `as_dict` form; `ValueError` when it is none.

    For who needs them and not the reading: of many thousands, making one costs more than this.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{name}: a reading is an object, not {type(entry).__name__}")
    get = entry.get
    if "unmeasured" in entry:
        reason, said = get("unmeasured"), get("detail", "")
        known = _REASONS.get(reason) if isinstance(reason, str) else None
        if known is None or not isinstance(said, str):
            raise ValueError(f"{name}: {str(reason)[:40]!r} is no reason, or its detail no text")
        return name, known, said
    value: Any = get("value")
    source: Any = get("source")
    unit, suspect, samples = get("unit", ""), get("suspect", ""), get("samples", 1)
    spread, seconds = get("spread"), get("seconds", 0.0)
    conditions, detail = get("conditions") or _NOTHING, get("detail") or _NOTHING
    if type(value) not in _SCALARS or type(source) is not str:
        raise ValueError(f"{name}: a reading needs 'value' and 'source'")
    if not (
        type(unit) is str
        and type(suspect) is str
        and type(samples) is int
        and type(seconds) in _NUMBERS
        and math.isfinite(seconds)
        and (spread is None or type(spread) in _NUMBERS)
        and type(conditions) is dict
        and type(detail) is dict
    ):
        raise ValueError(f"{name}: a part of this reading is of the wrong type")
    if (type(value) is float and not math.isfinite(value)) or not source or source.isspace():
        _check_value(name, value, source)
    spread = None if spread is None else float(spread)
    return name, value, unit, source, samples, spread, float(seconds), suspect, conditions, detail


def reading_of(parts: ReadingParts, before: Measurement | None = None) -> Reading:
    """The reading of checked parts. Of a large fleet's readings most texts repeat, and readings of
    one probe have their conditions and seconds in common: what is as in `before` is shared."""
    if len(parts) == 3:
        name, reason, said = parts
        return Unmeasured(name, reason, sys.intern(said))
    name, value, unit, source, samples, spread, seconds, suspect, conditions, detail = parts
    if before is not None:
        seconds = before.seconds if seconds == before.seconds else seconds
        conditions = before.conditions if conditions == before.conditions else conditions
    unit, source = sys.intern(unit), sys.intern(source)
    return Measurement(
        name, value, unit, source, samples, spread, seconds, suspect, conditions, detail
    )


def _check_value(name: str, value: Scalar, source: str) -> None:
    if not source.strip():
        raise ValueError(f"{name}: a measurement needs its source")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a measurement")


_REASONS = {reason.value: reason for reason in Reason}
_NUMBERS = frozenset((int, float))
_SCALARS = frozenset((bool, int, float, str))
#: Shared by every reading that came without; nobody changes a reading's parts.
_NOTHING: dict[str, Any] = {}


def median_and_spread(samples: Sequence[float]) -> tuple[float, float | None]:
    """Median and scaled MAD (None for fewer than three samples, where it says nothing)."""
    if not samples:
        raise ValueError("no samples")
    middle = statistics.median(samples)
    if len(samples) < 3:
        return middle, None
    return middle, MAD_TO_SIGMA * statistics.median([abs(s - middle) for s in samples])
