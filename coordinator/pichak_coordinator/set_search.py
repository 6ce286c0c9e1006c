"""The best n devices of a fleet for synchronous training: an exact search for small fleets, and
what a search has to answer. Pure.

Chosen devices lie on machines, and machines on a ring. A step takes

    T = max over the devices of their seconds + steps × max over the ring's links of theirs

and money is the price of every machine that is touched plus that of each chosen device. What is
made smallest is T, or T × money. A ring over one machine has no link, over two it has one; every
machine of the ring has at least one chosen device. Links that are absent cannot be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

By = Literal["speed", "cost"]
Pair = tuple[int, int]

#: Up to this many machines every set is looked at: 2^14 sets, their rings by dynamic programming.
EXACT_MACHINES = 14


@dataclass(frozen=True)
class Device:
    """A device that may be chosen: seconds of its own step, and its own price."""

    seconds: float
    price: float = 0.0


@dataclass(frozen=True)
class Problem:
    """`machines[m]` are the devices of machine m, `prices[m]` what touching it costs. `links` holds
    the seconds of a ring's step by (lower, higher) machine; a pair that it lacks takes
    `other_links`, or cannot be used where that is None. `count` devices are wanted.
    """

    machines: Sequence[Sequence[Device]]
    links: Mapping[Pair, float]
    count: int
    steps: int
    by: By = "speed"
    prices: Sequence[float] = ()
    other_links: float | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or self.steps < 0:
            raise ValueError(f"{self.count} devices in {self.steps} steps")
        if any(a >= b for a, b in self.links):
            raise ValueError("a link is named by its lower machine first")

    def link(self, one: int, other: int) -> float | None:
        """Seconds of a ring's step between two machines; None where it cannot be used."""
        pair = (one, other) if one < other else (other, one)
        return self.links.get(pair, self.other_links)

    def price(self, machine: int) -> float:
        """What touching a machine costs."""
        return self.prices[machine] if self.prices else 0.0

    @cached_property
    def levels(self) -> list[float]:
        """Every device's seconds, each once, the least first."""
        return sorted({device.seconds for some in self.machines for device in some})

    def merit(self, seconds: float, money: float) -> float:
        """What is made smallest."""
        return seconds if self.by == "speed" else seconds * money


@dataclass(frozen=True)
class Answer:
    """The set found. `devices` are (machine, index) in the order of `ring`, which is a cycle.

    `merit` is T, or T × money; no set has less than `bound`. `complete`: the two are the same.
    """

    devices: tuple[Pair, ...]
    ring: tuple[int, ...]
    compute_seconds: float
    link_seconds: float
    money: float
    merit: float
    bound: float = field(default=0.0)

    @property
    def gap(self) -> float:
        """By which share of its merit a better set could still be better; 0 when it is the best."""
        return max(0.0, 1 - self.bound / self.merit) if self.merit > 0 else 0.0


def search(problem: Problem) -> Answer | None:
    """The best set; None where no ring of usable links holds `count` devices."""
    from pichak_coordinator.set_search_large import large

    fields = [m for m, devices in enumerate(problem.machines) if devices]
    return exact(problem) if len(fields) <= EXACT_MACHINES else large(problem)


def exact(problem: Problem) -> Answer | None:
    """The best set, by looking at every set of machines. Time and memory grow as 2^machines."""
    fields = [m for m, devices in enumerate(problem.machines) if devices]
    size = len(fields)
    if size > 20:
        raise ValueError(f"{size} machines have too many sets to look at each")
    paths = _Paths(problem, fields)
    best: Answer | None = None
    for mask in range(1, 1 << size):
        if mask.bit_count() > problem.count:
            continue
        members = [fields[i] for i in range(size) if mask >> i & 1]
        if sum(len(problem.machines[m]) for m in members) < problem.count:
            continue
        link = paths.bottleneck(mask)
        if link is None:
            continue
        found = cheapest(problem, members, link, None if best is None else best.merit)
        if found is not None:
            best = _answer(problem, found, paths.ring(mask), link)
    return best if best is None else _with_bound(best, best.merit)


@dataclass(frozen=True)
class Chosen:
    """Devices chosen on given machines: their step, price and merit."""

    devices: tuple[Pair, ...]
    compute_seconds: float
    money: float
    merit: float


def cheapest(
    problem: Problem, members: Sequence[int], link_seconds: float, under: float | None = None
) -> Chosen | None:
    """The best `count` devices on all of these machines, for a ring whose step takes
    `link_seconds`; None where they have too few, or nothing below `under`."""
    best: Chosen | None = None
    limit = under
    for level in _levels(problem, members):
        seconds = level + problem.steps * link_seconds
        if problem.by == "speed" and limit is not None and seconds >= limit:
            break
        devices = _cheapest_at(problem, members, level)
        if devices is None:
            continue
        compute = max(problem.machines[m][d].seconds for m, d in devices)
        money = money_of(problem, devices)
        merit = problem.merit(compute + problem.steps * link_seconds, money)
        if limit is None or merit < limit:
            best, limit = Chosen(tuple(devices), compute, money, merit), merit
        if problem.by == "speed":
            break
    return best


