"""The main job: who measures what, in which order, and what becomes of each answer.

Every target (a GPU, or a node without one) is fingerprinted; the task's numbers are measured once,
on one healthy node; every target is then ramped with those numbers. Targets go at their own pace.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pichak_agent.messages import Job, Outcome
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.dispatch import AgentFailedError, Dispatcher, Ended
from pichak_coordinator.request import ProfileRequest, python_workload
from pichak_coordinator.target import Target, targets_of
from pichak_core.plan import Plan

#: A lost attempt is repeated once: a busy node is not a bad one (field case 89).
MOST_ATTEMPTS = 2
_TASK_NODES = 2
_POLL_SECONDS = 0.25
_RESTART_SECONDS = 30.0


class Keeper(Protocol):
    """Where outcomes are kept. `keep` returns once they are safe on disk."""

    def keep(self, target: Target, data: bytes) -> None: ...


class Watcher(Protocol):
    """Who is told how it goes."""

    def say(self, text: str) -> None: ...

    def show(self, targets: Sequence[Target]) -> None: ...


@dataclass
class Profiler:
    """One run over one fleet. `run` fills the targets; nothing is returned that was not stored."""

    request: ProfileRequest
    dispatcher: Dispatcher
    keeper: Keeper
    watcher: Watcher
    run_id: str
    clock: Callable[[], float] = time.monotonic
    targets: list[Target] = field(default_factory=list)
    task: Plan | None = None
    task_error: str = ""
    interrupted: bool = False
    _by_job: dict[str, Target] = field(default_factory=dict)
    _task_tried: list[Target] = field(default_factory=list)
    _task_done: bool = False
    _restarts: dict[Future[dict[str, Any] | str], tuple[Target, Job]] = field(default_factory=dict)

    def run(self, nodes: Sequence[ClusterNode]) -> list[Target]:
        """Profile the nodes. Ctrl-C ends the run with what has been measured."""
        with ThreadPoolExecutor(8) as pool:
            try:
                self._prepare(nodes)
                while self._work_left():
                    for ended in self.dispatcher.poll(_POLL_SECONDS):
                        self._on_end(ended, pool)
                    self._on_restarts()
                    self._show()
            except KeyboardInterrupt:
                self._interrupt()
            finally:
                for target in self.targets:
                    target.release()
                self.dispatcher.forget_files()
        return self.targets

    # -- starting ---------------------------------------------------------------------------------

    def _prepare(self, nodes: Sequence[ClusterNode]) -> None:
        self.watcher.say(f"{len(nodes)} node{'s' * (len(nodes) != 1)}: starting agents")
        hellos = self.dispatcher.start_agents(nodes)
        self.targets = targets_of(nodes, hellos, self.request.device)
        self._lease()
        ready = [t for t in self.targets if not t.ended]
        self._show()
        if ready:
            self._start_task(ready)
        for target in ready:
            if target.phase == "queued":
                self._start_fingerprint(target)

    def _lease(self) -> None:
        wanted = [t for t in self.targets if t.wants_gpu and not t.ended]
        for target, lease in zip(
            wanted, self.dispatcher.lease_gpus([t.node.node_id for t in wanted]), strict=True
        ):
            if lease is None:
                target.fail("busy: Ray has leased its GPU to somebody else")
            else:
                target.lease = lease

    def _start_fingerprint(self, target: Target) -> None:
        job = self.request.fingerprint_job(
            self._job_id(target, "fingerprint"), 1, target.child_device, target.lock
        )
        self._submit(target, job)

    def _start_task(self, ready: Iterable[Target]) -> None:
        """On this machine's own node if it is one: the data is there already."""
        here = socket.gethostname()
        fresh = [t for t in ready if t not in self._task_tried]
        fresh.sort(key=lambda t: (t.node.host != here, not t.node.is_head))
        for target in fresh[:1]:
            self._task_tried.append(target)
            try:
                files = self._files(target)
            except (AgentFailedError, ValueError) as error:
                target.fail(str(error))
                self._next_task(f"{target.label}: {error}")
                return
            job = self.request.task_job(
                self._job_id(target, "task"), 1, target.child_device, target.lock, files
            )
            self._submit(target, job)

    def _files(self, target: Target) -> dict[str, Any]:
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

    def _submit(self, target: Target, job: Job) -> None:
        self._by_job[job.job_id] = target
        target.start(job.kind, self.clock())
        self.dispatcher.submit(target.node.node_id, target.with_lease(job))

    # -- ends -------------------------------------------------------------------------------------

    def _work_left(self) -> bool:
        return bool(self.dispatcher.in_flight or self._restarts)

    def _on_end(self, ended: Ended, pool: ThreadPoolExecutor) -> None:
        target = self._by_job[ended.job.job_id]
        if ended.data is not None and ended.outcome is not None:
            self.keeper.keep(target, ended.data)
            self.dispatcher.acknowledge(ended.node_id, ended.job.job_id, ended.job.attempt)
            self._on_outcome(target, ended.outcome)
        elif ended.retryable and ended.job.attempt < MOST_ATTEMPTS and not self.interrupted:
            self.watcher.say(f"{target.label}: {ended.error}; trying again")
            target.start("reconnecting", self.clock())
            future = pool.submit(self._reconnect, target.node)
            self._restarts[future] = (target, ended.job)
        else:
            self._on_lost(target, ended.job, ended.error)

    def _reconnect(self, node: ClusterNode) -> dict[str, Any] | str:
        return self.dispatcher.start_agents([node], _RESTART_SECONDS)[node.node_id]

    def _on_restarts(self) -> None:
        for future in [f for f in self._restarts if f.done()]:
            target, job = self._restarts.pop(future)
            hello = future.result()
            if isinstance(hello, str):
                self._on_lost(target, job, hello)
            else:
                again = Job(**{**job.__dict__, "attempt": job.attempt + 1})
                self._submit(target, again)

    def _on_lost(self, target: Target, job: Job, error: str) -> None:
        target.fail(f"{job.kind}: {error}")
        if job.kind == "task":
            self._next_task(f"{target.label}: {error}")

    def _on_outcome(self, target: Target, outcome: Outcome) -> None:
        self.watcher.say(f"{target.label}: {outcome.kind} {_verdict(outcome)}")
        if outcome.kind == "fingerprint":
            target.take_fingerprint(outcome)
            self._maybe_ramp(target)
        elif outcome.kind == "task":
            self._on_task(target, outcome)
        else:
            target.take_ramp(outcome)

    def _on_task(self, target: Target, outcome: Outcome) -> None:
        plan = _task_plan(outcome.result, target.label)
        target.phase = "queued"
        if plan is not None:
            self.task = plan
        if outcome.ok:
            self._task_done = True
        else:
            self.task_error = f"task, measured on {target.label}: {outcome.error}"
            self._next_task(f"{target.label}: {outcome.error}")
        if not target.ended:
            self._start_fingerprint(target)
        if self._task_done:
            for waiting in self.targets:
                self._maybe_ramp(waiting)

    def _next_task(self, why: str) -> None:
        """Another node may measure the task; after that the ramps go on with what there is."""
        untried = [t for t in self.targets if not t.ended and t not in self._task_tried]
        idle = [t for t in untried if t.phase in ("queued", "waiting for the task")]
        if len(self._task_tried) < _TASK_NODES and (idle or untried):
            self._start_task(idle or untried)
            return
        self.task_error = self.task_error or f"the task was not measured: {why}"
        self._task_done = True
        for waiting in self.targets:
            self._maybe_ramp(waiting)

    def _maybe_ramp(self, target: Target) -> None:
        if target.ended or target.phase != "fingerprinted":
            return
        if not self._task_done:
            return
        if self.task is None and self.task_error:
            target.fail(self.task_error)
            return
        try:
            files = self._files(target)
        except (AgentFailedError, ValueError) as error:
            target.fail(str(error))
            return
        job = self.request.ramp_job(
            self._job_id(target, "ramp"), 1, target.child_device, target.lock, files, self.task
        )
        self._submit(target, job)

    def _interrupt(self) -> None:
        self.interrupted = True
        self.watcher.say("interrupted: cancelling the jobs and keeping what was measured")
        for ended in self.dispatcher.cancel_all():
            target = self._by_job[ended.job.job_id]
            if ended.data is not None and ended.outcome is not None:
                self.keeper.keep(target, ended.data)
                self.dispatcher.acknowledge(ended.node_id, ended.job.job_id, ended.job.attempt)
                self._take_partial(target, ended.outcome)
        for target in self.targets:
            if not target.ended:
                target.fail("interrupted")

    def _take_partial(self, target: Target, outcome: Outcome) -> None:
        if outcome.kind == "fingerprint":
            target.take_fingerprint(outcome)
        elif outcome.kind == "ramp":
            target.take_ramp(outcome)
        elif (plan := _task_plan(outcome.result, target.label)) is not None:
            self.task = plan

    def _show(self) -> None:
        texts = self.dispatcher.progress()
        now = self.clock()
        for job_id, target in self._by_job.items():
            if job_id in texts and target.job_kind == _kind_of(job_id):
                target.text = texts[job_id]
            target.now = now
        self.watcher.show(self.targets)


def _kind_of(job_id: str) -> str:
    return job_id.rsplit("-", 2)[1]


def _verdict(outcome: Outcome) -> str:
    if outcome.ok:
        return f"done in {outcome.seconds:.1f} s"
    return f"{outcome.status}: {outcome.error}"


def _task_plan(result: Mapping[str, Any], label: str) -> Plan | None:
    """The task's numbers, each source saying where it was measured."""
    record = result.get("plan")
    if not isinstance(record, dict):
        return None
    plan = Plan.from_dict(record)
    return plan.measured_on(label)
