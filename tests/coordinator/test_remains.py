"""What a coordinator that went away left on a node, with a real agent and a real store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.daemon import Agent
from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cut_runs import open_jobs
from pichak_coordinator.remains import Remains, done_before
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement

JOB = Job("j", 1, "fingerprint", {"device": "cpu"}, 30.0)


class Done:
    """A job that is done, whatever it is told, in the moment in which it is told to end."""

    def __init__(self) -> None:
        self.started, self.may_end = threading.Event(), threading.Event()

    def __call__(self, job: Job, *, cancel: threading.Event, **_: Any) -> bytes:
        self.started.set()
        cancel.wait(20.0)
        self.may_end.wait(20.0)
        found = Fingerprint()
        found.add(Measurement("disk.read_mb_s", 900.0, "MB/s", "timed", 9, 1.0))
        result = {"fingerprint": found.to_dict()}
        return encode(Outcome(job.job_id, job.attempt, job.kind, "ok", result))


class Direct:
    """`Dispatcher` without Ray between."""

    def __init__(self, agent: Agent, work: Done) -> None:
        self._agent, self._work = agent, work
        self.asked = 0

    def cancel_on(self, _node_id: str, job_id: str) -> bool:
        self.asked += 1
        if self.asked == 3:  # not before it was seen running twice
            self._work.may_end.set()
        return self._agent.cancel(job_id)

    def leftovers(self, _node_id: str) -> list[bytes]:
        return self._agent.pending()

    def acknowledge_bytes(self, _node_id: str, _data: bytes) -> None:
        self._agent.acknowledge(JOB.job_id, JOB.attempt)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "fleet.db") as made:
        yield made


def test_a_job_that_was_done_as_it_was_told_to_end_is_done(tmp_path: Path, store: Store) -> None:
    """A resumed run must not measure it once more."""
    run = store.begin_run("fleet profile", {})
    node = store.record_node(run, {"machine_id": "m", "host": "h"})
    store.record_job(run, JOB, node=node, device="cpu")
    work = Done()
    agent = Agent("one", root=tmp_path / "root", run_job=work)
    thread = threading.Thread(target=agent.run, args=(encode(JOB),))
    thread.start()
    try:
        assert work.started.wait(20.0)
        remains = Remains(Direct(agent, work), store, lambda _: None)  # type: ignore[arg-type]
        remains.end_open_jobs({node: "ray"})
        remains.await_ends()
        remains.collect(["ray"])
        assert done_before(store, run) == {(node, "cpu"): {"fingerprint"}}
        assert open_jobs(store) == []
        assert agent.pending() == []
    finally:
        work.may_end.set()
        thread.join(20.0)
        agent.close()
