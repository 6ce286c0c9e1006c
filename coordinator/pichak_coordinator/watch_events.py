"""What a probe of a node means: judged against peers and past, and told as events. Pure.

An event is a plain mapping: ``event`` (its kind), ``node``, ``host``, ``device`` ("" for the whole
node), ``text`` (a sentence for a person) and what the kind adds. Those of `NOTIFIED` go to the
webhook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pichak_coordinator.changes import Change
from pichak_coordinator.judge import History, judge
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.watch_memory import Drift, Memory, begun_anew, drift, still_open
from pichak_coordinator.watch_peers import Ident, Peers, ident
from pichak_core.measurement import Measurement

#: Kinds that leave the machine: what is sure, and who comes and goes.
NOTIFIED = frozenset(
    {"confirmed", "cleared", "changed", "joined", "left", "probe_failed", "probe_works"}
)

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """One device after a probe. `fresh`: something is suspected that was not before; `noise` as in
    `Drift`."""

    row: Row
    memory: Memory
    events: tuple[Event, ...]
    fresh: bool
    restless: bool
    noise: float | None


def judge_probe(
    rows: Sequence[Row],
    peers: Sequence[Row] | Peers,
    memories: Mapping[Ident, Memory],
    history: History,
) -> list[Judgement]:
    """Judge one probe's rows of a node: `peers` are the latest rows of every device of the fleet,
    the one that was read last at the end, older ones of these devices included, which count for
    nothing here."""
    known = peers if isinstance(peers, Peers) else Peers(peers)
    earlier = {row.key: memories.get(ident(row.node), Memory()).findings for row in rows}
    found = judge(rows, history=history, earlier=earlier, peers=known.beside(rows))
    return [_judged(row, found[row.key], memories.get(ident(row.node), Memory())) for row in rows]


def _judged(row: Row, found: Sequence[Finding], memory: Memory) -> Judgement:
    said = {finding.key: finding for finding in (*row.findings, *found)}
    findings = still_open(memory.findings, list(said.values()), row)
    was = {finding.key: finding for finding in memory.findings}
    moved = drift(memory, row)
    events: list[Event] = []
    fresh = restless = False
    for finding in findings:
        old = was.get(finding.key)
        if finding.state == "confirmed" and (old is None or old.state != "confirmed"):
            events.append(_event("confirmed", row, finding, moved))
            restless |= finding.severity != "info"
        elif old is None:
            events.append(_event("suspected", row, finding, moved))
            fresh |= finding.severity != "info"
            restless |= finding.severity != "info"
    now = {finding.key for finding in findings}
    over = [old for key, old in was.items() if key not in now]
    events += [_cleared(row, old, moved) for old in over]
    accused = {finding.metric for finding in findings}
    for change in moved.changed:
        restless = True
        if change.metric not in accused:
            events.append(_changed(row, change, moved))
    # That a fault ended has been told with its figures; it is no change to be told again.
    ended = [old.metric for old in over if old.state == "confirmed"]
    kept = replace(begun_anew(moved.memory, row, ended), findings=findings)
    return Judgement(row, kept, tuple(events), fresh, restless, moved.noise)


def event(kind: str, node: NodeRecord, text: str, **more: Any) -> dict[str, Any]:
    """One event; `text` is what a person reads after the node's name."""
    place = {"node": node.node, "host": node.host, "device": node.device, "name": node.label}
    if node.simulated:
        more = {"simulated": True, **more}
    return {"event": kind, **place, "text": text, **more}


def _event(kind: str, row: Row, finding: Finding, moved: Drift) -> Event:
    before = _before_after(row, finding.metric, moved)
    told = f" (before: {before['sentence']})" if before else ""
    return event(
        kind,
        row.node,
        f"{finding.severity} {finding.code}: {finding.sentence}{told}",
        finding=finding.as_dict(),
        change=before,
    )


def _before_after(row: Row, metric: str, moved: Drift) -> dict[str, Any] | None:
    """What the finding's metric was and is, with the conditions it was read under."""
    change = moved.differences.get(metric)
    if change is None:
        return None
    return {**_evidence(row, change), "sentence": change.sentence}


def _evidence(row: Row, change: Change) -> dict[str, Any]:
    reading = row.fingerprint.get(change.metric)
    if not isinstance(reading, Measurement):
        return change.as_dict()
    measured = {
        "samples": reading.samples,
        "source": reading.source,
        "conditions": dict(reading.conditions),
    }
    return {**change.as_dict(), **measured}


def _cleared(row: Row, finding: Finding, moved: Drift) -> Event:
    kind = "cleared" if finding.state == "confirmed" else "not_repeated"
    word = "is no longer seen" if kind == "cleared" else "was not seen again"
    return event(
        kind,
        row.node,
        f"{finding.code} {f'of {finding.metric} ' if finding.metric else ''}{word}",
        finding=finding.as_dict(),
        change=_before_after(row, finding.metric, moved),
    )


def _changed(row: Row, change: Change, moved: Drift) -> Event:
    before = moved.differences[change.metric]
    return event(
        "changed",
        row.node,
        f"changed, in two probes in a row: {before.sentence}",
        change={**_evidence(row, change), "sentence": before.sentence},
    )
