"""A CUDA (or ROCm) device: torch's caching allocator and what lies outside it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from pichak_core.devices import Capacity, GpuMemoryUse, Peak, ProcessMemory
from pichak_core.devices.caps import cap_of, remember_cap
from pichak_core.devices.cpu_backend import available_host_memory
from pichak_core.measurement import Unmeasured

#: Constants. On a part that shares the system's memory this much of it stays the system's: an
#: allocation that takes the rest raises nothing there and can freeze the host.
UNIFIED_RESERVE_BYTES = 2 * 2**30
UNIFIED_RESERVE_SHARE = 0.05

#: Counters that show less of a process than this share of what its allocator holds are not its.
_COVERED_SHARE = 0.5


class CudaBackend:
    """`cuda` is the namespace `torch.cuda`, or a fake with the same calls.

    Memory outside the allocator (the context's own at first, then kernels loaded late and library
    workspaces) is ``total - free - reserved``: what it was when this object was made is not free
    and so not in `capacity()`; what it grew by since is part of every peak. Another program's
    growth cannot be told from it and counts too.

    `available` gives the host memory still available and its source. `counters` reads what this
    process uses from the system's own counters, where it has them.
    """

    kind = "cuda"
    may_page = True
    watch_slows = False

    def __init__(
        self,
        device: str,
        cuda: Any,
        *,
        available: Callable[[], tuple[int, str]] = available_host_memory,
        counters: Callable[[], GpuMemoryUse | Unmeasured] | None = None,
    ) -> None:
        self._cuda = cuda
        self._available = available
        self._counters = counters
        self.spill_unknown = ""
        self._index = device_index(device, cuda)
        self.device = f"cuda:{self._index}"
        properties = cuda.get_device_properties(self._index)
        self._name = str(properties.name)
        self._total = int(properties.total_memory)
        self.unified = bool(getattr(properties, "is_integrated", False))
        self._outside_at_start = self._outside() or 0
        self._growth = 0
        self._limit_bytes: int | None = None

    def describe(self) -> str:
        """``name, total MiB``."""
        return f"{self._name}, {self._total / 2**20:,.0f} MiB"

    def capacity(self) -> Capacity:
        """Free now + reserved by this process, cut by the cap. On a unified part the system's
        available memory stands for "free", less a reserve: the driver counts the page cache as
        used there."""
        held = int(self._cuda.memory_reserved(self._index))
        if self.unified:
            available, why = self._available()
            reserve = max(UNIFIED_RESERVE_BYTES, int(UNIFIED_RESERVE_SHARE * available))
            total = max(0, available + held - reserve)
            source = (
                f"{_gib(available)} available to the system ({why}) + {_gib(held)} held by this "
                f"process - {_gib(reserve)} reserve (a constant): memory is shared with the system"
            )
        else:
            free, _ = self._memory_info()
            total = free + held
            source = (
                f"{_gib(free)} free on {self.device} now + {_gib(held)} held by this process, of "
                f"{_gib(self._total)} on the card"
            )
        cap = cap_of(self.device)
        if cap is not None and cap < total:
            return Capacity(cap, f"the cap set on this process, below {source}")
        self._limit_bytes = total
        return Capacity(total, source)

    def set_cap(self, cap_bytes: int | None) -> None:
        """Limit torch's allocator and remember the cap; None lifts both.

        The limit binds the allocator alone: what lies outside it comes on top, and the peaks of
        `watch()` show whether both together stay below the cap.
        """
        remember_cap(self.device, cap_bytes)
        self._limit_allocator(cap_bytes)

    def free_bytes(self) -> int | None:
        """Free on the device; None when it no longer answers (a broken context)."""
        try:
            return self._available()[0] if self.unified else self._memory_info()[0]
        except (RuntimeError, OSError):
            return None

    def host_free_bytes(self) -> int | None:
        """Host memory still available; None on a unified part or when it is unreadable."""
        if self.unified:
            return None
        try:
            return self._available()[0]
        except OSError:
            return None

    def process_memory(self) -> ProcessMemory | None:
        """The system's counters, where a reader was given and answers."""
        if self._counters is None:
            return None
        reserved = int(self._cuda.memory_reserved(self._index))
        use = self._counters()
        if isinstance(use, Unmeasured):
            self.spill_unknown = use.detail
            return None
        if use.dedicated + use.shared < _COVERED_SHARE * reserved:
            self.spill_unknown = (
                f"spill unknown: the counters show {_gib(use.dedicated + use.shared)} of this "
                f"process, whose allocator holds {_gib(reserved)}"
            )
            return None
        self.spill_unknown = ""
        return ProcessMemory(
            use.dedicated, use.shared, reserved, use.card_dedicated, use.card_shared
        )

    def peak_source(self) -> str:
        """What a peak counts."""
        if self.unified:
            return "what the allocator reserved"
        return "what the allocator reserved, plus what memory outside it grew by since the start"

    @contextlib.contextmanager
    def watch(self) -> Iterator[Peak]:
        """Peaks of the allocator over the block, and the growth outside it at its end. On a
        unified part the allocator is limited to the capacity last read meanwhile."""
        peak = Peak(held=int(self._cuda.memory_allocated(self._index)))
        self._cuda.reset_peak_memory_stats(self._index)
        guarded = self.unified and cap_of(self.device) is None
        if guarded:
            self._limit_allocator(self._limit_bytes)
        try:
            yield peak
        finally:
            if guarded:
                self._limit_allocator(None)
            outside = self._outside()
            if outside is not None:
                self._growth = max(0, outside - self._outside_at_start)
            peak.allocated = int(self._cuda.max_memory_allocated(self._index))
            peak.reserved = int(self._cuda.max_memory_reserved(self._index)) + self._growth

    def synchronize(self) -> None:
        """Wait for the device's queued work."""
        self._cuda.synchronize(self._index)

    def release(self) -> None:
        """Collect, then give the allocator's cache back to the device."""
        gc.collect()
        self._cuda.empty_cache()

    def _limit_allocator(self, limit_bytes: int | None) -> None:
        fraction = 1.0
        if limit_bytes is not None:
            # The driver's two totals can differ; the larger one keeps the limit below the cap.
            fraction = min(1.0, limit_bytes / max(self._total, self._memory_info()[1]))
        self._cuda.set_per_process_memory_fraction(fraction, self._index)

    def _memory_info(self) -> tuple[int, int]:
        free, total = self._cuda.mem_get_info(self._index)
        return int(free), int(total)

    def _outside(self) -> int | None:
        """Used on the device outside this process's allocator; None where it cannot be told (on a
        unified part from the page cache, on a broken context at all)."""
        if self.unified:
            return None
        try:
            free, total = self._memory_info()
        except RuntimeError:
            return None
        return total - free - int(self._cuda.memory_reserved(self._index))


def device_index(device: str, cuda: Any) -> int:
    """N of "cuda:N"; "cuda" is the current device. `ValueError` for another spelling,
    `RuntimeError` where there is no such device."""
    kind, colon, number = device.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"device {device!r} is not 'cuda' or 'cuda:N'")
    index = int(number) if colon else int(cuda.current_device())
    count = int(cuda.device_count())
    if index >= count:
        raise RuntimeError(f"device {device!r}: torch sees {count} CUDA device(s)")
    return index


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