def money_of(problem: Problem, devices: Sequence[Pair]) -> float:
    """The price of the machines that are touched and of the devices."""
    touched = sorted({machine for machine, _ in devices})
    own = sum(problem.machines[m][d].price for m, d in devices)
    return sum(problem.price(machine) for machine in touched) + own


def answer_of(problem: Problem, chosen: Chosen, ring: Sequence[int]) -> Answer:
    """An answer without a bound, from devices and the ring of their machines."""
    return _answer(problem, chosen, ring, ring_link(problem, ring) or 0.0)


def ring_link(problem: Problem, ring: Sequence[int]) -> float | None:
    """The slowest link's seconds around a ring; None where a link cannot be used."""
    if len(ring) < 2:
        return 0.0
    ways = [problem.link(one, other) for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)]
    known = [way for way in ways if way is not None]
    return max(known) if len(known) == len(ways) else None


def _levels(problem: Problem, members: Sequence[int]) -> list[float]:
    """The levels at which these machines have enough devices, each machine at least one."""
    own = sorted({device.seconds for m in members for device in problem.machines[m]})
    least = max(min(device.seconds for device in problem.machines[m]) for m in members)
    return [level for level in own if level >= least]


def _cheapest_at(problem: Problem, members: Sequence[int], level: float) -> list[Pair] | None:
    """The cheapest `count` devices of these machines that are no slower than `level`, at least one
    of each machine; of equal ones the fastest."""
    first: list[Pair] = []
    rest: list[tuple[float, float, int, int]] = []
    for machine in members:
        usable = sorted(
            (device.price, device.seconds, machine, index)
            for index, device in enumerate(problem.machines[machine])
            if device.seconds <= level
        )
        first.append((machine, usable[0][3]))
        rest += usable[1:]
    more = problem.count - len(first)
    if more < 0 or len(rest) < more:
        return None
    return first + [(machine, index) for _, _, machine, index in sorted(rest)[:more]]


def _answer(problem: Problem, chosen: Chosen, ring: Sequence[int], link_seconds: float) -> Answer:
    place = {machine: at for at, machine in enumerate(ring)}
    devices = sorted(chosen.devices, key=lambda pair: (place[pair[0]], pair[1]))
    return Answer(
        tuple(devices),
        tuple(ring),
        chosen.compute_seconds,
        link_seconds,
        chosen.money,
        problem.merit(chosen.compute_seconds + problem.steps * link_seconds, chosen.money),
    )


def _with_bound(answer: Answer, bound: float) -> Answer:
    return Answer(
        answer.devices,
        answer.ring,
        answer.compute_seconds,
        answer.link_seconds,
        answer.money,
        answer.merit,
        min(bound, answer.merit),
    )


class _Paths:
    """For every set of machines the ring whose slowest link is the fastest (Held and Karp's
    recursion with max for plus): paths start at the set's lowest machine."""

    def __init__(self, problem: Problem, fields: Sequence[int]) -> None:
        self._fields = fields
        size = len(fields)
        self._links = [[problem.link(a, b) if a != b else None for b in fields] for a in fields]
        self._paths: list[dict[int, tuple[float, int]]] = [{} for _ in range(1 << size)]
        for start in range(size):
            self._paths[1 << start][start] = (0.0, -1)
        most = min(problem.count, size)
        for mask in range(1, 1 << size):
            if mask.bit_count() >= most:
                continue
            low = (mask & -mask).bit_length() - 1
            for last, (so_far, _) in self._paths[mask].items():
                ways = self._links[last]
                for new in range(low + 1, size):
                    way = ways[new]
                    if mask >> new & 1 or way is None:
                        continue
                    longer = self._paths[mask | 1 << new]
                    worst = max(so_far, way)
                    if new not in longer or worst < longer[new][0]:
                        longer[new] = (worst, last)

    def _closing(self, mask: int) -> tuple[float, int] | None:
        """(slowest link, the machine before the ring closes)."""
        low = (mask & -mask).bit_length() - 1
        best: tuple[float, int] | None = None
        for last, (worst, _) in self._paths[mask].items():
            way = self._links[last][low] if last != low else 0.0
            if way is not None and (best is None or max(worst, way) < best[0]):
                best = max(worst, way), last
        return best

    def bottleneck(self, mask: int) -> float | None:
        """Seconds of the slowest link of the best ring over these machines; None without one."""
        closing = self._closing(mask)
        return closing[0] if closing else None

    def ring(self, mask: int) -> list[int]:
        """The machines of that ring in its order."""
        closing = self._closing(mask)
        if closing is None:
            raise ValueError("there is no ring over these machines")
        order: list[int] = []
        last = closing[1]
        while last >= 0:
            order.append(self._fields[last])
            before = self._paths[mask][last][1]
            mask ^= 1 << last
            last = before
        return order[::-1]
