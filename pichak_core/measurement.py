"""What one reading of a machine is: a `Measurement`, or `Unmeasured` with the reason.

"Not measured" is neither zero nor a pass nor a failure: it is its own thing, with a name.
"""

from __future__ import annotations

import math
import statistics
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


@dataclass(frozen=True)
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
        if not self.source.strip():
            raise ValueError(f"{self.name}: a measurement needs its source")
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"{self.name}: {self.value!r} is not a measurement")

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


@dataclass(frozen=True)
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
        for name, entry in record.items():
            made.add(reading_from_dict(str(name), entry))
        return made


def reading_from_dict(name: str, entry: Any) -> Reading:
    """One reading from its `as_dict` form; `ValueError` when it is not one."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{name}: a reading is an object, not {type(entry).__name__}")
    if "unmeasured" in entry:
        return Unmeasured(name, Reason(entry["unmeasured"]), str(entry.get("detail", "")))
    value, source = entry.get("value"), entry.get("source")
    if not isinstance(value, (bool, int, float, str)) or not isinstance(source, str):
        raise ValueError(f"{name}: a reading needs 'value' and 'source'")
    spread = entry.get("spread")
    return Measurement(
        name,
        value,
        str(entry.get("unit", "")),
        source,
        samples=int(entry.get("samples", 1)),
        spread=None if spread is None else float(spread),
        seconds=float(entry.get("seconds", 0.0)),
        suspect=str(entry.get("suspect", "")),
        conditions=dict(entry.get("conditions", {})),
        detail=dict(entry.get("detail", {})),
    )


def median_and_spread(samples: Sequence[float]) -> tuple[float, float | None]:
    """Median and scaled MAD (None for fewer than three samples, where it says nothing)."""
    if not samples:
        raise ValueError("no samples")
    middle = statistics.median(samples)
    if len(samples) < 3:
        return middle, None
    return middle, MAD_TO_SIGMA * statistics.median(abs(s - middle) for s in samples)
