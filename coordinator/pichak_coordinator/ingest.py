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

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_agent.messages import MessageError, Outcome, decode
from pichak_coordinator.records import Finding
from pichak_core.measurement import Fingerprint, Measurement, Reading
from pichak_core.plan import Plan

#: More readings or findings than any machine has.
_MAX_PARTS = 10_000
_MAX_SAMPLES = 10**12
_MAX_NAME = 200

MetricValues = tuple[str, float | None, str | None, str | None, str, float | None, int, str, str]


@dataclass(frozen=True)
class Parts:
    """An outcome and the parts of its result, checked."""

    outcome: Outcome
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    plan: Plan | None = None
    ramp: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def gpu_uuid(self) -> str:
        """Which card was measured; "" for a CPU, or where no UUID could be read."""
        return self.fingerprint.text("gpu.uuid") or ""

    def without_curves(self) -> Parts:
        """The same without lists of numbers (samples, curves) in its readings' details."""
        bare = Fingerprint()
        shared: Mapping[str, Any] = {}
        for name, reading in self.fingerprint.items():
            made = _bare(reading, shared)
            bare[name] = made
            if isinstance(made, Measurement) and made.detail:
                shared = made.detail
        return replace(self, fingerprint=bare)

    def metric_rows(self) -> list[MetricValues]:
        """(metric, value, text, unmeasured, unit, spread, samples, suspect, source) a reading."""
        return [_metric_row(reading) for reading in self.fingerprint.values()]


def read_outcome(data: bytes) -> Parts:
    """Decode and check; `MessageError` says which part is wrong."""
    outcome = decode(data, Outcome)
    result = outcome.result
    try:
        fingerprint = Fingerprint.from_dict(_mapping(result, "fingerprint") or {})
        plan = _mapping(result, "plan") or _mapping(result, "task")
        found = result.get("findings") or []
        if not isinstance(found, list):
            raise ValueError("findings: a list was expected")
        if max(len(found), len(fingerprint)) > _MAX_PARTS:
            raise ValueError(f"more than {_MAX_PARTS:,} readings or findings")
        for reading in fingerprint.values():
            _check(reading)
        return Parts(
            outcome,
            fingerprint,
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


def _bare(reading: Reading, shared: Mapping[str, Any]) -> Reading:
    """The reading without its curves; what is left of its detail is shared with the one before
    where they are equal, for a fleet's rows hold a million of them."""
    if not isinstance(reading, Measurement) or not reading.detail:
        return reading
    kept = {name: part for name, part in reading.detail.items() if not _is_curve(part)}
    same = kept == shared and [*map(type, kept.values())] == [*map(type, shared.values())]
    return replace(reading, detail=shared if same else kept)


def _is_curve(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and isinstance(part[0], (int, float))


def _check(reading: Reading) -> None:
    if len(reading.name) > _MAX_NAME:
        raise ValueError(f"a metric's name of {len(reading.name):,} characters")
    if not isinstance(reading, Measurement):
        return
    if reading.spread is not None and not 0 <= reading.spread < math.inf:
        raise ValueError(f"{reading.name}: a spread of {reading.spread!r}")
    if not 0 <= reading.samples <= _MAX_SAMPLES:
        raise ValueError(f"{reading.name}: {reading.samples!r} samples")


def _metric_row(reading: Reading) -> MetricValues:
    if not isinstance(reading, Measurement):
        return reading.name, None, None, reading.reason.value, "", None, 0, "", reading.detail
    value = reading.value
    number = None if isinstance(value, (str, bool)) else float(value)
    text = None if number is not None else str(value)
    return (
        reading.name,
        number,
        text,
        None,
        reading.unit,
        reading.spread,
        reading.samples,
        reading.suspect,
        reading.source,
    )
