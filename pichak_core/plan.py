"""A number and the measurement it came from, kept together.

A `Value` cannot exist without its source; a number that nobody measured says `CONSTANT`, and a
`Plan` lists all of those in one place, so that a reader can audit what was assumed.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

#: The source of a number that nobody measured.
CONSTANT = "constant (no measurement)"

Scalar = bool | int | float | str

_LABEL_WIDTH = 20


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One number (or word), its unit, the sentence a person can check, and its cost.

    `source` is never empty. `seconds` is what measuring it took. `low` and `high` are an interval
    in the same unit where one is known; `high=math.inf` says "unbounded above".
    Compares, orders, hashes, formats and converts like the bare value. There is no arithmetic, on
    purpose: a number computed from it has another source.

    Raises `ValueError` for an empty source, a value or cost that is not finite, a negative cost,
    or an interval whose low end lies above its high end.
    """

    value: Scalar
    source: str
    seconds: float = 0.0
    unit: str = ""
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        source: object = self.source
        if not (isinstance(source, str) and source.strip()):
            raise ValueError(
                f"a Value needs its source, and {self.value!r} came without one; "
                "a number that was not measured has the source CONSTANT"
            )
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"{self.value!r} is not a measurement; leave a note instead")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"seconds is {self.seconds!r}; what measuring took is 0 or more")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"the interval {self.low!r} to {self.high!r} begins above its end")

    @property
    def measured(self) -> bool:
        """False for a constant, also one with an explanation behind it."""
        return not self.source.startswith(CONSTANT)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __index__(self) -> int:
        if isinstance(self.value, (bool, int)):
            return int(self.value)
        raise TypeError(f"{self.value!r} is not an integer")

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, Value) else other))

    def __lt__(self, other: object) -> bool:
        bare = self._comparable(other)
        return NotImplemented if bare is None else bool(self.value < bare)

    def __le__(self, other: object) -> bool:
        bare = self._comparable(other)
        return NotImplemented if bare is None else bool(self.value <= bare)

    def __gt__(self, other: object) -> bool:
        bare = self._comparable(other)
        return NotImplemented if bare is None else bool(self.value > bare)

    def __ge__(self, other: object) -> bool:
        bare = self._comparable(other)
        return NotImplemented if bare is None else bool(self.value >= bare)

    def _comparable(self, other: object) -> Any:
        """The number (or word) in `other` where this one can be ordered against it, else None."""
        bare = other.value if isinstance(other, Value) else other
        kind = str if isinstance(self.value, str) else Real
        return bare if isinstance(bare, kind) else None

    def __hash__(self) -> int:
        return hash(self.value)

    def __format__(self, spec: str) -> str:
        """Without a spec as `str` has it, with the unit; else the bare value in that format."""
        return format(self.value, spec) if spec else str(self)

    def __str__(self) -> str:
        number = format_number(self.value)
        return f"{number} {_unit_of(self.value, self.unit)}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form; an unbounded `high` becomes the string ``"inf"``."""
        record: dict[str, Any] = {
            "value": self.value,
            "source": self.source,
            "seconds": self.seconds,
        }
        if self.unit:
            record["unit"] = self.unit
        if self.low is not None:
            record["low"] = _bound_out(self.low)
        if self.high is not None:
            record["high"] = _bound_out(self.high)
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Value:
        """The inverse of `as_dict`; `ValueError` names what is missing or of the wrong type."""
        value, source = record.get("value"), record.get("source")
        if not isinstance(value, (bool, int, float, str)) or not isinstance(source, str):
            raise ValueError(f"not a Value: {record!r}")
        return cls(
            value,
            sys.intern(source),  # the plans of a fleet have most of their sentences in common
            float(record.get("seconds", 0.0)),
            str(record.get("unit", "")),
            _bound_in(record.get("low")),
            _bound_in(record.get("high")),
        )


