"""A simulated fleet watched for some days: what was put in, what was found, how soon, at what cost,
and who was accused wrongly; and, where wanted, the history that a real fleet would have left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_coordinator.identity import node_identities
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.schedule import HOUR, Depth, Policy
from pichak_coordinator.simulated_fleet import (
    COPY,
    CPU,
    DISK,
    HOST,
    MATMUL,
    PutIn,
    SimulatedFleet,
)
from pichak_coordinator.simulated_rounds import hello_of
from pichak_coordinator.simulated_watch import DAY, SimulatedWatch
from pichak_coordinator.watch_events import Event
from pichak_core.simulated_host import SimulatedHost

#: What a probe of each depth is taken to cost: constants, nothing was timed.
COST_SECONDS: dict[Depth, float] = {"light": 8.0, "full": 25.0}
LONGEST_SECONDS: dict[Depth, float] = {"light": 60.0, "full": 90.0}
#: What a light probe reads of a host drawn here; a full one reads `FULL` too. Of a user's own hosts
#: a light probe leaves the disk out, and a full one reads everything.
LIGHT = (COPY, MATMUL, "gpu.kernel_launch_us", "cpu.matmul_fp32_gflop_s", HOST)
FULL = (DISK, CPU)

#: Kinds of events by which a fault is found.
_FOUND = ("confirmed", "changed", "probe_failed")


@dataclass(frozen=True)
class Result:
    """One fault, and how it was found: `hours` after it began, None where it was not."""

    fault: PutIn
    hours: float | None = None
    by: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "host": self.fault.host,
            "kind": self.fault.kind,
            "metric": self.fault.metric,
            "began_unix": self.fault.begin_unix,
            "hours_to_find": self.hours,
            "found_by": self.by,
        }


@dataclass(frozen=True)
class Wrong:
    """A false accusation: told of a host that had no such fault."""

    host: str
    event: str
    metric: str
    when_unix: float
    text: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return dict(self.__dict__)


@dataclass
class Simulation:
    """One simulation; `run` goes through it. `keep` gets the rows of each probe that a store should
    have: the first of a host's day, and whatever told something."""

    fleet: SimulatedFleet
    policy: Policy
    begin_unix: float
    days: float
    keep: Callable[[float, str, Depth, Sequence[Row]], None] = lambda *_: None
    say: Callable[[float], None] = lambda _: None
    events: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    findings: dict[tuple[str, str], tuple[Finding, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hosts = self.fleet.hosts
        names = node_identities([hello_of(host, n) for n, host in enumerate(hosts, 1)])
        self.hosts = dict(zip(names, hosts, strict=True))
        self.node_of = {host.host: node for node, host in self.hosts.items()}
        self._records = {node: _records(node, host) for node, host in self.hosts.items()}
        self._shown = {node: _by_depth(host) for node, host in self.hosts.items()}
        self._found: dict[PutIn, tuple[float, str]] = {}
        self._kept_day: dict[str, int] = {}
        self.watch = SimulatedWatch(
            *(self.policy, list(self.hosts), self._measure, COST_SECONDS),
            tell=self._tell,
            keep=self._keep,
            say=lambda now: self.say((now - self.begin_unix) / DAY),
            devices={node: len(records) for node, records in self._records.items()},
        )

    @property
    def end_unix(self) -> float:
        return self.begin_unix + self.days * DAY

    def run(self) -> Simulation:
        """All of it; the findings that are open at the end are in `findings`."""
        self.watch.run(self.begin_unix, self.end_unix)
        for (node, _), row in self.watch.latest.items():
            memory = self.watch.memories.get((node, row.node.gpu_uuid or row.node.device))
            if memory is not None and memory.findings:
                self.findings[row.key] = memory.findings
        return self

    def silent(self, now: float) -> set[str]:
        """Hosts that give nothing at this time."""
        return {f.host for f in self.fleet.faults if f.silent and now >= f.begin_unix}

    def _measure(self, node: str, depth: Depth, now: float) -> list[Row]:
        host = self.hosts[node]
        fault = self.fleet.fault_of(host.host, "", now)
        if fault is not None and fault.silent:
            return []
        shown = self._shown[node][depth]
        return [Row(r, shown.fingerprint(r.device, now)) for r in self._records[node]]

    def _keep(
        self, node: str, depth: Depth, now: float, rows: Sequence[Row], told: Sequence[Event]
    ) -> None:
        day = int((now - self.begin_unix) / DAY)
        if told or self._kept_day.get(node) != day:
            self._kept_day[node] = day
            self.keep(now, node, depth, rows)

    def _tell(self, now: float, told: Event) -> None:
        host = self.hosts[told["node"]].host
        finding = told.get("finding") or {}
        change = told.get("change") or {}
        metric = str(finding.get("metric") or change.get("metric") or "")
        kind = str(told["event"])
        self.events.append({**told, "host": host, "time": now, "simulated": True})
        if kind not in _FOUND or finding.get("severity") == "info":
            return
        fault = self.fleet.fault_of(host, metric, now)
        if fault is not None:
            self._found.setdefault(fault, (now, kind))
        else:
            self.wrong.append(Wrong(host, kind, metric, now, str(told["text"])))

    # -- figures ----------------------------------------------------------------------------------

    def results(self) -> list[Result]:
        """One for each fault that began, in the order in which they did."""
        made = []
        for fault in sorted(self.fleet.faults, key=lambda f: (f.begin_unix, f.host, f.metric)):
            if fault.begin_unix >= self.end_unix:
                continue
            when = self._found.get(fault)
            hours = None if when is None else (when[0] - fault.begin_unix) / HOUR
            made.append(Result(fault, hours, when[1] if when else ""))
        return made

    def as_dict(self) -> dict[str, Any]:
        """Every figure, JSON-ready; the same for the same fleet, policy and time."""
        starts = self.watch.starts
        ill = {fault.host for fault in self.fleet.faults}
        healthy = sum(self.hosts[node].host not in ill for _, node, _ in starts)
        seconds = sum(self.watch.seconds(node, depth) for _, node, depth in starts)
        accused = [w for w in self.wrong if w.host not in ill]
        results = self.results()
        return {
            "schema": 1,
            "simulated": True,
            "nodes": len(self.hosts),
            "devices": sum(len(records) for records in self._records.values()),
            "days": self.days,
            "begin_unix": self.begin_unix,
            "faults": [result.as_dict() for result in results],
            "faults_put_in": len(results),
            "faults_found": sum(result.hours is not None for result in results),
            "false_accusations": [wrong.as_dict() for wrong in self.wrong],
            "false_accusations_of_healthy_hosts": len(accused),
            "probes": len(starts),
            "probes_of_healthy_hosts": healthy,
            "probe_seconds": seconds,
            "probe_seconds_a_host_a_day": seconds / max(1, len(self.hosts)) / self.days,
            "cost_seconds": dict(COST_SECONDS),
            "events": dict(sorted(Counter(e["event"] for e in self.events).items())),
        }


def _records(node: str, host: SimulatedHost) -> list[NodeRecord]:
    gpus = {f"cuda:{gpu['index']}": gpu["uuid"] for gpu in host.hello()["gpus"]}
    cpu = str(host.metrics.get("cpu.model", ""))
    return [
        NodeRecord(
            node,
            host.host,
            device=device,
            device_name=host.gpu or cpu,
            gpu_model=host.gpu,
            cpu_model=cpu,
            gpu_uuid=gpus.get(device, ""),
            simulated=True,
        )
        for device in host.devices
    ]


def _by_depth(host: SimulatedHost) -> Mapping[Depth, SimulatedHost]:
    """The host with only what a probe of each depth reads."""

    def only(names: Sequence[str]) -> SimulatedHost:
        return replace(host, metrics={n: v for n, v in host.metrics.items() if n in names})

    light = [n for n in LIGHT if n in host.metrics]
    if not light:
        light = [n for n in host.metrics if not n.startswith("disk.")]
    return {"light": only(light), "full": only([*light, *FULL])}
