"""Sends the jobs of a network test and keeps what comes back. Nothing of it is tried again: a link
that failed is a gap with its reason, and a second probe looks again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pichak_agent.messages import Job, MessageError, Outcome
from pichak_coordinator.dispatch import Dispatcher, Ended
from pichak_coordinator.net_jobs import NetNode, without_secrets
from pichak_coordinator.store import Store

_POLL_SECONDS = 0.2


@dataclass
class Finished:
    """One job's end: its outcome, or why there is none. `lost`: its node or agent went away."""

    job: Job
    outcome: Outcome | None
    error: str = ""
    lost: bool = False

    @property
    def result(self) -> Mapping[str, Any]:
        """What it returned, possibly partial."""
        return self.outcome.result if self.outcome else {}


@dataclass
class Desk:
    """The jobs of one run. Outcomes are in the store before anybody hears of them.

    `on_other` is told of jobs that end while others are waited for, by their id.
    """

    dispatcher: Dispatcher
    store: Store
    run_id: str
    say: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    on_other: dict[str, Callable[[Finished], None]] = field(default_factory=dict)
    _count: int = 0

    def job_id(self, what: str) -> str:
        """A new job's id; ids of one run sort in the order in which they were made."""
        self._count += 1
        return f"{self.run_id}-net-{self._count:05d}-{what}"

    def submit(self, node: NetNode, job: Job) -> None:
        """Record the job, without its secrets, and send it."""
        with self.store.atomically():
            self.store.record_job(self.run_id, without_secrets(job), node=node.identity, device="")
            self.store.set_job_state(job.job_id, "dispatched", attempt=job.attempt)
        self.dispatcher.submit(node.node.node_id, job)

    def settle(self, jobs: Mapping[str, NetNode], seconds: float) -> dict[str, Finished]:
        """The end of each job; one that has none within `seconds` is cancelled and says so."""
        done: dict[str, Finished] = {}
        end = self.clock() + seconds
        while not done.keys() >= jobs.keys() and self.clock() < end:
            self.poll(done)
        for job_id, node in jobs.items():
            if job_id not in done:
                done[job_id] = self.give_up(job_id, f"it was not done within {seconds:.0f} s")
                self.say(f"{node.name}: {done[job_id].error}")
        return {job_id: done[job_id] for job_id in jobs}

    def give_up(self, job_id: str, why: str) -> Finished:
        """End a job that is not waited for any longer."""
        self.dispatcher.cancel(job_id)
        self.store.set_job_state(job_id, "failed", attempt=1, error=why)
        return Finished(Job(job_id, 1, "given-up", {}, 1.0), None, why)

    def poll(self, done: dict[str, Finished]) -> None:
        """Take what ended within a moment."""
        if not self.dispatcher.in_flight:
            time.sleep(_POLL_SECONDS)
        for ended in self.dispatcher.poll(_POLL_SECONDS):
            finished = self.record(ended)
            told = self.on_other.pop(ended.job.job_id, None)
            if told is not None:
                told(finished)
            else:
                done[ended.job.job_id] = finished

    def record(self, ended: Ended) -> Finished:
        """Store one end."""
        job = ended.job
        if ended.data is None or ended.outcome is None:
            self._failed(job, ended.error)
            return Finished(job, None, ended.error, lost=True)
        try:
            self.store.record_outcome(ended.data)
        except MessageError as refusal:
            error = f"its result was refused: {refusal}"
            self._failed(job, error)
            return Finished(job, None, error)
        self.dispatcher.acknowledge(ended.node_id, job.job_id, job.attempt)
        outcome = ended.outcome
        if outcome.ok:
            return Finished(job, outcome)
        error = f"{outcome.status}: {outcome.error}"
        if job.kind != "net_listen" or outcome.status != "cancelled":
            self._failed(job, error)
        return Finished(job, outcome, error)

    def _failed(self, job: Job, error: str) -> None:
        self.store.set_job_state(job.job_id, "failed", attempt=job.attempt, error=error)
