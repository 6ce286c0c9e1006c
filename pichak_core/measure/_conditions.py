"""What is true of the machine while a measurement runs, so that a slow number can be explained.

Counters (steal, CPU time) are exact over the window; what only has a present value (clocks, power)
is sampled during it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from pichak_core.devices.gpus import LiveGpu
from pichak_core.devices.host import CpuTimes, Host
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context
from pichak_core.measure._readings import host_of, is_cuda, nvml_gpu
from pichak_core.measurement import Unmeasured
from pichak_core.plan import Scalar

#: Linux counts CPU time in hundredths of a second; shorter windows hold too few ticks to divide.
_SHORTEST_WINDOW_SECONDS = 0.05

_ABSENT = (OSError, NotImplementedError, ValueError)


@dataclass(frozen=True)
class CpuUse:
    """How the CPUs spent a window. `steal_percent` is the share of the time this machine wanted to
    run that its hypervisor gave to somebody else; `others_cores` is what other processes used."""

    seconds: float
    steal_percent: float
    others_cores: float
    own_cores: float


class CpuWindow:
    """Counts from its construction to `end()`. Raises what the host raises (see `Host`)."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._started, self._times, self._own = clock(), host.cpu_times(), _own_seconds()

    def end(self) -> CpuUse | None:
        """The use since construction; None when the window is too short to say."""
        seconds = self._clock() - self._started
        own = _own_seconds() - self._own
        return cpu_use(self._times, self._host.cpu_times(), own, seconds)


def cpu_use(before: CpuTimes, after: CpuTimes, own: float, seconds: float) -> CpuUse | None:
    """The share of two readings' difference; `own` is this process's CPU time in between."""
    busy, steal = after.busy - before.busy, after.steal - before.steal
    if seconds < _SHORTEST_WINDOW_SECONDS or busy + steal <= 0:
        return None
    return CpuUse(
        seconds,
        100.0 * steal / (busy + steal),
        max(0.0, busy - own) / seconds,
        own / seconds,
    )


@dataclass
class Window:
    """Filled when the `during()` block ends: condition name (with unit) to value."""

    found: dict[str, Scalar] = field(default_factory=dict)


@contextmanager
def counted(host: Host, found: dict[str, Scalar]) -> Iterator[None]:
    """What the system's own counters say of a block, put into `found` when it ends; no thread and
    no child meanwhile."""
    cpu: CpuWindow | None = None
    with contextlib.suppress(*_ABSENT):
        cpu = CpuWindow(host)
    try:
        yield
    finally:
        with contextlib.suppress(*_ABSENT):
            use = cpu.end() if cpu else None
            if use is not None:
                found["cpu.steal_percent"] = round(use.steal_percent, 3)
                found["cpu.load_others_cores"] = round(use.others_cores, 3)
        with contextlib.suppress(*_ABSENT):
            found["cpu.load_average_1m"] = host.load_average()
        with contextlib.suppress(*_ABSENT):
            # Ray gives its workers 15: beside another load they are left little of a core.
            if (nice := host.niceness()) != 0:
                found["cpu.niceness"] = nice


class Conditions:
    """Samples one machine and at most one GPU of it. `close()` ends its thread and its child."""

    def __init__(
        self, host: Host, live: LiveGpu | None = None, interval_seconds: float = 0.1
    ) -> None:
        self._host, self._live = host, live
        self._frequencies: list[float] = []
        self._gpu: list[Gpu] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._frequency() is not None:
            self._thread = threading.Thread(
                target=self._sample, args=(interval_seconds,), name="conditions", daemon=True
            )
            self._thread.start()

    @classmethod
    def of(cls, context: Context) -> Conditions:
        """For the context's machine, and its GPU where NVML knows it."""
        live = None
        gpu = nvml_gpu(context) if is_cuda(context) else None
        if isinstance(gpu, Gpu):
            with contextlib.suppress(OSError):
                live = LiveGpu(gpu.index)
                live.wait_for_first(3.0)
        return cls(host_of(context), live)

    @contextmanager
    def during(self) -> Iterator[Window]:
        """The conditions of a block, in the yielded object when it ends, however it ends."""
        window = Window()
        self._frequencies.clear()
        self._gpu.clear()
        if self._live:
            self._live.latest()
        try:
            with counted(self._host, window.found):
                yield window
        finally:
            if self._frequencies:
                window.found["cpu.frequency_mhz"] = round(median(self._frequencies), 1)
            window.found.update(gpu_conditions(self.gpu_readings()))

    def gpu_readings(self) -> list[Gpu]:
        """The GPU's readings since the present block began; none where NVML does not know it."""
        if self._live:
            self._gpu += self._live.latest()
        return list(self._gpu)

    def close(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=2.0)
        if self._live:
            self._live.close()

    def _frequency(self) -> float | None:
        try:
            return self._host.cpu_frequency_mhz()
        except _ABSENT:
            return None

    def _sample(self, interval_seconds: float) -> None:
        while not self._stop.wait(interval_seconds):
            now = self._frequency()
            if now is not None:
                self._frequencies.append(now)


def gpu_conditions(readings: Sequence[Gpu]) -> dict[str, Scalar]:
    """Several readings of a GPU as conditions: clocks and power in the middle, temperature, link
    and memory at their highest (an idle link trains down), throttle reasons all together, and by
    how much each counter of throttled time grew: a power cap's bit alone is normal at full load."""
    found: dict[str, Scalar] = {}
    for name, summary in _SUMMARIES.items():
        values = [v for v in (reading.number(name) for reading in readings) if v is not None]
        if values:
            found[f"gpu.{name}"] = summary(values)
    counters = {n for reading in readings for n in reading.values if n.startswith(_COUNTERS)}
    for name in sorted(counters):
        values = [v for v in (reading.number(name) for reading in readings) if v is not None]
        if len(values) > 1 and values[-1] >= values[0]:  # a reset driver counts from zero again
            found[f"gpu.{name}"] = round(values[-1] - values[0], 6)
    used = found.pop("gpu.memory_used_bytes", None)
    if isinstance(used, (int, float)):
        found["gpu.memory_used_mib"] = round(used / 2**20, 1)
    lost = [reading.lost for reading in readings if isinstance(reading.lost, Unmeasured)]
    if lost:
        found["gpu.lost"] = lost[0].detail
    return found


def _bits(values: Sequence[float]) -> int:
    together = 0
    for value in values:
        together |= int(value)
    return together


def _highest(values: Sequence[float]) -> float:
    return max(values)


def _middle(values: Sequence[float]) -> float:
    return float(median(values))


#: Fields that count seconds since the driver was loaded.
_COUNTERS = "throttled_"

_SUMMARIES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sm_clock_mhz": _middle,
    "memory_clock_mhz": _middle,
    "power_watts": _middle,
    "temperature_celsius": _highest,
    "throttle_bitmask": _bits,
    "pcie_generation": _highest,
    "pcie_width": _highest,
    "utilisation_percent": _middle,
    "memory_used_bytes": _highest,
}


def _own_seconds() -> float:
    """CPU time of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
