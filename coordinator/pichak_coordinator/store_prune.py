"""What the history forgets: runs and events that are older than asked for, and that nothing needs.

Kept whatever their age: of each node the last run of each kind that measured it, so that there is
always something to compare with and the findings that are open stay; events of findings that are
still open, and of the joining of nodes that have not left; and events that the webhook has not had
yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pichak_coordinator.history_rows import ELSEWHERE
from pichak_coordinator.store import Store

#: How long a watch keeps history unless it is told otherwise.
KEEP_DAYS = 90.0
_DAY = 86400.0

_LAST_GOOD = """
SELECT run FROM (
    SELECT jobs.run AS run, row_number() OVER (
        PARTITION BY jobs.node, jobs.device, runs.command,
            CASE runs.command WHEN 'fleet watch' THEN runs.settings_json ELSE '' END
        ORDER BY runs.started_unix DESC, runs.seq DESC
    ) AS nth
    FROM jobs JOIN runs USING (run) JOIN outcomes USING (job_id)
    WHERE outcomes.status = 'ok'
    GROUP BY jobs.run, jobs.node, jobs.device
) WHERE nth = 1
"""
_OLD = (
    "SELECT run FROM runs WHERE started_unix < ? AND (? = '' OR command = ?) "  # noqa: S608
    f"AND run NOT IN ({_LAST_GOOD})"
)
_OF_RUN = (
    "DELETE FROM outcome_numbers WHERE job_id IN (SELECT job_id FROM jobs WHERE run = ?)",
    "DELETE FROM outcomes WHERE job_id IN (SELECT job_id FROM jobs WHERE run = ?)",
    "DELETE FROM jobs WHERE run = ?",
    "DELETE FROM plans WHERE run = ?",
    "DELETE FROM findings WHERE run = ?",
    "DELETE FROM run_nodes WHERE run = ?",
    "DELETE FROM runs WHERE run = ?",
)
#: Outcomes whose job this store did not send.
_UNASKED = (
    "DELETE FROM outcome_numbers WHERE run IS NULL AND received_unix < ?",
    "DELETE FROM outcomes WHERE received_unix < ? "
    "AND job_id IN (SELECT job_id FROM jobs WHERE run IS NULL)",
    "DELETE FROM jobs WHERE run IS NULL AND changed_unix < ? "
    "AND job_id NOT IN (SELECT job_id FROM outcomes)",
)


@dataclass(frozen=True)
class Pruned:
    """How many were forgotten."""

    runs: int = 0
    events: int = 0


def prune(store: Store, keep_days: float, now: float, *, command: str = "") -> Pruned:
    """Forget what is older than `keep_days`, of all runs or of those of one command.

    Run by run, each in a transaction of its own: others write in between, and what was interrupted
    goes on the next time.
    """
    before = now - keep_days * _DAY
    if not command:
        with store.atomically():
            for statement in _UNASKED:
                store.insert(statement, (before,))
    runs = [run for (run,) in store.each(_OLD, before, command, command)]
    for run in runs:
        with store.atomically():
            for statement in _OF_RUN:
                store.insert(statement, (run,))
    return Pruned(len(runs), _prune_events(store, before))


def _prune_events(store: Store, before: float) -> int:
    # Whichever of the node's devices: an event calls a GPU cuda:0, the memory by its UUID.
    needed = {
        (node, finding["code"], finding["metric"])
        for node, text in store.each("SELECT node, memory_json FROM watch_devices")
        for finding in json.loads(text)["findings"]
    }
    old = list(
        store.each(
            "SELECT seq, body FROM watch_events WHERE created_unix < ? AND delivery != 'pending'",
            before,
        )
    )
    here = _still_here(store)
    gone = [seq for seq, body in old if seq not in here and _about(json.loads(body)) not in needed]
    with store.atomically():
        for seq in gone:
            store.insert("DELETE FROM watch_events WHERE seq = ?", (seq,))
    return len(gone)


def _still_here(store: Store) -> set[int]:
    """The events that tell of the joining of nodes that have not left: without its own, the next
    watch would take a node for new."""
    last: dict[str, tuple[str, int]] = {}
    for seq, node, told in store.each(
        "SELECT seq, json_extract(body, '$.node'), json_extract(body, '$.event') FROM watch_events "
        "WHERE json_extract(body, '$.event') IN ('joined', 'left') AND delivery != ? ORDER BY seq",
        ELSEWHERE,
    ):
        last[node] = (told, seq)
    return {seq for told, seq in last.values() if told == "joined"}


def _about(event: dict[str, Any]) -> tuple[Any, Any, Any]:
    finding = event.get("finding") or {}
    return event.get("node"), finding.get("code"), finding.get("metric")
