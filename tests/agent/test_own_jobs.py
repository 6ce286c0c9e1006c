"""Which jobs use a GPU, as other processes of the node read it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pichak_agent import runner
from pichak_agent.daemon import Agent
from pichak_agent.environment import MARK
from pichak_agent.host_sampler import steady_seconds
from pichak_agent.messages import Job, Outcome, decode, encode
from pichak_agent.own_jobs import OwnJobs, own_training, telemetry_folder
from pichak_agent.readings import OwnUse
from pichak_agent.told_use import write_use
from pichak_agent.use_teller import USE_FILE, tell_step


def job(device: str, number: int = 1) -> Job:
    return Job(f"job-{number}", 1, "fingerprint", {"device": device}, 10.0)


def seen(home: Path) -> list[str]:
    """Another process' view."""
    code = (
        "import sys, pathlib; from pichak_agent.own_jobs import OwnJobs; "
        "print(*[u.job for u in OwnJobs(pathlib.Path(sys.argv[1])).uses()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_job_is_listed_while_it_runs(tmp_path: Path) -> None:
    jobs = OwnJobs(tmp_path)
    assert jobs.uses() == ()
    with jobs.running(job("cuda:0")), jobs.running(job("cpu", 2)), jobs.running(job("cuda", 3)):
        assert [use.job for use in jobs.uses()] == ["job-1.1", "job-3.1"]
        assert seen(tmp_path) == ["job-1.1", "job-3.1"]
        assert all(use.uuid == "" and use.held_bytes is None for use in jobs.uses())
    assert jobs.uses() == ()


def _die_while_it_runs(home: str) -> None:
    with OwnJobs(Path(home)).running(job("cuda:0")):
        os._exit(0)


def test_a_job_whose_process_died_is_none(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_die_while_it_runs, args=(str(tmp_path),)
    )
    child.start()
    child.join()
    assert len(list((telemetry_folder(tmp_path) / "own").iterdir())) == 1
    assert OwnJobs(tmp_path).uses() == ()


def test_a_home_that_cannot_be_written_stops_no_job(tmp_path: Path) -> None:
    (tmp_path / "telemetry").write_text("a file in the way")
    ran = False
    with OwnJobs(tmp_path).running(job("cuda:0")):
        ran = True
    assert ran
    assert OwnJobs(tmp_path).uses() == ()


# -- what they tell of themselves --------------------------------------------------------------

TOLD = OwnUse("GPU-1", allocated_bytes=7)


def tell(path: str) -> None:
    write_use(Path(path), [TOLD], steady_seconds=steady_seconds(), seconds_per_step=0.5)


def use_files(home: Path) -> list[Path]:
    return list((telemetry_folder(home) / "use").iterdir())


def test_what_a_job_tells_is_read_and_goes_with_it(tmp_path: Path) -> None:
    jobs = OwnJobs(tmp_path)
    with jobs.running(job("cuda:0")) as given, jobs.running(job("cuda:1", 2)) as silent:
        assert given == replace(job("cuda:0"), params=given.params)
        assert set(given.params) == {"device", USE_FILE}
        assert given.params[USE_FILE] != silent.params[USE_FILE]
        tell(given.params[USE_FILE])
        assert jobs.uses() == (
            OwnUse("GPU-1", "job-1.1", allocated_bytes=7, seconds_per_step=0.5),
            OwnUse("", "job-2.1"),
        )
        Path(given.params[USE_FILE]).write_text('{"steady_seconds"')
        assert jobs.uses()[0] == OwnUse("", "job-1.1")
    assert use_files(tmp_path) == []
    with jobs.running(job("cpu")) as given:
        assert given == job("cpu")


def test_a_relative_home_is_told_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with OwnJobs(Path("home")).running(job("cuda:0")) as given:
        assert Path(given.params[USE_FILE]).is_absolute()


#: Tells as a job's process does, and is killed in the midst of it.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from pichak_agent.messages import Job, decode
from tests.agent.test_own_jobs import tell
path = decode(sys.stdin.buffer.read(), Job).params["tell_use_to"]
tell(path)
Path(path + ".part").write_text("{")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_job_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    seen: list[tuple[OwnUse, ...]] = []
    left: list[int] = []

    def run_job(given: Job, **more: Any) -> bytes:
        made = runner.run(given, argv=[sys.executable, "-c", KILLED], **more)
        seen.append(OwnJobs(tmp_path).uses())
        left.append(len(use_files(tmp_path)))
        return made

    agent = Agent("one", root=tmp_path, run_job=run_job)
    outcome = decode(agent.run(encode(job("cuda:0"))), Outcome)
    agent.close()
    assert outcome.status == "killed", outcome
    assert [use.allocated_bytes for use in seen[0]] == [7]
    assert left == [2]
    assert use_files(tmp_path) == []


def _tell_and_die(home: str) -> None:
    with OwnJobs(Path(home)).running(job("cuda:0")) as given:
        tell(given.params[USE_FILE])
        os._exit(0)


def test_nothing_is_left_of_an_agent_that_was_killed(tmp_path: Path) -> None:
    died = multiprocessing.get_context("fork").Process(target=_tell_and_die, args=(str(tmp_path),))
    died.start()
    died.join()
    jobs = OwnJobs(tmp_path)
    (told,) = use_files(tmp_path)
    assert jobs.uses() == ()
    assert told.exists()  # its process may live where this one does not see it
    with jobs.running(job("cuda:0")) as given:
        tell(given.params[USE_FILE])
        for path in use_files(tmp_path):
            os.utime(path, (1e9, 1e9))
        assert len(jobs.uses()) == 1
        assert use_files(tmp_path) == [Path(given.params[USE_FILE])]


TRAINING = """
import sys
from pathlib import Path
from pichak_agent.own_jobs import own_training
from pichak_agent.use_teller import tell_step
with own_training("cuda:0", name="mine", home=Path(sys.argv[1])):
    tell_step(0.25)
    print("steps", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
sys.stdin.readline()
"""


def test_a_training_of_ones_own_is_known_and_tells_its_steps(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    jobs = OwnJobs(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        assert training.stdout.readline() == "steps\n"
        until = time.monotonic() + 20
        told = (OwnUse("", "mine", seconds_per_step=0.25),)
        while jobs.uses() != told and time.monotonic() < until:
            time.sleep(0.02)
        assert jobs.uses() == told
        assert seen(tmp_path) == ["mine"]
        print(file=training.stdin, flush=True)
        assert training.stdout.readline() == "ended\n"
        assert jobs.uses() == ()
        assert use_files(tmp_path) == []
        print(file=training.stdin, flush=True)


def test_what_has_no_gpu_or_is_a_job_already_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MARK, raising=False)
    with own_training("cpu", home=tmp_path):
        tell_step(0.5)
        assert OwnJobs(tmp_path).uses() == ()
    monkeypatch.setenv(MARK, "token")
    with own_training("cuda:0", home=tmp_path):
        tell_step(0.5)
        assert OwnJobs(tmp_path).uses() == ()
    with pytest.raises(ValueError, match="name"), own_training(name="a/b", home=tmp_path):
        pass


def test_a_home_that_cannot_be_written_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path))
    (tmp_path / "telemetry").write_text("a file in the way")
    ran = False
    with own_training("cuda:0"):
        tell_step(0.5)
        ran = True
    assert ran
