"""The best n devices of a large fleet: rings looked for at rising thresholds of their slowest link,
and a bound on what a better set could still gain. Pure.

At each threshold the graph of the links below it is searched for rings, on the fastest (or
cheapest) machines first. A ring needs two links of each of its machines and one connected part to
lie in; the fewest seconds at which a part is large enough bound from below what any ring there has.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from pichak_coordinator.ring_finder import candidates, find_rings
from pichak_coordinator.set_search import Answer, Problem, answer_of, cheapest, ring_link

#: Thresholds of the slowest link, and of seconds for each where money counts.
_THRESHOLDS = 64
_LEVELS = 10
#: Machines that rings looked for by cost may have in all, or there are fewer levels.
_WORK = 20_000


def large(problem: Problem) -> Answer | None:
    """A good set, with a bound; None where none was found. Machines without devices are out."""
    return _Sweep(problem).run()


class _Sweep:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        fields = [m for m, devices in enumerate(problem.machines) if devices]
        #: Place of preference -> machine.
        self.machine = sorted(fields, key=lambda m: (self._preference(m), m))
        self.seconds = [sorted(d.seconds for d in problem.machines[m]) for m in self.machine]
        self.levels = problem.levels
        self.money = self._least_money()
        self.best: Answer | None = None
        self.bound = math.inf

    def run(self) -> Answer | None:
        self._few_machines()
        if self.problem.count >= 3:
            self._rings()
        if self.best is None:
            return None
        return replace(self.best, bound=min(self.bound, self.best.merit))

    def _preference(self, machine: int) -> float:
        devices = self.problem.machines[machine]
        if self.problem.by == "speed":
            return min(device.seconds for device in devices)
        used = sorted(device.price for device in devices)[: self.problem.count]
        return (self.problem.price(machine) + sum(used)) / len(used)

    def _least_money(self) -> list[float]:
        """[level]: what `count` devices no slower than it cost at least; infinite where there are
        too few. A machine's price is spread over all of its devices."""
        problem = self.problem
        priced = sorted(
            (d.seconds, d.price + problem.price(m) / min(len(problem.machines[m]), problem.count))
            for m in self.machine
            for d in problem.machines[m]
        )
        made: list[float] = []
        kept: list[float] = []
        total, at = 0.0, 0
        for level in self.levels:
            while at < len(priced) and priced[at][0] <= level:
                heapq.heappush(kept, -priced[at][1])
                total += priced[at][1]
                if len(kept) > problem.count:
                    total += heapq.heappop(kept)
                at += 1
            made.append(total * (1 - 1e-12) if len(kept) == problem.count else math.inf)
        return made

    @property
    def under(self) -> float:
        return math.inf if self.best is None else self.best.merit

    def _take(self, ring: Sequence[int]) -> None:
        """Keep the best devices on a ring of machines where they are better than what there is."""
        link = ring_link(self.problem, ring)
        if link is None:
            return
        found = cheapest(self.problem, ring, link, None if self.best is None else self.best.merit)
        if found is not None:
            self.best = answer_of(self.problem, found, ring)

    # -- one machine, and two ---------------------------------------------------------------------

    def _few_machines(self) -> None:
        """Every machine alone and every two: all of them are looked at, so that they are no part of
        the bound but by the best of them."""
        problem, count = self.problem, self.problem.count
        holds = [len(seconds) for seconds in self.seconds]
        for place, machine in enumerate(self.machine):
            if holds[place] >= count:
                self._take([machine])
        if count < 2 or sum(sorted(holds)[-2:]) < count:
            self.bound = self.under
            return
        for place, one in enumerate(self.machine):
            for other_place in range(place + 1, len(self.machine)):
                other = self.machine[other_place]
                link = problem.link(one, other)
                if link is None or holds[place] + holds[other_place] < count:
                    continue
                fastest = max(self.seconds[place][0], self.seconds[other_place][0])
                money = problem.price(one) + problem.price(other)
                if problem.by == "speed" or money > 0:
                    least = problem.merit(fastest + problem.steps * link, money)
                    if least >= self.under:
                        continue
                self._take([one, other])
        self.bound = self.under

    # -- rings ------------------------------------------------------------------------------------

    def _rings(self) -> None:
        problem = self.problem
        place = {machine: at for at, machine in enumerate(self.machine)}
        size = len(self.machine)
        edges = sorted(
            (seconds, place[a], place[b])
            for (a, b), seconds in problem.links.items()
            if a in place and b in place
        )
        known = [1 << at for at in range(size)]
        for _, a, b in edges:
            known[a] |= 1 << b
            known[b] |= 1 << a
        everybody = (1 << size) - 1
        values = sorted({edge[0] for edge in edges} | self._others())
        links = [0] * size
        added, lower = 0, 0
        for threshold in _thresholds(values):
            while added < len(edges) and edges[added][0] <= threshold:
                _, a, b = edges[added]
                links[a] |= 1 << b
                links[b] |= 1 << a
                added += 1
            usable = links
            if problem.other_links is not None and problem.other_links <= threshold:
                usable = [links[at] | (everybody & ~known[at]) for at in range(size)]
            # Rings whose slowest link lies above the last threshold and not above this one.
            self._at(usable, values[lower])
            lower = bisect.bisect_right(values, threshold)

    def _others(self) -> set[float]:
        return set() if self.problem.other_links is None else {self.problem.other_links}

    def _at(self, links: Sequence[int], least_link: float) -> None:
        """Look for better rings over these links; each has one of `least_link` seconds or more,
        or was looked for before."""
        extra = self.problem.steps * least_link
        low = self._least_level(links, extra)
        if low is None:
            return
        self.bound = min(self.bound, self._least_merit(low, extra))
        if self.problem.by == "cost":
            looks = max(2, min(_LEVELS, _WORK // (self.problem.count * _THRESHOLDS)))
            step = max(1, (len(self.levels) - low) // looks)
            for level in [*range(low, len(self.levels), step), len(self.levels) - 1]:
                if (self.levels[low] + extra) * self.money[level] < self.under:
                    self._look(links, level)
            return
        high = len(self.levels) - 1
        while low <= high:
            middle = (low + high) // 2
            # What was found may be faster than the level that was asked for.
            if self.levels[middle] + extra >= self.under or self._look(links, middle):
                high = middle - 1
            else:
                low = middle + 1

    def _look(self, links: Sequence[int], level: int) -> bool:
        holds, allowed = self._capacity(level)
        found = False
        for part in candidates(links, allowed, holds, self.problem.count):
            for ring in find_rings(links, part, holds, self.problem.count):
                found = True
                self._take([self.machine[at] for at in ring])
                if self.problem.by == "speed":
                    return True
        return found

    def _capacity(self, level: int) -> tuple[list[int], int]:
        """How many devices of each machine are no slower than a level, and who has any."""
        limit = self.levels[level]
        holds = [bisect.bisect_right(seconds, limit) for seconds in self.seconds]
        return holds, sum(1 << at for at, some in enumerate(holds) if some)

    def _least_level(self, links: Sequence[int], extra: float) -> int | None:
        """The lowest level at which a ring may exist; None where that could be no better."""

        def may(level: int) -> bool:
            holds, allowed = self._capacity(level)
            return bool(candidates(links, allowed, holds, self.problem.count))

        high = len(self.levels) - 1
        if self.problem.by == "speed":
            high = bisect.bisect_left(self.levels, self.under - extra) - 1
        if high < 0 or not may(high):
            return None
        low = 0
        while low < high:
            middle = (low + high) // 2
            if may(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _least_merit(self, low: int, extra: float) -> float:
        """What no ring over devices of this level or a higher one can be below."""
        if self.problem.by == "speed":
            return self.levels[low] + extra
        return min(
            (self.levels[at] + extra) * self.money[at] for at in range(low, len(self.levels))
        )


def _thresholds(values: Sequence[float]) -> list[float]:
    """Up to `_THRESHOLDS` of the values, spread over them by rank, the first and the last among
    them."""
    if len(values) <= _THRESHOLDS:
        return list(values)
    last = len(values) - 1
    return sorted({values[round(k * last / (_THRESHOLDS - 1))] for k in range(_THRESHOLDS)})
