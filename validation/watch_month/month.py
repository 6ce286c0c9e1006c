"""A fleet that falls ill under a fake clock, watched with the real schedule, judge and memory."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.schedule import HOUR, Depth, Entry, Policy
from pichak_coordinator.simulated_watch import SimulatedWatch
from pichak_coordinator.watch_events import Event
from pichak_core.measurement import Fingerprint, Measurement

DAY = 86400.0
#: The stretch in which starts are counted.
STEP = 1800.0
MODELS = {"H100": 4.0, "A100": 2.5, "L40S": 1.8, "L4": 1.0}
COPY, MATMUL, HOST, DISK = (
    "gpu.h2d_pinned_mb_s",
    "gpu.matmul_bf16_tflop_s",
    "host.memory_copy_mb_s",
    "disk.read_mb_s",
)
LIGHT = {COPY: (6000.0, "MB/s"), MATMUL: (200.0, "TFLOP/s"), HOST: (8000.0, "MB/s")}
FULL = {**LIGHT, DISK: (900.0, "MB/s")}
COST: dict[Depth, float] = {"light": 8.0, "full": 25.0}
BUDGET = 1800.0


@dataclass(frozen=True)
class Fault:
    """What is wrong with a node's metric from `begin` on."""

    kind: str
    metric: str
    begin: float

    def factor(self, now: float) -> float:
        """By which its reading is multiplied."""
        if now < self.begin:
            return 1.0
        if self.kind == "drift":
            return 1 - min(0.20, 0.01 * (now - self.begin) / DAY)
        if self.kind == "daily":
            return 0.75 if (now - self.begin) % DAY < 8 * HOUR else 1.0
        return {"copies": 0.85, "matmul": 0.90, "disk": 0.70, "silent": 1.0}[self.kind]


KINDS = (
    ("copies", COPY, 6),
    ("matmul", MATMUL, 6),
    ("disk", DISK, 4),
    ("drift", COPY, 4),
    ("daily", HOST, 4),
    ("silent", "", 2),
)


@dataclass
class Month:
    """One simulated fleet; `run` fills the rest."""

    nodes: int = 500
    days: float = 30.0
    seed: int = 0
    noisy: int = 50
    kinds: Sequence[tuple[str, str, int]] = KINDS
    latest_fault_day: float = 20.0
    entries: dict[str, Entry] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)
    false: list[dict[str, Any]] = field(default_factory=list)
    starts: list[tuple[float, str, Depth]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.policy = Policy(
            every_seconds={"light": 2 * HOUR, "full": DAY},
            longest_seconds={"light": 60.0, "full": 90.0},
            budget_seconds=BUDGET,
            most_at_once=64,
            seed=self.seed,
        )
        self.names = [f"n-{i:04d}" for i in range(self.nodes)]
        chosen = self.draw.sample(self.names, self.noisy + sum(k[2] for k in self.kinds))
        self.noise = dict.fromkeys(self.names, 0.01)
        self.noise |= dict.fromkeys(chosen[: self.noisy], 0.03)
        ill = chosen[self.noisy :]
        for kind, metric, count in self.kinds:
            for _ in range(count):
                begin = self.draw.uniform(3, self.latest_fault_day) * DAY
                self.faults[ill.pop()] = Fault(kind, metric, begin)
        self.own = {
            name: {metric: 1 + 0.01 * self.draw.gauss(0, 1) for metric in FULL}
            for name in self.names
        }
        self.digest = hashlib.sha256()

    def run(self) -> Month:
        """The whole time."""
        watch = SimulatedWatch(self.policy, self.names, self._rows, COST, self._event)
        watch.run(0.0, self.days * DAY)
        self.entries, self.starts = watch.entries, watch.starts
        return self

    def _rows(self, node: str, depth: Depth, now: float) -> list[Row]:
        row = self._measure(node, depth, now)
        return [] if row is None else [row]

    def _event(self, now: float, told: Event) -> None:
        kind = told["event"]
        if kind == "probe_failed":
            self._tell(now, told["node"], kind, "", "fail")
            return
        finding = told.get("finding") or {}
        metric = finding.get("metric") or told["change"]["metric"]
        self._tell(now, told["node"], kind, metric, finding.get("severity", "warn"))

    def _measure(self, node: str, depth: Depth, now: float) -> Row | None:
        fault = self.faults.get(node)
        if fault and fault.kind == "silent" and now >= fault.begin:
            return None
        model = list(MODELS)[int(node[2:]) % len(MODELS)]
        found = Fingerprint()
        sigma = self.noise[node]
        for metric, (base, unit) in (FULL if depth == "full" else LIGHT).items():
            true = base * self.own[node][metric]
            if metric in (COPY, MATMUL):
                true *= MODELS[model]
            if fault and fault.metric == metric:
                true *= fault.factor(now)
            value = true * math.exp(sigma * self.draw.gauss(0, 1))
            # The spread that nine samples with the probe's own noise would show, thrice a median's.
            spread = value * max(0.01, 2.4 * sigma if sigma > 0.01 else 0.0)
            found.add(Measurement(metric, value, unit, "simulated", samples=9, spread=spread))
        return Row(
            NodeRecord(node, node, device="cuda:0", gpu_model=model, cpu_model="EPYC"), found
        )

    def _tell(self, now: float, node: str, kind: str, metric: str, severity: str) -> None:
        self.events[kind] += 1
        self.digest.update(json.dumps([now, node, kind, metric, severity]).encode())
        fault = self.faults.get(node)
        is_it = fault is not None and now >= fault.begin and metric == fault.metric
        if is_it and kind in ("confirmed", "probe_failed"):
            self.found.setdefault(node, now)
        elif not is_it and kind in ("confirmed", "changed", "probe_failed") and severity != "info":
            # A daily fault is well again for sixteen hours of the day: no false alarm either way.
            self.false.append({"node": node, "kind": kind, "metric": metric, "day": now / DAY})

    # -- figures ----------------------------------------------------------------------------------

    def hours_to_find(self, kind: str) -> list[float]:
        """Hours from each fault's beginning until it was found; infinite if never."""
        return sorted(
            (self.found.get(node, math.inf) - fault.begin) / HOUR
            for node, fault in self.faults.items()
            if fault.kind == kind
        )

    def healthy_probes(self) -> int:
        """Probes of nodes that never fall ill."""
        return sum(node not in self.faults for _, node, _ in self.starts)

    def fullest_hour(self) -> float:
        """The most probe-seconds of any hour, which begins with a start."""
        fullest, first, held = 0.0, 0, 0.0
        for at, _, depth in self.starts:
            held += COST[depth]
            while self.starts[first][0] <= at - HOUR:
                held -= COST[self.starts[first][2]]
                first += 1
            fullest = max(fullest, held)
        return fullest

    def most_in_a_step(self) -> int:
        """The most probes that began in any half-hour after the first day."""
        later = (int(at // STEP) for at, _, _ in self.starts if at >= DAY)
        return max(Counter(later).values(), default=0)

    def seconds_on_day(self, day: float, *, quiet_only: bool = False) -> float:
        """Probe-seconds of one day, of all nodes or of those that are neither ill nor noisy."""
        return sum(
            COST[depth]
            for at, node, depth in self.starts
            if day <= at / DAY < day + 1
            and not (quiet_only and (node in self.faults or self.noise[node] > 0.01))
        )

    def paces(self, *, noisy: bool) -> list[float]:
        """The pace of every node that is not ill, of the noisy ones or of the others, in order."""
        return sorted(
            entry.pace
            for node, entry in self.entries.items()
            if node not in self.faults and (self.noise[node] > 0.01) == noisy
        )
