"""Which readings of a row are judged, who answers for each, and which of a fleet's should be alike.
Pure.

Judged are rates ("…/s") and times (us, ms) by their unit. Left out: high percentiles, whose noise
no median tames; the cost of starting an operation, which matters as a share of a training step
only (24 µs was 2.5 % of one step and hours of another); and a network's readings, which belong to a
link and not to a node.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pichak_coordinator.records import Row
from pichak_coordinator.speed import processed_speed, scored_speed
from pichak_coordinator.verdict import Group, Sample
from pichak_core.measurement import Measurement

#: How many peers a reading needs beside it to be held against them.
MIN_PEERS = 5

Whose = Literal["gpu", "host", "node"]

_TIMES = ("us", "µs", "ms")
_NOT_JUDGED = ("p95", "p99", "kernel_launch", "op_dispatch", "network.")


@dataclass(frozen=True, eq=False, slots=True)
class Metric:
    """A metric that is judged, in one unit; there is one object of each. `whose`: a "gpu" answers
    for itself; the parts of a machine (disk, CPU, memory) are one reading however many GPUs it has,
    and peers of its CPU and memory ("host") have its CPU model and cores."""

    name: str
    unit: str
    whose: Whose

    @property
    def higher_is_better(self) -> bool:
        """Of a rate more is better, of a time less."""
        return self.unit not in _TIMES


@functools.lru_cache(maxsize=4096)
def judged_metric(name: str, unit: str) -> Metric | None:
    """What is judged under this name and unit; None where nothing is."""
    if not (unit.endswith("/s") or unit in _TIMES) or any(part in name for part in _NOT_JUDGED):
        return None
    if name.startswith("gpu."):
        return Metric(name, unit, "gpu")
    return Metric(name, unit, "host" if name.startswith(("cpu.", "host.")) else "node")


@functools.lru_cache(maxsize=64)
def _speed_metric(scored: bool, unit: str) -> Metric:
    name = "plan.scored_tokens_per_second" if scored else "plan.tokens_per_second"
    return Metric(name, unit, "gpu")


class Judged:
    """A row with what is judged of it, read once.

    `readings` holds the metric, its value and the relative standard error of it (None where no
    spread was measured); `speed` is the same of the plan, whose peers train the same `task`.
    """

    __slots__ = ("alike_host", "alike_model", "device", "model", "readings", "row", "speed", "task")

    def __init__(self, row: Row) -> None:
        self.row = row
        node = row.node
        self.model = node.model
        self.device = f"{node.node}/{node.device}"
        self.alike_model = ("model", self.model)
        # A container with half the cores is slower for that reason, and says so itself.
        self.alike_host = ("host", node.cpu_model, row.fingerprint.number("cpu.usable_cores"))
        self.readings = [
            (metric, float(one.value), _noise(one))
            for one in row.fingerprint.values()
            if one.__class__ is Measurement
            and (metric := judged_metric(one.name, one.unit)) is not None
            and not one.suspect
            and one.value.__class__ not in _NO_NUMBERS
        ]
        self.speed: tuple[Metric, float, float | None] | None = None
        self.task: tuple[Any, ...] = ()
        speed = scored_speed(row) or processed_speed(row)
        if speed is not None and row.plan is not None:
            length = row.plan["seq_len"].value if "seq_len" in row.plan else None
            metric = _speed_metric(speed.scored, speed.unit)
            self.speed = metric, speed.tokens_per_second, speed.noise
            self.task = ("plan", self.model, row.plan.model, row.plan.data, length)

    def __len__(self) -> int:
        """How many numbers of the row are judged."""
        return len(self.readings) + (self.speed is not None)

    @property
    def names(self) -> set[str]:
        """The metrics that are judged."""
        speed = {self.speed[0].name} if self.speed is not None else set()
        return {metric.name for metric, _, _ in self.readings} | speed


_NO_NUMBERS = frozenset((str, bool))


def _noise(reading: Measurement) -> float | None:
    """The relative standard error of a median of `samples`: 1.2533 · spread / √samples."""
    if reading.spread is None or reading.samples < 3:
        return None
    return 1.2533 * reading.spread / math.sqrt(reading.samples) / abs(float(reading.value) or 1.0)


class Kind:
    """Readings of one metric that should be alike; of each speaker the first one counts.

    Those that are to be judged stand side by side in `asked` (the number of the row), `values`,
    `noises` and `speakers`.
    """

    __slots__ = ("_first", "_group", "_known", "_noises", "_values", "asked", "metric", "noises",
                 "speakers", "values")  # fmt: skip

    def __init__(self, metric: Metric, *, known: bool) -> None:
        self.metric = metric
        self.asked: list[int] = []
        self.values: list[float] = []
        self.noises: list[float | None] = []
        self.speakers: list[str] = []
        self._known = known
        self._values: list[float] = []
        self._noises: list[float | None] = []
        self._first: dict[str, Sample] = {}
        self._group: Group | None = None

    def add(self, value: float, noise: float | None, asked: int | None, speaker: str) -> None:
        """One reading; `asked` is the number of its row where it is to be judged. `speaker` is ""
        where no other row speaks for the same. All are added before one is judged."""
        if not speaker or speaker not in self._first:
            self._values.append(value)
            self._noises.append(noise)
            if speaker:
                self._first[speaker] = Sample(value, noise)
        if asked is not None:
            self.asked.append(asked)
            self.values.append(value)
            self.noises.append(noise)
            self.speakers.append(speaker)

    def member(self, place: int) -> Sample:
        """What counts of the speaker of a reading that is to be judged."""
        own = Sample(self.values[place], self.noises[place])
        return self._first.get(self.speakers[place], own)

    def doubtful(self, group: Group) -> list[int]:
        """The places of those that take a verdict."""
        if not self._first:
            return list(group.doubtful(self.values))
        return list(group.doubtful([self.member(at).value for at in range(len(self.values))]))

    @property
    def peers(self) -> int:
        """How many others there are beside each; of a device of unknown model nobody is known."""
        return max(0, len(self._values) - 1) if self._known else 0

    @property
    def group(self) -> Group | None:
        """The values, where there are enough of them to judge one another."""
        if self.peers < MIN_PEERS:
            return None
        if self._group is None:
            self._group = Group.of(
                self._values, self._noises, higher_is_better=self.metric.higher_is_better
            )
        return self._group


class Kinds:
    """Every kind of reading there is, found by what must agree between peers."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], dict[Metric, Kind]] = {}

    def __iter__(self) -> Iterator[Kind]:
        for kinds in self._made.values():
            yield from kinds.values()

    def add(self, judged: Judged, asked: int | None, *, alone: bool) -> None:
        """Each reading of a row; `alone` says that no other row is of the same node."""
        row = judged.row
        own, device = ("", "") if alone else (row.node.node, judged.device)
        of_model = self._made.setdefault(judged.alike_model, {})
        of_host = self._made.setdefault(judged.alike_host, {})
        for metric, value, noise in judged.readings:
            host = metric.whose == "host"
            kind = (of_host if host else of_model).get(metric)
            if kind is None:
                known = bool(row.node.cpu_model if host else judged.model)
                kind = (of_host if host else of_model)[metric] = Kind(metric, known=known)
            kind.add(value, noise, asked, device if metric.whose == "gpu" else own)
        if judged.speed is not None:
            metric, value, noise = judged.speed
            of_task = self._made.setdefault(judged.task, {})
            kind = of_task.get(metric)
            if kind is None:
                kind = of_task[metric] = Kind(metric, known=bool(judged.model))
            kind.add(value, noise, asked, device)


def too_few(peers: int) -> str:
    """Why nobody was held against peers: how many there are, and how many it takes."""
    return f"too few peers to judge: {peers} of {MIN_PEERS} needed"


def unjudged(rows: Sequence[Row]) -> list[str]:
    """A sentence for each model of which there are too few devices to hold one against the others,
    though something was read of it that could be."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.node.model, []).append(row)
    return [
        f"{model or 'devices of unknown model'}: {too_few(len(some) - 1 if model else 0)}"
        for model, some in models.items()
        if (not model or len(some) <= MIN_PEERS) and any(len(Judged(row)) for row in some)
    ]
