"""``pichak agent probe``, ``import`` and ``export`` as a user runs them: real processes, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pichak_agent.messages import Outcome, decode, encode
from pichak_coordinator.alone import Alone
from pichak_coordinator.framed_file import FrameWriter, read_frames
from pichak_coordinator.probe_file import ProbeJob, read_probe, write_end, write_job
from pichak_coordinator.request import ProfileRequest
from pichak_coordinator.store import Store

pytest.importorskip("torch")

MAIN = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
WORKLOADS = Path(__file__).parent.parent / "data" / "workloads" / "tiny.py"
LITTLE = ["--device", "cpu", "--only", "software", "--memory-cap", "200MiB", "--limit", "2"]
NO_RAY = """
import os
with open(os.environ["RAY_WAS_IMPORTED"], "a") as file:
    file.write("x")
raise ImportError("there is no Ray on this machine")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "blocker" / "ray").mkdir(parents=True)
    (tmp_path / "blocker" / "ray" / "__init__.py").write_text(NO_RAY)
    (tmp_path / "task.py").write_text(WORKLOADS.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "blocker"), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PICHAK_HOME": str(folder / "home"),
        "PYTHONPATH": path.strip(os.pathsep),
        "RAY_WAS_IMPORTED": str(folder / "ray_was_imported"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "150",
    }


