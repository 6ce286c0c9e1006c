"""A node that does not exist, reading by reading: seeded, healthy, and with faults put into it.

Healthy is not quiet: clocks, temperatures and powers move, a full card shows its power cap, an idle
one trains its link down, jobs of this agent begin and end, checkpoints come and go, hypervisors
steal for a moment, NVML is late or answers nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pichak_agent.faults import Fault, gpu_fault, host_fault, own_fault
from pichak_agent.readings import GpuReading, HostReading, OwnUse, Reading
from pichak_core.devices import ProcessMemory
from pichak_core.devices.nvml_codes import IDLE, SW_POWER_CAP, SW_THERMAL
from pichak_core.plan import Scalar
from pichak_core.testing import GIB, MIB

__all__ = [
    "START_UNIX",
    "Fault",
    "SimulatedCard",
    "SimulatedNode",
    "gpu_fault",
    "host_fault",
    "own_fault",
]

START_UNIX = 1.8e9


@dataclass(frozen=True)
class SimulatedCard:
    """A model of card. `says_use` and `says_link`: whether NVML tells its utilisation and link."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_bytes: int = 80 * GIB
    reserved_bytes: int | None = 560 * MIB
    limit_watts: float = 700.0
    idle_watts: float = 70.0
    clock_mhz: int = 1980
    idle_clock_mhz: int = 345
    generation: int = 5
    width: int = 16
    says_use: bool = True
    says_link: bool = True
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    def facts(self, index: int, uuid: str) -> dict[str, Scalar]:
        """Everything that does not move."""
        link = {"pcie_generation_max": self.generation, "pcie_width_max": self.width}
        return {
            "uuid": uuid,
            "name": self.name,
            "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
            "sm_clock_max_mhz": self.clock_mhz,
            "power_limit_watts": self.limit_watts,
            "power_limit_default_watts": self.limit_watts,
            "ecc_corrected": 3,
            "ecc_uncorrected": 0,
            "remapped_rows_corrected": 0,
            "remapped_rows_uncorrected": 0,
            "remapped_rows_pending": False,
            "remapped_rows_failed": False,
            "compute_processes": 0,
            "compute_processes_dropped": 0,
            **(link if self.says_link else {}),
            **self.extra,
        }


@dataclass(frozen=True)
class SimulatedNode:
    """`jobs`: how busy this agent is, as the share of the time in which one of its jobs runs on
    every GPU at once. `interval_seconds` is that of the readings. `tells`: whether its jobs say
    what they hold. `windows`: WDDM with the system's counters, and pinned memory."""

    cards: Sequence[SimulatedCard] = (SimulatedCard(),)
    jobs: float = 0.5
    interval_seconds: int = 1
    tells: bool = True
    windows: bool = False
    memory_bytes: int = 256 * GIB
    disk_bytes: int = 1000 * GIB
    cores: int = 32
    seed: int = 0

    def trace(self, seconds: float, faults: Sequence[Fault] = ()) -> Iterator[Reading]:
        """Readings from `START_UNIX` on."""
        course = _Course(self, random.Random(self.seed))  # noqa: S311 - a test's noise
        for second in range(int(seconds) + 1):
            course.second(float(second))
            if second % self.interval_seconds:
                continue
            reading = course.reading(float(second))
            for fault in faults:
                reading = fault(second, reading)
            yield reading


