"""Public fakes of what a test cannot have at will: time, and devices with a known memory.

They stand for hardware alone; what is under test stays real.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pichak_core.devices import Capacity, Peak, ProcessMemory

MIB = 2**20
GIB = 2**30


# --- Time -------------------------------------------------------------------------------------


class FakeClock:
    """A clock that stands still until `advance()` moves it: call it for the seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


# --- A training device ------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """What the fake devices raise; by its name it is recognised like torch's own."""


def affine_memory(
    base_bytes: int, bytes_per_row: int, *, optimizer_phase_bytes: int = 0
) -> Callable[[int], int]:
    """``max(optimizer phase, base + rows · bytes_per_row)``: how a training step peaks."""
    return lambda rows: max(optimizer_phase_bytes, base_bytes + rows * bytes_per_row)


def step_seconds(
    fixed: float = 0.01, per_row: float = 0.001, *, jitter: float = 0.0, seed: int = 0
) -> Callable[[int], float]:
    """Seconds of a step by its rows, with a relative Gaussian `jitter` where it is not 0."""
    noise = random.Random(seed)  # noqa: S311 - a test's noise
    return lambda rows: (fixed + per_row * rows) * max(0.1, 1 + jitter * noise.gauss(0, 1))


@dataclass
class FakeDevice:
    """A device (`pichak_core.devices.Backend`) and the training on it, without hardware.

    `peak_of(rows)` is what a step allocates at its peak, in bytes, with everything it holds. The
    allocator reserves that in multiples of `rounding_bytes` and refuses what would pass
    `capacity_bytes`, unless the device `pages`: then a step that needs more than it really gets
    (`dedicated_bytes`, by default the capacity) takes `paging_factor` times as long. `may_page`
    says that it might, also where it does not.
    `state_bytes` of `peak_of` appear only behind the first step; `context_bytes` come on top of
    what the allocator reserved; each step leaves `leak_bytes` behind for good. `held_bytes` is
    held between steps. `counters` makes the system's counters readable, `pinned_bytes` of host
    memory are pinned by a step. `host_bytes_of(rows)` is taken from `host_bytes` while it runs.
    """

    capacity_bytes: int
    peak_of: Callable[[int], int]
    seconds_of: Callable[[int], float] = field(default_factory=step_seconds)
    clock: FakeClock = field(default_factory=FakeClock)
    rounding_bytes: int = 1
    held_bytes: int = 0
    state_bytes: int = 0
    context_bytes: int = 0
    leak_bytes: int = 0
    pages: bool = False
    dedicated_bytes: int | None = None
    paging_factor: float = 9.0
    counters: bool = False
    pinned_bytes: int = 0
    host_bytes: int | None = None
    host_bytes_of: Callable[[int], int] = lambda _: 0
    unified: bool = False
    device: str = "fake:0"
    kind: str = "fake"
    may_page: bool = False
    watch_slows: bool = False
    spill_unknown: str = ""
    cap_bytes: int | None = None
    ran: list[int] = field(default_factory=list)
    released: int = 0
    _allocated: int = 0
    _reserved: int = 0
    _host_taken: int = 0
    _leaked: int = 0
    _has_state: bool = False

    def __post_init__(self) -> None:
        self.may_page = self.may_page or self.pages

    def describe(self) -> str:
        return f"a fake device of {self.capacity_bytes:,} bytes"

    def capacity(self) -> Capacity:
        limit = self.capacity_bytes if self.cap_bytes is None else self.cap_bytes
        return Capacity(min(limit, self.capacity_bytes), "what the fake device was given")

    def set_cap(self, cap_bytes: int | None) -> None:
        self.cap_bytes = cap_bytes

    def free_bytes(self) -> int | None:
        return self.capacity().bytes - max(self._reserved, self.held_bytes)

    def host_free_bytes(self) -> int | None:
        return None if self.host_bytes is None else self.host_bytes - self._host_taken

    def process_memory(self) -> ProcessMemory | None:
        if not self.counters:
            return None
        spilled = max(0, self._reserved - self._dedicated())
        pinned = self.pinned_bytes if self._reserved else 0
        return ProcessMemory(self._reserved - spilled, spilled + pinned, self._reserved)

    def peak_source(self) -> str:
        return "what the fake device was told"

    @contextlib.contextmanager
    def watch(self) -> Iterator[Peak]:
        peak = Peak(held=self.held_bytes + self._leaked)
        self._allocated = self._reserved = peak.held
        try:
            yield peak
        finally:
            peak.allocated = self._allocated
            peak.reserved = self._reserved + (self.context_bytes if self.ran else 0)

    def synchronize(self) -> None:
        """Nothing is queued."""

    def release(self) -> None:
        self.released += 1
        self._allocated = self._reserved = self._host_taken = 0

    def occupy(self, reserved_bytes: int) -> None:
        """Take memory without training: what a step did before it failed."""
        self._reserved = max(self._reserved, reserved_bytes)

    def _dedicated(self) -> int:
        return self.capacity_bytes if self.dedicated_bytes is None else self.dedicated_bytes

    def train(self, rows: int) -> None:
        """One training step: memory is taken (or refused), time passes."""
        self.ran.append(rows)
        allocated = self.peak_of(rows) + self._leaked
        if not self._has_state:
            allocated -= self.state_bytes
        reserved = -(-allocated // self.rounding_bytes) * self.rounding_bytes
        needed = reserved + self.context_bytes
        if needed > self.capacity().bytes and not self.pages:
            raise OutOfMemoryError(f"fake out of memory. Tried to reserve {needed:,} bytes")
        self._allocated = max(self._allocated, allocated)
        self._reserved = max(self._reserved, reserved)
        self._host_taken = self.host_bytes_of(rows)
        self._leaked += self.leak_bytes
        self._has_state = True
        paging = needed > self._dedicated()
        self.clock.advance(self.seconds_of(rows) * (self.paging_factor if paging else 1.0))


@dataclass
class FakeStep:
    """A step function on a `FakeDevice`. `errors` maps rows to what is raised instead of training;
    `trains` says whether a call, by its number from 0, really trains."""

    device: FakeDevice
    errors: dict[int, Callable[[], BaseException]] = field(default_factory=dict)
    trains: Callable[[int], bool] = lambda _: True
    steps_run: int = 0
    phase: str = "idle"
    closed: int = 0
    calls: list[int] = field(default_factory=list)

    def __call__(self, rows: int) -> None:
        number = len(self.calls)
        self.calls.append(rows)
        self.phase = "forward"
        if rows in self.errors:
            raise self.errors[rows]()
        if self.trains(number):
            self.device.train(rows)
            self.steps_run += 1
        self.phase = "idle"

    def close(self) -> None:
        self.closed += 1


# --- torch.cuda -------------------------------------------------------------------------------


@dataclass
class FakeCuda:
    """The part of the namespace `torch.cuda` that memory is measured with, for one card.

    `others_bytes` is what other programs and this process's context use at first; `allocate()`
    and `free()` move this process's allocator, which reserves in multiples of `rounding_bytes`
    and obeys the process's fraction; `grow_outside()` is context growing. `uuid` is the card's, ""
    where torch is too old to tell.
    """

    total_bytes: int
    others_bytes: int = 0
    rounding_bytes: int = 2 * MIB
    name: str = "Fake GPU"
    is_integrated: bool = False
    count: int = 1
    current: int = 0
    fraction: float = 1.0
    broken: bool = False
    uuid: str = ""
    initialized: bool = True
    _allocated: int = 0
    _reserved: int = 0
    _peak_allocated: int = 0
    _peak_reserved: int = 0

    def current_device(self) -> int:
        return self.current

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, device: int) -> Any:  # noqa: ARG002 - torch's signature
        return SimpleNamespace(
            name=self.name,
            total_memory=self.total_bytes,
            is_integrated=self.is_integrated,
            uuid=self.uuid,
        )

    def is_initialized(self) -> bool:
        return self.initialized

    def mem_get_info(self, device: int) -> tuple[int, int]:  # noqa: ARG002
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.total_bytes - self.others_bytes - self._reserved, self.total_bytes

    def memory_allocated(self, device: int) -> int:  # noqa: ARG002
        return self._allocated

    def memory_reserved(self, device: int) -> int:  # noqa: ARG002
        return self._reserved

    def max_memory_allocated(self, device: int) -> int:  # noqa: ARG002
        return self._peak_allocated

    def max_memory_reserved(self, device: int) -> int:  # noqa: ARG002
        return self._peak_reserved

    def reset_peak_memory_stats(self, device: int) -> None:  # noqa: ARG002
        self._peak_allocated, self._peak_reserved = self._allocated, self._reserved

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:  # noqa: ARG002
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}")
        self.fraction = fraction

    def synchronize(self, device: int) -> None:
        """Nothing is queued."""

    def empty_cache(self) -> None:
        self._reserved = -(-self._allocated // self.rounding_bytes) * self.rounding_bytes

    def allocate(self, count: int) -> None:
        """Take `count` bytes, or raise past the fraction or the card."""
        wanted = self._allocated + count
        reserved = -(-wanted // self.rounding_bytes) * self.rounding_bytes
        limit = min(self.fraction * self.total_bytes, self.total_bytes - self.others_bytes)
        if reserved > limit:
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count:,} bytes")
        self._allocated = wanted
        self._reserved = max(self._reserved, reserved)
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def free(self, count: int) -> None:
        """Give `count` bytes back to the allocator's cache."""
        self._allocated -= count

    def grow_outside(self, count: int) -> None:
        """Memory outside the allocator grows: context, workspaces, another program."""
        self.others_bytes += count
