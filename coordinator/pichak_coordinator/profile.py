"""The main job: who measures what, in which order, and what becomes of each answer.

Every target (a GPU, or a node without one) is fingerprinted; the task's numbers are measured once,
on one healthy node; every target is then ramped with those numbers. Targets go at their own pace.
Nothing reaches the user that is not in the store first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pichak_agent.messages import Job, MessageError, Outcome
from pichak_coordinator import jobs
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.dispatch import AgentFailedError, Dispatcher, Ended
from pichak_coordinator.request import ProfileRequest, python_workload
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target, targets_of
from pichak_core.plan import Plan

#: A node that was lost during a probe is tried once more: a busy node is not a bad one (field case
#: 89). A child that was killed would only be killed again.
RETRY = jobs.RetryPolicy(max_attempts=2, base_seconds=2.0, retried=frozenset({"lost"}))
#: How many nodes may fail at the task before the ramps go on without its numbers.
_TASK_NODES = 2
_POLL_SECONDS = 0.25
_RECONNECT_SECONDS = 30.0


class Watcher(Protocol):
    """Who is told how it goes."""

    def say(self, text: str) -> None: ...

    def show(self, targets: Sequence[Target]) -> None: ...


@dataclass
class _Work:
    """One job on its way: what is sent, and where its state machine is."""

    target: Target
    job: Job
    state: jobs.JobState
    wake_at: float | None = None
    outcome: Outcome | None = None


@dataclass
class Profiler:
    """One run over one fleet, kept in `store` under `run_id`."""

    request: ProfileRequest
    dispatcher: Dispatcher
    store: Store
    watcher: Watcher
    run_id: str
    clock: Callable[[], float] = time.monotonic
    targets: list[Target] = field(default_factory=list)
    task: Plan | None = None
    interrupted: bool = False
    _task_error: str = ""
    _task_settled: bool = False
    _task_tried: list[Target] = field(default_factory=list)
    _work: dict[str, _Work] = field(default_factory=dict)
    _reconnecting: dict[Future[str], tuple[_Work, int]] = field(default_factory=dict)

    def run(self, nodes: Sequence[ClusterNode]) -> list[Target]:
        """Profile the nodes; Ctrl-C ends the run with what has been measured."""
        pool = ThreadPoolExecutor(8)
        try:
            self._prepare(nodes)
            while any(not work.state.final for work in self._work.values()):
                for ended in self._poll():
                    self._on_ended(ended, pool)
                self._on_timers(pool)
                self._show()
        except KeyboardInterrupt:
            self._interrupt()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for target in self.targets:
                target.release()
            self.dispatcher.forget_files()
        return self.targets

    def _poll(self) -> list[Ended]:
        if self.dispatcher.in_flight:
            return self.dispatcher.poll(_POLL_SECONDS)
        time.sleep(_POLL_SECONDS)
        return []

    # -- starting ---------------------------------------------------------------------------------

    def _prepare(self, nodes: Sequence[ClusterNode]) -> None:
        self.watcher.say(f"starting an agent on {_count(len(nodes), 'node')}")
        hellos = self.dispatcher.start_agents(nodes)
        identities = self._record_nodes(nodes, hellos)
        self.targets = targets_of(nodes, hellos, identities, self.request.device)
        self._take_leftovers()
        self._lease()
        for target in self.targets:
            if target.findings:
                found = target.findings
                self.store.record_findings(self.run_id, target.identity, target.device, found)
            if target.ended and isinstance(hellos.get(target.node.node_id), dict):
                self._record_unsent(target)
        self._show()
        ready = [t for t in self.targets if not t.ended]
        if ready:
            self._next_task("")
        for target in ready:
            if target.phase == "queued":
                self._fingerprint(target)

    def _record_nodes(
        self, nodes: Sequence[ClusterNode], hellos: dict[str, dict[str, Any] | str]
    ) -> dict[str, str]:
        answered: list[tuple[str, dict[str, Any]]] = []
        for node in nodes:
            hello = hellos[node.node_id]
            if not isinstance(hello, str):
                place = {"address": node.address, "host": node.host, "node_id": node.node_id}
                answered.append((node.node_id, {**hello, **place}))
        names = self.store.record_nodes(self.run_id, [hello for _, hello in answered])
        identities = dict(zip((node_id for node_id, _ in answered), names, strict=True))
        for node in nodes:
            why = hellos[node.node_id]
            if isinstance(why, str):
                place = {"address": node.address, "host": node.host}
                identities[node.node_id] = self.store.record_node(self.run_id, place, error=why)
        return identities

    def _take_leftovers(self) -> None:
        """Outcomes of an earlier run whose coordinator went away before it could store them."""
        taken = 0
        for node_id in {t.node.node_id for t in self.targets if t.hello}:
            for data in self.dispatcher.leftovers(node_id):
                try:
                    taken += self.store.record_outcome(data)
                except MessageError as error:
                    self.watcher.say(f"an old result was refused and stays on its node: {error}")
                    continue
                self.dispatcher.acknowledge_bytes(node_id, data)
        if taken:
            self.watcher.say(f"{_count(taken, 'result')} of an earlier run collected")

    def _lease(self) -> None:
        wanted = [t for t in self.targets if t.wants_gpu and not t.ended]
        leases = self.dispatcher.lease_gpus([t.node.node_id for t in wanted])
        for target, lease in zip(wanted, leases, strict=True):
            if lease is None:
                target.end("busy: Ray has leased its GPU to somebody else")
            else:
                target.lease = lease

    def _record_unsent(self, target: Target) -> None:
        job = self.request.fingerprint_job(
            self._job_id(target, "fingerprint"), 1, target.child_device
        )
        self.store.record_job(self.run_id, job, node=target.identity, device=target.device)
        self.store.set_job_state(job.job_id, "failed", error=target.error)

    # -- sending ----------------------------------------------------------------------------------

    def _fingerprint(self, target: Target) -> None:
        job = self.request.fingerprint_job(
            self._job_id(target, "fingerprint"), 1, target.child_device
        )
        self._add(target, job)

    def _next_task(self, why: str) -> None:
        """The task's numbers from the next node; when enough have failed, the ramps go on."""
        here = socket.gethostname()
        fresh = [t for t in self.targets if not t.ended and t not in self._task_tried]
        fresh.sort(key=lambda t: (t.phase not in _IDLE, t.node.host != here, not t.node.is_head))
        for target in fresh[: max(0, _TASK_NODES - len(self._task_tried))]:
            self._task_tried.append(target)
            try:
                files = self._files(target)
            except (AgentFailedError, ValueError) as error:
                target.end(str(error))
                continue
            job = self.request.task_job(self._job_id(target, "task"), 1, target.child_device, files)
            self._add(target, job)
            return
        self._settle_task(why)

    def _settle_task(self, error: str) -> None:
        self._task_settled, self._task_error = True, error
        for target in self.targets:
            self._maybe_ramp(target)

    def _maybe_ramp(self, target: Target) -> None:
        if target.ended or not target.fingerprinted or not self._task_settled:
            return
        if self.task is None and self._task_error:
            target.end(self._task_error)
            return
        try:
            files = self._files(target)
        except (AgentFailedError, ValueError) as error:
            target.end(str(error))
            return
        job = self.request.ramp_job(
            self._job_id(target, "ramp"), 1, target.child_device, files, self.task
        )
        self._add(target, job)

    def _files(self, target: Target) -> dict[str, Any]:
        """References to the files that the node may not have; they are sent if it does not."""
        files: dict[str, Any] = {}
        if self.request.data is not None:
            files["data"] = self.dispatcher.ship(target.node.node_id, self.request.data)
        own = python_workload(self.request.model)
        if own is not None:
            reference = self.dispatcher.ship(target.node.node_id, Path(own[0]))
            files |= {"model": reference, "factory": own[1]}
        return files

    def _job_id(self, target: Target, kind: str) -> str:
        return f"{self.run_id}-{kind}-{target.number}"

    def _add(self, target: Target, job: Job) -> None:
        work = _Work(target, job, jobs.JobState(job.job_id, policy=RETRY))
        self._work[job.job_id] = work
        self._advance(work, jobs.Ready())

    # -- the state machine and its instructions ---------------------------------------------------

    def _advance(
        self, work: _Work, event: jobs.Event, pool: ThreadPoolExecutor | None = None
    ) -> None:
        work.state, instructions = jobs.advance(work.state, event)
        for instruction in instructions:
            if isinstance(instruction, jobs.Send):
                self._send(work, instruction.attempt, pool)
            elif isinstance(instruction, jobs.WakeAfter):
                work.wake_at = self.clock() + instruction.seconds
                work.target.enter("reconnecting", self.clock(), work.state.error)
                self._note_state(work)
            elif isinstance(instruction, jobs.Abort):
                self.dispatcher.cancel(work.job.job_id)
            elif isinstance(instruction, jobs.Finished):
                self._note_state(work)
                if not self.interrupted:
                    self._on_finished(work)

    def _note_state(self, work: _Work) -> None:
        self.store.set_job_state(
            work.job.job_id, work.state.state, attempt=work.state.attempt, error=work.state.error
        )

    def _send(self, work: _Work, attempt: int, pool: ThreadPoolExecutor | None) -> None:
        target = work.target
        work.job = replace(work.job, attempt=attempt)
        self.store.record_job(self.run_id, work.job, node=target.identity, device=target.device)
        if attempt > 1 and pool is not None:
            future = pool.submit(self._reconnect, target.node)
            self._reconnecting[future] = (work, attempt)
            return
        target.enter(work.job.kind, self.clock())
        self.dispatcher.submit(target.node.node_id, target.with_lease(work.job))

    def _reconnect(self, node: ClusterNode) -> str:
        """ "" when an agent answers on the node again, else why not."""
        answer = self.dispatcher.start_agents([node], _RECONNECT_SECONDS)[node.node_id]
        return answer if isinstance(answer, str) else ""

    def _on_timers(self, pool: ThreadPoolExecutor) -> None:
        now = self.clock()
        for work in list(self._work.values()):
            if work.wake_at is not None and work.wake_at <= now:
                work.wake_at = None
                self._advance(work, jobs.Ready(), pool)
        for future in [f for f in self._reconnecting if f.done()]:
            work, attempt = self._reconnecting.pop(future)
            why = future.result()
            if why:
                self._advance(work, jobs.Ended(attempt, "lost", why))
            elif not work.state.final:
                work.target.enter(work.job.kind, now)
                sent = work.target.with_lease(work.job)
                self.dispatcher.submit(work.target.node.node_id, sent)

    # -- ends -------------------------------------------------------------------------------------

    def _on_ended(self, ended: Ended, pool: ThreadPoolExecutor | None) -> None:
        work = self._work[ended.job.job_id]
        attempt = ended.job.attempt
        if ended.data is None or ended.outcome is None:
            status = "lost" if ended.retryable else "refused"
            self._advance(work, jobs.Ended(attempt, status, ended.error), pool)
            return
        try:
            self.store.record_outcome(ended.data)
        except MessageError as error:
            why = f"its result was refused: {error}"
            self._advance(work, jobs.Ended(attempt, "refused", why), pool)
            return
        self.dispatcher.acknowledge(ended.node_id, ended.job.job_id, attempt)
        work.outcome = ended.outcome
        status, error_text = ended.outcome.status, _said(ended.outcome)
        self._advance(work, jobs.Ended(attempt, status, error_text), pool)

    def _on_finished(self, work: _Work) -> None:
        target, kind = work.target, work.job.kind
        done = work.state.state == "done"
        seconds = f" in {work.outcome.seconds:.1f} s" if work.outcome else ""
        verdict = f"done{seconds}" if done else work.state.error
        self.watcher.say(f"{target.label}: {kind} {verdict}")
        target.enter("waiting", self.clock())
        self._take_task(work)
        if kind == "fingerprint":
            target.fingerprinted = done
            if not done:
                target.end(f"fingerprint: {work.state.error}")
            self._maybe_ramp(target)
        elif kind == "ramp":
            target.end("" if done else f"ramp: {work.state.error}")
        else:
            self._on_task(target, work)
        if target.ended and target.error and self.task is not None:
            # What the task measured holds on this node too, whatever became of its own jobs.
            self.store.record_plan(self.run_id, target.identity, target.device, self.task)

    def _on_task(self, target: Target, work: _Work) -> None:
        error = work.state.error
        if work.outcome is None:
            target.end(f"task: {error}")
        elif not target.fingerprinted:
            self._fingerprint(target)
        if work.state.state == "done":
            self._settle_task("")
        else:
            self._next_task(f"the task's numbers could not be measured ({target.label}: {error})")

    def _take_task(self, work: _Work) -> None:
        """Keep the task's numbers, all or part of them, each saying where it was measured."""
        record = work.outcome.result.get("task") if work.outcome else None
        if isinstance(record, dict) and work.job.kind == "task":
            self.task = Plan.from_dict(record).measured_on(work.target.label)

    def _interrupt(self) -> None:
        self.interrupted = True
        self.watcher.say("interrupted: cancelling the jobs, keeping what was measured")
        for ended in self.dispatcher.cancel_all():
            self._on_ended(ended, None)
        for work in self._work.values():
            self._take_task(work)
            self._advance(work, jobs.Cancel("interrupted"))
        for target in self.targets:
            if not target.ended:
                target.end("interrupted")

    def _show(self) -> None:
        texts = self.dispatcher.progress()
        for work in self._work.values():
            if work.state.state in jobs.IN_FLIGHT and work.job.job_id in texts:
                work.target.text = texts[work.job.job_id]
        self.watcher.show(self.targets)


_IDLE = ("queued", "waiting")


def _said(outcome: Outcome) -> str:
    return "" if outcome.ok else f"{outcome.status}: {outcome.error}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
