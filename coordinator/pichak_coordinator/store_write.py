"""How the store is written: one transaction for what belongs together, dated by a clock."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pichak_coordinator.database import transaction, translated
from pichak_coordinator.ingest import Parts
from pichak_coordinator.store_read import Reader

#: Keys may hold lone surrogates, which only ASCII can carry.
_NUMBERS = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)


class Writer(Reader):
    """Transactions and dates, for `Store`."""

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
