from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.daemon import Agent
from pichak_agent.locks import FileLock
from pichak_agent.messages import Job, MessageError, Outcome, decode, encode
from pichak_agent.problems_file import told_problems
from pichak_agent.spool import Spool, SpoolError
from pichak_agent.telemetry import Telemetry


class FakeRun:
    """Stands for `runner.run`: holds each job until it is told to go on or is cancelled."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started = threading.Semaphore(0)
        self.jobs: list[Job] = []
        self.together = 0
        self.most_together = 0
        self._lock = threading.Lock()

    def __call__(
        self,
        job: Job,
        *,
        on_progress: Callable[[str], None],
        cancel: threading.Event,
        workdir: Path,
    ) -> bytes:
        with self._lock:
            self.jobs.append(job)
            self.together += 1
            self.most_together = max(self.most_together, self.together)
        on_progress("at work")
        self.started.release()
        while not self.go.wait(0.01) and not cancel.is_set():
            pass
        with self._lock:
            self.together -= 1
        status = "cancelled" if cancel.is_set() else "ok"
        return encode(Outcome(job.job_id, job.attempt, job.kind, status, {"n": len(self.jobs)}))


@pytest.fixture
def fake() -> FakeRun:
    return FakeRun()


@pytest.fixture
def agent(tmp_path: Path, fake: FakeRun) -> Iterator[Agent]:
    made = Agent("one", root=tmp_path / "root", run_job=fake)
    yield made
    fake.go.set()
    made.close()


def job(job_id: str = "job", attempt: int = 1, lock: str = "", **params: Any) -> bytes:
    return encode(Job(job_id, attempt, "fingerprint", params, 60.0, lock=lock))


class Call:
    """`agent.run` in a thread."""

    def __init__(self, agent: Agent, job_bytes: bytes) -> None:
        self._bytes = b""
        self._thread = threading.Thread(target=self._run, args=(agent, job_bytes))
        self._thread.start()

    def _run(self, agent: Agent, job_bytes: bytes) -> None:
        self._bytes = agent.run(job_bytes)

    def bytes(self) -> bytes:
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        return self._bytes

    def outcome(self) -> Outcome:
        return decode(self.bytes(), Outcome)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_real_job_through_the_whole_agent(tmp_path: Path) -> None:
    agent = Agent("real", root=tmp_path)
    data = agent.run(
        encode(Job("j", 1, "fingerprint", {"only": ["software"]}, 60.0, lock="machine"))
    )
    outcome = decode(data, Outcome)
    assert outcome.status == "ok", outcome.error
    assert "software.python" in outcome.result["fingerprint"]
    assert agent.pending() == [data]
    assert agent.run(job("j", lock="machine")) == data
    assert agent.acknowledge("j", 1) is True
    assert agent.acknowledge("j", 1) is False
    assert agent.pending() == []
    agent.close()
    assert [p.name for p in (tmp_path / "agent" / "real").iterdir()] == ["lock", "spool"]


def test_hello_says_who_answers(agent: Agent) -> None:
    hello = agent.hello()
    assert hello["instance"] == "one"
    assert hello["problems"] == []
    assert hello["cores"] >= 1
    assert hello["memory_bytes"] > 1 << 20
    assert set(hello["versions"]) >= {"pichak", "python"}
    assert isinstance(hello["gpu_uuids"], list)


def test_the_same_attempt_runs_once(agent: Agent, fake: FakeRun) -> None:
    first = Call(agent, job())
    fake.started.acquire()
    second = Call(agent, job())
    other = Call(agent, job(attempt=2))
    fake.started.acquire()
    fake.go.set()
    assert first.bytes() == second.bytes()
    assert other.outcome().attempt == 2
    assert agent.run(job()) == first.bytes()
    assert len(fake.jobs) == 2


def test_progress_and_cancel(agent: Agent, fake: FakeRun) -> None:
    call = Call(agent, job())
    fake.started.acquire()
    assert agent.progress("job") == "at work"
    assert agent.progress("another") == ""
    assert agent.cancel("job") is True
    assert call.outcome().status == "cancelled"
    assert agent.progress("job") == ""
    assert [decode(data, Outcome).status for data in agent.pending()] == ["cancelled"]


def test_a_cancel_that_overtakes_its_job(agent: Agent, fake: FakeRun) -> None:
    assert agent.cancel("job") is False
    assert Call(agent, job()).outcome().status == "cancelled"
    fake.go.set()
    assert Call(agent, job(attempt=2)).outcome().status == "ok"


def test_two_agents_of_a_machine_never_measure_the_same_at_once(
    tmp_path: Path, agent: Agent, fake: FakeRun
) -> None:
    other = Agent("two", root=tmp_path / "root", run_job=fake)
    calls = [
        Call(agent, job("a", lock="cpu")),
        Call(other, job("b", lock="cpu")),
        Call(agent, job("c", lock="cpu")),
    ]
    fake.started.acquire()
    running = {j.job_id for j in fake.jobs}
    waiting = {"a": agent, "b": other, "c": agent}
    (name,) = running
    del waiting[name]
    for job_id, its in waiting.items():
        wait_until(lambda i=its, j=job_id: f": job {name}, " in i.progress(j))  # type: ignore[misc]
        assert its.progress(job_id).startswith("waiting for 'cpu'")
    free = Call(other, job("d", lock="GPU-1"))
    fake.started.acquire()
    fake.go.set()
    assert [call.outcome().status for call in [*calls, free]] == ["ok"] * 4
    assert fake.most_together == 2
    other.close()


def test_waiting_has_its_own_limit_and_can_be_cancelled(tmp_path: Path, fake: FakeRun) -> None:
    agent = Agent("one", root=tmp_path, run_job=fake, lock_wait_seconds=0.3)
    first = Call(agent, job("first", lock="cpu"))
    fake.started.acquire()
    late = Call(agent, job("late", lock="cpu")).outcome()
    assert late.status == "busy"
    assert late.error.startswith("'cpu' was not free within 0.3 s; job first, attempt 1, pid ")
    fake.go.set()
    first.bytes()
    patient = Agent("two", root=tmp_path, run_job=fake)
    held = next((tmp_path / "locks").rglob("cpu.lock"))
    lock = FileLock(held)
    assert lock.try_acquire("somebody")
    call = Call(patient, job("waits", lock="cpu"))
    wait_until(lambda: "somebody" in patient.progress("waits"))
    patient.cancel("waits")
    assert call.outcome().status == "cancelled"
    lock.release()
    agent.close()
    patient.close()


def test_an_outcome_that_cannot_be_kept_is_still_returned_once(
    tmp_path: Path, agent: Agent, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_spool: Spool, _outcome: bytes) -> Path:
        raise SpoolError("the disk is full")

    monkeypatch.setattr(Spool, "put", full)
    fake.go.set()
    data = agent.run(job())
    assert decode(data, Outcome).status == "ok"
    assert agent.run(job()) == data
    assert agent.pending() == [data]
    assert agent.hello()["problems"] == ["the disk is full"]
    assert agent.acknowledge("job", 1) is True
    assert agent.pending() == []


def test_an_agent_that_is_at_fault_says_so(tmp_path: Path) -> None:
    def broken(_job: Job, **_options: Any) -> bytes:
        raise ZeroDivisionError("a bug")

    agent = Agent("one", root=tmp_path, run_job=broken)
    outcome = decode(agent.run(job()), Outcome)
    assert outcome.status == "error"
    assert outcome.error == "the agent failed: ZeroDivisionError: a bug"
    agent.close()


def test_bytes_that_are_no_job_are_refused(agent: Agent) -> None:
    with pytest.raises(MessageError):
        agent.run(b"garbage")


def test_files_are_made_ready_for_a_job(agent: Agent, fake: FakeRun) -> None:
    content = b"def factory(settings): ..."
    digest = hashlib.sha256(content).hexdigest()
    model = {"file": {"sha256": digest, "name": "task.py", "path": "/not/here/task.py"}}
    missing = Call(agent, job("missing", model=model)).outcome()
    assert missing.status == "refused"
    assert "task.py" in missing.error
    assert "not on this node" in missing.error
    assert not agent.has_file(digest, "/not/here/task.py")
    assert agent.put_file(digest, 0, content, len(content)) == len(content)
    assert agent.has_file(digest)
    call = Call(agent, job(model=model))
    fake.started.acquire()
    path = Path(fake.jobs[-1].params["model"])
    assert (path.name, path.read_bytes()) == ("task.py", content)
    fake.go.set()
    assert call.outcome().status == "ok"
    assert not path.exists()
    agent.forget_files()
    assert not agent.has_file(digest)


def test_close_ends_what_runs_and_the_next_agent_finds_the_outcome(
    tmp_path: Path, fake: FakeRun
) -> None:
    agent = Agent("one", root=tmp_path, run_job=fake)
    call = Call(agent, job())
    fake.started.acquire()
    agent.close()
    assert call.outcome().status == "cancelled"
    # Another name, as after a restart of the node under another id.
    heir = Agent("two", root=tmp_path, run_job=fake)
    assert heir.pending() == [call.bytes()]
    assert heir.run(job()) == call.bytes()
    heir.close()


def test_an_agent_that_dies_beside_another_loses_nothing(tmp_path: Path, fake: FakeRun) -> None:
    fake.go.set()
    first = Agent("node", root=tmp_path, run_job=fake)
    data = first.run(job())
    second = Agent("node", root=tmp_path, run_job=fake)
    assert second.pending() == []
    first.close()
    assert second.pending() == [data]
    second.close()


def test_a_closed_agent_touches_nothing_of_its_heir(tmp_path: Path, fake: FakeRun) -> None:
    closed = Agent("node", root=tmp_path, run_job=fake)
    closed.close()
    heir = Agent("node", root=tmp_path, run_job=fake)
    call = Call(heir, job())
    fake.started.acquire()
    closed.close()
    assert decode(closed.run(job("late")), Outcome).status == "cancelled"
    assert (tmp_path / "agent" / "node" / "work").is_dir()
    fake.go.set()
    assert call.outcome().status == "ok"
    assert heir.pending() == [call.bytes()]
    heir.close()


def test_a_greeting_tells_what_the_telemetry_found(tmp_path: Path) -> None:
    class Found(Telemetry):
        def findings(self) -> list[dict[str, Any]]:
            states = ["confirmed", "resolved", *["suspected"] * 60]
            return [{"code": f"c{n}", "state": state} for n, state in enumerate(states)]

    agent = Agent("one", root=tmp_path, telemetry=lambda home: Found(home, start_nvml=None))
    try:
        found = agent.hello()["findings"]
        assert len(found) == 50
        assert [f["code"] for f in found[:3]] == ["c0", "c2", "c3"]
        assert agent._telemetry is not None
        until = time.monotonic() + 10
        while not agent._telemetry.ring():
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        agent.close()
    assert not agent._telemetry.owner
    assert agent._telemetry._thread is None


def test_an_agent_without_telemetry_finds_nothing(tmp_path: Path) -> None:
    agent = Agent("one", root=tmp_path)
    assert agent.hello()["findings"] == []
    agent.close()


def test_problems_are_told_to_the_nodes_other_processes(tmp_path: Path, fake: FakeRun) -> None:
    """As they arise, and no longer when the agent has ended."""
    fake.go.set()
    agent = Agent("one", root=tmp_path, run_job=fake)
    assert told_problems(tmp_path, everywhere=False) == []
    agent.run(job())
    (kept,) = tmp_path.rglob("*.mpk")
    kept.write_bytes(b"x")
    assert agent.pending() == []
    (told,) = told_problems(tmp_path, everywhere=False)
    assert told.startswith(f"{kept.name} was put aside in ")
    assert agent.problems() == agent.hello()["problems"] == [told]
    agent.close()
    assert told_problems(tmp_path, everywhere=False) == []
    heir = Agent("two", root=tmp_path, run_job=fake)
    assert [path.name for path in (tmp_path / "agent").iterdir()] == ["two"]
    heir.close()


def test_what_a_dead_agent_told_is_told_no_more(tmp_path: Path, fake: FakeRun) -> None:
    folder = tmp_path / "agent" / "one"
    folder.mkdir(parents=True)
    for name in ("problems.json", "problems.part", "lock"):
        (folder / name).write_text('["old"]')
    assert told_problems(tmp_path, everywhere=False) == []
    agent = Agent("two", root=tmp_path, run_job=fake)
    assert [path.name for path in (tmp_path / "agent").iterdir()] == ["two"]
    agent.close()
