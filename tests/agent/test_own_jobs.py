"""Which jobs use a GPU, as other processes of the node read it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from pichak_agent.messages import Job
from pichak_agent.own_jobs import OwnJobs, telemetry_folder


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
