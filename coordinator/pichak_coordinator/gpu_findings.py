"""The verdicts that a node's own `gpu_state` measurement gave, as findings. Pure.

They need no other machine: they are kept in the detail of ``gpu.state_verdict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pichak_coordinator.records import Finding, FindingState, Row, Severity
from pichak_core.measurement import Measurement

METRIC = "gpu.state_verdict"

#: Every code, and whether one reading confirms it: what the driver counts or says is read, what the
#: card did under load is timed and must be seen again.
STATES: Mapping[str, FindingState] = {
    "gpu_lost": "confirmed",
    "gpu_identity": "confirmed",
    "gpu_ecc": "confirmed",
    "gpu_ecc_history": "confirmed",
    "gpu_repair_failed": "confirmed",
    "gpu_repair_pending": "confirmed",
    "gpu_power_limit": "confirmed",
    "gpu_unlicensed": "confirmed",
    "gpu_slowed": "suspected",
    "gpu_held_back": "suspected",
    "gpu_link": "suspected",
    "gpu_below_sisters": "suspected",
    "gpu_shared_memory": "suspected",
}


def gpu_findings(row: Row) -> Iterator[Finding]:
    """The findings of a row; entries that are malformed or of an unknown code are left out."""
    reading = row.fingerprint.get(METRIC)
    listed = reading.detail.get("findings") if isinstance(reading, Measurement) else None
    for entry in listed if isinstance(listed, (list, tuple)) else ():
        made = _finding(entry)
        if made is not None:
            yield made


def _finding(entry: Any) -> Finding | None:
    if not isinstance(entry, Mapping):
        return None
    code, sentence, evidence = (entry.get(n) for n in ("code", "sentence", "evidence"))
    severity: Any = entry.get("severity")
    if not isinstance(code, str) or code not in STATES:
        return None
    if severity not in get_args(Severity):
        return None
    if not isinstance(sentence, str) or not sentence.strip():
        return None
    return Finding(
        code,
        severity,
        sentence,
        dict(evidence) if isinstance(evidence, Mapping) else {},
        STATES[code],
        metric=METRIC,
    )
