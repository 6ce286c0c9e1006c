"""Jobs on their way: recorded, sent, tried again after a loss, stored, acknowledged.

Drives the state machine of `jobs` for each job and carries out its instructions. An outcome is in
the store before anybody else hears of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pichak_agent.messages import Job, MessageError, Outcome
from pichak_coordinator import jobs
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.dispatch import Dispatcher, Ended
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target

#: A node that was lost during a probe is tried once more: a busy node is not a bad one (field case
#: 89). A child that was killed would only be killed again.
RETRY = jobs.RetryPolicy(max_attempts=2, base_seconds=2.0, retried=frozenset({"lost"}))
#: Jobs that are on nodes at one time. Each costs the coordinator a call, its progress and a reply.
MOST_IN_FLIGHT = 256
_POLL_SECONDS = 0.25
_RECONNECT_SECONDS = 30.0


@dataclass
class Work:
    """One job: what is sent, where its state machine is, and its outcome once there is one."""

    target: Target
    job: Job
    state: jobs.JobState
    wake_at: float | None = None
    outcome: Outcome | None = None

    @property
    def done(self) -> bool:
        """It ended, and well."""
        return self.state.state == "done"


@dataclass
class Courier:
    """Sends jobs of one run and calls `on_finished` once for each that ended."""

    dispatcher: Dispatcher
    store: Store
    run_id: str
    on_finished: Callable[[Work], None]
    clock: Callable[[], float] = time.monotonic
    policy: jobs.RetryPolicy = RETRY
    most_in_flight: int = MOST_IN_FLIGHT
    interrupted: bool = False
    #: Seconds in which at least one job was in flight.
    busy_seconds: float = 0.0
    work: dict[str, Work] = field(default_factory=dict)
    _queue: deque[Work] = field(default_factory=deque)
    _pool: ThreadPoolExecutor | None = None
    _reconnecting: dict[Future[str], tuple[Work, int]] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[Courier]:
        """Has the threads that reconnect to lost nodes; they are not waited for at the end."""
        self._pool = ThreadPoolExecutor(8)
        try:
            yield self
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return all(work.state.final for work in self.work.values())

    def add(self, target: Target, job: Job) -> None:
        """Send the job as soon as there is room, in the order of these calls."""
        work = Work(target, job, jobs.JobState(job.job_id, policy=self.policy))
        self.work[job.job_id] = work
        with self.store.atomically():
            self.store.record_job(self.run_id, job, node=target.identity, device=target.device)
            self._queue.append(work)
            going = self._going()
        for each in going:
            self._submit(each)

    def record_unsent(self, target: Target, job: Job, state: str, error: str) -> None:
        """A job that was wanted and never sent: the row says why it has no result."""
        self.store.record_job(self.run_id, job, node=target.identity, device=target.device)
        self.store.set_job_state(job.job_id, state, error=error)

    def step(self) -> None:
        """Take what ended within a moment, and do what has become due."""
        started = self.clock()
        if self.dispatcher.in_flight:
            self._take(self.dispatcher.poll(_POLL_SECONDS))
            self.busy_seconds += self.clock() - started
        else:
            time.sleep(_POLL_SECONDS)
        self._on_timers()
        self._fill()

    def cancel_all(self) -> None:
        """End every job, keeping the partial results that still come."""
        self.interrupted = True
        self._take(self.dispatcher.cancel_all())
        for work in self.work.values():
            self._advance(work, jobs.Cancel("interrupted"))

    def _fill(self) -> None:
        if not self._queue or self._away >= self.most_in_flight:
            return
        with self.store.atomically():
            going = self._going()
        for work in going:
            self._submit(work)

    def _going(self) -> list[Work]:
        """Those for which there is room. That they are sent is in the store before they are, all of
        them with one wait for the disk: whoever reads after a kill must not think them unbegun."""
        going: list[Work] = []
        while self._queue and self._away + len(going) < self.most_in_flight:
            work = self._queue.popleft()
            work.state, sends = jobs.advance(work.state, jobs.Ready())
            if sends:  # none for one that was called off while it waited
                self._note_state(work)
                going.append(work)
        return going

    @property
    def _away(self) -> int:
        """How many jobs are on a node, or on their way back to one."""
        return self.dispatcher.in_flight + len(self._reconnecting)

    def _advance(self, work: Work, event: jobs.Event) -> None:
        work.state, instructions = jobs.advance(work.state, event)
        for instruction in instructions:
            if isinstance(instruction, jobs.Send):
                self._send(work, instruction.attempt)
            elif isinstance(instruction, jobs.WakeAfter):
                work.wake_at = self.clock() + instruction.seconds
                work.target.enter("reconnecting", self.clock(), work.state.error)
                self._note_state(work)
            elif isinstance(instruction, jobs.Abort):
                self.dispatcher.cancel(work.job.job_id)
            elif isinstance(instruction, jobs.Finished):
                self._note_state(work)
                self.on_finished(work)

    def _note_state(self, work: Work) -> None:
        self.store.set_job_state(
            work.job.job_id, work.state.state, attempt=work.state.attempt, error=work.state.error
        )

    def _send(self, work: Work, attempt: int) -> None:
        target = work.target
        if attempt > 1:
            work.job = replace(work.job, attempt=attempt)
            self.store.record_job(self.run_id, work.job, node=target.identity, device=target.device)
            self._note_state(work)
        if attempt > 1 and self._pool is not None:
            future = self._pool.submit(self._reconnect, target.node)
            self._reconnecting[future] = (work, attempt)
        else:
            self._submit(work)

    def _submit(self, work: Work) -> None:
        work.target.enter(work.job.kind, self.clock())
        self.dispatcher.submit(work.target.node.node_id, work.target.with_lease(work.job))

    def _reconnect(self, node: ClusterNode) -> str:
        """ "" when an agent answers on the node again, else why not."""
        answer = self.dispatcher.start_agents([node], _RECONNECT_SECONDS)[node.node_id]
        return answer if isinstance(answer, str) else ""

    def _on_timers(self) -> None:
        now = self.clock()
        for work in list(self.work.values()):
            if work.wake_at is not None and work.wake_at <= now:
                work.wake_at = None
                self._advance(work, jobs.Ready())
        for future in [f for f in self._reconnecting if f.done()]:
            work, attempt = self._reconnecting.pop(future)
            why = future.result()
            if why:
                self._advance(work, jobs.Ended(attempt, "lost", why))
            elif not work.state.final:
                self._submit(work)

    def _take(self, ended: Sequence[Ended]) -> None:
        """Outcomes that came together go into the store together, with one wait for the disk;
        nobody hears of one before all of them are there."""
        data = [each.data for each in ended if each.data is not None and each.outcome is not None]
        kept = iter(self.store.record_outcomes(data) if data else ())
        for each in ended:
            if each.data is None or each.outcome is None:
                status = "lost" if each.retryable else "refused"
                event = jobs.Ended(each.job.attempt, status, each.error)
                self._advance(self.work[each.job.job_id], event)
            else:
                self._on_stored(each, each.outcome, next(kept))

    def _on_stored(self, ended: Ended, outcome: Outcome, answer: bool | MessageError) -> None:
        work, attempt = self.work[ended.job.job_id], ended.job.attempt
        if isinstance(answer, MessageError):
            why = f"its result was refused: {answer}"
            self._advance(work, jobs.Ended(attempt, "refused", why))
            return
        self.dispatcher.acknowledge(ended.node_id, ended.job.job_id, attempt)
        work.outcome = outcome
        status, why = outcome.status, _said(outcome)
        if self.interrupted and status == "cancelled":
            why = "interrupted"
        self._advance(work, jobs.Ended(attempt, status, why))


def _said(outcome: Outcome) -> str:
    return "" if outcome.ok else f"{outcome.status}: {outcome.error}"
