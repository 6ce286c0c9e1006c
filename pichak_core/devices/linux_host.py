"""Linux as a `Host`: each question, and the file that answers it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pichak_core.devices import linux, linux_identity
from pichak_core.devices.cgroups import cpu_quotas
from pichak_core.devices.filesystems import filesystem_of
from pichak_core.devices.host import CpuTimes, HostKind, Identity, Pressure, SharedMemory

#: Reading every core of a large server would cost more than it tells.
_FREQUENCY_CPUS = 16


class LinuxHost:
    """`proc`, `sys` and `root` (for ``/etc``, ``/run``, ``/dev/shm``) are where it reads."""

    def __init__(self, proc: Path, sys: Path, root: Path) -> None:
        self.proc, self.sys, self.root = proc, sys, root

    def operating_system(self) -> str:
        return linux_identity.operating_system(self.root)

    def kernel(self) -> str:
        return (self.proc / "sys/kernel/osrelease").read_text().strip()

    def identity(self) -> Identity:
        return linux_identity.identity(self.sys, self.root, self._in_container())

    def kind(self) -> HostKind:
        return linux_identity.host_kind(self.proc, self.sys, self.root)

    def cpu_model(self) -> str:
        return linux.parse_cpu_model((self.proc / "cpuinfo").read_text(errors="replace"))

    def usable_cores(self) -> tuple[int, str]:
        return linux.usable_cores(self.proc, self.sys)

    def quota_cores(self) -> tuple[float, str] | None:
        quotas = cpu_quotas(self.proc, self.sys)
        if not quotas:
            return None
        tightest = min(quotas, key=lambda quota: quota.cores)
        return tightest.cores, (
            f"{tightest.quota_us} us in every {tightest.period_us} us, {tightest.directory}"
        )

    def memory_total_bytes(self) -> int:
        meminfo = linux.parse_meminfo((self.proc / "meminfo").read_text())
        if "MemTotal" not in meminfo:
            raise OSError(f"{self.proc}/meminfo has no MemTotal")
        return meminfo["MemTotal"]

    def usable_memory_bytes(self) -> tuple[int, str]:
        return linux.usable_memory_bytes(self.proc, self.sys)

    def shared_memory(self) -> SharedMemory:
        path = self.root / "dev/shm"
        size = os.statvfs(path)
        if self.root == Path("/"):
            where = filesystem_of(path, proc=self.proc, sys_root=self.sys)
            if where.kind not in ("memory", "unknown"):
                raise OSError(f"{path} is no memory, it is {where.describe()}")
        return SharedMemory(str(path), size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize)

    def last_level_cache_bytes(self) -> int:
        return linux.last_level_cache_bytes(self.sys)

    def cpu_times(self) -> CpuTimes:
        return linux.parse_cpu_times((self.proc / "stat").read_text(), os.sysconf("SC_CLK_TCK"))

    def pressure(self, resource: str) -> Pressure:
        return linux.parse_pressure((self.proc / "pressure" / resource).read_text())

    def load_average(self) -> float:
        return linux.parse_load_average((self.proc / "loadavg").read_text())

    def cpu_frequency_mhz(self) -> float:
        # cpuinfo's "cpu MHz" is no substitute: inside a virtual machine it is a constant.
        readings = []
        for cpu in self._allowed_cpus()[:_FREQUENCY_CPUS]:
            file = self.sys / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq"
            readings.append(int(file.read_text()) / 1000)
        return sum(readings) / len(readings)

    def niceness(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def open_file_limit(self) -> int:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def gpu_numa_node(self, pci_bus_id: str) -> int:
        # NVML writes the domain with eight digits, sysfs with four.
        short = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", pci_bus_id.lower())
        return int((self.sys / "bus/pci/devices" / short / "numa_node").read_text())

    def gpu_driver_model(self) -> str:
        return "Linux"

    def _allowed_cpus(self) -> Sequence[int]:
        try:
            return sorted(os.sched_getaffinity(0))
        except OSError:
            return range(os.cpu_count() or 1)

    def _in_container(self) -> bool:
        return bool(linux_identity.container_evidence(self.proc, self.root))
