"""The endings that are not easily had from a real process; the rest is in test_runner.py."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from pichak_agent.ending import Seen, conclude
from pichak_agent.environment import child_environment
from pichak_agent.messages import MAX_BYTES, Job, Outcome, decode, encode

JOB = Job("job", 1, "ramp", {}, 60.0)


def concluded(**seen: Any) -> Outcome:
    return decode(conclude(JOB, Seen(**seen), node="host", versions={"python": "3"}), Outcome)


def sent(status: str = "ok", **more: Any) -> bytes:
    return encode(Outcome("job", 1, "ramp", status, **more))


def test_what_the_child_sent_is_kept_and_completed() -> None:
    outcome = concluded(
        outcome=sent(result={"a": 1}, versions={"torch": "2"}, simulated=True),
        log=b"printed",
        seconds=2.0,
        started_unix=5.0,
        exit_code=0,
    )
    assert outcome == Outcome(
        "job",
        1,
        "ramp",
        "ok",
        {"a": 1},
        log_tail="printed",
        node="host",
        started_unix=5.0,
        seconds=2.0,
        versions={"python": "3", "torch": "2"},
        simulated=True,
    )


def test_the_out_of_memory_killer_is_named_on_evidence_only() -> None:
    rose = {"/sys/fs/cgroup/memory.events": (2, 3)}
    with_evidence = concluded(signal_number=signal.SIGKILL, oom_kills=rose)
    assert with_evidence.status == "killed"
    assert "may have been the kernel's out-of-memory killer" in with_evidence.error
    assert "another process" in with_evidence.error
    assert "/sys/fs/cgroup/memory.events rose from 2 to 3" in with_evidence.error
    assert "memory" not in concluded(signal_number=signal.SIGKILL).error
    elsewhere = concluded(signal_number=signal.SIGKILL, oom_kills=rose, in_group=True)
    assert "out-of-memory killer" not in elsewhere.error
    assert "counts no process killed for want of memory" in elsewhere.error
    here = concluded(signal_number=signal.SIGKILL, in_group=True, group_oom_kills=1)
    assert "by the kernel's out-of-memory killer (its own control group counts it)" in here.error
    assert "memory" not in concluded(signal_number=signal.SIGSEGV, oom_kills=rose).error
    mine = concluded(verdict="timeout", why="late", signal_number=signal.SIGKILL, oom_kills=rose)
    assert (mine.status, mine.error) == ("timeout", "late")


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert "signal 40" in concluded(signal_number=40).error


@pytest.mark.parametrize("verdict", ["timeout", "cancelled", "killed"])
def test_the_partial_result_stands_for_one_that_never_came(verdict: str) -> None:
    late = concluded(verdict=verdict, why="w", outcome=sent("cancelled", result={"n": 2}))
    assert (late.status, late.result) == (verdict, {"n": 2})
    none = concluded(verdict=verdict, why="w", partial={"n": 1})
    assert (none.status, none.result) == (verdict, {"n": 1})
    done = concluded(verdict=verdict, why="w", outcome=sent(result={"n": 3}))
    assert (done.status, done.result) == ("ok", {"n": 3})


def test_processes_that_cannot_be_killed_are_told() -> None:
    assert "2 of its processes could not be killed" in concluded(left_running=2).log_tail


def test_a_result_that_leaves_no_room_for_the_rest_is_an_error_of_its_own() -> None:
    big = {str(i): "x" * 65_000 for i in range(64)} | {"rest": "x" * 30_000}
    assert (
        4000 < MAX_BYTES - 64 * 65_000 - 30_000 < 8000
    )  # room for the result, not for the log too
    outcome = concluded(outcome=sent(result=big), log="é".encode() * 9000)
    assert outcome.status == "error"
    assert "cannot be kept" in outcome.error


def test_the_threads_that_ray_forbids_come_back(tmp_path: Any) -> None:
    own = {"OMP_NUM_THREADS": "1", "PATH": "/bin", "PYTHONPATH": f"rel:{tmp_path}:/kept:"}
    made = child_environment(own, {"PATH": "/bin"}, params={}, working_folder=tmp_path)
    assert made == {"PATH": "/bin", "PYTHONPATH": "/kept"}
    users = child_environment(own, own, params={}, working_folder=tmp_path)
    assert users["OMP_NUM_THREADS"] == "1"
    unknown = child_environment(own, None, params={}, working_folder=tmp_path)
    assert unknown["OMP_NUM_THREADS"] == "1"
