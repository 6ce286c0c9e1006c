"""The main job: who measures what, in which order, and what becomes of each answer.

Every target (a GPU, or a node without one) is fingerprinted; the task's numbers are measured once,
on one healthy node; every target is then ramped with those numbers. Targets go at their own pace.
Nothing reaches the user that is not in the store first.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pichak_agent.messages import Job
from pichak_coordinator import jobs
from pichak_coordinator.cluster import Cluster, ClusterNode
from pichak_coordinator.courier import Courier, Work
from pichak_coordinator.dispatch import AgentFailedError, Dispatcher
from pichak_coordinator.guesses import RampGuesses
from pichak_coordinator.identity import node_identities
from pichak_coordinator.remains import Remains, done_before, task_before
from pichak_coordinator.request import ProfileRequest, python_workload
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target, targets_of
from pichak_core.plan import Plan

#: How many nodes may fail at the task before the ramps go on without its numbers.
_TASK_NODES = 2


class Watcher(Protocol):
    """Who is told how it goes."""

    def say(self, text: str) -> None: ...

    def show(self, targets: Sequence[Target]) -> None: ...


@dataclass
class Profiler:
    """One run over one fleet, kept in `store` under `run_id`."""

    request: ProfileRequest
    cluster: Cluster
    dispatcher: Dispatcher
    store: Store
    watcher: Watcher
    run_id: str
    resumed: bool = False
    clock: Callable[[], float] = time.monotonic
    targets: list[Target] = field(default_factory=list)
    task: Plan | None = None
    _suffix: str = ""
    _guesses: RampGuesses = field(default_factory=RampGuesses)
    _task_error: str = ""
    _task_settled: bool = False
    _task_tried: list[Target] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.courier = Courier(
            self.dispatcher, self.store, self.run_id, self._on_finished, self.clock
        )
        self.remains = Remains(self.dispatcher, self.store, self.watcher.say)

    @property
    def interrupted(self) -> bool:
        """Ctrl-C ended the run."""
        return self.courier.interrupted

    def run(self, nodes: Sequence[ClusterNode]) -> list[Target]:
        """Profile the nodes; Ctrl-C ends the run with what has been measured."""
        with self.courier.open():
            try:
                self._prepare(nodes)
                while not self.courier.idle:
                    self.courier.step()
                    self._show()
            except KeyboardInterrupt:
                self._interrupt()
            finally:
                for target in self.targets:
                    target.release()
                self.remains.settle({t.node.node_id for t in self.targets if t.hello})
                self._take_problems()
                self.dispatcher.forget_files()
        return self.targets

    def _take_problems(self) -> None:
        """What the agents tell at the end: the run itself may have brought it about."""
        asked = {t.node.node_id: t.identity for t in self.targets if t.hello}
        for node_id, told in self.dispatcher.problems(asked).items():
            self.store.record_problems(self.run_id, asked[node_id], told)

    # -- starting ---------------------------------------------------------------------------------

    def _prepare(self, nodes: Sequence[ClusterNode]) -> None:
        self.watcher.say(f"starting an agent on {_count(len(nodes), 'node')}")
        hellos = self.dispatcher.start_agents(nodes)
        identities = self._record_nodes(nodes, hellos)
        self.targets = targets_of(nodes, hellos, identities, self.request.device)
        for target in self.targets:
            target.since = self.clock()
        answering = {t.identity: t.node.node_id for t in self.targets if t.hello}
        self.remains.end_open_jobs(answering)
        if self.resumed:
            self.remains.await_ends()
        self.remains.collect(answering.values())
        if self.resumed:
            self._go_on()
        self._learn_from_the_run_before()
        self._lease()
        for target in self.targets:
            if target.findings:
                found = target.findings
                self.store.record_findings(self.run_id, target.identity, target.device, found)
            if target.error and isinstance(hellos.get(target.node.node_id), dict):
                self._record_unsent(target, "fingerprint", "failed", target.error)
        self._show()
        ready = [t for t in self.targets if not t.ended]
        if ready and not self._task_settled:
            self._next_task("")
        for target in ready:
            if target.fingerprinted:
                self._maybe_ramp(target)
            elif target.phase == "queued":
                self._fingerprint(target)

    def _record_nodes(
        self, nodes: Sequence[ClusterNode], hellos: dict[str, dict[str, Any] | str]
    ) -> dict[str, str]:
        answered: list[tuple[str, dict[str, Any]]] = []
        for node in nodes:
            hello = hellos[node.node_id]
            if not isinstance(hello, str):
                place = {"address": node.address, "host": node.host, "node_id": node.node_id}
                labels = dict(node.labels)
                answered.append((node.node_id, {**hello, **place, "labels": labels}))
        greeted = [hello for _, hello in answered]
        before = self.store.hellos_of(self.run_id) if self.resumed else {}
        named = node_identities(greeted, {n: hello for n, hello in before.items() if hello})
        names = self.store.record_nodes(self.run_id, greeted, named)
        identities = dict(zip((node_id for node_id, _ in answered), names, strict=True))
        for node in nodes:
            why = hellos[node.node_id]
            if isinstance(why, str):
                place = {"address": node.address, "host": node.host}
                identities[node.node_id] = self.store.record_node(self.run_id, place, error=why)
        return identities

    def _go_on(self) -> None:
        """Take what this run had measured before it was cut off."""
        self._suffix = f".{secrets.token_hex(2)}"
        done = done_before(self.store, self.run_id)
        for target in self.targets:
            kinds = done.get((target.identity, target.device), set())
            target.fingerprinted = "fingerprint" in kinds
            if "ramp" in kinds:
                target.end()
        labels = {target.identity: target.label for target in self.targets}
        self.task = task_before(self.store, self.run_id, lambda node: labels.get(node, node))
        self._task_settled = self.task is not None

    def _learn_from_the_run_before(self) -> None:
        before = self.store.previous_run(self.run_id)
        if before is not None:
            rows = self.store.rows_of(before.run)
            self._guesses.learn_run(rows, before.settings, self.request.settings())

    def _lease(self) -> None:
        wanted = [t for t in self.targets if t.wants_gpu and not t.ended]
        leases = self.cluster.lease_gpus([t.node.node_id for t in wanted])
        for target, lease in zip(wanted, leases, strict=True):
            if lease is None:
                target.end("busy: Ray has leased its GPU to somebody else")
            else:
                target.lease = lease

    def _end_unsent(self, target: Target, kind: str, error: str) -> None:
        """It ends with a job that was never sent; its row says why."""
        target.end(error)
        self._record_unsent(target, kind, "failed", error)

    def _record_unsent(self, target: Target, kind: str, state: str, error: str) -> None:
        job = Job(self._job_id(target, kind), 1, kind, {"device": target.child_device}, 1.0)
        self.courier.record_unsent(target, job, state, error)

    # -- sending ----------------------------------------------------------------------------------

    def _fingerprint(self, target: Target) -> None:
        job = self.request.fingerprint_job(
            self._job_id(target, "fingerprint"), 1, target.child_device
        )
        self.courier.add(target, job)

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
                self._end_unsent(target, "task", str(error))
                continue
            job = self.request.task_job(self._job_id(target, "task"), 1, target.child_device, files)
            self.courier.add(target, job)
            return
        self._settle_task(why)

    def _settle_task(self, error: str) -> None:
        self._task_settled, self._task_error = True, error
        for target in self.targets:
            self._maybe_ramp(target)

    def _maybe_ramp(self, target: Target) -> None:
        if target.ended or not target.fingerprinted or not self._task_settled:
            return
        if self._job_id(target, "ramp") in self.courier.work:
            return
        if self.task is None and self._task_error:
            self._end_unsent(target, "ramp", self._task_error)
            return
        if self._sister_ramps(target):
            return
        try:
            files = self._files(target)
        except (AgentFailedError, ValueError) as error:
            self._end_unsent(target, "ramp", str(error))
            return
        guess = self._guesses.of(target.model)
        job = self.request.ramp_job(
            self._job_id(target, "ramp"), 1, target.child_device, files, self.task, guess
        )
        self.courier.add(target, job)

    def _sister_ramps(self, target: Target) -> bool:
        """Another device of the same machine is at its ramp: this one would wait for it anyway, and
        begins with what that one finds."""
        ramps = (self.courier.work.get(self._job_id(t, "ramp")) for t in self._sisters(target))
        return any(work is not None and not work.state.final for work in ramps)

    def _sisters(self, target: Target) -> list[Target]:
        return [t for t in self.targets if t is not target and t.node is target.node]

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
        return f"{self.run_id}-{kind}-{target.number}{self._suffix}"

    # -- ends -------------------------------------------------------------------------------------

    def _on_finished(self, work: Work) -> None:
        target, kind = work.target, work.job.kind
        self._take_task(work)
        if self.interrupted:
            return
        seconds = f" in {work.outcome.seconds:.1f} s" if work.outcome else ""
        self.watcher.say(
            f"{target.label}: {kind} {f'done{seconds}' if work.done else work.state.error}"
        )
        target.enter("waiting", self.clock())
        if kind == "fingerprint":
            target.fingerprinted = work.done
            if not work.done:
                target.end(f"fingerprint: {work.state.error}")
            self._maybe_ramp(target)
        elif kind == "ramp":
            target.end("" if work.done else f"ramp: {work.state.error}")
            if work.outcome is not None:
                ramp = work.outcome.result.get("ramp")
                self._guesses.learn(target.model, ramp, target.label)
            for sister in self._sisters(target):
                self._maybe_ramp(sister)
        else:
            self._on_task(target, work)
        if target.ended and target.error and self.task is not None:
            self._keep_task(target)

    def _keep_task(self, target: Target) -> None:
        """What the task measured holds on this node too, whatever became of its own jobs."""
        work = self.courier.work.get(self._job_id(target, "ramp"))
        if self.task and not (work and work.outcome and work.outcome.result.get("plan")):
            self.store.record_plan(self.run_id, target.identity, target.device, self.task)

    def _on_task(self, target: Target, work: Work) -> None:
        error = work.state.error
        if work.outcome is None:
            target.end(f"task: {error}")
        elif not target.fingerprinted:
            self._fingerprint(target)
        if work.done:
            self._settle_task("")
        else:
            self._next_task(f"the task's numbers could not be measured ({target.label}: {error})")

    def _take_task(self, work: Work) -> None:
        """Keep the task's numbers, all or part of them, each saying where it was measured."""
        record = work.outcome.result.get("task") if work.outcome else None
        if isinstance(record, dict) and work.job.kind == "task":
            self.task = Plan.from_dict(record).measured_on(work.target.label)

    def _interrupt(self) -> None:
        self.watcher.say("interrupted: cancelling the jobs, keeping what was measured")
        self.courier.cancel_all()
        for target in self.targets:
            if target.ended:
                continue
            target.end("interrupted")
            for kind in ("fingerprint", "ramp"):
                if self._job_id(target, kind) not in self.courier.work:
                    self._record_unsent(target, kind, "cancelled", "interrupted before it began")

    def _show(self) -> None:
        texts = self.dispatcher.progress()
        for work in self.courier.work.values():
            if work.state.state in jobs.IN_FLIGHT and work.job.job_id in texts:
                work.target.text = texts[work.job.job_id]
        self.watcher.show(self.targets)


_IDLE = ("queued", "waiting")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