@dataclass
class Plan:
    """Everything derived for one (model, data, device).

    `plan.micro_batch` is the number, `plan.why("micro_batch")` its sentence, and
    `"micro_batch" in plan` whether it was derived at all. `notes` holds what is not a number: a
    refusal, a fallback, an ambiguous measurement.
    """

    model: str = ""
    data: str = ""
    device: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def set(
        self,
        name: str,
        value: Scalar | Value,
        source: str = "",
        seconds: float = 0.0,
        *,
        unit: str = "",
    ) -> Plan:
        """Add or replace a number; its cost is added to the plan's. Returns the plan."""
        made = value if isinstance(value, Value) else Value(value, source, seconds, unit)
        replaced = self.values.get(name)
        self.values[name] = made
        self.seconds += made.seconds - (replaced.seconds if replaced else 0.0)
        return self

    def note(self, text: str) -> Plan:
        """Add a note once. Returns the plan."""
        if text not in self.notes:
            self.notes.append(text)
        return self

    def measured_on(self, where: str) -> Plan:
        """The same plan, each measured source saying on which machine it was measured."""
        moved = {
            name: replace(v, source=f"{v.source} (measured once, on {where})") if v.measured else v
            for name, v in self.values.items()
        }
        return replace(self, values=moved, notes=list(self.notes))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Value] = self.__dict__.get("values", {})
        if name in values:
            return values[name].value
        present = ", ".join(sorted(values)) or "(none)"
        raise AttributeError(f"{name!r} was not derived; this plan holds: {present}")

    def __getitem__(self, name: str) -> Value:
        if name not in self.values:
            raise KeyError(f"{name!r} was not derived")
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def why(self, name: str) -> str:
        """The measurement behind one number; `KeyError` when it was not derived."""
        return self[name].source

    def constants(self) -> dict[str, Scalar]:
        """Every number in the plan that nobody measured."""
        return {name: v.value for name, v in self.values.items() if not v.measured}

    def as_dict(self) -> dict[str, Scalar]:
        """Plain values, for a trainer."""
        return {name: v.value for name, v in self.values.items()}

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain containers."""
        return {
            "model": self.model,
            "data": self.data,
            "device": self.device,
            "seconds": self.seconds,
            "values": {name: v.as_dict() for name, v in self.values.items()},
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`; `ValueError` when the record is not a plan."""
        values = record.get("values")
        if not isinstance(values, dict):
            raise ValueError("not a plan: it has no 'values'")
        return cls(
            model=str(record.get("model", "")),
            data=str(record.get("data", "")),
            device=str(record.get("device", "")),
            values={str(name): Value.from_dict(v) for name, v in values.items()},
            notes=[str(note) for note in record.get("notes", [])],
            seconds=float(record.get("seconds", 0.0)),
        )

    def to_json(self, indent: int | None = 1) -> str:
        """Lossless JSON (valid JSON: no NaN or Infinity)."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`; `ValueError` when the text is not a plan."""
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("not a plan: the JSON is not an object")
        return cls.from_dict(record)

    def to(self, trainer: str) -> dict[str, Any]:
        """The settings that `trainer` takes ("transformers", "trl", "deepspeed", …), of this plan.

        What the plan does not hold is left out. `ValueError` names the trainers that are known.
        """
        from pichak_core.tune.export import export_plan

        return export_plan(self, trainer)

    def report(self, width: int = 78) -> str:
        """The text a person pastes into an issue, wrapped to `width` columns."""
        width = max(40, width)
        lines = [f"{label:<8}{text}" for label, text in self._headings() if text]
        lines.append("-" * width)
        for name, value in self.values.items():
            if value.measured:
                lines += _entry(name, value, width)
        constants = self.constants()
        if constants:
            listed = ", ".join(f"{k} = {format_number(v)}" for k, v in constants.items())
            lines.append("")
            lines += textwrap.wrap(
                f"NOT MEASURED ({len(constants)}): {listed}", width, subsequent_indent="  "
            )
        if self.notes:
            lines.append("")
            for note in self.notes:
                lines += textwrap.wrap(
                    note, width, initial_indent="note: ", subsequent_indent="      "
                )
        lines += ["", f"total {self.seconds:.1f} s of measuring"]
        return "\n".join(lines)

    def _headings(self) -> list[tuple[str, str]]:
        return [("model", self.model), ("data", self.data), ("device", self.device)]


def format_number(value: Scalar) -> str:
    """A number as a person reads it: thousands grouped, four significant digits; a float of more
    than 15 digits by its power of ten."""
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e15:
        return f"{value:.4g}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size == 0 or size >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def _unit_of(value: Scalar, unit: str) -> str:
    """``1 row``, ``2 rows``; a rate or an abbreviation stays as it is."""
    if value != 1 or "/" in unit or not unit.endswith("s") or len(unit) < 3:
        return unit
    return unit[:-2] if unit.endswith("ches") else unit[:-1]


def _entry(name: str, value: Value, width: int) -> list[str]:
    head = f"{name:<{_LABEL_WIDTH}} {value}"
    if value.low is not None or value.high is not None:
        head += f"  ({_range(value)})"
    if value.seconds >= 0.05:
        head += f"  [{value.seconds:.1f} s]"
    return [
        head,
        *textwrap.wrap(value.source, width, initial_indent="    ", subsequent_indent="    "),
    ]


def _range(value: Value) -> str:
    low = "?" if value.low is None else format_number(value.low)
    if value.high is not None and math.isinf(value.high):
        return f"{low} or more"
    high = "?" if value.high is None else format_number(value.high)
    return f"{low} to {high}"


def _bound_out(bound: float) -> float | str:
    return bound if math.isfinite(bound) else str(bound)


def _bound_in(bound: Any) -> float | None:
    return None if bound is None else float(bound)
