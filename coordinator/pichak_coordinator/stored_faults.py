"""What a network test found after a profile, put beside the profile's own findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pichak_coordinator.records import Row
from pichak_coordinator.store_read import Reader


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
        made.append(replace(row, findings=tuple(sorted([*kept, *more], key=lambda f: f.order))))
    return made
