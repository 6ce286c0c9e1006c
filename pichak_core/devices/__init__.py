"""What the platform says. The only folder that differs by platform."""

from __future__ import annotations

import sys as _sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pichak_core.devices.windows_child import CounterSession
    from pichak_core.measurement import Unmeasured


@dataclass(frozen=True)
class Capacity:
    """How many bytes a process can have on a device, and the sentence that says how it is known."""

    bytes: int
    source: str


@dataclass
class Peak:
    """Filled in when the `watch()` block ends. `allocated` and `reserved` are bytes at their peak;
    they are equal where the backend has no caching allocator. `reserved` is what the device really
    gives up, including the context outside the allocator where that is known; `held` is what was
    allocated when the block began."""

    allocated: int = 0
    reserved: int = 0
    held: int = 0


@dataclass(frozen=True)
class ProcessMemory:
    """What the system's own counters say a process uses of a GPU, in bytes: on the card
    (`dedicated`), and in system memory that stands in for the card (`shared`); and what the
    allocator had `reserved` at that moment, None where the process does not tell.
    `card_dedicated` and `card_shared` are all programs' together, None where the system does not
    say."""

    dedicated: int
    shared: int
    reserved: int | None
    card_dedicated: int | None = None
    card_shared: int | None = None


@dataclass(frozen=True)
class GpuMemoryUse:
    """The system's counters of one process on one card and of the whole card, in bytes; see
    `ProcessMemory`."""

    dedicated: int
    shared: int
    card_dedicated: int | None = None
    card_shared: int | None = None


class Backend(Protocol):
    """One training device (``cuda`` or ``cpu``) behind what a ramp needs to know of it.

    `unified`: the capacity is the system's own memory, so that allocating until it is refused can
    take the host down. `may_page`: an allocation past the capacity may
    be backed by slower memory without an error. `watch_slows`: `watch()` slows the steps it
    counts, so that they say nothing about speed. `spill_unknown`: why `process_memory()` last gave
    nothing, "" where it gave something or nobody asked.
    """

    device: str
    kind: str
    unified: bool
    may_page: bool
    watch_slows: bool
    spill_unknown: str

    def describe(self) -> str:
        """A person's name for the device ("NVIDIA L4, 23,034 MiB" / the CPU's model)."""

    def capacity(self) -> Capacity:
        """What this process can have now: free + already held, cut by a cap."""

    def set_cap(self, cap_bytes: int | None) -> None:
        """Cap what this process may allocate; past it `torch.OutOfMemoryError` is raised."""

    def free_bytes(self) -> int | None:
        """What the device could still give now; None when it cannot say."""

    def host_free_bytes(self) -> int | None:
        """The host memory that this process can still have; None when that is the device's own
        memory or cannot be read."""

    def process_memory(self) -> ProcessMemory | None:
        """The system's counters for this process; None where there are none or they are not
        readable (never zero for "unknown")."""

    def peak_source(self) -> str:
        """What a peak counts, in a few words."""

    def watch(self) -> AbstractContextManager[Peak]:
        """Count memory over a block: the peak is in the yielded object when the block ends."""

    def synchronize(self) -> None:
        """Wait for queued work, so that a wall clock means something."""

    def release(self) -> None:
        """Give back what nothing references: collector first, then the allocator's cache."""


def gpu_memory_reader(
    pci_bus_id: Callable[[], str],
) -> Callable[[], GpuMemoryUse | Unmeasured] | None:
    """Reads this process's GPU memory from the system's own counters; None where the system has
    none (only Windows itself has them: WSL2 spills too, and shows no counters inside).

    `pci_bus_id` gives NVML's address of the card, "" when unknown; it is asked once, at the first
    reading.
    """
    if _sys.platform != "win32":
        return None
    from pichak_core.devices.windows import gpu_memory

    address: list[str] = []

    def read() -> GpuMemoryUse | Unmeasured:
        if not address:
            address.append(pci_bus_id())
        return gpu_memory(address[0])

    return read


def gpu_counter_session() -> Callable[[], CounterSession] | None:
    """Starts the process that reads the system's counters of all cards and of any process; None
    where the system has none."""
    if _sys.platform != "win32":
        return None
    from pichak_core.devices.windows_child import CounterSession

    return CounterSession
