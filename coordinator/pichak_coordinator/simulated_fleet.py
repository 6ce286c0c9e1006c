"""A fleet that does not exist: hosts of several kinds drawn from a seed, and faults put in. Pure.

The figures are round ones in the range of public reports of such parts, for trying the tools on;
they are no statement about any product.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pichak_core.plan import Scalar
from pichak_core.simulated_host import Fault, SimulatedHost

HOUR = 3600.0
DAY = 24 * HOUR
#: Machines of one kind differ by so much (one relative standard deviation), and so many of them
#: are noisier than the rest, by this factor.
APART = 0.01
NOISY_SHARE = 0.1
NOISIER = 3.0

COPY = "gpu.h2d_pinned_mb_s"
MATMUL = "gpu.matmul_bf16_tflop_s"
HOST = "host.memory_copy_mb_s"
DISK = "disk.read_mb_s"
CPU = "cpu.all_core_deflate_mb_s"


@dataclass(frozen=True)
class Kind:
    """One kind of machine: `share` is how often it is drawn, `numbers` differ from machine to
    machine, `texts` do not; `training` as in a simulated host's file."""

    name: str
    share: float
    gpu: str
    numbers: Mapping[str, float]
    texts: Mapping[str, Scalar]
    training: Mapping[str, float]


def _gpu_kind(
    name: str,
    share: float,
    gpu: str,
    link: str,
    copies: tuple[float, float, float, float],
    figures: tuple[float, float, float, float, float],
    training: tuple[float, float, float, float, float],
) -> Kind:
    """`copies`: h2d and d2h pinned, h2d and d2h pageable; `figures`: launch µs, bf16 TFLOP/s,
    memory copy MB/s, disk MB/s, its best depth; `training`: capacity, base and row in MiB, seconds
    of a step and of a row."""
    launch, matmul, memory, disk, depth = figures
    numbers = {
        COPY: copies[0],
        "gpu.d2h_pinned_mb_s": copies[1],
        "gpu.h2d_pageable_mb_s": copies[2],
        "gpu.d2h_pageable_mb_s": copies[3],
        "gpu.kernel_launch_us": launch,
        MATMUL: matmul,
        "gpu.memory_copy_mb_s": memory,
        HOST: 18000.0,
        CPU: 1500.0,
        DISK: disk,
        "disk.read_depth1_mb_s": disk / 3,
        "disk.read_p99_ms": 3.2,
    }
    texts: dict[str, Scalar] = {
        "cpu.model": "AMD EPYC 9354 32-Core Processor",
        "cpu.usable_cores": 32,
        "disk.read_best_depth": int(depth),
        "disk.filesystem": "ext4",
        "gpu.link_under_load": f"{link} under load",
        "gpu.throttle_reasons": "none",
        "gpu.driver_model": "Linux",
        "host.kind": "vm",
        "software.driver": "580.95.05",
    }
    keys = ("capacity_mib", "base_mib", "row_mib", "step_seconds", "row_seconds")
    return Kind(name, share, gpu, numbers, texts, dict(zip(keys, training, strict=True)))


KINDS: tuple[Kind, ...] = (
    _gpu_kind(
        *("h100", 0.35, "NVIDIA H100 80GB HBM3", "PCIe 5.0 x16"),
        (52000.0, 50000.0, 21000.0, 19000.0),
        (3.4, 640.0, 1350000.0, 5600.0, 16),
        (80000, 3600, 1150, 0.018, 0.0031),
    ),
    _gpu_kind(
        *("a100", 0.3, "NVIDIA A100-SXM4-40GB", "PCIe 4.0 x16"),
        (25000.0, 24300.0, 12000.0, 10500.0),
        (4.1, 255.0, 720000.0, 3100.0, 8),
        (40300, 3600, 1150, 0.026, 0.0072),
    ),
    _gpu_kind(
        *("rtx", 0.2, "NVIDIA GeForce RTX 4090", "PCIe 4.0 x8"),
        (12600.0, 13100.0, 9000.0, 8700.0),
        (5.2, 165.0, 460000.0, 6400.0, 4),
        (24000, 3600, 1150, 0.03, 0.0095),
    ),
    Kind(
        "cpu",
        0.15,
        "",
        {
            HOST: 16500.0,
            CPU: 720.0,
            DISK: 900.0,
            "disk.read_depth1_mb_s": 410.0,
            "disk.read_p99_ms": 11.0,
            "cpu.matmul_fp32_gflop_s": 900.0,
            "cpu.op_dispatch_us": 1.1,
        },
        {
            "cpu.model": "Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz",
            "cpu.usable_cores": 16,
            "disk.read_best_depth": 3,
            "disk.filesystem": "xfs",
            "host.kind": "vm",
        },
        {
            "capacity_mib": 31000,
            "base_mib": 1400,
            "row_mib": 620,
            "step_seconds": 0.3,
            "row_seconds": 0.21,
        },
    ),
)


