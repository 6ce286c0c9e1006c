"""Result files into the store: strict, once, in one run, dated by when they were measured."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.messages import Outcome, encode, unpack_map
from pichak_coordinator.compare import compare
from pichak_coordinator.framed_file import FramedFileError, FrameWriter, read_frames
from pichak_coordinator.importing import KILLED, import_probes
from pichak_coordinator.probe_file import (
    MAX_JOBS,
    Probe,
    ProbeJob,
    read_probe,
    write_end,
    write_job,
)
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan, Value

NOW = 1_800_000_000.0
DAY = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "fleet.db", clock=lambda: NOW) as opened:
        yield opened


def outcome(job_id: str, kind: str, started: float, **result: Any) -> bytes:
    status = result.pop("status", "ok")
    simulated = result.pop("simulated", False)
    error = "" if status == "ok" else "RuntimeError: the cable is loose"
    made = Outcome(
        *(job_id, 1, kind, status, result, error),
        started_unix=started,
        seconds=5.0,
        simulated=simulated,
    )
    return encode(made)


def probe(
    host: str,
    *,
    started: float = NOW - DAY,
    rate: float = 1000.0,
    disk: float = 2000.0,
    name: str = "",
    gpus: tuple[str, ...] = (),
    device: str = "cpu",
    status: str = "ok",
    simulated: bool = False,
) -> Probe:
    name = name or f"probe-{host}-{int(started)}-{device.replace(':', '')}"
    fingerprint = Fingerprint()
    fingerprint.add(Measurement("disk.read_mb_s", disk, "MB/s", "median of 9", samples=9))
    fingerprint.add(Measurement("cpu.model", "Same CPU", "", "/proc/cpuinfo"))
    plan = Plan("builtin:gpt-1m", "train.jsonl", device)
    plan.set("micro_batch", Value(4, "real steps"))
    plan.set("tokens_per_second", Value(rate, "median of the repeated steps"))
    ids = {kind: f"{name}-{kind}-0" for kind in ("fingerprint", "ramp")}
    data = [
        outcome(
            ids["fingerprint"],
            "fingerprint",
            started + 1,
            fingerprint=fingerprint.to_dict(),
            simulated=simulated,
        ),
        outcome(
            ids["ramp"],
            "ramp",
            started + 10,
            status=status,
            simulated=simulated,
            **({"plan": plan.to_dict()} if status == "ok" else {}),
        ),
    ]
    hello = {"machine_id": f"id-{host}", "host": host, "cpu_model": "Same CPU", "gpus": []}
    hello["gpu_uuids"] = list(gpus)
    jobs = tuple(ProbeJob.ended(device, some) for some in data)
    return Probe(name, started, hello, {"model": "builtin:gpt-1m"}, jobs, started + 30)


def save(path: Path, made: Probe) -> Path:
    writer = FrameWriter(path, replace=True)
    writer.object(made.header())
    for job in made.jobs:
        write_job(writer, job)
    write_end(writer, made.finished_unix or 0.0, made.interrupted)
    return path


def everything(path: Path) -> str:
    with sqlite3.connect(path) as db:
        return "\n".join(db.iterdump())


# --- reading ------------------------------------------------------------------------------------


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = probe("alpha", status="error")
    unsent = ProbeJob(f"{made.name}-task-0", "task", "cpu", "cancelled", "interrupted")
    made = replace(made, jobs=(*made.jobs, unsent), interrupted=True)
    read = read_probe(save(tmp_path / "a.mpk", made))
    assert read == made
    assert [job.data for job in read.jobs] == [job.data for job in made.jobs]
    (row,) = read.rows()
    assert row.error == "ramp: error: RuntimeError: the cable is loose; task: interrupted"
    assert row.fingerprint.number("disk.read_mb_s") == 2000.0


def frames(made: Probe, path: Path) -> list[Any]:
    return list(read_frames(save(path, made)))


def framed(path: Path, parts: list[Any]) -> Path:
    writer = FrameWriter(path, replace=True)
    for part in parts:
        if isinstance(part, bytes):
            writer.outcome(part)
        else:
            writer.object(part)
    writer.finish()
    return path


def changed(part: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    return {**part, **values}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: [changed(f[0], schema=99), *f[1:]], "schema 99"),
        (lambda f: [changed(f[0], file="other"), *f[1:]], "not a file of"),
        (lambda f: [changed(f[0], extra=1), *f[1:]], "'extra'"),
        (lambda f: [changed(f[0], started_unix="now"), *f[1:]], "started_unix"),
        (lambda f: [changed(f[0], started_unix=float("nan")), *f[1:]], "started_unix"),
        (lambda f: [changed(f[0], probe="../../etc"), *f[1:]], "probe"),
        (lambda f: [changed(f[0], probe="x" * 100), *f[1:]], "100 characters"),
        (lambda f: [changed(f[0], hello={}), *f[1:]], "names no machine"),
        (lambda f: [changed(f[0], hello={"host": 5}), *f[1:]], "host"),
        (lambda f: [changed(f[0], hello={"host": "x" * 5000}), *f[1:]], "host"),
        (lambda f: [changed(f[0], hello={"host": "a", "gpus": {}}), *f[1:]], "gpus"),
        (lambda f: [changed(f[0], probe="another"), *f[1:]], "none of probe another"),
        (lambda f: [f[0], changed(f[1], device="/dev/sda"), *f[2:]], "device"),
        (lambda f: [f[0], changed(f[1], kind="shell"), *f[2:]], "kind"),
        (lambda f: [f[0], changed(f[1], unsent="done", error="e"), *f[2:]], "neither"),
        (lambda f: [f[0], changed(f[1], unsent="failed"), *f[2:]], "neither"),
        (lambda f: [f[0], changed(f[1], job=f[3]["job"]), *f[2:]], "the outcome behind it"),
        (lambda f: [f[0], f[1], *f[3:]], "its outcome is missing"),
        (lambda f: [f[0], f[2], *f[3:]], "without its job"),
        (lambda f: [f[0], f[1], b"not msgpack", *f[3:]], "not msgpack"),
        (lambda f: [*f[:3], *f[1:3], *f[3:]], "twice"),
        (lambda f: [*f, f[1]], "behind the end"),
        (lambda f: f[:-1], "how the probe ended"),
        (lambda f: [f[0], f[-1]], "no job"),
        (lambda f: f[1:], "not a file of"),
    ],
)
def test_a_file_that_no_probe_writes_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    path = tmp_path / "a.mpk"
    framed(path, spoil(frames(probe("alpha"), path)))
    with pytest.raises(FramedFileError, match=said) as caught:
        read_probe(path)
    assert str(path) in str(caught.value)


def test_more_jobs_than_a_machine_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mpk"
    head, job, _data, *rest = frames(probe("alpha"), path)
    many = [
        changed(job, job=f"{head['probe']}-{n}", unsent="failed", error="e")
        for n in range(MAX_JOBS + 1)
    ]
    with pytest.raises(FramedFileError, match="more than"):
        read_probe(framed(path, [head, *many, rest[-1]]))


def test_random_changes_of_any_value_are_refused_or_harmless(tmp_path: Path, store: Store) -> None:
    """Well-framed files with values that no probe writes: nothing but a refusal or a sound import,
    whose rows can then be read and compared."""
    rng = random.Random(11)
    path = tmp_path / "a.mpk"
    strange = [None, -1, 2**63, 1e308, "", "\x1b[31m", [], {}, [[]], {"a": {"b": [1]}}, True, b""]
    refused = taken = 0
    for number in range(150):
        parts = frames(probe("alpha", name=f"probe-{number}"), path)
        index = rng.randrange(len(parts))
        part = unpack_map(parts[index]) if isinstance(parts[index], bytes) else parts[index]
        spot = part
        while True:
            key = rng.choice(list(spot))
            if isinstance(spot[key], dict) and spot[key] and rng.random() < 0.8:
                spot = spot[key]
                continue
            break
        value = rng.choice(strange)
        if value == b"" or rng.random() < 0.1:
            del spot[key]
        else:
            spot[key] = value
        if isinstance(parts[index], bytes):
            import msgpack

            parts[index] = msgpack.packb(part, use_bin_type=True)
        else:
            parts[index] = part
        framed(path, parts)
        try:
            read = read_probe(path)
        except FramedFileError:
            refused += 1
            continue
        taken += 1
        (entry,) = import_probes(store, [read])
        rows = store.rows_of(entry.run)
        compare(rows).as_dict()
        [row.as_dict() for row in rows]
    assert refused > 40
    assert taken > 8


# --- storing ------------------------------------------------------------------------------------


def test_files_of_one_call_are_one_run_with_one_table(store: Store) -> None:
    machines = [f"gpu-{letter}" for letter in "abcdefgh"]
    made = import_probes(store, [probe(host) for host in machines])
    assert {entry.status for entry in made} == {"new"}
    assert len({entry.run for entry in made}) == 1
    assert [entry.new_outcomes for entry in made] == [2] * 8
    run = made[0].run
    assert sorted(row.node.host for row in store.rows_of(run)) == machines
    assert [job.state for job in store.jobs(run)] == ["done"] * 16
    stored = store.run(run)
    assert stored is not None
    # It is dated by the measuring, not by the import.
    assert (stored.started_unix, stored.finished_unix) == (NOW - DAY, NOW - DAY + 30)
    assert run.startswith("20270114T080000Z")
    (point,) = store.history(made[0].node, "disk.read_mb_s")
    assert point.received_unix == NOW - DAY + 1 + 5


def test_the_same_file_again_changes_nothing(store: Store) -> None:
    probes = [probe("alpha"), probe("beta")]
    first = import_probes(store, probes)
    before = everything(store.path)
    again = import_probes(store, [probes[1], probes[0], probes[0]])
    assert [entry.status for entry in again] == ["known"] * 3
    assert {entry.run for entry in again} == {first[0].run}
    assert [entry.node for entry in again] == [first[1].node, first[0].node, first[0].node]
    assert everything(store.path) == before


def test_twice_in_one_call_is_once(store: Store) -> None:
    made = import_probes(store, [probe("alpha"), probe("alpha")])
    assert [entry.status for entry in made] == ["new", "known"]
    assert made[0].run == made[1].run
    assert len(store.runs()) == 1


def test_a_late_file_joins_the_run_of_the_others(store: Store) -> None:
    early = [probe("alpha"), probe("beta")]
    first = import_probes(store, early)
    made = import_probes(store, [*early, probe("gamma")])
    assert [entry.status for entry in made] == ["known", "known", "new"]
    assert {entry.run for entry in made} == {first[0].run}
    assert len(store.rows_of(first[0].run)) == 3


def test_a_name_is_joined_later_and_alone_a_file_is_a_run_of_its_own(store: Store) -> None:
    (a,) = import_probes(store, [probe("alpha")], "friday")
    (b,) = import_probes(store, [probe("beta")])
    (c,) = import_probes(store, [probe("gamma")], "friday")
    assert a.run == c.run != b.run
    stored = store.run(a.run)
    assert stored is not None
    assert stored.settings["name"] == "friday"


def test_two_probes_of_one_machine_are_two_runs_in_their_order(store: Store) -> None:
    old, new = probe("alpha", started=NOW - 2 * DAY, rate=900.0), probe("alpha", rate=1000.0)
    made = import_probes(store, [new, old, probe("beta")])
    assert made[0].run == made[2].run != made[1].run
    assert [run.run for run in store.runs()] == [made[0].run, made[1].run]
    before = store.previous_rows(made[0].run)
    assert list(before) == [(made[0].node, "cpu")]
    rates = [p.received_unix for p in store.history(made[0].node, "disk.read_mb_s")]
    assert rates == sorted(rates)
    # An even older one, later: it does not become the newest.
    (oldest,) = import_probes(store, [probe("alpha", started=NOW - 9 * DAY)])
    assert [run.run for run in store.runs()][-1] == oldest.run
    (seen,) = [n for n in store.nodes() if n.host == "alpha"]
    assert (seen.first_seen_unix, seen.last_seen_unix) == (NOW - 9 * DAY, NOW - DAY)


def test_two_gpus_of_one_machine_in_two_files_are_two_rows_of_one_node(store: Store) -> None:
    some = [probe("box", device=f"cuda:{i}", gpus=("GPU-a", "GPU-b")) for i in (0, 1)]
    made = import_probes(store, some)
    assert (made[0].run, made[0].node) == (made[1].run, made[1].node)
    assert [row.node.device for row in store.rows_of(made[0].run)] == ["cuda:0", "cuda:1"]


def test_copies_of_one_image_are_several_machines(store: Store) -> None:
    """Virtual machines made from one image have one machine id, and no GPU tells them apart."""

    def copy(host: str, started: float = NOW - DAY) -> Probe:
        made = probe(host, started=started)
        return replace(made, hello={**made.hello, "machine_id": "of-the-image"})

    some = [copy("alpha"), copy("beta"), copy("gamma")]
    made = import_probes(store, some)
    run = made[0].run
    assert [entry.run for entry in made] == [run] * 3
    assert len({entry.node for entry in made}) == 3
    assert len(store.rows_of(run)) == 3
    (late,) = import_probes(store, [copy("delta"), *some])[:1]
    assert late.run == run
    assert len(store.rows_of(run)) == 4
    # The next day each finds its own history again, whichever of them comes first.
    nodes = {entry.probe.hello["host"]: entry.node for entry in (*made, late)}
    for host in ("gamma", "alpha", "delta", "beta"):
        (entry,) = import_probes(store, [copy(host, NOW - 60)])
        assert entry.node == nodes[host]
        assert list(store.previous_rows(entry.run)) == [(nodes[host], "cpu")]


def test_copies_of_one_image_have_each_their_own_gpu(store: Store) -> None:
    def copy(host: str, gpu: str, days: float) -> Probe:
        made = probe(host, started=NOW - days * DAY, gpus=(gpu,))
        return replace(made, hello={**made.hello, "machine_id": "of-the-image"})

    import_probes(store, [copy("alpha", "GPU-a", 5), copy("beta", "GPU-b", 5)])
    alone = [copy("alpha", "GPU-a", 4), copy("beta", "GPU-b", 3), copy("gamma", "GPU-c", 2)]
    for some in alone:
        (entry,) = import_probes(store, [some])
        assert not store.findings(entry.run), some.hello
    (swapped,) = import_probes(store, [copy("beta", "GPU-x", 1)])
    ((found,),) = store.findings(swapped.run).values()
    assert found.code == "gpu_swapped"
    assert found.evidence == {"missing": ["GPU-b"], "added": ["GPU-x"]}


def test_a_renamed_machine_is_held_against_what_it_was(store: Store) -> None:
    before = probe("box", started=NOW - 2 * DAY, gpus=("GPU-old",))
    after = probe("renamed", gpus=("GPU-new",))
    after = replace(after, hello={**after.hello, "machine_id": before.hello["machine_id"]})
    import_probes(store, [before])
    (entry,) = import_probes(store, [after])
    ((found,),) = store.findings(entry.run).values()
    assert found.code == "gpu_swapped"


def test_imported_machines_are_judged_by_their_peers_also_when_they_come_late(
    store: Store,
) -> None:
    fast = [probe(f"gpu-{n}", disk=2000.0 + n) for n in range(5)]
    slow = probe("slow", disk=1000.0)
    (alone,) = import_probes(store, [slow])
    assert not store.findings(alone.run)
    made = import_probes(store, [slow, *fast])
    found = store.findings(made[0].run)
    assert {f.code for f in found[(made[0].node, "cpu")]} == {"slower_than_peers"}
    assert len(found) == 1


def test_a_swapped_gpu_is_told_by_the_time_of_the_probes(store: Store) -> None:
    after = probe("box", gpus=("GPU-new",))
    before = probe("box", started=NOW - 3 * DAY, gpus=("GPU-old",))
    (newer,) = import_probes(store, [after])
    (older,) = import_probes(store, [before])
    # The older probe, imported last, knows of no change: nothing came before it.
    assert not store.findings(older.run)
    assert not store.findings(newer.run)
    (latest,) = import_probes(store, [probe("box", started=NOW - 60, gpus=("GPU-old",))])
    ((found,),) = store.findings(latest.run).values()
    assert found.code == "gpu_swapped"


def test_a_killed_probe_is_completed_by_its_whole_file(store: Store, tmp_path: Path) -> None:
    whole = probe("alpha")
    path = save(tmp_path / "a.mpk", whole)
    data = path.read_bytes()
    (tmp_path / "cut.part").write_bytes(data[: len(data) * 2 // 3])
    part = read_probe(tmp_path / "cut.part", partial=True)
    assert (len(part.jobs), part.finished_unix) == (1, None)
    (entry,) = import_probes(store, [part])
    (row,) = store.rows_of(entry.run)
    assert row.error == KILLED
    (more,) = import_probes(store, [whole])
    assert (more.status, more.run, more.new_outcomes) == ("extended", entry.run, 1)
    (row,) = store.rows_of(entry.run)
    assert (row.error, row.plan is not None) == ("", True)
    (again,) = import_probes(store, [part])
    assert again.status == "known"
    assert store.rows_of(entry.run)[0].error == ""


def test_another_result_under_a_known_name_is_refused_and_the_rest_is_taken(store: Store) -> None:
    import_probes(store, [probe("alpha")])
    before = everything(store.path)
    (forged,) = import_probes(store, [probe("alpha", rate=9e9)])
    assert forged.status == "refused"
    assert "another result" in forged.error
    assert everything(store.path) == before
    made = import_probes(store, [probe("alpha", rate=9e9), probe("beta")])
    assert [entry.status for entry in made] == ["refused", "new"]


def test_a_job_of_a_fleet_run_cannot_be_replaced(store: Store) -> None:
    from pichak_agent.messages import Job

    run = store.begin_run("fleet profile")
    (node,) = store.record_nodes(run, [{"machine_id": "m", "host": "h"}])
    victim = probe("alpha")
    job = Job(victim.jobs[1].job_id, 1, "ramp", {"device": "cpu"}, 60.0)
    store.record_job(run, job, node=node)
    (entry,) = import_probes(store, [victim])
    assert entry.status == "refused"
    assert store.jobs(run)[0].state == "queued"


@pytest.mark.parametrize("clock", [0.0, 86400.0, -5.0, 1e15])
def test_a_clock_that_was_never_set_dates_nothing(store: Store, clock: float) -> None:
    (entry,) = import_probes(store, [probe("alpha", started=clock, name="p")])
    run = store.run(entry.run)
    assert run is not None
    assert run.started_unix == NOW
    assert run.finished_unix == NOW


def test_a_simulated_result_says_so_everywhere_and_is_nobodys_peer(store: Store) -> None:
    real = [probe(f"gpu-{n}", disk=2000.0 + n) for n in range(5)]
    made = import_probes(store, [*real, probe("sim", disk=10.0, simulated=True)])
    run, node = made[-1].run, made[-1].node
    assert made[-1].probe.simulated
    (row,) = [row for row in store.rows_of(run) if row.node.node == node]
    assert row.node.label == "sim (simulated)"
    assert row.as_dict()["simulated"] is True
    assert not row.findings
    table = compare(store.rows_of(run))
    assert "sim (simulated)" in table.to_csv()
    assert "sim (simulated)" in table.to_markdown()
    marked = {entry["node"]: entry["simulated"] for entry in table.as_dict()["rows"]}
    assert marked == {entry.node: entry.node == node for entry in made}
    (point,) = store.history(node, "disk.read_mb_s")
    assert point.simulated
    assert not store.history(made[0].node, "disk.read_mb_s")[0].simulated


# --- kill -9 ------------------------------------------------------------------------------------


def test_killed_while_importing_it_is_all_or_nothing_and_importing_again_completes_it(
    tmp_path: Path,
) -> None:
    probes = [probe("alpha"), probe("beta", disk=900.0)]
    killed = 0
    for step in range(5, 3000, 37):
        path = tmp_path / f"{step}.db"
        Store.open(path).close()
        empty = everything(path)
        pid = os.fork()
        if pid == 0:
            _import_and_die(path, probes, step)
        _, status = os.waitpid(pid, 0)
        dump = everything(path)
        if os.WIFSIGNALED(status):
            killed += 1
            assert dump == empty or dump.count('INSERT INTO "outcomes"') == 4
        else:
            assert dump != empty
        with Store.open(path, clock=lambda: NOW) as store:
            made = import_probes(store, probes)
            assert len(store.rows_of(made[0].run)) == 2
            assert {entry.status for entry in made} == {"new" if dump == empty else "known"}
        if not os.WIFSIGNALED(status):
            break
    assert killed > 10


def _import_and_die(path: Path, probes: list[Probe], step: int) -> None:
    """In a process of its own: import, and be killed before the given line of the store's code."""
    lines = 0

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal lines
        if "/pichak_coordinator/" not in frame.f_code.co_filename:
            return None
        if event == "line" and "/store" in frame.f_code.co_filename:
            lines += 1
            if lines == step:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        with Store.open(path, clock=lambda: NOW) as store:
            sys.settrace(trace)
            import_probes(store, probes)
    finally:
        os._exit(0)
