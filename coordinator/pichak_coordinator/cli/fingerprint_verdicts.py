"""What is wrong, for the page of one fingerprint: the rules that need no other machine."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pichak_coordinator.absolute import absolute_findings
from pichak_coordinator.gpu_findings import METRIC
from pichak_coordinator.records import SEVERITIES, NodeRecord, Row
from pichak_core.measurement import Measurement, Reason, Unmeasured

if TYPE_CHECKING:
    from pichak_core.measurement import Fingerprint

_ENDING = "_verdict"
#: A driver that is there and does not answer; one that is not there is no fault.
_BROKEN = (Reason.FAILED, Reason.LOST, Reason.TIMED_OUT)


def is_verdict(name: str) -> bool:
    """Whether a metric is a verdict in words: shown among them, not among the numbers."""
    return name.endswith(_ENDING)


def verdicts(fingerprint: Fingerprint) -> list[tuple[str, str]]:
    """(severity, sentence), the worst first: the absolute rules' and the measurements' own."""
    found: list[tuple[str, str]] = []
    driver = fingerprint.get("software.driver")
    if isinstance(driver, Unmeasured) and driver.reason in _BROKEN:
        found.append(("fail", f"the GPUs cannot be read: {driver.detail}"))
    found += [
        (finding.severity, finding.sentence)
        for finding in absolute_findings(Row(NodeRecord("here"), fingerprint))
    ]
    for name, reading in fingerprint.items():
        if not is_verdict(name) or not isinstance(reading, Measurement):
            continue
        if name != METRIC:  # its findings are among the absolute rules'
            found.append(("info", f"{name.removesuffix(_ENDING)}: {reading.value}"))
    rank: dict[str, int] = {severity: place for place, severity in enumerate(SEVERITIES)}
    return sorted(dict.fromkeys(found), key=lambda each: rank.get(each[0], len(rank)))


def verdict_lines(fingerprint: Fingerprint, width: int) -> list[str]:
    """The section; nothing where nothing was judged, which is not "all is well"."""
    found = verdicts(fingerprint)
    judged = [n for n in fingerprint if is_verdict(n) and isinstance(fingerprint[n], Measurement)]
    if not found:
        return ["VERDICTS", "  nothing found by the rules that could be applied"] if judged else []
    lines = [f"VERDICTS ({len(found)})"]
    for severity, sentence in found:
        lines += textwrap.wrap(
            sentence,
            width,
            initial_indent=f"  {severity:<6}",
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
    return lines
