"""What the platform says. The only folder that differs by platform."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


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
    """What the system's own counters say this process uses of a GPU, in bytes: on the card
    (`dedicated`), and in system memory that stands in for the card (`shared`); and what the
    allocator had `reserved` at that moment."""

    dedicated: int
    shared: int
    reserved: int


class Backend(Protocol):
    """One training device (``cuda`` or ``cpu``) behind what a ramp needs to know of it.

    `unified`: the capacity is the system's own memory, so that allocating until it is refused can
    take the host down. `may_page`: an allocation past the capacity may
    be backed by slower memory without an error. `watch_slows`: `watch()` slows the steps it
    counts, so that they say nothing about speed.
    """

    device: str
    kind: str
    unified: bool
    may_page: bool
    watch_slows: bool

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
