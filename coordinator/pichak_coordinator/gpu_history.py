"""Whether a machine still has the GPUs that it had when it was last seen."""

# ruff: noqa: S608  - the SQL is put together from constants of this package; values are bound.

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pichak_coordinator.identity import gpu_changes, gpu_uuids, machine_key
from pichak_coordinator.records import Finding
from pichak_coordinator.store_read import BEFORE


def changed_gpus(
    db: sqlite3.Connection, run: str, hellos: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, list[Finding]]]:
    """For each machine of a run whose GPUs changed: the number of its first hello, and what to say.

    It is held against the last run before this one that saw it. Copies of one image share a machine
    id and differ by host name: each is held against itself. A machine under one new name is the old
    one, renamed.
    """
    places = [(machine_key(hello), str(hello.get("host") or "")) for hello in hellos]
    for machine, host in dict.fromkeys(places):
        had = _had(db, run, machine, host)
        if had is None and sum(other == machine for other, _ in set(places)) == 1:
            names = db.execute(
                "SELECT DISTINCT host FROM nodes WHERE machine = ? AND host <> ?", (machine, host)
            ).fetchall()
            had = _had(db, run, machine, names[0][0]) if len(names) == 1 else None
        if had is None:
            continue
        mine = [i for i, place in enumerate(places) if place == (machine, host)]
        found = gpu_changes(had, {uuid for i in mine for uuid in gpu_uuids(hellos[i])})
        if found:
            yield mine[0], found


def _had(db: sqlite3.Connection, run: str, machine: str, host: str) -> set[str] | None:
    """The GPUs of a machine in the last run that saw it under this name; None without one."""
    found = db.execute(
        "SELECT gpu_uuids_json FROM nodes JOIN run_nodes USING (node) "
        "WHERE machine = ? AND host = ? AND run = (SELECT run FROM runs JOIN run_nodes USING (run) "
        f"JOIN nodes USING (node) WHERE machine = ? AND host = ? AND {BEFORE} "
        "AND run_nodes.error = '' ORDER BY started_unix DESC, seq DESC LIMIT 1)",
        (machine, host, machine, host, run),
    ).fetchall()
    return {uuid for (text,) in found for uuid in json.loads(text)} if found else None
