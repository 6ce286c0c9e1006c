"""The store: exactly once, nothing acknowledged is lost, nothing foreign is overwritten."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest

from pichak_agent.messages import Job, MessageError, Outcome, encode
from pichak_coordinator.database import APPLICATION_ID, migrations, transaction
from pichak_coordinator.records import Finding
from pichak_coordinator.store import CorruptStoreError, Store, StoreError, default_path
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan, Value

COPY = Measurement(
    "gpu.h2d_pinned_mb_s", 12800.0, "MB/s", "median of 9 verified copies", samples=9, spread=40.0
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(tmp_path / "fleet.db", clock=Clock()) as opened:
        yield opened


def outcome(job_id: str, attempt: int = 1, *readings, status: str = "ok", **parts) -> bytes:
    result = dict(parts)
    if readings:
        fingerprint = Fingerprint()
        for reading in readings:
            fingerprint.add(reading)
        result["fingerprint"] = fingerprint.to_dict()
    error = "" if status == "ok" else f"it was {status}"
    return encode(Outcome(job_id, attempt, "fingerprint", status, result, error=error, node="n-x"))


def job(job_id: str, attempt: int = 1, kind: str = "fingerprint", device: str = "cuda:0") -> Job:
    return Job(job_id, attempt, kind, {"device": device}, 60.0)


def begin(store: Store, *hellos: dict) -> tuple[str, list[str]]:
    run = store.begin_run("fleet profile", {"model": "builtin:gpt-1m"})
    return run, store.record_nodes(run, hellos or [{"machine_id": "m1", "host": "alpha"}])


def test_an_outcome_is_kept_as_its_bytes_with_its_readings(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("j1"), node=node)
    lost = Unmeasured("gpu.d2h_pinned_mb_s", Reason.LOST, "the device fell off the bus")
    named = Measurement("software.driver", "550.90", "", "NVML")
    on = Measurement("gpu.persistence", True, "", "NVML")
    data = outcome("j1", 1, COPY, lost, named, on)
    assert store.record_outcome(data) is True
    assert store.outcome_bytes("j1", 1) == data
    (point,) = store.history(node, "gpu.h2d_pinned_mb_s")
    assert (point.value, point.unit, point.spread, point.samples) == (12800.0, "MB/s", 40.0, 9)
    assert (point.run, point.device, point.source) == (run, "cuda:0", COPY.source)
    (absent,) = store.history(node, "gpu.d2h_pinned_mb_s")
    assert (absent.value, absent.text, absent.unmeasured) == (None, None, "lost")
    (driver,) = store.history(node, "software.driver")
    assert (driver.value, driver.text) == (None, "550.90")
    # A truth value is not the number 1, here as in Fingerprint.number.
    assert store.history(node, "gpu.persistence")[0].value is None
    assert len(store.metric_names(node)) == 4


def test_the_same_attempt_twice_is_kept_once(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("j1"), node=node)
    first = outcome("j1", 1, COPY)
    assert store.record_outcome(first) is True
    assert store.record_outcome(first) is False
    # A replay with other contents does not replace what was acknowledged.
    assert store.record_outcome(outcome("j1", 1, status="error")) is False
    assert store.outcome_bytes("j1", 1) == first
    assert len(store.history(node, COPY.name)) == 1
    assert store.record_outcome(outcome("j1", 2, COPY)) is True
    assert len(store.history(node, COPY.name)) == 2


def test_a_batch_keeps_the_sound_ones_and_says_what_is_wrong_with_the_others(store: Store) -> None:
    good, worse = outcome("j1", 1, COPY), b"\x00not msgpack"
    answers = store.record_outcomes([good, worse, outcome("j2"), good])
    assert [a for a in answers if isinstance(a, bool)] == [True, True, False]
    assert isinstance(answers[1], MessageError)


@pytest.mark.parametrize(
    "result",
    [
        {"fingerprint": ["a list"]},
        {"fingerprint": {"disk.read_mb_s": 5}},
        {"fingerprint": {"disk.read_mb_s": {"value": 5}}},
        {"fingerprint": {"disk.read_mb_s": {"unmeasured": "because"}}},
        {"fingerprint": {"a_mb_s": {"value": float("nan"), "source": "s"}}},
        {"fingerprint": {"a_mb_s": {"value": 1.0, "source": "s", "spread": float("inf")}}},
        {"fingerprint": {"a_mb_s": {"value": 1.0, "source": "s", "spread": -1.0}}},
        {"fingerprint": {"a_mb_s": {"value": 1.0, "source": "s", "samples": -1}}},
        {"fingerprint": {"a_mb_s": {"value": 1.0, "source": "s", "samples": {}}}},
        {"fingerprint": {"a_mb_s": {"value": 1.0, "source": " "}}},
        {"plan": {"values": {"micro_batch": {"value": 4, "source": ""}}}},
        {"plan": "a plan"},
        {"task": {"values": {"seq_len": {"value": [512], "source": "s"}}}},
        {"ramp": [1, 2]},
        {"findings": {"code": "x"}},
        {"findings": [{"code": "x", "severity": "terrible", "sentence": "s"}]},
        {"findings": [{"code": 5, "severity": "warn", "sentence": "s"}]},
        {"findings": [None]},
    ],
)
def test_an_outcome_with_a_malformed_part_is_refused_whole(store: Store, result: dict) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("j1"), node=node)
    data = encode(Outcome("j1", 1, "fingerprint", "ok", result))
    with pytest.raises(MessageError, match="j1"):
        store.record_outcome(data)
    assert store.outcome_bytes("j1", 1) is None
    assert store.metric_names(node) == []
    assert store.jobs(run)[0].state == "queued"


def test_damaged_bytes_store_nothing(store: Store) -> None:
    whole = outcome("j1", 1, COPY)
    rng = random.Random(5)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        cut = bytes(damaged[: rng.randrange(len(damaged))]) if rng.random() < 0.5 else damaged
        answer = store.record_outcomes([bytes(cut)])[0]
        refused += isinstance(answer, MessageError)
    assert refused > 150
    other = msgpack.packb({"message": "Outcome", "schema": 999})
    assert isinstance(store.record_outcomes([other])[0], MessageError)


def test_numbers_beyond_64_bits_of_sqlite(store: Store) -> None:
    # field case 14: the raw not-available sentinel, should a node ever send it
    huge = Measurement("gpu.used_bytes", 2**64 - 1, "bytes", "raw")
    assert store.record_outcome(outcome("j1", 1, huge)) is True
    assert store.history("n-x", "gpu.used_bytes")[0].value == float(2**64)


@pytest.mark.parametrize("part", ["value", "spread", "seconds"])
def test_whole_numbers_of_64_bits_in_every_part_of_a_reading(store: Store, part: str) -> None:
    reading = {"value": 1.0, "source": "s", part: 2**64 - 1}
    data = Outcome("j", 1, "fingerprint", "ok", {"fingerprint": {"m": reading}}, node="n-x")
    assert store.record_outcome(encode(data))


def test_an_outcome_of_an_unknown_job_is_kept_without_a_run(store: Store) -> None:
    assert store.record_outcome(outcome("stranger", 3, COPY, device="cuda:1")) is True
    (point,) = store.history("n-x", COPY.name)
    assert (point.run, point.device) == (None, "cuda:1")
    assert store.outcome_bytes("stranger", 3) is not None


def test_a_job_has_one_final_state(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("j1"), node=node)
    assert store.set_job_state("j1", "dispatched", attempt=1)
    assert store.set_job_state("j1", "failed", error="the node died")
    assert not store.set_job_state("j1", "done")
    store.record_outcome(outcome("j1", 1, COPY))  # late, and kept
    (kept,) = store.jobs(run)
    assert (kept.state, kept.error, kept.attempts) == ("failed", "the node died", 1)
    assert not store.set_job_state("nobody", "done")
    with pytest.raises(ValueError, match="finishing"):
        store.set_job_state("j1", "finishing")


def test_an_ok_outcome_finishes_its_job_in_the_same_transaction(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("j1"), node=node)
    store.set_job_state("j1", "retrying", attempt=1, error="lost")
    store.record_job(run, job("j1", 2), node=node)
    store.record_outcome(outcome("j1", 2, COPY))
    (kept,) = store.jobs(run)
    assert (kept.state, kept.attempts, kept.error) == ("done", 2, "")


def test_rows_put_a_nodes_outcomes_together(store: Store) -> None:
    run, (one, two) = begin(
        store,
        {
            "machine_id": "m1",
            "host": "alpha",
            "address": "10.0.0.1",
            "cpu_model": "EPYC 7763",
            "gpus": [{"uuid": "GPU-1", "name": "NVIDIA L4"}, {"uuid": "GPU-2", "name": "A10"}],
            "gpu_uuids": ["GPU-1", "GPU-2"],
            "versions": {"torch": "2.13.0"},
        },
        {"machine_id": "m2", "host": "beta"},
    )
    for name, device in (("host", ""), ("g0", "cuda:0"), ("g1", "cuda:1"), ("r1", "cuda:1")):
        kind = "ramp" if name.startswith("r") else "fingerprint"
        store.record_job(run, job(name, 1, kind, device), node=one)
    disk = Measurement("disk.read_mb_s", 900.0, "MB/s", "O_DIRECT")
    store.record_outcome(outcome("host", 1, disk))
    named = Measurement("gpu.name", "NVIDIA L4", "", "NVML")
    store.record_outcome(outcome("g0", 1, COPY, named, Unmeasured("disk.read_mb_s", Reason.BUSY)))
    slow = Measurement(COPY.name, 800.0, "MB/s", "9 copies")
    store.record_outcome(outcome("g1", 1, status="killed"))
    store.record_outcome(outcome("g1", 2, slow))
    plan = Plan(model="m").set("micro_batch", 7, "a real ramp")
    ramp = encode(
        Outcome("r1", 1, "ramp", "ok", {"plan": plan.to_dict(), "ramp": {"micro_batch": 7}})
    )
    store.record_outcome(ramp)
    store.record_job(run, job("b", 1, device="cpu"), node=two)
    store.set_job_state("b", "failed", error="the node died (Ray lost contact with it)")

    first, second, third = store.rows_of(run)
    assert [r.key for r in (first, second, third)] == [
        (one, "cuda:0"),
        (one, "cuda:1"),
        (two, "cpu"),
    ]
    # The hello lists two kinds of card, in an order of its own: only the child knows which it had.
    assert (first.node.gpu_model, second.node.gpu_model) == ("NVIDIA L4", "")
    assert first.node.cpu_model == "EPYC 7763"
    assert first.node.versions == {"torch": "2.13.0"}
    assert first.fingerprint.number(COPY.name) == 12800.0
    assert second.fingerprint.number(COPY.name) == 800.0
    # The whole node's reading is in both rows; "busy" in one job does not hide it.
    assert first.fingerprint.number("disk.read_mb_s") == 900.0
    assert second.fingerprint.number("disk.read_mb_s") == 900.0
    assert (first.plan, second.plan) == (None, plan)
    assert second.ramp == {"micro_batch": 7}
    assert (first.error, second.error) == ("", "")
    assert third.error == "fingerprint: the node died (Ray lost contact with it)"
    assert not third.measured
    assert [r.key for r in store.rows_of(run, [two])] == [(two, "cpu")]
    better = Plan(model="m").set("micro_batch", 8, "put together later")
    store.record_plan(run, one, "cuda:1", better)
    assert store.rows_of(run)[1].plan == better


def test_a_node_without_an_agent_has_a_row_with_its_error(store: Store) -> None:
    run = store.begin_run("fleet profile")
    node = store.record_node(run, {"address": "10.0.0.9"}, error="no agent could be started")
    (row,) = store.rows_of(run)
    assert row.node.address == "10.0.0.9"
    assert row.error == "no agent could be started"
    again = store.begin_run("fleet profile")
    assert store.record_node(again, {"address": "10.0.0.9"}, error="again") == node
    assert store.node_at("10.0.0.9") == node
    assert store.node_at("10.0.0.8") is None


def test_partial_results_of_a_failed_job_are_in_its_row(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("j1"), node=node)
    store.record_outcome(outcome("j1", 1, COPY, status="timeout"))
    (unfinished,) = store.rows_of(run)
    assert unfinished.error == "fingerprint: not begun"
    assert unfinished.unfinished and not unfinished.failed
    store.set_job_state("j1", "dispatched", attempt=1)
    assert store.rows_of(run)[0].error == "fingerprint: begun, and not ended"
    store.set_job_state("j1", "failed", error="it was timeout")
    (row,) = store.rows_of(run)
    assert row.fingerprint.number(COPY.name) == 12800.0
    assert row.error == "fingerprint: it was timeout"
    assert row.failed and not row.unfinished


def test_an_error_that_another_one_tells_is_told_once(store: Store) -> None:
    run, (node,) = begin(store)
    why = "error: WorkloadError: no tokenizer"
    ramp = f"the task's numbers are not known ({why})"
    for kind, error in (("fingerprint", "lost"), ("task", why), ("ramp", ramp)):
        store.record_job(run, job(kind, kind=kind), node=node)
        store.set_job_state(kind, "failed", error=error)
    (row,) = store.rows_of(run)
    assert row.error == f"fingerprint: lost; ramp: {ramp}"
    store.record_job(run, job("z", kind="task"), node=node)
    store.set_job_state("z", "failed", error="lost")
    assert store.rows_of(run)[0].error.count("lost") == 2  # of two jobs, in the same words


def test_findings_come_with_their_rows_the_worst_first(store: Store) -> None:
    run, (node,) = begin(store)
    mild = {"code": "small_shm", "severity": "info", "sentence": "/dev/shm has 64 MB"}
    store.record_job(run, job("j1"), node=node)
    store.record_outcome(outcome("j1", 1, COPY, findings=[mild]))
    slow = Finding("slow", "warn", "copies are slow", {"value": 1.0}, metric=COPY.name)
    store.record_findings(run, node, "cuda:0", [slow])
    bad = Finding("wrong_numbers", "fail", "the golden step differs", state="confirmed")
    store.record_findings(run, node, "", [bad])
    (row,) = store.rows_of(run)
    assert [f.code for f in row.findings] == ["wrong_numbers", "slow", "small_shm"]
    assert row.findings[1] == slow
    again = Finding("slow", "warn", "copies are slow", metric=COPY.name, state="confirmed")
    store.record_findings(run, node, "cuda:0", [again])
    assert store.findings(run)[node, "cuda:0"][0] == again


def test_runs_and_what_came_before(store: Store) -> None:
    assert store.latest_run() is None
    runs = []
    for hosts in (("m1", "m2"), ("m1",), ("m1", "m2")):
        run, nodes = begin(store, *({"machine_id": m} for m in hosts))
        for node, host in zip(nodes, hosts, strict=True):
            store.record_job(run, job(f"{run}-{host}"), node=node)
            speed = Measurement(COPY.name, 100.0 + len(runs), "MB/s", "copies")
            store.record_outcome(outcome(f"{run}-{host}", 1, speed))
        store.finish_run(run)
        runs.append(run)
    first, second, third = runs
    one, two = nodes
    assert [r.run for r in store.runs()] == [third, second, first]
    assert [r.run for r in store.runs(2)] == [third, second]
    latest = store.latest_run()
    assert latest is not None
    assert latest.run == third
    assert latest.settings == {"model": "builtin:gpt-1m"}
    assert latest.finished_unix is not None
    assert latest.finished_unix > latest.started_unix
    assert store.previous_run(first) is None
    assert store.previous_run(third) == store.run(second)
    assert store.previous_run(third, two) == store.run(first)
    before = store.previous_rows(third)
    assert before[one, "cuda:0"].fingerprint.number(COPY.name) == 101.0
    assert before[two, "cuda:0"].fingerprint.number(COPY.name) == 100.0
    assert store.earlier_values(third, store.rows_of(third)) == {
        (one, "cuda:0", COPY.name): [100.0, 101.0],
        (two, "cuda:0", COPY.name): [100.0],
    }
    end = latest.finished_unix
    store.finish_run(third)
    assert store.run(third).finished_unix == end  # type: ignore[union-attr]


def test_a_run_that_measured_nothing_is_not_what_came_before(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("a"), node=node)
    store.record_outcome(outcome("a", 1, COPY))
    empty, _ = begin(store)
    last, _ = begin(store)
    assert store.previous_run(last) == store.run(empty)
    assert store.previous_run(last, node) == store.run(run)


def test_suspect_values_are_kept_and_do_not_judge(store: Store) -> None:
    run, (node,) = begin(store)
    store.record_job(run, job("a"), node=node)
    cached = Measurement("disk.read_mb_s", 50000.0, "MB/s", "reads", suspect="faster than DRAM")
    store.record_outcome(outcome("a", 1, cached))
    later, _ = begin(store)
    assert store.history(node, "disk.read_mb_s")[0].suspect == "faster than DRAM"
    (row,) = store.rows_of(later)
    assert row.key == (node, "cpu")
    store.record_job(later, job("b"), node=node)
    assert store.earlier_values(later, store.rows_of(later)) == {}


def test_a_card_is_recognised_by_its_uuid_whatever_its_number(store: Store) -> None:
    runs = []
    for first, second in (("GPU-1", "GPU-2"), ("GPU-2", "GPU-1")):
        run, (node,) = begin(store, {"machine_id": "m", "gpu_uuids": ["GPU-1", "GPU-2"]})
        for device, uuid in (("cuda:0", first), ("cuda:1", second)):
            store.record_job(run, job(f"{run}-{uuid}", device=device), node=node)
            speed = Measurement(COPY.name, 100.0 if uuid == "GPU-1" else 200.0, "MB/s", "copies")
            told = Measurement("gpu.uuid", uuid, "", "NVML")
            store.record_outcome(outcome(f"{run}-{uuid}", 1, speed, told))
        runs.append(run)
    rows = store.rows_of(runs[1])
    assert [row.node.gpu_uuid for row in rows] == ["GPU-2", "GPU-1"]
    before = store.previous_rows(runs[1])
    assert before[node, "cuda:0"].fingerprint.number(COPY.name) == 200.0
    assert before[node, "cuda:1"].fingerprint.number(COPY.name) == 100.0
    history = store.earlier_values(runs[1], rows)
    assert history == {
        (node, "cuda:0", COPY.name): [200.0],
        (node, "cuda:1", COPY.name): [100.0],
    }


def test_a_node_keeps_its_history_under_a_new_address(store: Store) -> None:
    # field case 88
    hello = {"machine_id": "m1", "host": "a", "address": "10.0.0.1", "gpu_uuids": ["G1"]}
    _, (before,) = begin(store, hello)
    run, (after,) = begin(store, {**hello, "host": "b", "address": "10.9.9.9", "node_id": "ray2"})
    assert after == before
    assert store.node_at("10.9.9.9") == before
    assert store.rows_of(run)[0].findings == ()


def test_nodes_that_were_ever_seen(store: Store) -> None:
    begin(store, {"machine_id": "m1", "host": "a", "gpu_uuids": ["G2", "G1"]})
    _, (second,) = begin(store, {"machine_id": "m2", "host": "b", "address": "10.0.0.2"})
    latest, first = store.nodes()
    assert (latest.node, latest.host, latest.address) == (second, "b", "10.0.0.2")
    assert (first.gpu_uuids, latest.gpu_uuids) == (("G1", "G2"), ())
    assert first.last_seen_unix < latest.last_seen_unix


def test_machines_of_one_name_are_told_apart(store: Store) -> None:
    run, nodes = begin(
        store,
        {"machine_id": "m1", "host": "ubuntu", "address": "10.0.0.1"},
        {"machine_id": "m2", "host": "ubuntu", "address": "10.0.0.2"},
        {"machine_id": "m3", "host": "other", "address": "10.0.0.3", "agent_id": "a"},
        {"machine_id": "m3", "host": "other", "address": "10.0.0.3", "agent_id": "b"},
    )
    assert [row.node.label for row in store.rows_of(run)] == [
        "ubuntu (10.0.0.1)",
        "ubuntu (10.0.0.2)",
        "other",
        "other #2",
    ]
    assert store.rows_of(run)[0].node.host == "ubuntu"
    # Behind one address translation, only the identity is left.
    run, nodes = begin(store, *({"machine_id": m, "host": "u", "address": "x"} for m in "12"))
    assert [r.node.label for r in store.rows_of(run)] == [f"u ({node})" for node in nodes]


@pytest.mark.parametrize(
    ("now", "code", "severity"),
    [
        (["G1", "G3"], "gpu_swapped", "warn"),
        (["G1"], "gpu_missing", "fail"),  # field case 28
        (["G1", "G2", "G3"], "gpu_added", "info"),
    ],
)
def test_changed_gpus_are_told(store: Store, now: list[str], code: str, severity: str) -> None:
    begin(store, {"machine_id": "m1", "gpu_uuids": ["G2", "G1"]}, {"machine_id": "m2"})
    run, nodes = begin(store, {"machine_id": "m2"}, {"machine_id": "m1", "gpu_uuids": now})
    rows = {row.node.node: row for row in store.rows_of(run)}
    (finding,) = rows[nodes[1]].findings
    assert (finding.code, finding.severity, finding.state) == (code, severity, "confirmed")
    assert rows[nodes[0]].findings == ()
    assert all(uuid in finding.sentence for uuid in set(now) ^ {"G1", "G2"})


def test_two_agents_with_their_own_gpus_each_are_no_swap(store: Store) -> None:
    hellos = [{"machine_id": "m1", "gpu_uuids": [g], "address": g} for g in ("G1", "G2")]
    begin(store, *hellos)
    run, _ = begin(store, *reversed(hellos))
    assert [row.findings for row in store.rows_of(run)] == [(), ()]


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "p"))
    assert default_path() == tmp_path / "p" / "fleet.db"
    with Store.open() as opened:
        assert opened.path.exists()
    monkeypatch.delenv("PICHAK_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local" / "share" / "pichak" / "fleet.db"


def test_reading_needs_a_history_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "odd name #1?.db"
    with pytest.raises(StoreError, match="no history"):
        Store.open(path, read_only=True)
    assert not path.exists()
    with Store.open(path) as writer:
        run, _ = begin(writer)
        # A reader works beside the writer, and sees what is committed.
        with Store.open(path, read_only=True) as reader:
            assert reader.latest_run() == writer.run(run)
            with pytest.raises(StoreError, match="readonly"):
                reader.begin_run("no")
            second = writer.begin_run("more")
            assert {r.run for r in reader.runs()} == {run, second}


def test_a_new_file_is_ours_and_in_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    path.touch()  # an empty file is what a crash before the first commit leaves
    Store.open(path).close()
    header = path.read_bytes()[:100]
    assert int.from_bytes(header[68:72], "big") == APPLICATION_ID
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert raw.execute("PRAGMA user_version").fetchone()[0] == len(migrations())
    raw.close()


def other_program(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE runs (mine)")
    db.commit()
    db.close()


def newer_version(path: Path) -> None:
    Store.open(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()


def half_overwritten(path: Path) -> None:
    with Store.open(path) as opened:
        run, (node,) = begin(opened)
        for i in range(60):
            opened.record_job(run, job(f"j{i}"), node=node)
            opened.record_outcome(outcome(f"j{i}", 1, COPY))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 8192))


def truncated(path: Path) -> None:
    half_overwritten(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda p: p.write_text("my notes\n" * 50), CorruptStoreError, "not a SQLite database"),
        (lambda p: p.write_bytes(b"SQLite format 3\x00"), CorruptStoreError, "not a SQLite"),
        (other_program, StoreError, "another program's database"),
        (newer_version, StoreError, "newer pichak-fleet"),
        (half_overwritten, CorruptStoreError, "damaged"),
        (truncated, CorruptStoreError, "damaged"),
    ],
)
def test_a_file_that_is_not_a_sound_store_is_refused_untouched(
    tmp_path: Path, make, error: type[StoreError], says: str, read_only: bool
) -> None:
    path = tmp_path / "fleet.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(error, match=says) as caught, Store.open(path, read_only=read_only) as s:
        s.rows_of(s.runs()[0].run)
    assert str(path) in str(caught.value)
    assert "move it away" in str(caught.value) or "PICHAK_HOME" in str(caught.value)
    assert path.read_bytes() == before


def test_a_folder_or_an_unwritable_place_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder"):
        Store.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="PICHAK_HOME"):
        Store.open(tmp_path / "file" / "fleet.db")


def test_a_full_disk_is_said_and_loses_nothing(store: Store) -> None:
    assert store.record_outcome(outcome("j0", 1, COPY))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    kept = 0
    with pytest.raises(StoreError, match="full"):
        for i in range(1, 1000):
            store.record_outcome(outcome(f"j{i}", 1, COPY))
            kept = i
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.outcome_bytes(f"j{kept}", 1) is not None
    assert store.outcome_bytes(f"j{kept + 1}", 1) is None
    assert store.record_outcome(outcome(f"j{kept + 1}", 1, COPY))


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.db"
    with Store.open(path) as opened:
        run, _ = begin(opened)
    first = migrations()
    broken = [*first, "CREATE TABLE extra (a);\nINSERT INTO nowhere VALUES (1);\n"]
    monkeypatch.setattr("pichak_coordinator.database.migrations", lambda: broken)
    with pytest.raises(StoreError, match="nowhere"):
        Store.open(path)
    fixed = [*first, "CREATE TABLE extra (a); -- kept; with a semicolon\n"]
    monkeypatch.setattr("pichak_coordinator.database.migrations", lambda: fixed)
    # Reading an older file brings it up to date first, and keeps what it holds.
    with Store.open(path, read_only=True) as reader:
        assert reader.latest_run().run == run  # type: ignore[union-attr]
        assert reader._db.execute("SELECT count(*) FROM extra").fetchone() == (0,)


def test_threads_share_a_store(store: Store) -> None:
    def send(worker: int) -> None:
        for i in range(25):
            store.record_outcome(outcome(f"w{worker}-{i}", 1, COPY))

    threads = [threading.Thread(target=send, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.history("n-x", COPY.name)) == 100


WRITER = """
import sys
from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement

