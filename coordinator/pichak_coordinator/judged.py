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


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is judged, in one unit: `key` holds both. `whose`: a "gpu" answers for itself;
    the parts of a machine (disk, CPU, memory) are one reading however many GPUs it has, and peers
    of its CPU and memory ("host") have its CPU model and cores."""

    key: tuple[str, str]
    whose: Whose

    @property
    def name(self) -> str:
        return self.key[0]

    @property
    def unit(self) -> str:
        return self.key[1]

    @property
    def higher_is_better(self) -> bool:
        """Of a rate more is better, of a time less."""
        return self.unit not in _TIMES


class _Metrics(dict[tuple[str, str], "Metric | None"]):
    """(name, unit) -> what is judged under them, None where nothing is. Nodes choose their names:
    of too many only the latest are kept."""

    def __missing__(self, key: tuple[str, str]) -> Metric | None:
        if len(self) >= _MOST_METRICS:
            self.clear()
        self[key] = made = _metric(*key)
        return made


_MOST_METRICS = 4096


def _metric(name: str, unit: str) -> Metric | None:
    if not (unit.endswith("/s") or unit in _TIMES) or any(part in name for part in _NOT_JUDGED):
        return None
    if name.startswith("gpu."):
        return Metric((name, unit), "gpu")
    return Metric((name, unit), "host" if name.startswith(("cpu.", "host.")) else "node")


_METRICS = _Metrics()


@functools.lru_cache(maxsize=64)
def _speed_metric(scored: bool, unit: str) -> Metric:
    name = "plan.scored_tokens_per_second" if scored else "plan.tokens_per_second"
    return Metric((name, unit), "gpu")


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
            and (metric := _METRICS[one.name, one.unit]) is not None
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

    All of them stand side by side in `values`, `noises` and `asked`: the number of the row of those
    that are to be judged, None of the others.
    """

    __slots__ = ("_first", "_group", "_known", "_same", "asked", "metric", "noises", "values")

    def __init__(self, metric: Metric, *, known: bool) -> None:
        self.metric = metric
        self.values: list[float] = []
        self.noises: list[float | None] = []
        self.asked: list[int | None] = []
        self._known = known
        self._first: dict[str, int] = {}
        self._same: dict[int, int] = {}
        self._group: Group | None = None

    def spoke(self, speaker: str) -> None:
        """Who the last reading is of, where other rows may speak for the same. All are added before
        one is judged."""
        place = len(self.values) - 1
        first = self._first.setdefault(speaker, place)
        if first != place:
            self._same[place] = first

    def member(self, place: int) -> Sample:
        """What counts of the speaker of a reading."""
        first = self._same.get(place, place)
        return Sample(self.values[first], self.noises[first])

    def doubtful(self, group: Group) -> list[tuple[int, int]]:
        """(place, number of its row) of those to be judged that take a verdict."""
        values = self.values
        if self._same:
            values = [self.member(at).value for at in range(len(values))]
        asked = self.asked
        return [(at, row) for at in group.doubtful(values) if (row := asked[at]) is not None]

    @property
    def peers(self) -> int:
        """How many others there are beside each; of a device of unknown model nobody is known."""
        return max(0, len(self.values) - len(self._same) - 1) if self._known else 0

    @property
    def group(self) -> Group | None:
        """The values, where there are enough of them to judge one another."""
        if self.peers < MIN_PEERS:
            return None
        if self._group is None:
            counted = [at for at in range(len(self.values)) if at not in self._same]
            self._group = Group.of(
                [self.values[at] for at in counted] if self._same else self.values,
                [self.noises[at] for at in counted] if self._same else self.noises,
                higher_is_better=self.metric.higher_is_better,
            )
        return self._group


class Kinds:
    """Every kind of reading there is, found by what must agree between peers."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], dict[tuple[str, str], Kind]] = {}

    def __iter__(self) -> Iterator[Kind]:
        for kinds in self._made.values():
            yield from kinds.values()

    def add(self, judged: Judged, asked: int | None, *, alone: bool) -> None:
        """Each reading of a row; `alone` says that no other row is of the same node."""
        node = judged.row.node
        of_model = self._made.setdefault(judged.alike_model, {})
        of_host = self._made.setdefault(judged.alike_host, {})
        for metric, value, noise in judged.readings:
            alike = of_host if metric.whose == "host" else of_model
            kind = alike.get(metric.key)
            if kind is None:
                known = bool(node.cpu_model if metric.whose == "host" else judged.model)
                kind = alike[metric.key] = Kind(metric, known=known)
            kind.values.append(value)
            kind.noises.append(noise)
            kind.asked.append(asked)
            if not alone:
                kind.spoke(judged.device if metric.whose == "gpu" else node.node)
        if judged.speed is not None:
            metric, value, noise = judged.speed
            of_task = self._made.setdefault(judged.task, {})
            kind = of_task.get(metric.key)
            if kind is None:
                kind = of_task[metric.key] = Kind(metric, known=bool(judged.model))
            kind.values.append(value)
            kind.noises.append(noise)
            kind.asked.append(asked)
            if not alone:
                kind.spoke(judged.device)


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
