"""Jobs wait for room before they are sent, and one that waits can still be called off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.courier import Courier, Work
from pichak_coordinator.dispatch import Ended
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target


class Slow:
    """Stands for a `Dispatcher`: each poll ends the job that has been away longest."""

    def __init__(self) -> None:
        self.away: list[tuple[str, Job]] = []
        self.sent: list[str] = []
        self.most = 0

    @property
    def in_flight(self) -> int:
        return len(self.away)

    def submit(self, node_id: str, job: Job) -> None:
        self.away.append((node_id, job))
        self.sent.append(job.job_id)
        self.most = max(self.most, len(self.away))

    def poll(self, _timeout_seconds: float) -> list[Ended]:
        node_id, job = self.away.pop(0)
        outcome = Outcome(job.job_id, job.attempt, job.kind, "ok", {"fingerprint": {}})
        return [Ended(node_id, job, encode(outcome), outcome)]

    def acknowledge(self, _node_id: str, _job_id: str, _attempt: int) -> None: ...

    def cancel(self, _job_id: str) -> None: ...

    def cancel_all(self) -> list[Ended]:
        ended = [Ended(node, job, error="cancelled; it did not answer") for node, job in self.away]
        self.away.clear()
        return ended


def courier_of(tmp_path: Path, dispatcher: Any, most: int) -> tuple[Courier, Store, list[Work]]:
    store = Store.open(tmp_path / "fleet.db")
    run = store.begin_run("fleet profile", {})
    finished: list[Work] = []
    made = Courier(dispatcher, store, run, finished.append, most_in_flight=most)
    for number in range(10):
        place = {"address": f"10.0.0.{number}", "host": f"host-{number}"}
        identity = store.record_node(run, place)
        node = ClusterNode(
            *(f"node-{number}", f"host-{number}", f"10.0.0.{number}"), True, 1.0, 0, False
        )
        target = Target(number, node, identity, {}, "cpu")
        made.add(target, Job(f"job-{number}", 1, "fingerprint", {}, 30.0))
    return made, store, finished


def test_no_more_jobs_than_allowed_are_away_and_each_ends_once(tmp_path: Path) -> None:
    dispatcher = Slow()
    courier, store, finished = courier_of(tmp_path, dispatcher, most=3)
    with store, courier.open():
        while not courier.idle:
            courier.step()
        assert dispatcher.most == 3
        assert dispatcher.sent == [f"job-{n}" for n in range(10)]
        assert sorted(work.job.job_id for work in finished) == sorted(dispatcher.sent)
        assert {job.state for job in store.jobs(courier.run_id)} == {"done"}


def test_an_interrupt_ends_the_jobs_that_were_still_waiting_for_room(tmp_path: Path) -> None:
    dispatcher = Slow()
    courier, store, finished = courier_of(tmp_path, dispatcher, most=2)
    with store, courier.open():
        courier.step()
        courier.cancel_all()
        assert courier.idle
        courier.step()  # nothing of it is sent afterwards
        assert len(dispatcher.sent) == 3
        assert len(finished) == 10
        ends = [work.state.state for work in finished]
        # One was done, two were away and did not answer, seven had not been sent.
        assert [ends.count(s) for s in ("done", "failed", "cancelled")] == [1, 2, 7]
        kept = [job.state for job in store.jobs(courier.run_id)]
        assert sorted(kept) == sorted(ends)


def test_a_job_that_is_on_its_node_is_no_job_that_was_not_begun(tmp_path: Path) -> None:
    """What another process reads at each sending is what is left of a kill at that moment."""
    seen: list[str] = []

    class Read(Slow):
        def submit(self, node_id: str, job: Job) -> None:
            with Store.open(tmp_path / "fleet.db", read_only=True) as reader:
                found = reader.job(job.job_id)
                seen.append(f"{found.state} {found.attempts}" if found else "unknown")
            super().submit(node_id, job)

    courier, store, _ = courier_of(tmp_path, Read(), most=2)
    with store, courier.open():
        assert seen == ["dispatched 1"] * 2
        errors = sorted(row.error for row in store.rows_of(courier.run_id))
        begun, waiting = "fingerprint: begun, and not ended", "fingerprint: not begun"
        assert errors == [begun] * 2 + [waiting] * 8
        while not courier.idle:
            courier.step()
        assert seen == ["dispatched 1"] * 10


def test_what_comes_together_is_on_the_disk_before_any_of_it_is_acknowledged(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Three outcomes at once, one of them refused: one transaction, and at the first
    acknowledgement another process reads both of the others."""
    heard: list[tuple[str, int]] = []

    class Three(Slow):
        def poll(self, _timeout_seconds: float) -> list[Ended]:
            ended = [super(Three, self).poll(0.0)[0] for _ in range(3)]
            bad = Outcome(ended[1].job.job_id, 1, "fingerprint", "ok", {"fingerprint": {"a": {}}})
            ended[1] = Ended(ended[1].node_id, ended[1].job, encode(bad), bad)
            return ended

        def acknowledge(self, _node_id: str, job_id: str, _attempt: int) -> None:
            with Store.open(tmp_path / "fleet.db", read_only=True) as reader:
                heard.append((job_id, next(iter(reader.each("SELECT count(*) FROM outcomes")))[0]))

    dispatcher = Three()
    courier, store, finished = courier_of(tmp_path, dispatcher, most=3)
    batches: list[int] = []
    record = store.record_outcomes
    monkeypatch.setattr(store, "record_outcomes", lambda d: batches.append(len(d)) or record(d))
    with store, courier.open():
        courier.step()
    assert batches == [3]
    assert heard == [("job-0", 2), ("job-2", 2)]
    states = {work.job.job_id: work.state.state for work in finished}
    assert states == {"job-0": "done", "job-1": "failed", "job-2": "done"}
    assert "its result was refused" in finished[1].state.error
