"""A system without a module of its own: what Python and psutil know of any machine."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid

from pichak_core.devices.host import CpuTimes, HostKind, Identity, Pressure, SharedMemory
from pichak_core.devices.linux import affinity_count, usable_memory_bytes


class OtherHost:
    """The `Host` of a system that is not Linux."""

    def operating_system(self) -> str:
        return platform.platform(aliased=True, terse=True)

    def kernel(self) -> str:
        return f"{platform.system()} {platform.release()}"

    def identity(self) -> Identity:
        address = uuid.getnode()
        # uuid sets the multicast bit on the number it makes up when it finds no interface.
        if address >> 40 & 1:
            raise OSError("no network interface has an address to recognise this machine by")
        hashed = hashlib.sha256(f"pichak-fleet:{address:012x}".encode()).hexdigest()[:16]
        return Identity(hashed, "hash of a network interface's address")

    def kind(self) -> HostKind:
        raise NotImplementedError(f"{platform.system()} is not asked for its hypervisor")

    def cpu_model(self) -> str:
        name = platform.processor() or platform.machine()
        if not name:
            raise OSError("the system gives no name for its CPU")
        return name

    def usable_cores(self) -> tuple[int, str]:
        return affinity_count()

    def quota_cores(self) -> tuple[float, str] | None:
        return None

    def memory_total_bytes(self) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    def usable_memory_bytes(self) -> tuple[int, str]:
        return usable_memory_bytes()

    def shared_memory(self) -> SharedMemory:
        raise NotImplementedError(f"{platform.system()} has no /dev/shm")

    def last_level_cache_bytes(self) -> int:
        raise NotImplementedError(f"{platform.system()} is not asked for its caches")

    def cpu_times(self) -> CpuTimes:
        import psutil

        times = psutil.cpu_times()
        total = float(sum(times))
        return CpuTimes(busy=total - float(times.idle), steal=0.0, total=total)

    def pressure(self, resource: str) -> Pressure:
        raise NotImplementedError(f"{platform.system()} keeps no stall times of {resource}")

    def load_average(self) -> float:
        if not hasattr(os, "getloadavg"):
            raise NotImplementedError(f"{platform.system()} keeps no load average")
        return os.getloadavg()[0]

    def cpu_frequency_mhz(self) -> float:
        raise NotImplementedError(f"{platform.system()} is not asked for its clocks")

    def niceness(self) -> int:
        if not hasattr(os, "getpriority"):
            raise NotImplementedError(f"{platform.system()} has no niceness")
        return os.getpriority(os.PRIO_PROCESS, 0)

    def open_file_limit(self) -> int:
        raise NotImplementedError(f"{platform.system()} is not asked for its limits")

    def gpu_numa_node(self, pci_bus_id: str) -> int:
        raise NotImplementedError(f"the NUMA node of {pci_bus_id} is read on Linux only")

    def gpu_driver_model(self) -> str:
        raise NotImplementedError(f"{platform.system()}: only the driver knows its model")
