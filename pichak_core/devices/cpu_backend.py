"""The CPU as a training device: its memory is the system's, and peaks are live tensor storage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from pichak_core.devices import Capacity, Peak, ProcessMemory
from pichak_core.devices.caps import cap_of, remember_cap
from pichak_core.devices.host import this_host
from pichak_core.devices.live_tensors import LiveTensors, live_bytes


def available_host_memory() -> tuple[int, str]:
    """(bytes of host memory that this process can still have, which bound won); `OSError` where
    the system does not say."""
    return this_host().usable_memory_bytes()


class CpuBackend:
    """`available` gives the host memory that this process can still have and its source.

    With a cap below that, the cap is the device: a step that passes it gets
    `torch.OutOfMemoryError`. Without one the whole host is at stake, so `unified` is True.
    """

    device = "cpu"
    kind = "cpu"
    may_page = False
    spill_unknown = ""
    watch_slows = True

    def __init__(self, available: Callable[[], tuple[int, str]] = available_host_memory) -> None:
        self._available = available
        self._limit_bytes: int | None = None
        self._collected = False
        self.unified = cap_of(self.device) is None

    def describe(self) -> str:
        """The CPU's name, "CPU" where the system gives none."""
        try:
            return this_host().cpu_model()
        except (OSError, ValueError, NotImplementedError):
            return "CPU"

    def capacity(self) -> Capacity:
        """Host memory available now + live tensors, cut by the cap. `OSError` when neither the
        memory is readable nor a cap is set."""
        held, cap = live_bytes(), cap_of(self.device)
        try:
            available, why = self._available()
        except OSError:
            if cap is None:
                raise
            available, why = cap, "available memory unreadable"
        total = available + held
        self.unified = cap is None or cap > total
        if cap is not None and cap <= total:
            self._limit_bytes = cap
            return Capacity(cap, f"the cap set on this process ({why}: {_gib(available)})")
        self._limit_bytes = total
        return Capacity(total, f"{_gib(available)} available ({why}) + {_gib(held)} held")

    def set_cap(self, cap_bytes: int | None) -> None:
        """Live tensors past `cap_bytes` raise `torch.OutOfMemoryError` inside `watch()`."""
        remember_cap(self.device, cap_bytes)
        self._limit_bytes = None
        self.unified = cap_bytes is None

    def free_bytes(self) -> int | None:
        """Host memory available now."""
        try:
            return self._available()[0]
        except OSError:
            return None

    def host_free_bytes(self) -> int | None:
        """None: the host's memory is the device's own."""
        return None

    def process_memory(self) -> ProcessMemory | None:
        """None: there is no GPU to count."""
        return None

    def peak_source(self) -> str:
        """What a peak counts."""
        return (
            "live tensor storage, counted at every operation; what an operation needs inside "
            "itself is not seen"
        )

    @contextlib.contextmanager
    def watch(self) -> Iterator[Peak]:
        """Count live tensor storage, raising past the cap (or the capacity last read)."""
        peak = Peak()
        counter = LiveTensors(self._limit_bytes or cap_of(self.device))
        try:
            with counter.counting(collect=not self._collected):
                self._collected = False
                peak.held = counter.live_bytes
                yield peak
        finally:
            peak.allocated = peak.reserved = counter.peak_bytes

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def release(self) -> None:
        """Collect what only reference cycles keep."""
        gc.collect()
        self._collected = True


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
