"""What a look at the readings can see of the past: the last minutes, one reading a minute of the
last hours, what each figure was at first, and how this agent's jobs began. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from pichak_agent.readings import GpuReading, OwnUse, Reading
from pichak_core.devices import ProcessMemory

#: The last minutes, reading by reading.
WINDOW_SECONDS = 180.0
MINUTE_SECONDS, MINUTES = 60.0, 120
_LASTING_SECONDS, _LONGEST_LASTING_SECONDS = 60.0, 150.0
_PIECES, _LASTING_SHARE = 6, 0.8
_MOST_JOBS = 64
#: Steps that make a median of a job's pace.
PACE_STEPS = 16

#: Counters of a GPU, which only a reload of the driver sets back.
COUNTERS = (
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_rows_corrected",
    "remapped_rows_uncorrected",
    "retired_pages_corrected",
    "retired_pages_uncorrected",
)
_TRACKED = (*COUNTERS, "power_limit_watts")


class Seen(NamedTuple):
    """A figure and its time."""

    value: float
    at_unix: float


class GpuSeen(NamedTuple):
    """A GPU in one reading."""

    at: Reading
    gpu: GpuReading


class Growth(NamedTuple):
    """A counter's growth: `rate` a second over the whole time, `parts` those of up to six pieces of
    it, the oldest first."""

    rate: float
    parts: Sequence[float]

    def lasts(self, above: float) -> bool:
        """Whether it grew faster than `above`, and did so for most of the time: a burst does not
        last."""
        faster = sum(part > above for part in self.parts)
        return self.rate > above and faster >= _LASTING_SHARE * len(self.parts)


def growth(points: Sequence[tuple[float, float]]) -> Growth | None:
    """Of a counter at (seconds, value); None for fewer than three readings and for one that was set
    back meanwhile."""
    if len(points) < 3 or points[-1][0] <= points[0][0]:
        return None
    if any(after[1] < before[1] for before, after in pairwise(points)):
        return None
    piece = (points[-1][0] - points[0][0]) / _PIECES
    parts, last = [], points[0]
    for point in points[1:]:
        if point[0] - last[0] >= 0.99 * piece:
            parts.append((point[1] - last[1]) / (point[0] - last[0]))
            last = point
    rate = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    return Growth(rate, parts)


@dataclass
class JobPast:
    """How a job of this agent began on a GPU: its first memory counters (the first with what its
    allocator held, where that is told); and its pace: the last step times, each told once, and the
    best median of `PACE_STEPS` in a row."""

    began: Reading
    memory: ProcessMemory | None = None
    memory_at: float = 0.0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    best: Seen | None = None

    def take(self, use: OwnUse, at: Reading) -> None:
        memory = use.memory
        if memory is not None and (
            self.memory is None or (self.memory.reserved is None and memory.reserved is not None)
        ):
            self.memory, self.memory_at = memory, at.at_unix
        step = use.seconds_per_step
        if step is None or (self.steps and step == self.steps[-1]):
            return
        self.steps.append(step)
        pace = self.pace
        if pace is not None and (self.best is None or pace < self.best.value):
            self.best = Seen(pace, at.at_unix)

    @property
    def pace(self) -> float | None:
        """Seconds a step, the median of the last `PACE_STEPS`; None before there are so many."""
        return median(self.steps) if len(self.steps) == PACE_STEPS else None


@dataclass(frozen=True)
class Window:
    """`readings` of the last `WINDOW_SECONDS` and `minutes` of the last hours, the oldest first.

    `first` is what a GPU's figure was when the watch began (counters: since they last began at
    zero); `had` are the GPUs that the node had, UUID to name; `jobs` how the running ones began, by
    job and GPU; `answered`: when NVML last gave a full answer, None when it never did.
    """

    readings: Sequence[Reading]
    minutes: Sequence[Reading]
    first: Mapping[tuple[str, str], Seen]
    had: Mapping[str, str]
    jobs: Mapping[tuple[str, str], JobPast]
    answered: Reading | None

    @property
    def now(self) -> Reading:
        return self.readings[-1]

    @cached_property
    def lasting_seconds(self) -> float:
        """What has to last so long is a sign: a minute, longer where readings are rare."""
        times = [reading.steady_seconds for reading in self.readings[-8:]]
        apart = (times[-1] - times[0]) / max(1, len(times) - 1)
        return min(_LONGEST_LASTING_SECONDS, max(_LASTING_SECONDS, 5 * apart))

    def since(self, seconds: float) -> list[Reading]:
        """The readings of the last `seconds`."""
        after = self.now.steady_seconds - seconds
        return [reading for reading in self.readings if reading.steady_seconds >= after]

    @cached_property
    def gpus(self) -> Mapping[str, Sequence[GpuSeen]]:
        """Each GPU's readings, by its key, where it was read."""
        found: dict[str, list[GpuSeen]] = {}
        for reading in self.readings:
            for gpu in reading.gpus:
                if not gpu.lost:
                    found.setdefault(gpu.key, []).append(GpuSeen(reading, gpu))
        return found

    def recent(self, key: str, seconds: float) -> list[GpuSeen]:
        """A GPU's readings of the last `seconds`."""
        after = self.now.steady_seconds - seconds
        return [seen for seen in self.gpus.get(key, ()) if seen.at.steady_seconds >= after]

    @cached_property
    def full(self) -> Sequence[Reading]:
        """The readings that hold every fact of the GPUs."""
        return [reading for reading in self.readings if reading.full]


class Past:
    """Takes readings, and gives the window of now."""

    def __init__(self, had: dict[str, str]) -> None:
        self._readings: deque[Reading] = deque()
        self._minutes: deque[Reading] = deque(maxlen=MINUTES)
        self._first: dict[tuple[str, str], Seen] = {}
        self.had = had
        self._jobs: dict[tuple[str, str], JobPast] = {}
        self._answered: Reading | None = None

    def take(self, reading: Reading) -> None:
        """Add a reading; what has left the window is forgotten."""
        self._readings.append(reading)
        while reading.steady_seconds - self._readings[0].steady_seconds > WINDOW_SECONDS:
            self._readings.popleft()
        last = self._minutes[-1].steady_seconds if self._minutes else float("-inf")
        if reading.steady_seconds - last >= MINUTE_SECONDS:
            self._minutes.append(reading)
        if reading.full and any(not gpu.lost for gpu in reading.gpus):
            self._answered = reading
            for gpu in reading.gpus:
                self._remember(gpu, reading.at_unix)
            if not self.had:
                self.had.update(
                    {g.uuid: str(g.facts.get("name", "")) for g in reading.gpus if g.uuid}
                )
        self._follow_jobs(reading)

    def window(self) -> Window:
        """What there is to look at now."""
        return Window(
            list(self._readings),
            list(self._minutes),
            self._first,
            self.had,
            self._jobs,
            self._answered,
        )

    def _remember(self, gpu: GpuReading, at_unix: float) -> None:
        for name in _TRACKED:
            value = gpu.number(name)
            if value is None:
                continue
            before = self._first.get((gpu.key, name))
            if before is None or (name in COUNTERS and value < before.value):
                self._first[gpu.key, name] = Seen(value, at_unix)

    def _follow_jobs(self, reading: Reading) -> None:
        running = {(use.job, use.uuid): use for use in reading.own}
        for gone in [key for key in self._jobs if key not in running]:
            del self._jobs[gone]
        for key, use in running.items():
            if key not in self._jobs:
                if len(self._jobs) >= _MOST_JOBS:
                    continue
                self._jobs[key] = JobPast(reading)
            self._jobs[key].take(use, reading)