def start(
    folder: Path, *arguments: str | Path, before: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, *MAIN, *map(str, arguments)],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    folder: Path, *arguments: str | Path, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    process = start(folder, *arguments, before=before)
    out, errors = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def without_network() -> tuple[str, ...]:
    """A network namespace with nothing in it, where this user may make one."""
    for words in (("unshare", "-n"), ("unshare", "-rn")):
        try:
            subprocess.run([*words, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return words
    return ()


def left_running(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PICHAK_HOME") == str(folder / "home"):
                found.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


def wait_until_nothing_runs(folder: Path) -> None:
    until = time.monotonic() + 30
    while left_running(folder):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.1)


def test_the_whole_job_without_ray_and_without_network_then_beside_others(folder: Path) -> None:
    done = run(
        folder,
        *("agent", "probe", "--model", "task.py:make", "--out", "a.mpk", "--json", *LITTLE),
        before=without_network(),
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "ray_was_imported").exists()
    assert sorted(p.name for p in folder.glob("*.mpk*")) == ["a.mpk"]
    (told,) = json.loads(done.stdout)["nodes"]
    assert told["error"] is None
    assert told["plan"]["values"]["micro_batch_max"]["value"] == 2
    assert "value" in told["fingerprint"]["software.os"]
    probe = read_probe(folder / "a.mpk")
    assert [(job.kind, job.state) for job in probe.jobs] == [
        ("fingerprint", "done"),
        ("task", "done"),
        ("ramp", "done"),
    ]
    assert probe.hello["host"] == told["host"]
    # It does not overwrite what somebody measured.
    again = run(folder, "agent", "probe", "--seq-len", "64", "--out", "a.mpk", *LITTLE)
    assert again.returncode == 2
    assert again.stderr.strip().splitlines()[-1].startswith("pichak: a.mpk exists")

    first = run(folder, "import", "a.mpk", "--json")
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert [node["plan"] for node in record["nodes"]] == [told["plan"]]
    assert [entry["status"] for entry in record["files"]] == ["new"]
    with Store.open(folder / "home" / "fleet.db", read_only=True) as store:
        for job in probe.jobs:
            assert store.outcome_bytes(job.job_id, 1) == job.data
    second = run(folder, "import", "a.mpk")
    assert second.returncode == 0
    assert "nothing changed" in second.stderr
    assert str(told["host"]) in second.stdout

    exported = run(folder, "export", "--all", "--out", "h.mpk", "--json")
    assert json.loads(exported.stdout)["rows"]["outcomes"] == 3
    other = ["--store", folder / "other.db"]
    moved = run(folder, "import", "h.mpk", "--json", *other)
    assert json.loads(moved.stdout)["nodes"] == record["nodes"]
    assert "nothing changed" in run(folder, "import", "a.mpk", *other).stderr
    assert not (folder / "ray_was_imported").exists()


def test_a_part_that_fails_is_in_the_file_with_its_error(folder: Path) -> None:
    done = run(
        folder,
        *("agent", "probe", "--model", "task.py:raises", "--out", "a.mpk", "--strict", *LITTLE),
    )
    assert done.returncode == 1
    assert "the tokenizer of this team is not here" in done.stdout
    assert "Traceback" not in done.stderr
    states = {job.kind: (job.state, job.error) for job in read_probe(folder / "a.mpk").jobs}
    assert states["fingerprint"] == ("done", "")
    assert states["task"][0] == "failed"
    assert "the tokenizer of this team" in states["task"][1]
    assert states["ramp"][0] == "failed"
    assert "the task's numbers could not be measured" in states["ramp"][1]
    imported = run(folder, "import", "a.mpk")
    assert imported.returncode == 0
    assert "failed" in imported.stdout


@pytest.mark.parametrize(
    "how",
    [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_ended_in_the_middle_it_keeps_what_was_measured(folder: Path, how: int) -> None:
    process = start(folder, "agent", "probe", "--model", "task.py:hangs", "--out", "a.mpk", *LITTLE)
    assert process.stderr is not None
    while "cpu: ramp" not in (line := process.stderr.readline()):
        assert line, "it ended before the ramp began"
    time.sleep(1.0)
    process.send_signal(how)
    out, errors = process.communicate(timeout=60)
    wait_until_nothing_runs(folder)
    if how == signal.SIGKILL:
        assert [p.name for p in folder.glob("*.mpk*")] == ["a.mpk.part"]
        probe = read_probe(folder / "a.mpk.part", partial=True)
        assert [job.state for job in probe.jobs] == ["done", "done"]
        assert run(folder, "import", "a.mpk.part").returncode == 2
        taken = run(folder, "import", "--partial", "a.mpk.part", "--json")
        (node,) = json.loads(taken.stdout)["nodes"]
        assert "killed" in node["error"]
        assert "value" in node["fingerprint"]["software.os"]
        return
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert [p.name for p in folder.glob("*.mpk*")] == ["a.mpk"]
    probe = read_probe(folder / "a.mpk")
    assert probe.interrupted
    assert [job.state for job in probe.jobs] == ["done", "done", "cancelled"]
    # What the interrupted ramp had of the plan until then is there too.
    assert "rewrite_scale" in out


# --- in this process ----------------------------------------------------------------------------


def alone(outcomes: dict[str, Any], *devices: str) -> tuple[Alone, list[str]]:
    """A probe whose jobs end as told: an outcome's fields, bytes, or an exception."""
    ran: list[str] = []

    def run_job(job: Any, say: Any) -> bytes:
        ran.append(f"{job.kind} {job.params['device']}")
        ends = outcomes.get(job.kind, {})
        if isinstance(ends, BaseException):
            raise ends
        if isinstance(ends, bytes):
            return ends
        fields = {"status": "ok", "result": {}, **ends}
        return encode(Outcome(job.job_id, 1, job.kind, **fields))

    made = Alone(
        ProfileRequest(model="builtin:gpt-1m"),
        devices or ("cpu",),
        {},
        say=lambda _text: None,
        show=lambda *_: None,
        run=run_job,
        describe=lambda: {"machine_id": "m", "host": "box\x1b[2J", "gpu_uuids": []},
        clock=lambda: 1.8e9,
    )
    return made, ran


TASK = {"result": {"task": {"values": {"seq_len": {"value": 64, "source": "rows"}}}}}


def test_every_device_is_fingerprinted_and_ramped_and_the_task_is_measured_once(
    tmp_path: Path,
) -> None:
    made, ran = alone({"task": TASK}, "cuda:0", "cuda:1")
    probe = made.probe(tmp_path / "a.mpk")
    assert ran == [
        *("fingerprint cuda:0", "fingerprint cuda:1"),
        *("task cuda:0", "ramp cuda:0", "ramp cuda:1"),
    ]
    assert read_probe(tmp_path / "a.mpk") == probe
    assert [row.node.device for row in probe.rows()] == ["cuda:0", "cuda:1"]


def test_the_bytes_are_those_of_the_child(tmp_path: Path) -> None:
    """Bytes that `encode` would make otherwise (another order of keys) stay as they are."""
    import msgpack

    made, _ = alone({"task": TASK})
    sent: list[bytes] = []
    inner = made.run

    def reordered(job: Any, say: Any) -> bytes:
        record = msgpack.unpackb(inner(job, say))
        data = msgpack.packb(dict(sorted(record.items(), reverse=True)), use_bin_type=True)
        assert data != encode(decode(data, Outcome))
        sent.append(data)
        return data

    made.run = reordered
    made.probe(tmp_path / "a.mpk")
    assert [f for f in read_frames(tmp_path / "a.mpk") if isinstance(f, bytes)] == sent
    assert [job.data for job in read_probe(tmp_path / "a.mpk").jobs] == sent


@pytest.mark.parametrize(
    ("ends", "states"),
    [
        ({"fingerprint": {"status": "error", "error": "no"}}, ["failed", "done", "done"]),
        ({"fingerprint": b"garbage"}, ["failed", "done", "done"]),
        ({"ramp": {"status": "timeout", "error": "late"}}, ["done", "done", "failed"]),
        ({"fingerprint": KeyboardInterrupt()}, ["cancelled"] * 3),
        ({"task": {"status": "cancelled", "error": "it was"}}, ["done", "cancelled", "cancelled"]),
    ],
)
def test_each_job_ends_once_and_is_in_the_file(
    tmp_path: Path, ends: dict[str, Any], states: list[str]
) -> None:
    made, _ = alone({"task": TASK, **ends})
    probe = made.probe(tmp_path / "a.mpk")
    assert [job.state for job in probe.jobs] == states
    assert probe.interrupted == ("cancelled" in states)
    assert read_probe(tmp_path / "a.mpk") == probe


def test_ctrl_c_between_two_jobs_keeps_what_was_measured(tmp_path: Path) -> None:
    made, ran = alone({"task": TASK})

    def say(text: str) -> None:
        if "fingerprint done" in text:
            raise KeyboardInterrupt

    made.say = say
    probe = made.probe(tmp_path / "a.mpk")
    assert ran == ["fingerprint cpu"]
    assert [job.state for job in read_probe(tmp_path / "a.mpk").jobs] == [
        "done",
        "cancelled",
        "cancelled",
    ]
    assert probe.interrupted


def test_one_bad_file_does_not_keep_the_others_out_and_nothing_reaches_the_terminal(
    folder: Path,
) -> None:
    made, _ = alone({"task": TASK, "ramp": {"status": "error", "error": "\x1b]0;owned\x07 no"}})
    made.probe(folder / "good.mpk")
    (folder / "cut.mpk").write_bytes((folder / "good.mpk").read_bytes()[:-9])
    (folder / "stranger.mpk").write_bytes(b"\x1b[31m" * 100)
    writer = FrameWriter(folder / "evil.mpk")
    head = {**next(iter(read_frames(folder / "good.mpk"))), "probe": "evil"}
    head["settings"] = {"model": "\x1b[31m", "name": "\u202e"}
    writer.object(head)
    write_job(writer, ProbeJob("evil-1", "ramp", "cpu", "failed", "\x1b[2Jgone"))
    write_end(writer, 1.8e9, False)
    files = ["good.mpk", "cut.mpk", "stranger.mpk", "evil.mpk", "missing.mpk"]
    done = run(folder, "import", *files)
    assert done.returncode == 2
    for name in ("cut.mpk", "stranger.mpk", "missing.mpk"):
        assert [line for line in done.stderr.splitlines() if line.startswith(f"pichak: {name}")]
    assert "Traceback" not in done.stderr
    history = run(folder, "fleet", "history")
    for text in (done.stdout, done.stderr, history.stdout):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "box\\x1b[2J" in done.stdout
    with Store.open(folder / "home" / "fleet.db", read_only=True) as store:
        # The same machine in both: the run of one probe, and the run of the other.
        assert len(store.runs()) == 2


# --- simulated hosts ----------------------------------------------------------------------------

HOST = """
host = "{name}"
gpu = "NVIDIA H100 80GB HBM3"

[metrics]
"gpu.kernel_launch_us" = 4.2
"disk.read_mb_s" = 3000

[[fault]]
metric = "disk.read_mb_s"
starts = {starts}
factor = 0.5
"""


def test_a_simulated_fleet_says_so_and_its_fault_is_found_when_it_starts(tmp_path: Path) -> None:
    """Eight hosts probed on two days; the disk of one halves between them."""
    from pichak_agent.simulation import simulated_runner
    from pichak_coordinator.importing import import_probes
    from pichak_core.simulated_host import SimulatedHost

    first, second = 1_796_040_000.0, 1_796_126_400.0  # 2026-11-30 and 2026-12-01, 12:00 UTC
    runs = []
    with Store.open(tmp_path / "fleet.db", clock=lambda: second + 86400) as store:
        for day in (first, second):
            probes = []
            for n in range(8):
                starts = "2026-12-01T00:00:00Z" if n == 3 else "2030-01-01T00:00:00Z"
                path = tmp_path / f"{n}.toml"
                path.write_text(HOST.format(name=f"sim-{n}", starts=starts))
                host = SimulatedHost.load(path)
                made, _ = alone({}, *host.devices)
                made.run, made.describe = simulated_runner(host, lambda day=day: day), host.hello
                made.clock = lambda day=day: day
                file = tmp_path / f"{n}-{day:.0f}.mpk"
                made.probe(file)
                probes.append(read_probe(file))
            entries = import_probes(store, probes)
            assert {entry.probe.simulated for entry in entries} == {True}
            runs.append(entries[0].run)
        disk = [
            {
                row.node.host: [f.code for f in row.findings if f.metric == "disk.read_mb_s"]
                for row in store.rows_of(run)
            }
            for run in runs
        ]
        assert not any(disk[0].values())
        assert [host for host, codes in disk[1].items() if codes] == ["sim-3"]
        assert all("(simulated)" in row.node.label for row in store.rows_of(runs[1]))


def test_the_command_simulates(folder: Path) -> None:
    (folder / "host.toml").write_text(HOST.format(name="sim", starts="2020-01-01T00:00:00Z"))
    done = run(
        folder, "agent", "probe", "--simulate", "host.toml", "--out", "s.mpk", "--json", "--quiet"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["simulated"] is True
    (node,) = record["nodes"]
    assert (node["simulated"], node["device"], node["error"]) == (True, "cuda:0", None)
    assert node["fingerprint"]["disk.read_mb_s"]["value"] == pytest.approx(1500, rel=0.05)
    imported = run(folder, "import", "s.mpk")
    assert "s.mpk: sim (simulated)" in imported.stderr
    assert "(simulated)" in imported.stdout
    wrong = run(folder, "agent", "probe", "--simulate", "no.toml", "--out", "t.mpk")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no.toml" in wrong.stderr
