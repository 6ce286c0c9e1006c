"""How the store is written: one transaction for what belongs together, dated by a clock."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pichak_coordinator.database import transaction, translated
from pichak_coordinator.ingest import Parts
from pichak_coordinator.store_read import Reader

#: How far apart the first readings of two outcomes are numbered; see migration 3.
_IN_A_SET = 65536
_MOST_NAMES = 10_000


class Writer(Reader):
    """Transactions and dates, for `Store`."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(path, db)
        self._clock = clock
        self._names: dict[tuple[str, str], int] = {}
        self._names_version = -1

    @contextmanager
    def atomically(self) -> Iterator[None]:
        """Everything that the block writes, in one transaction: all of it, or nothing. Blocks may
        lie in one another; the outermost one decides."""
        with self._lock, translated(self.path):
            if self._db.in_transaction:
                yield
                return
            try:
                with transaction(self._db):
                    yield
            except BaseException:
                self._names.clear()  # what was new among them is not in the file
                raise

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

    def forget_unused_names(self) -> None:
        """Drop the names under which nothing is kept any more."""
        self._names.clear()
        self._write("DELETE FROM reading_names WHERE id NOT IN (SELECT name FROM readings)", [()])

    def _put_readings(self, where: Sequence[Any], parts: Parts) -> None:
        """The readings of one outcome; `where` is what they have in common, in the columns' order
        of ``reading_sets``. Runs in the transaction of the outcome."""
        if not parts.readings:
            return
        version: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._names_version:  # another process wrote: it may have forgotten some
            self._names.clear()
            self._names_version = version
        made = self._db.execute(
            "INSERT INTO reading_sets (node, received_unix, job_id, attempt, run, device, gpu_uuid)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            where,
        )
        first = (made.lastrowid or 0) * _IN_A_SET
        names = self._names
        numbers: list[tuple[Any, ...]] = []
        others: list[tuple[Any, ...]] = []
        for at, row in enumerate(parts.metric_rows(), first):
            metric, value, text, unmeasured, unit, spread, samples, suspect, source = row
            name = names.get((metric, unit)) or self._name(metric, unit)
            if value is not None and not suspect:
                numbers.append((at, name, value, spread, samples, source))
            else:
                more = (text, unmeasured, suspect)
                others.append((at, name, value, spread, samples, source, *more))
        # Most are plain numbers: without the three values that they lack they take a third less.
        self._db.executemany(
            "INSERT INTO readings (id, name, value, spread, samples, source, suspect) "
            "VALUES (?, ?, ?, ?, ?, ?, '')",
            numbers,
        )
        self._db.executemany(
            "INSERT INTO readings (id, name, value, spread, samples, source, text, unmeasured, "
            "suspect) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            others,
        )

    def _name(self, metric: str, unit: str) -> int:
        """The number of a metric in a unit. Nodes choose their names: not all are kept at hand."""
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        self._db.execute(
            "INSERT INTO reading_names (metric, unit) VALUES (?, ?) ON CONFLICT DO NOTHING",
            (metric, unit),
        )
        found = self._db.execute(
            "SELECT id FROM reading_names WHERE metric = ? AND unit = ?", (metric, unit)
        )
        number: int = found.fetchone()[0]
        self._names[metric, unit] = number
        return number

    def _write(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        with self.atomically():
            return self._db.executemany(sql, rows).rowcount
