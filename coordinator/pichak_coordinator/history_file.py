"""Stored history as a file, to be read into another machine's store.

Rows travel as they are, outcomes as the bytes that the nodes produced; the readings of an outcome
are read from it again where it arrives. What is there already stays, so that importing twice, or
two overlapping exports, changes nothing the second time.

Of a watch its events and what it remembers of each device travel, where everything does; its
schedule, its budget and who it is do not. What the other machine's own watch remembers stays.

Files of older stores are read too: they are the archive of what was pruned. A migration that
changes a column of one of `TABLES` must therefore say here what a row of before becomes, or raise
`_OLDEST_STORE` and tell in the CHANGELOG whose exports are no longer read.
"""

# ruff: noqa: S608  - the SQL is put together from constants of this package; values are bound.

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pichak_agent.messages import SCHEMA, MessageError
from pichak_coordinator.framed_file import FramedFileError, FrameWriter, read_frames
from pichak_coordinator.history_rows import ELSEWHERE, TABLES, check_row
from pichak_coordinator.ingest import read_outcome
from pichak_coordinator.store import Store
from pichak_coordinator.store_read import Reader

_KIND = "history"
#: Since this schema of the store the columns of `TABLES` are what they are; those of a watch are
#: there since 2.
_OLDEST_STORE = 1

#: Which rows of a table belong to a run; `?` is the run.
_OF_RUN = {
    "runs": "run = ?",
    "nodes": "node IN (SELECT node FROM run_nodes WHERE run = ?)",
    "run_nodes": "run = ?",
    "jobs": "run = ?",
    "outcomes": "job_id IN (SELECT job_id FROM jobs WHERE run = ?)",
    "plans": "run = ?",
    "findings": "run = ?",
}
_ORDER = {"runs": "seq", "run_nodes": "run, position, node", "watch_events": "seq"}

#: What happens to a row whose key is there already. Nothing, but for these:
_MERGE = {
    "runs": "(run) DO UPDATE SET finished_unix = excluded.finished_unix "
    "WHERE finished_unix IS NULL AND excluded.finished_unix IS NOT NULL",
    "nodes": "(node) DO UPDATE SET "
    "host = CASE WHEN excluded.last_seen_unix > last_seen_unix THEN excluded.host ELSE host END, "
    "address = CASE WHEN excluded.last_seen_unix > last_seen_unix THEN excluded.address "
    "ELSE address END, "
    "first_seen_unix = min(first_seen_unix, excluded.first_seen_unix), "
    "last_seen_unix = max(last_seen_unix, excluded.last_seen_unix) "
    "WHERE excluded.last_seen_unix > last_seen_unix OR excluded.first_seen_unix < first_seen_unix",
    "jobs": "(job_id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts, "
    "error = excluded.error, changed_unix = excluded.changed_unix "
    "WHERE state NOT IN ('done', 'failed', 'cancelled') AND excluded.changed_unix > changed_unix",
}


@dataclass
class Added:
    """What an import of history did: rows in the file and rows that were new, by table."""

    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    new: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    newest: tuple[str, ...] = ()
    cut: bool = False

    @property
    def changed(self) -> bool:
        return any(self.new.values())

    @property
    def sentence(self) -> str:
        runs, outcomes = self.held["runs"], self.held["outcomes"]
        text = f"history of {_count(runs, 'run')} with {_count(outcomes, 'result')}"
        if self.cut:
            text += ", which is what is whole of a file that ends too early"
        if not self.changed:
            return f"{text}, all of it imported before; nothing changed"
        text += f", of which {self.new['runs']} and {self.new['outcomes']} are new here"
        if self.new["watch_events"] or self.new["watch_devices"]:
            events, devices = self.new["watch_events"], self.new["watch_devices"]
            text += (
                f"; of a watch {_count(events, 'event')} and what it remembers of "
                f"{_count(devices, 'device')}, not its schedule"
            )
        if self.cut and self.new["runs"]:
            text += "; those runs stand as not finished, until the whole file is imported"
        return text

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        status = "new" if self.changed else "known"
        rows = {"rows": dict(self.held), "new_rows": dict(self.new)}
        return {"status": status, "cut": self.cut, **rows}


def export_history(
    store: Reader, path: Path, runs: Sequence[str] | None, *, replace: bool = False
) -> dict[str, int]:
    """Write `runs` (None: everything, also outcomes of no run) as they are at one moment; rows by
    table. `FramedFileError` when the file cannot be written: nothing is left of it then."""
    made = FrameWriter(path, replace=replace)
    try:
        counts = dict.fromkeys(TABLES, 0)
        made.object({"file": _KIND, "schema": SCHEMA, "store": store.schema()})
        with store.snapshot():
            for table in TABLES:
                for row in _rows(store, table, runs):
                    data = row.pop("data", None)
                    made.object({"table": table, "row": row})
                    if data is not None:
                        made.outcome(data)
                    counts[table] += 1
        made.finish()
    except BaseException:
        made.discard()
        raise
    return counts


