"""What a network test found after a profile, and what a watch holds open, put beside the profile's
own findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from pichak_coordinator.records import Finding, Row
from pichak_coordinator.store_read import Reader
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_peers import ident

#: What the evidence of a finding says that only the watch holds.
SEEN_BY_WATCH = "fleet watch"


def rows_as_known(store: Reader, run: str, *, curves: bool = True) -> list[Row]:
    """The rows of `run` with all that is known against its nodes: what it found itself, what a
    network test after it found, and, of the newest run, what a watch holds open."""
    rows = with_network_findings(store, run, store.rows_of(run, curves=curves))
    newest = next((r.run for r in store.runs() if r.compares), "")
    return with_watch_findings(store, rows) if run == newest else rows


def with_network_findings(store: Reader, run: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of `run`, each with what the newest network test after it found of its node."""
    newer = []
    for other in store.runs():
        if other.run == run:
            break
        newer.append(other)
    tested = {row.node.node for row in rows}
    test = next(
        (r for r in newer if r.command == "net" and tested & set(store.nodes_of(r.run))), None
    )
    if test is None:
        return list(rows)
    found = store.findings(test.run)
    made = []
    for row in rows:
        known = {finding.key for finding in row.findings if finding.fault}
        more = [f for f in found.get((row.node.node, ""), []) if f.key not in known]
        keys = {finding.key for finding in more}
        kept = [f for f in row.findings if f.key not in keys]
        made.append(replace(row, findings=tuple(sorted([*kept, *more], key=_order))))
    return made


def with_watch_findings(store: Reader, rows: Sequence[Row]) -> list[Row]:
    """The rows, each with what `pichak fleet watch` holds open of its device now and its own run
    did not find."""
    held = {
        (node, device): Memory.from_dict(json.loads(text)).findings
        for node, device, text in store.each("SELECT node, device, memory_json FROM watch_devices")
    }
    made = []
    for row in rows:
        known = {finding.key for finding in row.findings}
        more = [
            replace(f, evidence={**f.evidence, "seen_by": SEEN_BY_WATCH})
            for f in held.get(ident(row.node), ())
            if f.key not in known
        ]
        made.append(replace(row, findings=tuple(sorted([*row.findings, *more], key=_order))))
    return made


def _order(finding: Finding) -> tuple[int, bool, str, str]:
    return finding.order
