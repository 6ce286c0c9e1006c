"""Readings in the store: one row each, what they have in common once, as the view shows them."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.database import APPLICATION_ID, migrations
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

COLUMNS = (
    "node, metric, received_unix, job_id, attempt, run, device, gpu_uuid, value, text, "
    "unmeasured, unit, spread, samples, suspect, source"
)
Row = tuple[Any, ...]
FIRST: Row = ("j-1", 1, "r-1", "cuda:0", "GPU-1")
SECOND: Row = ("j-1", 2, "r-1", "cuda:0", "GPU-1")
STRAY: Row = ("j-2", 1, None, "cpu", "")
#: Rows as a store of schema 2 held them: a job that ran twice, and an outcome without a run.
OLD: tuple[Row, ...] = (
    ("n-1", "m0_mb_s", 10.0, *FIRST, 0.1, None, None, "MB/s", 0.3, 9, "", "timed, 0"),
    ("n-1", "m1_mb_s", 10.0, *FIRST, 1.1, None, None, "MB/s", 0.3, 9, "", "timed, 1"),
    ("n-1", "gpu.name", 10.0, *FIRST, None, "L4", None, "", None, 1, "", "read"),
    ("n-1", "m0_mb_s", 11.0, *SECOND, 7.5, None, None, "MB/s", None, 1, "too fast", "timed"),
    ("n-1", "m0_mb_s", 11.0, *SECOND, 7.5, None, None, "us", None, 1, "", "in another unit"),
    ("n-2", "m9_mb_s", 12.0, *STRAY, None, None, "failed", "", None, 0, "", "it would not"),
)


def test_a_store_of_the_schema_before_keeps_every_reading(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        for script in migrations()[:2]:
            db.executescript(script)
        marks = ", ".join("?" * 16)
        db.executemany(f"INSERT INTO metrics ({COLUMNS}) VALUES ({marks})", OLD)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("PRAGMA user_version = 2")
        db.commit()
    with Store.open(path) as store:
        assert tuple(store.each(f"SELECT {COLUMNS} FROM metrics")) == OLD
        assert next(store.each("SELECT count(*) FROM reading_sets"))[0] == 3
        assert [(p.value, p.unit) for p in store.history("n-1", "m0_mb_s")] == [
            (0.1, "MB/s"),
            (7.5, "MB/s"),
            (7.5, "us"),
        ]
        assert store.metric_names("n-2") == ["m9_mb_s"]


def put(store: Store, number: int, *readings: Measurement | Unmeasured) -> str:
    run = store.begin_run("fleet profile")
    node = store.record_node(run, {"machine_id": "m", "host": "h"})
    job = Job(f"j-{number}", 1, "fingerprint", {"device": "cpu"}, 60.0)
    store.record_job(run, job, node=node)
    found = Fingerprint({reading.name: reading for reading in readings})
    result = {"fingerprint": found.to_dict()}
    assert store.record_outcome(encode(Outcome(job.job_id, 1, job.kind, "ok", result)))
    return node


def test_every_kind_of_reading_comes_back(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db", clock=lambda: 50.0) as store:
        node = put(
            store,
            1,
            Measurement("a_mb_s", 1 / 3, "MB/s", "timed", 9, 0.1, suspect="too fast"),
            Measurement("b", "ext4", "", "read"),
            Measurement("c", True, "", "read"),
            Unmeasured("d_us", Reason.TIMED_OUT, "after 3 s"),
        )
        (a,) = store.history(node, "a_mb_s")
        assert (a.value, a.unit, a.spread, a.samples) == (1 / 3, "MB/s", 0.1, 9)
        assert (a.suspect, a.source, a.device) == ("too fast", "timed", "cpu")
        (b,), (c,), (d,) = (store.history(node, name) for name in ("b", "c", "d_us"))
        assert (b.text, c.text, d.value) == ("ext4", "True", None)
        assert (d.unmeasured, d.source) == ("timed out", "after 3 s")


def test_names_that_another_process_forgot_are_written_again(tmp_path: Path) -> None:
    reading = Measurement("a_mb_s", 1.0, "MB/s", "timed")
    with Store.open(tmp_path / "fleet.db") as store, Store.open(tmp_path / "fleet.db") as other:
        node = put(store, 1, reading)
        with other.atomically():
            other.insert("DELETE FROM readings", ())
        other.forget_unused_names()
        assert list(other.each("SELECT * FROM reading_names")) == []
        put(store, 2, reading)
        assert [p.value for p in store.history(node, "a_mb_s")] == [1.0]


def test_names_of_a_transaction_that_failed_are_not_taken_for_written(tmp_path: Path) -> None:
    reading = Measurement("a_mb_s", 1.0, "MB/s", "timed")
    with Store.open(tmp_path / "fleet.db") as store:
        with contextlib.suppress(KeyboardInterrupt), store.atomically():
            put(store, 1, reading)
            raise KeyboardInterrupt
        node = put(store, 2, reading)
        assert [p.value for p in store.history(node, "a_mb_s")] == [1.0]
