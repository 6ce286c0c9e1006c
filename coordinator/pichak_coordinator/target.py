"""One line of the table in the making: a GPU, or a node without one, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_agent.messages import Job, Outcome
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.dispatch import Lease
from pichak_coordinator.identity import node_identities
from pichak_coordinator.records import NodeRecord, Row
from pichak_core.measurement import Fingerprint
from pichak_core.plan import Plan

_ENDED = ("done", "failed")


@dataclass(eq=False)
class Target:
    """What a run measures. `phase` is one of queued, fingerprint, fingerprinted, task, ramp,
    reconnecting, done and failed; `error` is one sentence once something failed."""

    number: int
    node: ClusterNode
    identity: str
    hello: Mapping[str, Any]
    device: str
    wants_gpu: bool = False
    phase: str = "queued"
    text: str = ""
    since: float = 0.0
    now: float = 0.0
    job_kind: str = ""
    error: str = ""
    notes: list[str] = field(default_factory=list)
    lease: Lease | None = None
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    plan: Plan | None = None
    ramp: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """How progress and sentences name it."""
        host = self.node.host or self.node.address
        suffix = self.identity.split("-", 2)[2:]
        name = f"{host} #{suffix[0]}" if suffix else host
        return f"{name} {self.device}" if self.wants_gpu else name

    @property
    def child_device(self) -> str:
        """The device as the child sees it: a leased GPU is the only one that it can see."""
        return "cuda:0" if self.wants_gpu else "cpu"

    @property
    def lock(self) -> str:
        """Measurements on one machine disturb each other, also on two GPUs: one at a time."""
        return "machine"

    @property
    def ended(self) -> bool:
        return self.phase in _ENDED

    def start(self, phase: str, now: float) -> None:
        """A job of this kind is running."""
        self.phase, self.job_kind, self.text = phase, phase, ""
        self.since = self.now = now

    def fail(self, error: str) -> None:
        """It ends here; what was measured before stays."""
        self.phase, self.error = "failed", self.error or error
        self.text = self.error
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

    def take_fingerprint(self, outcome: Outcome) -> None:
        """Keep the readings, all or part of them."""
        record = outcome.result.get("fingerprint")
        if isinstance(record, dict):
            self.fingerprint = Fingerprint.from_dict(record)
        if outcome.ok:
            self.phase = "fingerprinted"
        else:
            self.fail(f"fingerprint {outcome.status}: {outcome.error}")

    def take_ramp(self, outcome: Outcome) -> None:
        """Keep the ramp and the plan made from it, all or part of them."""
        plan, ramp = outcome.result.get("plan"), outcome.result.get("ramp")
        if isinstance(plan, dict):
            self.plan = Plan.from_dict(plan)
        if isinstance(ramp, dict):
            self.ramp = ramp
        if outcome.ok:
            self.phase = "done"
            self.release()
        else:
            self.fail(f"ramp {outcome.status}: {outcome.error}")

    def row(self) -> Row:
        """The line of the comparison, as far as it came."""
        cpu_model = self.fingerprint.text("cpu.model") or str(self.hello.get("cpu_model", ""))
        gpu_model = self.fingerprint.text("gpu.name") or ""
        record = NodeRecord(
            node=self.identity,
            host=self.node.host,
            address=self.node.address,
            device=self.device,
            device_name=gpu_model if self.wants_gpu else cpu_model,
            gpu_model=gpu_model if self.wants_gpu else "",
            cpu_model=cpu_model,
            versions=_texts(self.hello.get("versions")),
        )
        plan = self.plan
        if plan is not None:
            for note in self.notes:
                plan.note(note)
        return Row(record, self.fingerprint, plan, self.ramp, self.error)


def targets_of(
    nodes: Sequence[ClusterNode], hellos: Mapping[str, Mapping[str, Any] | str], device: str
) -> list[Target]:
    """The targets of a run: one for each GPU that Ray may lease, or one for a node without.

    `device` is ``auto``, ``cpu`` or ``cuda``. A node without an agent is one failed target whose
    error says why.
    """
    answered = [n for n in nodes if isinstance(hellos.get(n.node_id), Mapping)]
    places = [
        {**dict(_mapping(hellos[n.node_id])), "address": n.address, "node_id": n.node_id}
        for n in answered
    ]
    identities = dict(zip((n.node_id for n in answered), node_identities(places), strict=True))
    targets: list[Target] = []
    for node in nodes:
        hello = hellos.get(node.node_id, "its agent never answered")
        if isinstance(hello, str):
            lost = Target(len(targets), node, f"ray-{node.node_id[:10]}", {}, "cpu")
            lost.fail(hello)
            targets.append(lost)
            continue
        gpus = 0 if device == "cpu" else node.gpus
        for index in range(max(1, gpus)):
            name = f"cuda:{index}" if gpus else "cpu"
            made = Target(
                len(targets), node, identities[node.node_id], hello, name, wants_gpu=gpus > 0
            )
            _say_what_is_odd(made, device)
            targets.append(made)
    return targets


def _say_what_is_odd(target: Target, device: str) -> None:
    """A GPU that Ray does not offer is not measured: nothing says that it is free."""
    held = target.hello.get("gpu_uuids")
    count = len(held) if isinstance(held, (list, tuple)) else 0
    if device == "cuda" and not target.wants_gpu:
        target.fail(
            "it offers no GPU to Ray: start it with `ray start --num-gpus=N`"
            if count
            else "it has no GPU (NVML shows none and Ray is offered none)"
        )
    elif device == "auto" and not target.wants_gpu and count:
        target.notes.append(
            f"{count} GPU{'s' * (count > 1)} here but not offered to Ray, so not measured: start "
            "the node with `ray start --num-gpus=N`"
        )


def _mapping(hello: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return hello if isinstance(hello, Mapping) else {}


def _texts(versions: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {}
