"""One probe of one node: its devices one after the other, each with its jobs in their order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pichak_agent.messages import Job
from pichak_coordinator import jobs
from pichak_coordinator.cluster import Cluster
from pichak_coordinator.courier import Courier, Work
from pichak_coordinator.dispatch import AgentFailedError, Dispatcher
from pichak_coordinator.request import ProfileRequest, python_workload
from pichak_coordinator.schedule import Depth
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target, targets_of
from pichak_coordinator.watch_members import Member, same_node
from pichak_core.plan import Plan

#: What the light probe takes: seconds in all, nothing written to a disk.
LIGHT = (
    "software",
    "cpu",
    "host_memory",
    "kernel_launch",
    "matmul",
    "transfer",
    "gpu_state",
)
LIGHT_SECONDS = 60.0
#: A lost probe is not tried again by itself: the schedule does that.
ONCE = jobs.RetryPolicy(max_attempts=1)
#: Over its deadline, what a job may take to end.
_END_SECONDS = 5.0
#: A GPU that does not come free so quickly is in use, and is not waited for. A lease of a free one
#: starts a process, which takes seconds where many begin at once.
_LEASE_SECONDS = 15.0
_AGENT_SECONDS = 30.0


@dataclass(frozen=True)
class Requests:
    """What each depth measures. `ramp`: the full probe trains, as `fleet profile` does; without it
    the full probe is the whole fingerprint."""

    light: ProfileRequest
    full: ProfileRequest
    ramp: bool

    @classmethod
    def of(cls, request: ProfileRequest, *, ramp: bool) -> Requests:
        """From the request of a profile; `deadline_seconds` may hold one for ``light``."""
        seconds = dict(request.deadline_seconds)
        light = seconds.pop("light", LIGHT_SECONDS)
        return cls(
            replace(request, depth="quick", only=LIGHT, deadline_seconds={"fingerprint": light}),
            replace(request, deadline_seconds=seconds),
            ramp,
        )

    def longest_seconds(self) -> dict[Depth, float]:
        """What one probe of one device may take at each depth, its jobs' ends included."""
        full = ("fingerprint", "task", "ramp") if self.ramp else ("fingerprint",)
        return {
            "light": self.light.deadline("fingerprint") + _END_SECONDS,
            "full": sum(self.full.deadline(kind) + _END_SECONDS for kind in full),
        }


class MovedError(RuntimeError):
    """The node's machine or GPUs are not those that it joined with."""


@dataclass(eq=False)
class Probing:
    """A probe under way. `seconds` is what its jobs took so far, a lost one at its longest;
    `failures` says why devices gave nothing, `busy` how many were in use."""

    name: str
    run: str
    member: Member
    depth: Depth
    started: float
    targets: list[Target] = field(default_factory=list)
    seconds: float = 0.0
    busy: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    moved: bool = False
    getting_ready: Future[list[Target]] | None = None

    @property
    def over(self) -> bool:
        return self.getting_ready is None and all(target.ended for target in self.targets)


