"""How the store is written: one transaction for what belongs together, dated by a clock; and how an
outcome is, exactly once."""

# ruff: noqa: S608  - the SQL is put together from constants of this package; values are bound.

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pichak_coordinator.database import transaction, translated
from pichak_coordinator.ingest import Parts
from pichak_coordinator.jobs import FINAL
from pichak_coordinator.records import Finding
from pichak_coordinator.store_read import Reader

#: Keys may hold lone surrogates, which only ASCII can carry.
_NUMBERS = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)
#: Characters of a device's name in an outcome that nobody asked for.
_MAX_DEVICE = 128
FINAL_SQL = ", ".join(f"'{state}'" for state in sorted(FINAL))


class Writer(Reader):
    """Transactions, dates and outcomes, for `Store`."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(path, db)
        self._clock = clock

    @contextmanager
    def atomically(self) -> Iterator[None]:
        """Everything that the block writes, in one transaction: all of it, or nothing. Blocks may
        lie in one another; the outermost one decides."""
        with self._lock, translated(self.path):
            if self._db.in_transaction:
                yield
                return
            with transaction(self._db):
                yield

    @contextmanager
    def dated(self, unix: float) -> Iterator[None]:
        """What the block writes is dated `unix`: it was measured then, and arrives only now."""
        with self._lock:
            kept, self._clock = self._clock, lambda: unix
            try:
                yield
            finally:
                self._clock = kept

    def now(self) -> float:
        """The store's own clock, in Unix seconds."""
        return self._clock()

    def insert(self, sql: str, values: Sequence[Any]) -> int:
        """Carry out one INSERT of this package's; how many rows it made or changed."""
        return self._write(sql, [values])

    def give_room_back(self) -> None:
        """Make the file as small as what it holds; takes as much room beside it meanwhile."""
        with self._lock, translated(self.path):
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _put_outcome(self, data: bytes, parts: Parts) -> bool:
        outcome, now = parts.outcome, self._clock()
        job_id, attempt = outcome.job_id, outcome.attempt
        db = self._db
        job = db.execute("SELECT run, node, device FROM jobs WHERE job_id = ?", (job_id,))
        known = job.fetchone()
        if known is None:
            device = outcome.result.get("device")
            named = isinstance(device, str) and len(device) <= _MAX_DEVICE
            known = (None, outcome.node, device if named else "")
            db.execute(
                "INSERT INTO jobs VALUES (?, NULL, ?, ?, ?, 'queued', ?, ?, '{}', ?)",
                (job_id, known[1], known[2], outcome.kind, attempt, outcome.error, now),
            )
        run, node, device = known
        if not self._insert_outcome(data, parts, run, node, device, now):
            return False
        if run is not None:
            self._put_findings(run, node, device, parts.findings)
        db.execute(
            "UPDATE jobs SET attempts = max(attempts, ?), changed_unix = ?, "
            "error = CASE WHEN ? THEN '' ELSE error END, "
            "state = CASE WHEN ? THEN 'done' ELSE state END "
            f"WHERE job_id = ? AND state NOT IN ({FINAL_SQL})",
            (attempt, now, outcome.ok, outcome.ok, job_id),
        )
        return True

    def _insert_outcome(
        self, data: bytes, parts: Parts, run: str | None, node: str, device: str, received: float
    ) -> bool:
        """The outcome and its readings; False when it was there before."""
        outcome, db = parts.outcome, self._db
        job_id, attempt = outcome.job_id, outcome.attempt
        new = db.execute(
            "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (job_id, attempt, node, outcome.status, outcome.simulated, received, data),
        ).rowcount
        if not new:
            return False
        where = (node, received, job_id, attempt, run, device, parts.gpu_uuid)
        self._put_numbers(where, parts)
        return True

    def _put_findings(self, run: str, node: str, device: str, found: Iterable[Finding]) -> None:
        for f in found:
            self._db.execute(
                "INSERT OR REPLACE INTO findings (run, node, device, code, metric, severity, "
                "state, confidence, sentence, evidence_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(run, node, device, f.code, f.metric, f.severity),
                    *(f.state, f.confidence, f.sentence, as_json(f.evidence)),
                ),
            )

    def _put_numbers(self, where: Sequence[Any], parts: Parts) -> None:
        """The numbers of one outcome that later ones are judged by; `where` is what they have in
        common, in the columns' order of ``outcome_numbers``. Runs in the outcome's transaction."""
        if parts.readings:
            self._db.execute(
                "INSERT INTO outcome_numbers (node, received_unix, job_id, attempt, run, device, "
                "gpu_uuid, numbers_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*where, _NUMBERS.encode(parts.numbers())),
            )

    def _write(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        with self.atomically():
            return self._db.executemany(sql, rows).rowcount


def as_json(record: Any) -> str:
    """The text of a JSON column."""
    return json.dumps(record, ensure_ascii=True, default=str)
