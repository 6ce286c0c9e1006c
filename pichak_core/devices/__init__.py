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
    gives up, including the context outside the allocator where that is known."""

    allocated: int = 0
    reserved: int = 0


class Backend(Protocol):
    """One training device (``cuda`` or ``cpu``) behind what a ramp needs to know of it."""

    device: str
    kind: str
    unified: bool

    def describe(self) -> str:
        """A person's name for the device ("NVIDIA L4, 23,034 MiB" / the CPU's model)."""

    def capacity(self) -> Capacity:
        """What this process can have now: free + already held, cut by a cap."""

    def set_cap(self, cap_bytes: int | None) -> None:
        """Cap what this process may allocate; past it `torch.OutOfMemoryError` is raised."""

    def watch(self) -> AbstractContextManager[Peak]:
        """Count memory over a block: the peak is in the yielded object when the block ends."""

    def synchronize(self) -> None:
        """Wait for queued work, so that a wall clock means something."""

    def release(self) -> None:
        """Give back what nothing references: collector first, then the allocator's cache."""