class Prober:
    """Runs probes through one courier; `on_over` is called once for each. `ended` counts its jobs
    by kind and final state."""

    def __init__(
        self,
        requests: Requests,
        cluster: Cluster,
        dispatcher: Dispatcher,
        store: Store,
        pool: ThreadPoolExecutor,
        on_over: Callable[[Probing], None],
        device: str = "auto",
    ) -> None:
        self._requests, self._cluster, self._dispatcher = requests, cluster, dispatcher
        self._store, self._pool, self._on_over, self._device = store, pool, on_over, device
        self.courier = Courier(dispatcher, store, "", self._on_finished, policy=ONCE)
        self.running: dict[str, Probing] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        self._task: Plan | None = None

    def begin(self, probing: Probing) -> None:
        """Get the node ready in a thread; its jobs follow from `step`."""
        self.running[probing.name] = probing
        probing.getting_ready = self._pool.submit(self._ready, probing.member, probing.depth)

    def step(self) -> None:
        """A moment's work."""
        for probing in list(self.running.values()):
            if probing.getting_ready is not None and probing.getting_ready.done():
                self._begin_jobs(probing, probing.getting_ready)
            if probing.over:
                self._end(probing)
        self.courier.step()
        for probing in [p for p in self.running.values() if p.over]:
            self._end(probing)

    def interrupt(self) -> None:
        """Cancel every job; partial results that still come are stored."""
        self.courier.cancel_all()
        for probing in self.running.values():
            if probing.getting_ready is not None and not probing.getting_ready.cancel():
                probing.getting_ready.add_done_callback(_release)
            for target in probing.targets:
                target.release()

    def _end(self, probing: Probing) -> None:
        if self.running.pop(probing.name, None) is not None:
            for target in probing.targets:
                target.release()
            self._on_over(probing)

    def _ready(self, member: Member, depth: Depth) -> list[Target]:
        """In a thread: the agent (again), a lease of each idle GPU, and the files."""
        node = member.node
        answer = self._dispatcher.start_agents([node], _AGENT_SECONDS)[node.node_id]
        if isinstance(answer, str):
            raise AgentFailedError(answer)
        place = {"address": node.address, "host": node.host, "node_id": node.node_id}
        hello = {**answer, **place}
        if not same_node(hello, member.hello):
            raise MovedError("its GPUs are not those that it joined with")
        targets = targets_of(
            [node], {node.node_id: hello}, {node.node_id: member.identity}, self._device
        )
        try:
            if depth == "full" and self._requests.ramp:
                self._files(node.node_id)
            wanted = [t for t in targets if t.wants_gpu and not t.ended]
            leases = self._cluster.lease_gpus([node.node_id] * len(wanted), _LEASE_SECONDS)
            for target, lease in zip(wanted, leases, strict=True):
                target.lease = lease
        except ValueError as error:  # a file that is too large to be sent
            raise AgentFailedError(str(error)) from error
        return targets

    def _begin_jobs(self, probing: Probing, ready: Future[list[Target]]) -> None:
        probing.getting_ready = None
        try:
            probing.targets = ready.result()
        except (AgentFailedError, MovedError) as error:
            probing.moved = isinstance(error, MovedError)
            probing.failures.append(str(error))
            return
        hello = probing.targets[0].hello
        self._store.record_node(probing.run, hello, node=probing.member.identity)
        for target in probing.targets:
            if target.findings:
                self._store.record_findings(
                    probing.run, target.identity, target.device, target.findings
                )
            if target.wants_gpu and target.lease is None and not target.ended:
                target.end("busy: Ray has leased its GPU to somebody else")
                probing.busy.append(target.error)
            elif target.ended:
                probing.failures.append(target.error)
            else:
                self._send(probing, target, "fingerprint")

    def _send(self, probing: Probing, target: Target, kind: str) -> None:
        request = self._requests.light if probing.depth == "light" else self._requests.full
        name, device = f"{probing.name}-{kind}-{target.number}", target.child_device
        job: Job
        if kind == "fingerprint":
            job = request.fingerprint_job(name, 1, device)
        elif kind == "task":
            job = request.task_job(name, 1, device, self._files(target.node.node_id))
        else:
            files = self._files(target.node.node_id)
            job = request.ramp_job(name, 1, device, files, self._task)
        self.courier.run_id = probing.run
        self.courier.add(target, job)

    def _files(self, ray_id: str) -> dict[str, Any]:
        request = self._requests.full
        files: dict[str, Any] = {}
        if request.data is not None:
            files["data"] = self._dispatcher.ship(ray_id, request.data)
        own = python_workload(request.model)
        if own is not None:
            files |= {"model": self._dispatcher.ship(ray_id, Path(own[0])), "factory": own[1]}
        return files

    def _on_finished(self, work: Work) -> None:
        target, kind = work.target, work.job.kind
        self.ended[kind, work.state.state] += 1
        self.courier.work.pop(work.job.job_id, None)
        probing = next((p for p in self.running.values() if target in p.targets), None)
        if probing is None:
            return
        longest = work.job.deadline_seconds + _END_SECONDS
        took = work.outcome.seconds if work.outcome else longest
        probing.seconds += took if math.isfinite(took) and took >= 0 else longest
        if self.courier.interrupted:
            target.end("interrupted")
            return
        if kind == "task" and work.done and work.outcome:
            record = work.outcome.result.get("task")
            if isinstance(record, dict):
                self._task = Plan.from_dict(record).measured_on(target.label)
        if work.outcome is not None and work.outcome.status == "busy":
            target.end(work.state.error)
            probing.busy.append(work.state.error)
            return
        if not work.done:
            target.end(f"{kind}: {work.state.error}")
            probing.failures.append(target.error)
            return
        self._follow(probing, target, kind)

    def _follow(self, probing: Probing, target: Target, kind: str) -> None:
        """The next job of a device whose last one ended well. The task's numbers are the same on
        every node: they are measured once while this process lives."""
        if kind == "ramp" or probing.depth == "light" or not self._requests.ramp:
            target.end()
            return
        try:
            self._send(probing, target, "ramp" if self._task is not None else "task")
        except (AgentFailedError, ValueError) as error:
            target.end(str(error))
            probing.failures.append(target.error)


def _release(ready: Future[list[Target]]) -> None:
    if ready.cancelled() or ready.exception() is not None:
        return
    for target in ready.result():
        target.release()
