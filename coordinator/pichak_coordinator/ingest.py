"""One outcome's bytes, read once and strictly, as what the store keeps of it.

What an outcome's `result` may hold, whatever its kind:

- ``fingerprint``: `Fingerprint.to_dict()` of the job's device;
- ``plan``: `Plan.to_dict()`, the plan of the job's device; or ``task``, the task's part of one;
- ``ramp``: the ramp's own record, rung by rung;
- ``findings``: a list of `Finding.as_dict()`.

Anything else is kept in the bytes and read by nobody here. A part that is there and malformed
makes the whole outcome refused: nothing of it is stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_agent.messages import MessageError, Outcome, decode
from pichak_coordinator.records import Finding
from pichak_core.measurement import (
    Fingerprint,
    Measurement,
    ReadingParts,
    reading_of,
    reading_parts,
)
from pichak_core.plan import Plan

#: More readings or findings than any machine has.
_MAX_PARTS = 10_000
_MAX_SAMPLES = 10**12
_MAX_NAME = 200
#: How many parts a reading has that was not measured.
_UNMEASURED = 3
_NUMBERS = frozenset((int, float))
#: Samples and spread of what was read once.
_ONCE = (1, None)

PointValues = tuple[float | None, str | None, str, float | None, int, str, str, str]


@dataclass(frozen=True)
class Parts:
    """An outcome and the parts of its result, checked."""

    outcome: Outcome
    readings: Mapping[str, ReadingParts] = field(default_factory=dict)
    plan: Plan | None = None
    ramp: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The readings; made when somebody asks, for a store only takes their parts."""
        made = Fingerprint()
        before: Measurement | None = None
        for name, parts in self.readings.items():
            reading = made[name] = reading_of(parts, before)
            if isinstance(reading, Measurement):
                before = reading
        return made

    @property
    def gpu_uuid(self) -> str:
        """Which card was measured; "" for a CPU, or where no UUID could be read."""
        parts = self.readings.get("gpu.uuid", ())
        return str(parts[1]) if len(parts) > _UNMEASURED else ""

    def without_curves(self) -> Parts:
        """The same without lists of numbers (samples, curves) in its readings' details; what is
        left is shared with the reading before where it is equal, for a fleet has a million."""
        bare: dict[str, ReadingParts] = {}
        shared: dict[str, Any] = {}
        for name, parts in self.readings.items():
            detail = parts[-1]
            if len(parts) > _UNMEASURED and detail:
                kept = {key: part for key, part in detail.items() if not _is_curve(part)}
                same = kept == shared and [*map(type, kept.values())] == [
                    *map(type, shared.values())
                ]
                shared = shared if same else kept
                bare[name] = (*parts[:-1], shared)
            else:
                bare[name] = parts
        return replace(self, readings=bare)

    def numbers(self) -> dict[str, float]:
        """metric -> value of the readings that may judge later ones: numbers, none suspect."""
        return {
            parts[0]: float(parts[1])
            for parts in self.readings.values()
            if len(parts) > _UNMEASURED and type(parts[1]) in _NUMBERS and not parts[7]
        }

    def point(self, metric: str) -> PointValues | None:
        """(value, text, unit, spread, samples, suspect, unmeasured, source) of one reading, as a
        `Point` has them; None where it is not among these."""
        parts = self.readings.get(metric)
        if parts is None:
            return None
        if len(parts) == _UNMEASURED:
            _, reason, said = parts
            return None, None, "", None, 0, "", reason.value, said
        _, value, unit, source, samples, spread, _, suspect, _, _ = parts
        number = float(value) if type(value) in _NUMBERS else None
        text = str(value) if number is None else None
        return number, text, unit, spread, samples, suspect, "", source


def read_outcome(data: bytes) -> Parts:
    """Decode and check; `MessageError` says which part is wrong."""
    outcome = decode(data, Outcome)
    result = outcome.result
    try:
        entries = _mapping(result, "fingerprint") or {}
        plan = _mapping(result, "plan") or _mapping(result, "task")
        found = result.get("findings") or []
        if not isinstance(found, list):
            raise ValueError("findings: a list was expected")
        if max(len(found), len(entries)) > _MAX_PARTS:
            raise ValueError(f"more than {_MAX_PARTS:,} readings or findings")
        readings: dict[str, ReadingParts] = {}
        for name, entry in entries.items():
            parts = readings[name] = reading_parts(name, entry)
            # Most were read once, without a spread: there is nothing to check of them.
            if len(name) > _MAX_NAME or (len(parts) > _UNMEASURED and parts[4:6] != _ONCE):
                _check(parts)
        return Parts(
            outcome,
            readings,
            Plan.from_dict(plan) if plan else None,
            _mapping(result, "ramp"),
            tuple(Finding.from_dict(entry) for entry in found),
        )
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise MessageError(f"{outcome.kind} outcome of {outcome.job_id}: {error}") from error


def _mapping(result: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    part = result.get(name)
    if part is None or isinstance(part, dict):
        return part
    raise ValueError(f"{name}: an object was expected, not {type(part).__name__}")


def _is_curve(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and isinstance(part[0], (int, float))


def _check(parts: ReadingParts) -> None:
    name = parts[0]
    if len(name) > _MAX_NAME:
        raise ValueError(f"a metric's name of {len(name):,} characters")
    if len(parts) == _UNMEASURED:
        return
    samples, spread = parts[4], parts[5]
    if spread is not None and not 0 <= spread < math.inf:
        raise ValueError(f"{name}: a spread of {spread!r}")
    if not 0 <= samples <= _MAX_SAMPLES:
        raise ValueError(f"{name}: {samples!r} samples")
