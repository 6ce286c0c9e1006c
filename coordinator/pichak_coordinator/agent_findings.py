"""What a node's agent has seen between probes, as it tells when it is greeted. Pure.

It comes from the node, so nothing of it is believed beyond its form: known codes, short plain text,
flat figures, a bounded number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, get_args

from pichak_coordinator.records import Finding, Severity

#: The codes of the agent's watch (`pichak_agent.watch_rules`).
CODES = frozenset(
    {
        "clock_jumped",
        "cpu_steal",
        "disk_filling",
        "gpu_added",
        "gpu_below_sisters",
        "gpu_ecc",
        "gpu_ecc_growing",
        "gpu_foreign_process",
        "gpu_link",
        "gpu_lost",
        "gpu_missing",
        "gpu_power_limit",
        "gpu_power_limit_changed",
        "gpu_pushed_out",
        "gpu_repair_failed",
        "gpu_repair_pending",
        "gpu_rows_replaced",
        "gpu_shared_memory",
        "gpu_slowed",
        "gpu_spill",
        "gpu_swapped",
        "memory_pressure",
        "nvml_hung",
        "nvml_lost",
        "oom_kill",
        "spill_unknown",
        "throughput_collapse",
    }
)
#: What a machine has, however many nodes it is: one kernel counts it.
OF_THE_MACHINE = frozenset({"clock_jumped", "cpu_steal", "memory_pressure", "oom_kill"})
_SEEN_BY = "agent"
_MOST = 50
_MOST_FIGURES, _MOST_TEXT = 20, 500
#: Years 2001 to 2100.
_EARLIEST_UNIX, _LATEST_UNIX = 1e9, 4.1e9


def agent_findings(hello: Mapping[str, Any]) -> list[Finding]:
    """The findings of a greeting, one for each code: several GPUs with the same are one sentence.

    What is malformed, resolved or of an unknown code is left out.
    """
    listed = hello.get("findings")
    found: dict[str, list[Finding]] = {}
    for entry in listed[:_MOST] if isinstance(listed, (list, tuple)) else ():
        for made in _finding(entry, str(hello.get("host") or "its node")):
            found.setdefault(made.code, []).append(made)
    return sorted(map(_together, found.values()), key=lambda finding: finding.order)


def findings_of_each(hellos: Sequence[Mapping[str, Any]]) -> list[list[Finding]]:
    """`agent_findings` of every greeting. What several nodes of one machine tell of that machine is
    told once, by the one that is surest of it; nodes whose `boot` is not known stand alone."""
    told = [agent_findings(hello) for hello in hellos]
    boots = [boot if isinstance(boot := hello.get("boot"), str) else "" for hello in hellos]
    nodes = Counter(boot for boot in boots if boot)
    surest: dict[tuple[str, str], int] = {}
    for number, (boot, found) in enumerate(zip(boots, told, strict=True)):
        for finding in found:
            if finding.code in OF_THE_MACHINE and nodes[boot] > 1:
                best = surest.setdefault((boot, finding.code), number)
                other = next(f for f in told[best] if f.code == finding.code)
                if finding.order < other.order:
                    surest[boot, finding.code] = number
    return [
        [
            _of_nodes(finding, nodes[boot]) if (boot, finding.code) in surest else finding
            for finding in found
            if surest.get((boot, finding.code), number) == number
        ]
        for number, (boot, found) in enumerate(zip(boots, told, strict=True))
    ]


def _of_nodes(finding: Finding, nodes: int) -> Finding:
    return replace(
        finding,
        sentence=f"{finding.sentence} (its machine is {nodes} nodes of this run)",
        evidence={**finding.evidence, "nodes_of_the_machine": nodes},
    )


def from_agent(finding: Finding) -> bool:
    """Whether a node's agent saw it between probes."""
    return finding.evidence.get("seen_by") == _SEEN_BY


def _finding(entry: Any, host: str) -> Iterator[Finding]:
    if not isinstance(entry, Mapping):
        return
    code, sentence, evidence = (entry.get(n) for n in ("code", "sentence", "evidence"))
    severity: Any = entry.get("severity")
    state: Any = entry.get("state")
    first = _time(entry.get("first_unix"))
    # Sentence and evidence are those of the last look.
    last = _time(entry.get("last_unix", first))
    if not isinstance(code, str) or code not in CODES or severity not in get_args(Severity):
        return
    if state not in ("suspected", "confirmed") or not isinstance(sentence, str) or not sentence:
        return
    if first is None or last is None:
        return
    when = _said(last)
    if _said(first) != when:
        when += f" (and first at {_said(first)})"
    told = f"the agent on {_plain(host, 100)} saw, at {when}: {_plain(sentence, _MOST_TEXT)}"
    subject = entry.get("subject")
    figures = {**_figures(evidence), "first_unix": first, "last_unix": last, "seen_by": _SEEN_BY}
    if isinstance(subject, str) and subject:
        figures["subject"] = _plain(subject, 100)
    yield Finding(code, severity, told, figures, state)


def _time(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if _EARLIEST_UNIX <= value <= _LATEST_UNIX else None


def _said(at_unix: float) -> str:
    return datetime.fromtimestamp(at_unix, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _figures(evidence: Any) -> dict[str, Any]:
    """Flat figures and short texts."""
    if not isinstance(evidence, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, value in list(evidence.items())[:_MOST_FIGURES]:
        key = _plain(str(name), 60)
        if isinstance(value, str):
            found[key] = _plain(value, 200)
        elif isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
    return found


def _together(alike: list[Finding]) -> Finding:
    """The worst of one code, with a word of how many there are."""
    worst = min(alike, key=lambda finding: finding.order)
    if len(alike) == 1:
        return worst
    more = len(alike) - 1
    return replace(
        worst,
        sentence=f"{worst.sentence} (and {more} more of this kind)",
        evidence={**worst.evidence, "of_this_kind": len(alike)},
    )


def _plain(text: str, most: int) -> str:
    """One printable line."""
    return "".join(c if c.isprintable() else " " for c in text[:most]).strip() or "?"
