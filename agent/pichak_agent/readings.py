"""One reading of a node: its host and its GPUs at one moment. What was not read is None or absent,
never zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pichak_core.devices import ProcessMemory
from pichak_core.devices.nvml_codes import DRIVER_MODELS
from pichak_core.plan import Scalar


@dataclass(frozen=True, slots=True)
class HostReading:
    """The machine. Figures in ``_seconds`` and ``_us`` count since boot; `memory_available_bytes`
    is what this process can have (the least over its control groups and the machine);
    `steady_unix` is the wall clock minus a clock that nobody sets."""

    cpu_busy_seconds: float | None = None
    cpu_steal_seconds: float | None = None
    cpu_total_seconds: float | None = None
    cpu_pressure_us: int | None = None
    memory_pressure_us: int | None = None
    memory_full_pressure_us: int | None = None
    io_pressure_us: int | None = None
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    oom_kills: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    steady_unix: float | None = None

    def as_dict(self) -> dict[str, Scalar]:
        """What was read."""
        pairs = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in pairs if value is not None}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU: `live` is what moves, `facts` everything of its last full reading (shared by many
    readings). `lost` says why it could not be read."""

    index: int
    uuid: str = ""
    live: Mapping[str, Scalar] = field(default_factory=dict)
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    lost: str = ""

    def get(self, name: str) -> Scalar | None:
        value = self.live.get(name)
        return self.facts.get(name) if value is None else value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        return None if value is None or isinstance(value, (str, bool)) else float(value)

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        return value if isinstance(value, bool) else None

    @property
    def name(self) -> str:
        """How a sentence names it."""
        return f"GPU {self.index} ({self.facts.get('name', 'unnamed')})"

    @property
    def pages(self) -> bool:
        """Whether its driver says that it backs memory with the system's instead of refusing it."""
        model = self.number("driver_model")
        return model is not None and DRIVER_MODELS.get(int(model)) == "WDDM"

    @property
    def key(self) -> str:
        """What makes it the same GPU at another time."""
        return self.uuid or f"gpu{self.index}"

    def as_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = {"index": self.index, "uuid": self.uuid, "live": dict(self.live)}
        return {**made, "lost": self.lost} if self.lost else made


class ProcessId(NamedTuple):
    """One process: `started` differs when its number is given to another one."""

    pid: int
    started: str


#: Who read the memory counters of a process: it did itself, in one moment with what its allocator
#: holds; or the agent did, between two tells of it.
TOLD, COUNTED = "read by the process itself", "read by the agent"


@dataclass(frozen=True, slots=True)
class OwnUse:
    """What a job of this agent uses of one GPU, or a training that the user made known. `uuid` is
    the GPU's, "" where the job may use any of them.

    `processes` on the GPU, `held_bytes` of it (allocator and context), `allocated_bytes` and
    `reserved_bytes` of its allocator are None where the job does not say; so are `held_bytes` and
    `memory`, the system's own counters, everywhere but on Windows. `memory_source` says who read
    those (`TOLD` or `COUNTED`), "" where nobody did. `seconds_per_step` is the last that it told.
    `process` tells, at `told_steady`; None where that is not known, and no part of what is equal.
    """

    uuid: str = ""
    job: str = ""
    processes: int | None = None
    held_bytes: int | None = None
    allocated_bytes: int | None = None
    seconds_per_step: float | None = None
    memory: ProcessMemory | None = None
    reserved_bytes: int | None = None
    memory_source: str = ""
    process: ProcessId | None = field(default=None, compare=False)
    told_steady: float | None = field(default=None, compare=False)

    def memory_as_dict(self) -> dict[str, Any]:
        """Its counters, JSON-ready; empty where nobody read them."""
        if self.memory is None:
            return {}
        made: dict[str, Any] = {"job": self.job, "uuid": self.uuid}
        if self.process is not None:
            made["pid"] = self.process.pid
        made |= {
            "dedicated_bytes": self.memory.dedicated,
            "shared_bytes": self.memory.shared,
            "source": self.memory_source,
        }
        reserved = self.memory.reserved
        return made if reserved is None else {**made, "reserved_bytes": reserved}


@dataclass(frozen=True, slots=True)
class CardUse:
    """What all programs together use of one card by the system's own counters: `dedicated_bytes` on
    it, `shared_bytes` of system memory in its place; None where they do not say. `uuid` is ""
    where NVML has not named the card at `pci_address`."""

    pci_address: str
    uuid: str = ""
    dedicated_bytes: int | None = None
    shared_bytes: int | None = None

    def as_dict(self) -> dict[str, Scalar]:
        """JSON-ready; what was not read is left out."""
        pairs = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in pairs if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Reading:
    """A node at `at_unix`; `steady_seconds` is the same moment by a clock that nobody sets.

    `gpus` is empty while NVML has not answered; `nvml_gap` says why it does not (with the reason's
    name in `nvml_reason`), and `fresh_gap` that a process which starts now could not open it.
    `full`: the GPUs' facts were read for this reading. `own` are this agent's jobs. `cards` is what
    Windows' counters said of each card since the last reading, `counters_gap` why they say nothing;
    elsewhere both are empty.
    """

    at_unix: float
    steady_seconds: float
    host: HostReading = field(default_factory=HostReading)
    gpus: tuple[GpuReading, ...] = ()
    nvml_gap: str = ""
    nvml_reason: str = ""
    fresh_gap: str = ""
    full: bool = False
    own: tuple[OwnUse, ...] = ()
    cards: tuple[CardUse, ...] = ()
    counters_gap: str = ""

    def own_on(self, gpu: GpuReading) -> list[OwnUse]:
        """The jobs of this agent that use, or may use, the GPU. One whose GPU is not among those
        that NVML lists (a part of a card, a virtual one) may use any."""
        listed = {each.uuid for each in self.gpus}
        # While NVML does not answer, no list says that a job's GPU is none of it.
        known = listed or {use.uuid for use in self.own}
        return [use for use in self.own if use.uuid in ("", gpu.uuid) or use.uuid not in known]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; what was not read is left out."""
        made: dict[str, Any] = {
            "at_unix": round(self.at_unix, 3),
            "host": self.host.as_dict(),
            "gpus": [gpu.as_dict() for gpu in self.gpus],
            "own_jobs": len({use.job for use in self.own}),
        }
        if self.cards:
            made["cards"] = [card.as_dict() for card in self.cards]
        memory = [told for use in self.own if (told := use.memory_as_dict())]
        if memory:
            made["own_memory"] = memory
        for name in ("nvml_gap", "fresh_gap", "counters_gap"):
            if getattr(self, name):
                made[name] = getattr(self, name)
        return made