@dataclass(frozen=True)
class PutIn:
    """A fault that was put in: from `begin_unix` on `metric` of `host` is not what it was; a
    `silent` host gives nothing any more."""

    host: str
    kind: str
    metric: str
    begin_unix: float
    silent: bool = False


@dataclass
class SimulatedFleet:
    """The hosts, and what is wrong with them."""

    hosts: list[SimulatedHost]
    faults: list[PutIn] = field(default_factory=list)

    def fault_of(self, host: str, metric: str, now: float) -> PutIn | None:
        """The fault that a host has in this metric at this time; "" asks for silence."""
        return next(
            (
                fault
                for fault in self.faults
                if fault.host == host and fault.metric == metric and now >= fault.begin_unix
            ),
            None,
        )


def drawn_fleet(
    nodes: int,
    *,
    seed: int = 0,
    noise: float = 0.01,
    fault_rate: float = 0.1,
    begin_unix: float = 0.0,
    days: float = 7.0,
) -> SimulatedFleet:
    """`nodes` hosts, of which the share `fault_rate` falls ill within the time, not in its first
    tenth nor its last quarter, so that there is a before and an after."""
    draw = random.Random(seed)  # noqa: S311 - a simulation is repeated, not kept secret
    width = max(2, len(str(nodes)))
    counts: dict[str, int] = {}
    hosts: list[SimulatedHost] = []
    for _ in range(nodes):
        kind = draw.choices(KINDS, [k.share for k in KINDS])[0]
        counts[kind.name] = counts.get(kind.name, 0) + 1
        louder = NOISIER if draw.random() < NOISY_SHARE else 1.0
        numbers = {
            name: value * max(0.5, 1 + APART * draw.gauss(0, 1))
            for name, value in kind.numbers.items()
        }
        hosts.append(
            SimulatedHost(
                f"{kind.name}-{counts[kind.name]:0{width}d}",
                kind.gpu,
                1 if kind.gpu else 0,
                noise * louder,
                seed,
                {**numbers, **kind.texts},
                {**_plain_training(), **kind.training},
            )
        )
    ill = draw.sample(range(nodes), round(nodes * fault_rate))
    faults: list[PutIn] = []
    for number in sorted(ill):
        host = hosts[number]
        kinds = [k for k in FAULTS if k.metric in host.metrics or not k.metric]
        kind_of_fault = draw.choice(kinds)
        begin = begin_unix + DAY * days * draw.uniform(0.1, 0.75)
        end = begin_unix + DAY * days
        faults.append(
            PutIn(
                host.host, kind_of_fault.name, kind_of_fault.metric, begin, not kind_of_fault.metric
            )
        )
        steps = tuple(kind_of_fault.steps(begin, end))
        hosts[number] = replace(host, faults=(*host.faults, *steps))
    return SimulatedFleet(hosts, faults)


def given_fleet(hosts: Sequence[SimulatedHost]) -> SimulatedFleet:
    """A fleet of a user's own hosts, each with the faults of its file."""
    faults = [
        PutIn(host.host, "as in its file", fault.metric, fault.starts_unix)
        for host in hosts
        for fault in host.faults
        if not fault.metric.startswith("training.")
    ]
    return SimulatedFleet(list(hosts), faults)


@dataclass(frozen=True)
class FaultKind:
    """One way to fall ill; "" as the metric is a host that gives nothing any more."""

    name: str
    metric: str
    factor: float = 1.0
    each_day: bool = False
    hours_a_day: float = 24.0

    def steps(self, begin: float, end: float) -> Iterable[Fault]:
        """The fault as a simulated host has it: what its reading is multiplied by, from when on."""
        if not self.metric:
            return
        if self.each_day:
            for day in range(20):
                yield Fault(self.metric, begin + day * DAY, self.factor)
        elif self.hours_a_day < 24:
            at = begin
            while at < end:
                yield Fault(self.metric, at, self.factor)
                yield Fault(self.metric, at + self.hours_a_day * HOUR, 1 / self.factor)
                at += DAY
        else:
            yield Fault(self.metric, begin, self.factor)


FAULTS = (
    FaultKind("copies 15 % slower", COPY, 0.85),
    FaultKind("matrix products 10 % slower", MATMUL, 0.90),
    FaultKind("disk 30 % slower", DISK, 0.70),
    FaultKind("copies slower by 1 % a day", COPY, 0.99, each_day=True),
    FaultKind("memory copy 25 % slower, 8 h a day", HOST, 0.75, hours_a_day=8.0),
    FaultKind("gives nothing any more", ""),
)


def _plain_training() -> dict[str, float]:
    return {"seq_len": 1024.0, "scored_tokens_per_row": 400.0}