def _rows(store: Reader, table: str, runs: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    if runs is not None and table not in _OF_RUN:
        return  # what a watch keeps is of no run
    columns = [name for name in store.columns(table) if name != "seq"]
    sql = f"SELECT {', '.join(columns)} FROM {table}"
    order = f" ORDER BY {_ORDER.get(table, 'rowid' if table == 'outcomes' else '1, 2')}"
    if runs is None:
        for record in store.each(sql + order):
            yield dict(zip(columns, record, strict=True))
        return
    seen: set[str] = set()
    for run in runs:
        for record in store.each(f"{sql} WHERE {_OF_RUN[table]}{order}", run):
            if table == "nodes" and record[0] in seen:
                continue
            seen.add(record[0])
            yield dict(zip(columns, record, strict=True))


def is_history(path: Path) -> bool:
    """Whether a file says that it is one; `FramedFileError` when it is no file of ours at all."""
    head = next(read_frames(path, partial=True), None)
    return isinstance(head, dict) and head.get("file") == _KIND


def import_history(store: Store, path: Path, *, partial: bool = False) -> Added:
    """Read a file into the store: all of it, or nothing and `FramedFileError`.

    With `partial` all is what is whole in a file that ends too early. Findings stand at the end of
    a file, so that runs which came that way are left without their end: nobody takes them for
    complete, and the whole file, imported later, completes them.
    """
    try:
        with store.atomically():
            return _import(store, path, partial)
    except FramedFileError:
        raise
    except (MessageError, ValueError, sqlite3.IntegrityError) as error:
        raise FramedFileError(f"{path}: {error}; nothing of it was imported") from error


def _import(store: Store, path: Path, partial: bool) -> Added:
    added = Added(cut=partial and _is_cut(path))
    frames = read_frames(path, partial=partial)
    head = next(frames, None)
    if not isinstance(head, dict) or head.get("file") != _KIND:
        raise ValueError("not a file of `pichak export`")
    _refuse_other_version(head.get("schema"), head.get("store"), store.schema())
    columns = {table: store.columns(table) for table in TABLES}
    newest = (float("-inf"), "")
    for record in frames:
        if isinstance(record, bytes):
            raise ValueError("a result without its row")
        table, row = record.get("table"), record.get("row")
        if set(record) != {"table", "row"} or table not in TABLES or not isinstance(row, dict):
            raise ValueError("a part that is no row of any table")
        if table == "outcomes":
            data = next(frames, None)
            if data is None and added.cut:
                break
            if not isinstance(data, bytes):
                raise ValueError("a row of outcomes without its result")
            check_row(table, row, [c for c in columns[table] if c != "data"])
            new = _put_outcome(store, row, data)
        else:
            check_row(table, row, columns[table])
            if added.cut and table == "runs":
                row["finished_unix"] = None
            new = _put_row(store, table, row)
        added.held[table] += 1
        added.new[table] += new
        if table == "runs" and row["command"] not in ("net", "fleet watch"):
            newest = max(newest, (row["started_unix"], row["run"]))
    if added.cut and not any(added.held.values()):
        raise ValueError("nothing in it is whole: copy it again")
    added.newest = (newest[1],) if newest[1] else ()
    return added


def _refuse_other_version(schema: Any, wrote: Any, here: int) -> None:
    """Rows of an older store are what they are here; nobody knows what a newer one holds."""
    if (type(schema), schema) == (int, SCHEMA) and type(wrote) is int:
        if _OLDEST_STORE <= wrote <= here:
            return
        if wrote > here:
            raise ValueError(
                f"written by a newer pichak-fleet (store {wrote}; this one knows {here}): install "
                "that version here too"
            )
    raise ValueError(
        f"written by another version (schema {str(schema)[:20]}, store {str(wrote)[:20]}; here "
        f"{SCHEMA} and {here}): install the same pichak-fleet version on both machines"
    )


def _is_cut(path: Path) -> bool:
    cut: list[bool] = []
    for _ in read_frames(path, partial=True, on_cut=lambda: cut.append(True)):
        pass
    return bool(cut)


def _put_row(store: Store, table: str, row: Mapping[str, Any]) -> int:
    if table == "jobs":
        there = store.job(row["job_id"])
        if there is not None and (there.run, there.node) != (row["run"], row["node"]):
            raise ValueError(f"job {row['job_id']} is in the store as another run's")
    if table == "runs":
        run = store.run(row["run"])
        if run is not None and (run.command, run.started_unix) != (
            row["command"],
            row["started_unix"],
        ):
            raise ValueError(f"run {row['run']} is in the store as something else")
    if table == "watch_events":
        row = {**row, "delivery": ELSEWHERE}
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    merge = _MERGE.get(table, "DO NOTHING")
    return store.insert(
        f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT {merge}", list(row.values())
    )


def _put_outcome(store: Store, row: Mapping[str, Any], data: bytes) -> int:
    parts = read_outcome(data)
    outcome = parts.outcome
    said = (row["job_id"], row["attempt"], row["status"], row["simulated"])
    if said != (outcome.job_id, outcome.attempt, outcome.status, int(outcome.simulated)):
        raise ValueError(f"the row of job {row['job_id']} is not that of the result behind it")
    there = store.outcome_bytes(outcome.job_id, outcome.attempt)
    if there is not None and there != data:
        raise ValueError(f"job {outcome.job_id} is in the store with another result")
    return int(store.restore_outcome(data, parts, row["received_unix"]))


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
