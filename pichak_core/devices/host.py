"""The machine under this process, whatever its system: one interface, chosen once.

Every call returns a value or raises an `OSError` (missing, not permitted) or `NotImplementedError`
(this system has no such thing), so that whoever asks can name the gap.
"""

from __future__ import annotations

import sys as _sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IS_LINUX = _sys.platform.startswith("linux")


@dataclass(frozen=True)
class Identity:
    """Who a machine is: a hash of something that outlives reboots, and what it was made from."""

    hashed: str
    source: str


@dataclass(frozen=True)
class HostKind:
    """`kind` is ``bare metal``, ``vm``, ``container`` or ``wsl2``; `hypervisor` its name, ``none``
    or ``unknown``. `evidence` holds what was seen, a phrase each."""

    kind: str
    hypervisor: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all CPUs together since boot, as the system counts them."""

    busy: float
    steal: float
    total: float


@dataclass(frozen=True)
class Pressure:
    """Microseconds since boot in which some / all tasks waited for a resource."""

    some_us: int
    full_us: int | None


@dataclass(frozen=True)
class SharedMemory:
    """Where processes share memory (``/dev/shm``) and its size."""

    path: str
    total_bytes: int
    free_bytes: int


class Host(Protocol):
    """What the platform says of this machine."""

    def operating_system(self) -> str:
        """The distribution and version, as a person would say it."""

    def kernel(self) -> str:
        """The kernel's release."""

    def identity(self) -> Identity:
        """A stable, hashed id of the machine."""

    def kind(self) -> HostKind:
        """Bare metal, virtual machine, container or WSL2."""

    def cpu_model(self) -> str:
        """The CPU's name."""

    def usable_cores(self) -> tuple[int, str]:
        """(cores this process can keep busy, which bound won)."""

    def quota_cores(self) -> tuple[float, str] | None:
        """(CPU time a second in cores, where the limit is); None without a limit."""

    def memory_total_bytes(self) -> int:
        """Memory of the machine."""

    def usable_memory_bytes(self) -> tuple[int, str]:
        """(bytes this process can have now, which bound won)."""

    def shared_memory(self) -> SharedMemory:
        """Size of the memory that processes share."""

    def last_level_cache_bytes(self) -> int:
        """The CPUs' largest caches, all of them together."""

    def cpu_times(self) -> CpuTimes:
        """CPU seconds since boot."""

    def pressure(self, resource: str) -> Pressure:
        """Stall times of ``cpu``, ``memory`` or ``io``."""

    def load_average(self) -> float:
        """Runnable tasks, averaged over a minute."""

    def cpu_frequency_mhz(self) -> float:
        """Mean frequency now of the CPUs this process may run on."""

    def niceness(self) -> int:
        """How far this process gives way to others when CPUs are short: 0 is usual, 19 most."""

    def open_file_limit(self) -> int:
        """How many files and sockets this process may have open."""

    def gpu_numa_node(self, pci_bus_id: str) -> int:
        """The NUMA node a PCI device hangs on; -1 is the system's word for "it does not say"."""

    def gpu_driver_model(self) -> str:
        """How the system drives its GPUs: ``Linux``, or what the driver must be asked for."""


def this_host(proc: Path = Path("/proc"), sys: Path = Path("/sys"), root: Path = Path("/")) -> Host:
    """The host, read below these roots (Linux; other systems have none)."""
    if IS_LINUX:
        from pichak_core.devices.linux_host import LinuxHost

        return LinuxHost(proc, sys, root)
    from pichak_core.devices.other import OtherHost

    return OtherHost()
