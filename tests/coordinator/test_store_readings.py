"""Readings in the store: whole in the outcomes' bytes, and beside them the numbers that judge."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.database import APPLICATION_ID, migrations
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

READINGS = (
    Measurement("a_mb_s", 1 / 3, "MB/s", "timed", 9, 0.1, suspect="too fast"),
    Measurement("b", "ext4", "", "read"),
    Measurement("c", True, "", "read"),
    Unmeasured("d_us", Reason.TIMED_OUT, "after 3 s"),
    Measurement("e_us", 0.1 + 0.2, "us", "timed", 5, 0.01),
    Measurement("f_cores", 32, "", "counted"),
)
NUMBERS = {"e_us": 0.1 + 0.2, "f_cores": 32.0}


def outcome(job_id: str, *readings: Measurement | Unmeasured, attempt: int = 1) -> bytes:
    found = Fingerprint({reading.name: reading for reading in readings})
    return encode(Outcome(job_id, attempt, "fingerprint", "ok", {"fingerprint": found.to_dict()}))


def put(store: Store, number: int, *readings: Measurement | Unmeasured) -> str:
    run = store.begin_run("fleet profile")
    node = store.record_node(run, {"machine_id": "m", "host": "h"})
    job = Job(f"j-{number}", 1, "fingerprint", {"device": "cpu"}, 60.0)
    store.record_job(run, job, node=node)
    assert store.record_outcome(outcome(job.job_id, *readings))
    return node


def test_every_kind_of_reading_comes_back(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db", clock=lambda: 50.0) as store:
        node = put(store, 1, *READINGS)
        (a,) = store.history(node, "a_mb_s")
        assert (a.value, a.unit, a.spread, a.samples) == (1 / 3, "MB/s", 0.1, 9)
        assert (a.suspect, a.source, a.device) == ("too fast", "timed", "cpu")
        assert (a.received_unix, a.simulated) == (50.0, False)
        (b,), (c,), (d,) = (store.history(node, name) for name in ("b", "c", "d_us"))
        assert (b.text, c.text, d.value) == ("ext4", "True", None)
        assert (d.unmeasured, d.source) == ("timed out", "after 3 s")
        assert sorted(store.metric_names(node)) == sorted(r.name for r in READINGS)
        assert store.history(node, "never_us") == []
        assert store.history(node, "b", device="cuda:0") == []


def test_histories_of_several_are_those_of_each(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db") as store:
        node = ""
        for number in range(4):
            node = put(store, number, Measurement("x_us", float(number), "us", "timed"), *READINGS)
        found = store.histories(node, ["x_us", "never_us", "d_us"])
        assert list(found) == ["x_us", "never_us", "d_us"]
        assert all(points == store.history(node, name) for name, points in found.items())
        assert [p.value for p in found["x_us"]] == [0.0, 1.0, 2.0, 3.0]


def test_only_sound_numbers_judge(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db") as store:
        node = put(store, 1, *READINGS)
        put(store, 2, *READINGS)
        now = store.latest_run()
        assert now is not None
        values = store.earlier_values(now.run)
        assert values == {(node, "cpu", name): [value] for name, value in NUMBERS.items()}


def test_a_store_of_the_schema_before_keeps_every_reading(tmp_path: Path) -> None:
    """A job that ran twice, the first time without what judges, and an outcome without a run."""
    path = tmp_path / "fleet.db"
    old = [
        ("n-1", 10.0, "j-1", 1, "r-1", "cuda:0", "GPU-1", outcome("j-1", READINGS[1])),
        ("n-1", 11.0, "j-1", 2, "r-1", "cuda:0", "GPU-1", outcome("j-1", *READINGS, attempt=2)),
        ("n-2", 12.0, "j-2", 1, None, "cpu", "", outcome("j-2", READINGS[4])),
    ]
    with contextlib.closing(sqlite3.connect(path)) as db:
        for script in migrations()[:3]:
            db.executescript(script)
        for id_, (*where, data) in enumerate(old, start=7):
            node, received, job_id, attempt, *_ = where
            kept = (job_id, attempt, node, "ok", 0, received, data)
            db.execute("INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?)", kept)
            db.execute("INSERT INTO reading_sets VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (id_, *where))
            entries = Outcome(**_fields(data)).result["fingerprint"]
            for at, (name, entry) in enumerate(entries.items()):
                _put_row(db, id_ * 65536 + at, name, entry)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("PRAGMA user_version = 3")
        db.commit()
    with Store.open(path) as store:
        numbers = store.each("SELECT numbers_json FROM outcome_numbers ORDER BY received_unix")
        assert [json.loads(text) for (text,) in numbers] == [{}, NUMBERS, {"e_us": 0.1 + 0.2}]
        common = "SELECT node, received_unix, job_id, attempt, run, device, gpu_uuid FROM "
        assert list(store.each(f"{common} outcome_numbers ORDER BY id")) == [o[:-1] for o in old]
        assert [p.text for p in store.history("n-1", "b")] == ["ext4", "ext4"]
        assert store.metric_names("n-2") == ["e_us"]


def _fields(data: bytes) -> dict[str, object]:
    import msgpack

    record = dict(msgpack.unpackb(data))
    del record["message"]
    return record


def _put_row(db: sqlite3.Connection, id_: int, name: str, entry: dict[str, object]) -> None:
    """As schema 3 kept a reading."""
    key = (name, str(entry.get("unit", "")))
    db.execute("INSERT OR IGNORE INTO reading_names (metric, unit) VALUES (?, ?)", key)
    (number,) = db.execute(
        "SELECT id FROM reading_names WHERE metric = ? AND unit = ?", key
    ).fetchone()
    value = entry.get("value")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = None if is_number or value is None else str(value)
    db.execute(
        "INSERT INTO readings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(id_, number, value if is_number else None, text, entry.get("unmeasured")),
            *(entry.get("spread"), entry.get("samples", 0)),
            *(entry.get("suspect", ""), entry.get("source", "")),
        ),
    )
