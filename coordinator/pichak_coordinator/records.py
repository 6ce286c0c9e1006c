"""What the coordinator's pure code works on: plain, frozen records.

The store fills them, `judge`, `compare` and `pick` read them, and tests write them by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pichak_core.measurement import Fingerprint
from pichak_core.plan import Plan

Severity = Literal["info", "warn", "fail"]
FindingState = Literal["suspected", "confirmed"]
Confidence = Literal["low", "normal"]

#: The worst first; also how findings are sorted.
SEVERITIES: tuple[Severity, ...] = ("fail", "warn", "info")

#: The device of what is about a whole node.
WHOLE = ""


@dataclass(frozen=True)
class Finding:
    """Something a person should know about a node.

    `code` is stable and documented; `sentence` is for a person; `evidence` holds the figures that
    it rests on, arithmetic included. Seen once it is *suspected*; a second, separate probe makes it
    *confirmed*. `metric` names the reading it is about, "" when it is about none. `confidence` is
    low where it rests on fewer than five peers.
    """

    code: str
    severity: Severity
    sentence: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    state: FindingState = "suspected"
    confidence: Confidence = "normal"
    metric: str = ""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("severity", self.severity, get_args(Severity)),
            ("state", self.state, get_args(FindingState)),
            ("confidence", self.confidence, get_args(Confidence)),
        ):
            if value not in allowed:
                raise ValueError(f"finding {self.code!r}: {name} {value!r} is none of {allowed}")
        if not self.code or not self.sentence.strip():
            raise ValueError("a finding needs a code and a sentence")

    @property
    def key(self) -> tuple[str, str]:
        """What makes two findings of one device the same one, seen twice."""
        return self.code, self.metric

    @property
    def fault(self) -> bool:
        """A confirmed failure: never picked silently."""
        return self.severity == "fail" and self.state == "confirmed"

    @property
    def order(self) -> tuple[int, bool, str, str]:
        """Sorts the worst first."""
        return SEVERITIES.index(self.severity), self.state != "confirmed", self.code, self.metric

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form (SPEC 8)."""
        return {
            "code": self.code,
            "severity": self.severity,
            "sentence": self.sentence,
            "evidence": dict(self.evidence),
            "state": self.state,
            "confidence": self.confidence,
            "metric": self.metric,
        }

    @classmethod
    def from_dict(cls, record: Any) -> Finding:
        """The inverse of `as_dict`; `ValueError` says what is wrong."""
        if not isinstance(record, Mapping):
            raise ValueError(f"a finding is an object, not {type(record).__name__}")
        evidence = record.get("evidence", {})
        if not isinstance(evidence, Mapping):
            raise ValueError("a finding's evidence is an object")
        texts = {
            name: record.get(name, default)
            for name, default in (
                ("code", ""),
                ("severity", ""),
                ("sentence", ""),
                ("state", "suspected"),
                ("confidence", "normal"),
                ("metric", ""),
            )
        }
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ValueError(f"a finding's {name} is text, not {type(value).__name__}")
        return cls(evidence=dict(evidence), **texts)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One training device of one node; a node with four GPUs has four of them.

    `node` is the stable identity (`identity.node_identity`). `device` is ``cpu``, ``cuda:N``, or
    `WHOLE`; `device_name` is what a person calls it; `gpu_uuid` is "" where none was read.
    `versions` are those of the agent's hello. `alias` stands for a host name that several machines
    share. `simulated` says that no machine was measured; it is said wherever the node is named, and
    a simulated node is no peer of a real one. `labels` are the Ray node's, `problems` what its
    agent tells of itself, a sentence each.
    """

    node: str
    host: str = ""
    address: str = ""
    device: str = "cpu"
    device_name: str = ""
    gpu_model: str = ""
    cpu_model: str = ""
    gpu_uuid: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    alias: str = ""
    simulated: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """(node, device): what a row is about."""
        return self.node, self.device

    @property
    def model(self) -> str:
        """What makes a peer: the GPU model, and the CPU model for a CPU. "" is nobody's peer."""
        name = self.cpu_model if self.device.startswith("cpu") else self.gpu_model
        return f"{name} (simulated)" if name and self.simulated else name

    @property
    def label(self) -> str:
        """How a sentence names it: the host, which agent there, and the GPU where it is one."""
        name = self.alias or self.host or self.node
        # node_identities: the second agent of a machine is "n-…-2".
        nth = self.node.split("-")[2:] if self.host else []
        name = f"{name} #{nth[0]}" if nth else name
        gpu = self.device != WHOLE and not self.device.startswith("cpu")
        name = f"{name} {self.device}" if gpu else name
        return f"{name} (simulated)" if self.simulated else name


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a device, what was measured of it, and what is wrong with it.

    `plan` and `ramp` are None where they were not derived. `error` is one sentence when something
    that was asked for failed, "" otherwise; a row with an error may still hold readings. `printed`
    are the last lines of what each failed job printed, by its kind, safe to show. `unfinished`: the
    error is only that jobs have not ended, for the run goes on or was cut off.
    """

    node: NodeRecord
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    plan: Plan | None = None
    ramp: Mapping[str, Any] | None = None
    error: str = ""
    findings: tuple[Finding, ...] = ()
    printed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unfinished: bool = False

    @property
    def failed(self) -> bool:
        """Something that was asked for failed; what has not ended did not."""
        return bool(self.error) and not self.unfinished

    @property
    def key(self) -> tuple[str, str]:
        """(node, device)."""
        return self.node.key

    @property
    def measured(self) -> bool:
        """True when there is at least one number, of any kind."""
        if self.plan is not None and any(v.measured for v in self.plan.values.values()):
            return True
        return any(self.fingerprint.text(name) is not None for name in self.fingerprint)

    def as_dict(self) -> dict[str, Any]:
        """One entry of ``nodes`` in ``pichak fleet profile --json`` (SPEC 8)."""
        node = self.node
        gpus = [] if node.device.startswith("cpu") else [node.gpu_model or node.device_name]
        plan = self.plan.to_dict() if self.plan is not None else None
        record = {
            "node": node.node,
            "host": node.host,
            "address": node.address,
            "device": node.device,
            "device_name": node.device_name,
            "gpus": gpus,
            "versions": dict(node.versions),
            "simulated": node.simulated,
            "problems": list(node.problems),
            "fingerprint": self.fingerprint.to_dict(),
            "plan": plan,
            "findings": [finding.as_dict() for finding in self.findings],
            "error": self.error or None,
            "unfinished": self.unfinished,
            "log_tail": {kind: list(lines) for kind, lines in self.printed.items()},
        }
        safe: dict[str, Any] = json_safe(record)
        return safe


def json_safe(value: Any) -> Any:
    """`value` with what JSON cannot say as text: infinities and NaN by name, bytes in hex."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Run:
    """One run of a command over a fleet. `finished_unix` is None while it runs or if it was cut."""

    run: str
    started_unix: float
    finished_unix: float | None = None
    command: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether it measures machines side by side: a network test compares links, and a watch's
        probe is of some nodes only."""
        return self.command not in ("net", "fleet watch")

    def simulated(self, rows: Sequence[Row]) -> bool:
        """Whether its time is a simulation's, `rows` being its own: no machine took it."""
        if self.settings.get("simulated"):
            return True
        return self.command == "import" and bool(rows) and all(r.node.simulated for r in rows)


@dataclass(frozen=True)
class SeenNode:
    """A node as it was last seen, in whichever run."""

    node: str
    host: str
    address: str
    gpu_uuids: tuple[str, ...]
    first_seen_unix: float
    last_seen_unix: float


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job as the store keeps it."""

    job_id: str
    run: str | None
    node: str
    device: str
    kind: str
    state: str
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True)
class Point:
    """One reading of one metric in a node's history.

    `value` is None for text and for what was not measured; `unmeasured` then has the reason.
    """

    run: str | None
    device: str
    metric: str
    received_unix: float
    value: float | None
    text: str | None = None
    unit: str = ""
    spread: float | None = None
    samples: int = 1
    suspect: str = ""
    unmeasured: str = ""
    source: str = ""
    simulated: bool = False