class _Course:
    """What happens on the node, second by second."""

    def __init__(self, node: SimulatedNode, rng: random.Random) -> None:
        self.node, self.rng = node, rng
        self.uuids = [f"GPU-simulated-{node.seed}-{i}" for i in range(len(node.cards))]
        self.facts = [c.facts(i, u) for i, (c, u) in enumerate(zip(node.cards, self.uuids))]  # noqa: B905
        self.temperature = [35.0] * len(node.cards)
        self.thermal = [0.0] * len(node.cards)
        self.power_capped = [900.0] * len(node.cards)
        self.cpu_total = self.cpu_steal = self.stalled_us = 0.0
        self.job, self.job_until, self.job_began = "", 0.0, 0.0
        self.jobs = 0
        self.full_at = -100.0
        self.spike_until = 0.0
        self.blip_until = [0.0] * len(node.cards)
        self.free_bytes = 0.6 * node.disk_bytes
        self.checkpoints: list[float] = []
        self.offset = 0.0
        self.held_share = 0.9
        self.step = 0.5
        self.next_job = rng.uniform(30, 600)

    def second(self, at: float) -> None:
        """One second passes."""
        node, rng = self.node, self.rng
        self._jobs(at)
        self._disk()
        busy = self._busy(at)
        for index in range(len(node.cards)):
            self.temperature[index] += ((74.0 if busy else 33.0) - self.temperature[index]) / 60
            blip = at < self.blip_until[index]
            if busy and not blip and rng.random() < 1 / 1800:
                self.blip_until[index] = at + rng.uniform(1, 8)  # heat for a moment
            self.thermal[index] += blip
            self.power_capped[index] += 0.9 * busy
        if rng.random() < 1 / 1200:
            self.spike_until = at + rng.uniform(2, 15)
        steal = 0.2 if at < self.spike_until else max(0.0, rng.gauss(0.004, 0.004))
        self.cpu_total += node.cores
        self.cpu_steal += node.cores * steal
        self.stalled_us += 1e6 * max(0.0, rng.gauss(0.002, 0.01))
        self.offset += rng.gauss(0, 20e-6)

    def reading(self, at: float) -> Reading:
        """The node as it is read now."""
        node, rng = self.node, self.rng
        full = at - self.full_at >= 30.0
        gpus: tuple[GpuReading, ...] = ()
        if full or rng.random() > 0.03:  # now and then NVML is late
            gpus = tuple(self._gpu(i, at, full) for i in range(len(node.cards)))
            self.full_at = at if full else self.full_at
        return Reading(
            START_UNIX + at + self.offset,
            at,
            self._host(),
            gpus,
            full=full,
            own=tuple(self._own()),
        )

    def _jobs(self, at: float) -> None:
        rng, node = self.rng, self.node
        if self.job and at >= self.job_until:
            self.job = ""
            share = max(0.02, min(0.98, node.jobs))
            self.next_job = at + rng.expovariate(share / (1 - share) / 900)
        elif not self.job and node.jobs and at >= self.next_job:
            self.jobs += 1
            self.job = f"job-{self.jobs}"
            self.job_began, self.job_until = at, at + rng.uniform(60, 3600)
            self.held_share = rng.uniform(0.1, 0.95)
            self.step = rng.uniform(0.05, 3.0)

    def _busy(self, at: float) -> bool:
        """A job works, but for its start and the pauses in which it evaluates and saves."""
        return bool(self.job) and at - self.job_began > 8 and (at - self.job_began) % 600 < 570

    def _gpu(self, index: int, at: float, full: bool) -> GpuReading:
        card, rng = self.node.cards[index], self.rng
        busy = self._busy(at)
        blip = at < self.blip_until[index]
        bits = SW_POWER_CAP | (SW_THERMAL if blip else 0) if busy else IDLE
        draw = (
            rng.gauss(0.97, 0.015) * card.limit_watts
            if busy
            else rng.gauss(1, 0.03) * card.idle_watts
        )
        clock = card.clock_mhz - rng.randrange(0, 240, 15) if busy else card.idle_clock_mhz
        # An idle card wakes for a moment: whoever asks it lifts its state.
        awake = busy or rng.random() < 0.05
        live: dict[str, Scalar] = {
            "throttle_bitmask": bits,
            "throttled_power_seconds": self.power_capped[index],
            "throttled_thermal_seconds": self.thermal[index],
            "sm_clock_mhz": clock if not awake or busy else card.clock_mhz,
            "power_watts": round(draw, 2),
            "temperature_celsius": round(self.temperature[index] + rng.gauss(0, 1)),
            "memory_total_bytes": card.total_bytes,
            "memory_used_bytes": self._used(index),
        }
        if card.reserved_bytes is not None:
            live["memory_reserved_bytes"] = card.reserved_bytes
        else:
            live["memory_used_bytes"] = self._used(index) + 600 * MIB
        if card.says_link:
            live["pcie_generation"] = card.generation if awake else 1
            live["pcie_width"] = card.width
        if card.says_use:
            live["utilisation_percent"] = rng.randint(82, 100) if busy else 0
        if full:
            facts = dict(self.facts[index])
            if rng.random() < 0.002:
                facts["ecc_corrected"] = int(facts["ecc_corrected"]) + 1
            facts["compute_processes"] = 1 if self.job else 0
            self.facts[index] = facts
        return GpuReading(index, self.uuids[index], live, self.facts[index])

    def _used(self, index: int) -> int:
        return self._held(index) + self.rng.randrange(4, 40) * MIB

    def _held(self, index: int) -> int:
        if not self.job:
            return 0
        return int(self.held_share * self.node.cards[index].total_bytes) - 2 * GIB

    def _own(self) -> Iterator[OwnUse]:
        if not self.job:
            return
        for index, uuid in enumerate(self.uuids):
            if not self.node.tells:
                yield OwnUse(uuid, self.job)
                continue
            held = self._held(index)
            # Now and then a step takes much longer: it evaluates, saves, or waits for its data.
            slow = 6.0 if self.rng.random() < 0.02 else 1.0
            step = self.step * slow * max(0.5, self.rng.gauss(1, 0.03))
            memory = None
            if self.node.windows:
                pinned = int(self.rng.uniform(0.5, 4) * GIB)
                shared = pinned + 80 * MIB
                memory = ProcessMemory(held + 76 * MIB, shared, held, held + GIB, shared + 90 * MIB)
            yield OwnUse(uuid, self.job, 1, held, held, step, memory)

    def _host(self) -> HostReading:
        node, rng = self.node, self.rng
        used = rng.uniform(0.3, 0.6 if self.job else 0.35)
        return HostReading(
            cpu_busy_seconds=0.4 * self.cpu_total,
            cpu_steal_seconds=round(self.cpu_steal, 2),
            cpu_total_seconds=self.cpu_total,
            memory_pressure_us=int(3 * self.stalled_us),
            memory_full_pressure_us=int(self.stalled_us),
            memory_available_bytes=int((1 - used) * node.memory_bytes),
            memory_total_bytes=node.memory_bytes,
            swap_used_bytes=0,
            oom_kills=2,
            disk_free_bytes=int(self.free_bytes),
            disk_total_bytes=node.disk_bytes,
            steady_unix=START_UNIX + self.offset + rng.gauss(0, 1e-4),
        )

    def _disk(self) -> None:
        """Logs grow; a checkpoint is written at times, and the oldest of three goes."""
        self.free_bytes -= 20e3
        if self.job and self.rng.random() < 1 / 600:
            size = self.rng.uniform(1, 20) * GIB
            self.checkpoints.append(size)
            self.free_bytes -= size
            if len(self.checkpoints) > 3:
                self.free_bytes += self.checkpoints.pop(0)
