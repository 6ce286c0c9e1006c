"""One line of the table in the making: a GPU, or a node without one, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_agent.messages import Job
from pichak_coordinator.cluster import ClusterNode, Lease
from pichak_coordinator.records import Finding


@dataclass(eq=False)
class Target:
    """What a run measures. `phase` is what it is doing now, in a word; `error` is one sentence once
    something failed. A target whose `ended` is set gets no more jobs."""

    number: int
    node: ClusterNode
    identity: str
    hello: Mapping[str, Any]
    device: str
    wants_gpu: bool = False
    phase: str = "queued"
    text: str = ""
    since: float = 0.0
    error: str = ""
    ended: bool = False
    fingerprinted: bool = False
    findings: list[Finding] = field(default_factory=list)
    lease: Lease | None = None

    @property
    def label(self) -> str:
        """How progress and sentences name it."""
        host = self.node.host or self.node.address
        suffix = self.identity.split("-", 2)[2:]
        name = f"{host} #{suffix[0]}" if suffix else host
        name = f"{name} {self.device}" if self.wants_gpu else name
        return f"{name} (simulated)" if self.hello.get("simulated") else name

    @property
    def model(self) -> str:
        """The model of its device, as `Row.node.model` has it; "" where the GPUs of the machine are
        not alike, since which of them Ray will lease is not known here."""
        if not self.wants_gpu:
            return str(self.hello.get("cpu_model") or "")
        gpus = self.hello.get("gpus")
        names = (
            {str(gpu.get("name") or "") for gpu in gpus}
            if isinstance(gpus, (list, tuple))
            else set()
        )
        return names.pop() if len(names) == 1 else ""

    @property
    def child_device(self) -> str:
        """The device as the child sees it: a leased GPU is the only one that it can see."""
        return "cuda:0" if self.wants_gpu else "cpu"

    def enter(self, phase: str, now: float, text: str = "") -> None:
        """It is doing this now."""
        self.phase, self.text, self.since = phase, text, now

    def end(self, error: str = "") -> None:
        """No more jobs; the first error is the one that is told. Its GPU is given back."""
        self.ended = True
        self.error = self.error or error
        self.enter("failed" if self.error else "done", self.since, self.error)
        self.release()

    def release(self) -> None:
        """Give its GPU back, if it holds one."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def with_lease(self, job: Job) -> Job:
        """The job, told which GPU it may see."""
        if self.lease is None:
            return job
        params = {**job.params, "visible_devices": self.lease.visible_devices}
        return replace(job, params=params)


def targets_of(
    nodes: Sequence[ClusterNode],
    hellos: Mapping[str, Mapping[str, Any] | str],
    identities: Mapping[str, str],
    device: str,
) -> list[Target]:
    """The targets of a run: one for each GPU that Ray may lease, or one for a node without.

    `hellos` and `identities` are by Ray node id. `device` is ``auto``, ``cpu`` or ``cuda``. A node
    without an agent is one ended target whose error says why.
    """
    targets: list[Target] = []
    for node in nodes:
        hello = hellos.get(node.node_id, "its agent never answered")
        identity = identities[node.node_id]
        if isinstance(hello, str):
            lost = Target(len(targets), node, identity, {}, "cpu")
            lost.end(hello)
            targets.append(lost)
            continue
        gpus = 0 if device == "cpu" else node.gpus
        for index in range(max(1, gpus)):
            name = f"cuda:{index}" if gpus else "cpu"
            made = Target(len(targets), node, identity, hello, name, wants_gpu=gpus > 0)
            _say_what_is_odd(made, device)
            targets.append(made)
    return targets


def _say_what_is_odd(target: Target, device: str) -> None:
    """A GPU that Ray does not offer is not measured: nothing says that it is free."""
    held = target.hello.get("gpu_uuids")
    count = len(held) if isinstance(held, (list, tuple)) else 0
    if device == "cuda" and not target.wants_gpu:
        target.end(
            "it offers no GPU to Ray: start it with `ray start --num-gpus=N`"
            if count
            else "it has no GPU (NVML shows none and Ray is offered none)"
        )
    elif device == "auto" and not target.wants_gpu and count:
        sentence = (
            f"{count} GPU{'s' * (count > 1)} here but not offered to Ray, so not measured: start "
            "the node with `ray start --num-gpus=N`"
        )
        evidence = {"gpu_uuids": list(held or ())}
        target.findings.append(
            Finding("gpu_not_offered", "warn", sentence, evidence, state="confirmed")
        )
