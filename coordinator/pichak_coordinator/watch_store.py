"""What a watch keeps in the history's file: schedule, memory of each device, charges, events.

One watch holds a store at a time. Everything that one probe changes is written in one transaction.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pichak_coordinator.database import StoreError, transaction, translated
from pichak_coordinator.history_rows import ELSEWHERE
from pichak_coordinator.records import Row, json_safe
from pichak_coordinator.schedule import HOUR, Charge, Entry
from pichak_coordinator.store import Store
from pichak_coordinator.watch_memory import Memory

COMMAND = "fleet watch"


@dataclass(frozen=True)
class Delivery:
    """An event that the webhook has not taken yet. `body` is sent as it is, every time."""

    event: str
    body: str
    created_unix: float
    attempts: int


class WatchStore(Store):
    """The store as a watch uses it."""

    @contextmanager
    def held(self) -> Any:
        """Be the only watch of this store, until the block or this process ends, however it ends.

        `StoreError` says who holds it.
        """
        # A lock of SQLite's own on a file of its own: it goes with the process on every system,
        # and neither readers nor writers of the history notice it.
        beside = self.path.with_name(self.path.name + "-watch")
        with translated(beside):
            guard = sqlite3.connect(beside, timeout=0, isolation_level=None)
        try:
            try:
                guard.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                raise StoreError(self._held_by(error)) from error
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            self._write(
                "INSERT INTO watch_state VALUES (1, NULL, ?) "
                "ON CONFLICT (one) DO UPDATE SET holder = excluded.holder",
                [(holder,)],
            )
            yield
        finally:
            guard.close()

    def _held_by(self, error: sqlite3.OperationalError) -> str:
        if "locked" not in str(error):
            return f"{self.path}: the watch's lock cannot be taken ({error})"
        found = self._all("SELECT holder FROM watch_state")
        who = found[0][0] if found else "another process"
        return (
            f"{self.path} is already watched by {who}: stop that one first, or give this watch a "
            "history of its own with --store"
        )

    # -- schedule ---------------------------------------------------------------------------------

    def entries(self) -> dict[str, Entry]:
        """Every node's schedule."""
        found = self._all("SELECT node, entry_json FROM watch_nodes")
        return {node: Entry.from_dict(json.loads(text)) for node, text in found}

    def last_look(self) -> float | None:
        """When a watch last looked at its schedule; None before the first."""
        found = self._all("SELECT looked_unix FROM watch_state")
        return found[0][0] if found else None

    def look(self, now: float, entries: Iterable[Entry] = ()) -> None:
        """Note a look, and the entries that it changed."""
        with self._lock, translated(self.path), transaction(self._db):
            self._db.execute("UPDATE watch_state SET looked_unix = ?", (now,))
            self._put_entries(entries)

    def charges(self, now: float) -> dict[str, Charge]:
        """Probe -> what it is charged, of the last hour; older ones are forgotten."""
        self._write("DELETE FROM watch_charges WHERE started_unix <= ?", [(now - HOUR,)])
        found = self._all("SELECT probe, started_unix, seconds FROM watch_charges")
        return {probe: Charge(started, seconds) for probe, started, seconds in found}

    def begin_probe(self, probe: str, charge: Charge, entry: Entry) -> None:
        """Before anything of a probe is sent: its charge, and the node's next time."""
        with self._lock, translated(self.path), transaction(self._db):
            self._put_charge(probe, charge)
            self._put_entries([entry])

    def end_probe(
        self,
        probe: str,
        charge: Charge,
        entry: Entry,
        memories: Mapping[tuple[str, str], Memory],
        events: Sequence[tuple[Mapping[str, Any], bool]],
    ) -> list[dict[str, Any]]:
        """What a probe came to, at once; returns the events with their ids, as `tell` does."""
        with self._lock, translated(self.path), transaction(self._db):
            self._put_charge(probe, charge)
            self._put_entries([entry])
            self._put_memories(memories)
            return self._put_events(events)

    def remember(
        self, entries: Iterable[Entry], memories: Mapping[tuple[str, str], Memory]
    ) -> None:
        """Schedule and memories as a whole, of a watch that took place elsewhere."""
        with self._lock, translated(self.path), transaction(self._db):
            self._put_entries(entries)
            self._put_memories(memories)

    def memory(self, node: str, device: str) -> Memory:
        """What is remembered of a device; nothing where it was never probed."""
        found = self._all(
            "SELECT memory_json FROM watch_devices WHERE node = ? AND device = ?", node, device
        )
        return Memory.from_dict(json.loads(found[0][0])) if found else Memory()

    def latest_rows(self, nodes: Iterable[str]) -> list[Row]:
        """Of each node the rows of its last light and its last full watch probe, the older first,
        as far as they were measured."""
        by_run: dict[str, set[str]] = {}
        for node in nodes:
            found = self._all(
                "SELECT run, max(started_unix) FROM runs JOIN run_nodes USING (run) "
                "WHERE node = ? AND command = ? AND EXISTS (SELECT 1 FROM jobs JOIN outcomes "
                "USING (job_id) WHERE jobs.run = runs.run AND jobs.node = run_nodes.node) "
                "GROUP BY settings_json",
                node,
                COMMAND,
            )
            for run, _ in found:
                by_run.setdefault(run, set()).add(node)
        return [row for run in sorted(by_run) for row in self.rows_of(run, by_run[run])]

    def last_measured(self, nodes: Iterable[str]) -> dict[tuple[str, str], float]:
        """(node, depth) -> when a watch last got a result that is ok."""
        made: dict[tuple[str, str], float] = {}
        for node in nodes:
            found = self._all(
                "SELECT settings_json, max(received_unix) FROM run_nodes JOIN runs USING (run) "
                "JOIN jobs ON jobs.run = runs.run AND jobs.node = run_nodes.node "
                "JOIN outcomes USING (job_id) WHERE run_nodes.node = ? AND command = ? "
                "AND status = 'ok' GROUP BY settings_json",
                node,
                COMMAND,
            )
            made |= {(node, str(json.loads(text).get("depth"))): at for text, at in found}
        return made

    # -- events -----------------------------------------------------------------------------------

    def tell(self, events: Sequence[tuple[Mapping[str, Any], bool]]) -> list[dict[str, Any]]:
        """Keep events (and whether the webhook gets each); returns them with their ids."""
        with self._lock, translated(self.path), transaction(self._db):
            return self._put_events(events)

    def events(self) -> list[dict[str, Any]]:
        """Every event, the oldest first, with `delivery`: how far the webhook is with it."""
        found = self._all("SELECT body, delivery FROM watch_events ORDER BY created_unix, seq")
        return [{**json.loads(body), "delivery": delivery} for body, delivery in found]

    def members(self) -> dict[str, dict[str, Any]]:
        """Node -> the event that told of its joining, of those that were not told to have left; of
        the watches of this store, and not of one whose events came in a file."""
        found = self._all(
            "SELECT body FROM watch_events WHERE json_extract(body, '$.event') IN "
            "('joined', 'left') AND delivery != ? ORDER BY seq",
            ELSEWHERE,
        )
        made: dict[str, dict[str, Any]] = {}
        for (body,) in found:
            told = json.loads(body)
            made.pop(told["node"], None)
            if told["event"] == "joined":
                made[told["node"]] = told
        return made

    def next_delivery(self, now: float) -> Delivery | None:
        """The oldest event that is due to be sent; events are sent in their order."""
        found = self._all(
            "SELECT event, body, created_unix, attempts, next_try_unix FROM watch_events "
            "WHERE delivery = 'pending' ORDER BY seq LIMIT 1"
        )
        if not found or found[0][4] > now:
            return None
        return Delivery(*found[0][:4])

    def pending_deliveries(self) -> int:
        """How many events wait for the webhook."""
        found = self._all("SELECT count(*) FROM watch_events WHERE delivery = 'pending'")
        return int(found[0][0])

    def note_delivery(
        self, event: str, state: str, *, next_try: float = 0.0, error: str = ""
    ) -> None:
        """After a try: 'sent', 'given up', or 'pending' with the time of the next one."""
        self._write(
            "UPDATE watch_events SET delivery = ?, attempts = attempts + 1, next_try_unix = ?, "
            "error = ? WHERE event = ? AND delivery = 'pending'",
            [(state, next_try, error, event)],
        )

    def _put_entries(self, entries: Iterable[Entry]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO watch_nodes VALUES (?, ?)",
            [(entry.node, json.dumps(entry.as_dict())) for entry in entries],
        )

    def _put_memories(self, memories: Mapping[tuple[str, str], Memory]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO watch_devices VALUES (?, ?, ?)",
            [
                (node, device, json.dumps(json_safe(memory.as_dict())))
                for (node, device), memory in memories.items()
            ],
        )

    def _put_charge(self, probe: str, charge: Charge) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO watch_charges VALUES (?, ?, ?)",
            (probe, charge.started, charge.seconds),
        )

    def _put_events(self, events: Sequence[tuple[Mapping[str, Any], bool]]) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for event, notify in events:
            now = self._clock()
            record: dict[str, Any] = json_safe({"id": secrets.token_hex(8), "time": now, **event})
            self._db.execute(
                "INSERT INTO watch_events (event, created_unix, body, delivery, attempts, "
                "next_try_unix, error) VALUES (?, ?, ?, ?, 0, 0, '')",
                (record["id"], now, json.dumps(record), "pending" if notify else ""),
            )
            kept.append(record)
        return kept
