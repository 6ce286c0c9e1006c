"""The machine's own figures, each as often as it is worth its cost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pichak_agent.readings import HostReading
from pichak_core.devices.host import Host
from pichak_core.devices.processes import oom_kills

Answer = TypeVar("Answer")

#: Walking the control groups costs more than everything else together.
SLOW_SECONDS = 10.0


def steady_seconds() -> float:
    """Seconds of a clock that nobody sets and that goes on while the machine sleeps, where there is
    one (Linux)."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class HostSampler:
    """`disk` is a folder of the file system whose space is watched. What fails is None, and its
    reason is in `gaps` by the figure's name."""

    def __init__(
        self,
        host: Host,
        disk: Path,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_seconds,
    ) -> None:
        self._host, self._disk, self._clock, self._steady = host, disk, clock, steady
        self._slow = HostReading()
        self._slow_at = float("-inf")
        self.gaps: dict[str, str] = {}

    def read(self) -> tuple[float, float, HostReading]:
        """(wall clock, steady clock, the machine)."""
        now, steady = self._clock(), self._steady()
        if not 0 <= steady - self._slow_at < SLOW_SECONDS:
            self._slow, self._slow_at = self._read_slow(), steady
        cpu = self._ask("cpu", self._host.cpu_times)
        memory = self._ask("memory_pressure", lambda: self._host.pressure("memory"))
        return (
            now,
            steady,
            replace(
                self._slow,
                cpu_busy_seconds=None if cpu is None else cpu.busy,
                cpu_steal_seconds=None if cpu is None else cpu.steal,
                cpu_total_seconds=None if cpu is None else cpu.total,
                memory_pressure_us=None if memory is None else memory.some_us,
                memory_full_pressure_us=None if memory is None else memory.full_us,
                steady_unix=now - steady,
            ),
        )

    def _read_slow(self) -> HostReading:
        available = self._ask("memory_available", self._host.usable_memory_bytes)
        cpu = self._ask("cpu_pressure", lambda: self._host.pressure("cpu"))
        io = self._ask("io_pressure", lambda: self._host.pressure("io"))
        disk = self._ask("disk", lambda: shutil.disk_usage(self._disk))
        kills = oom_kills()
        return HostReading(
            cpu_pressure_us=None if cpu is None else cpu.some_us,
            io_pressure_us=None if io is None else io.some_us,
            memory_available_bytes=None if available is None else available[0],
            memory_total_bytes=self._ask("memory_total", self._host.memory_total_bytes),
            swap_used_bytes=self._ask("swap", swap_used_bytes),
            oom_kills=max(kills.values()) if kills else None,
            disk_free_bytes=None if disk is None else disk.free,
            disk_total_bytes=None if disk is None else disk.total,
        )

    def _ask(self, name: str, ask: Callable[[], Answer]) -> Answer | None:
        try:
            answer = ask()
        except (OSError, NotImplementedError, ValueError, ImportError, RuntimeError) as error:
            self.gaps[name] = f"{type(error).__name__}: {error}"[:300]
            return None
        self.gaps.pop(name, None)
        return answer


def swap_used_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Swap in use. `OSError` where that is not told: psutil would warn, and say 0."""
    if not meminfo.exists():
        import psutil

        return int(psutil.swap_memory().used)
    told: dict[str, int] = {}
    for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in ("SwapTotal", "SwapFree"):
            told[name] = int(value.split()[0]) * 1024
    if len(told) < 2:
        raise OSError(f"{meminfo} does not tell the swap")
    return max(0, told["SwapTotal"] - told["SwapFree"])