path, name = sys.argv[1:]
fingerprint = Fingerprint()
fingerprint.add(Measurement("disk.read_mb_s", 1.0, "MB/s", "reads"))
with Store.open(path) as store:
    run = store.begin_run("writer")
    (node,) = store.record_nodes(run, [{"machine_id": name}])
    print("open", flush=True)
    for i in range(100000):
        job_id = f"{name}-{i}"
        store.record_job(run, Job(job_id, 1, "fingerprint", {"device": "cpu"}, 60.0), node=node)
        result = {"fingerprint": fingerprint.to_dict()}
        store.record_outcome(encode(Outcome(job_id, 1, "fingerprint", "ok", result)))
        print(job_id, flush=True)
"""


def writer(path: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True
    )


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path, rng = tmp_path / "fleet.db", random.Random(11)
    acknowledged: list[str] = []
    for round_number in range(10):
        process = writer(path, f"r{round_number}")
        assert process.stdout is not None
        # Some rounds are killed while the file is created or opened, the others while it writes.
        if round_number % 3:
            assert process.stdout.readline() == "open\n"
            acknowledged += [process.stdout.readline().strip() for _ in range(rng.randrange(1, 9))]
            time.sleep(rng.uniform(0.0, 0.03))
        else:
            time.sleep(rng.uniform(0.15, 0.45))
        process.send_signal(signal.SIGKILL)
        # What is still in the pipe was acknowledged too; a last line without its end was not.
        rest = process.communicate()[0].split("\n")[:-1]
        acknowledged += [line for line in rest if line != "open"]
        # A reader may be the first to come after the crash.
        if round_number % 2 and path.exists() and path.stat().st_size:
            with Store.open(path, read_only=True) as reader:
                reader.runs()
    assert len(acknowledged) >= 6
    with Store.open(path) as store:
        for job_id in acknowledged:
            assert store.outcome_bytes(job_id, 1) is not None
        # Each outcome came with its readings, in one transaction, and finished its job.
        count = "SELECT count(*) FROM "
        (outcomes,) = store._db.execute(count + "outcomes").fetchone()
        (readings,) = store._db.execute(count + "outcome_numbers").fetchone()
        (done,) = store._db.execute(count + "jobs WHERE state = 'done'").fetchone()
        assert outcomes == readings == done >= len(acknowledged)
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_reader_comes_first_after_a_crash(tmp_path: Path) -> None:
    """A file with a journal that must be undone, as a crash in the midst of a commit leaves it."""
    path, copy = tmp_path / "fleet.db", tmp_path / "crashed.db"
    with Store.open(path) as store:
        run = store.begin_run("before")
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("PRAGMA journal_mode = DELETE")
    raw.execute("PRAGMA cache_size = 2")
    raw.execute("BEGIN")
    for i in range(200):
        raw.execute("INSERT INTO runs VALUES (NULL, ?, 0, 0, ?, '{}')", (f"r{i}", "x" * 3000))
    for suffix in ("", "-journal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    raw.close()
    assert copy.stat().st_size > 100_000  # half of the transaction is in the file
    with Store.open(copy, read_only=True) as reader:
        assert [r.run for r in reader.runs()] == [run]


def test_two_processes_create_and_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    processes = [writer(path, name) for name in ("a", "b")]
    for process in processes:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        assert lines[0] == "open\n"
        assert lines[5].startswith(("a-", "b-"))
    for process in processes:
        process.kill()
        process.communicate()
    with Store.open(path) as store:
        assert len(store.runs()) == 2


def test_a_writer_that_never_ends_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pichak_coordinator.database.BUSY_SECONDS", 0.1)
    with Store.open(tmp_path / "fleet.db") as one, Store.open(tmp_path / "fleet.db") as two:
        with transaction(one._db), pytest.raises(StoreError, match="another pichak held it"):
            two.begin_run("x")
        assert two.begin_run("y")


def test_values_with_intervals_survive(store: Store) -> None:
    run, (node,) = begin(store)
    plan = Plan().set(
        "noise_scale_tokens", Value(4400, "16 gradients", 2.0, "tokens", 3000.0, float("inf"))
    )
    store.record_plan(run, node, "cpu", plan)
    (row,) = store.rows_of(run)
    assert row.plan is not None
    kept = row.plan["noise_scale_tokens"]
    assert (kept.low, kept.high, kept.unit) == (3000.0, float("inf"), "tokens")
