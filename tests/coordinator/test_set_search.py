"""The search for the best set: equal to brute force on small fleets, within its bound on large."""

from __future__ import annotations

import itertools
import random

import pytest

from pichak_coordinator.ring_finder import candidates, find_rings
from pichak_coordinator.set_search import Device, Problem, exact, ring_link, search
from pichak_coordinator.set_search_large import large


def brute(problem: Problem) -> float | None:
    """The least merit over every set of devices and every order of their machines."""
    devices = [(m, d) for m, some in enumerate(problem.machines) for d in range(len(some))]
    rings: dict[tuple[int, ...], float | None] = {}

    def best_ring(machines: tuple[int, ...]) -> float | None:
        if machines not in rings:
            first, *rest = machines
            orders = (ring_link(problem, (first, *o)) for o in itertools.permutations(rest))
            rings[machines] = min((link for link in orders if link is not None), default=None)
        return rings[machines]

    best = None
    for chosen in itertools.combinations(devices, problem.count):
        machines = tuple(sorted({m for m, _ in chosen}))
        link = best_ring(machines)
        if link is None:
            continue
        seconds = max(problem.machines[m][d].seconds for m, d in chosen) + problem.steps * link
        money = sum(problem.prices[m] for m in machines)
        money += sum(problem.machines[m][d].price for m, d in chosen)
        merit = seconds if problem.by == "speed" else seconds * money
        best = merit if best is None else min(best, merit)
    return best


def fleet(rng: random.Random, size: int, count: int, by: str, **more) -> Problem:
    """Links that depend on the machines at their ends, or not; some missing, some machines with
    several devices or none."""
    dense, several, by_machine = more["dense"], more.get("several", False), rng.random() < 0.5
    machines = [
        [
            Device(rng.uniform(0.5, 1.5), rng.choice([0.0, rng.uniform(0, 2)]))
            for _ in range(rng.randrange(4) if several else 1)
        ]
        for _ in range(size)
    ]
    own = [rng.lognormvariate(0, 0.6) for _ in range(size)]
    links = {}
    for a, b in itertools.combinations(range(size), 2):
        if rng.random() < dense:
            slow = max(own[a], own[b]) if by_machine else rng.lognormvariate(0, 0.8)
            links[a, b] = 0.1 / count * slow * rng.uniform(1, 1.1)
    prices = [rng.uniform(0.5, 3) for _ in range(size)]
    return Problem(
        machines,
        links,
        count,
        2 * (count - 1),
        by,
        prices,
        more.get("other"),  # type: ignore[arg-type]
    )


def check(problem: Problem) -> float | None:
    """The search against brute force; how far the large search is from it."""
    right = brute(problem)
    found, wide = exact(problem), large(problem)
    if right is None:
        assert found is None
        assert wide is None
        return None
    assert found is not None
    assert found.merit == pytest.approx(right, rel=1e-12)
    assert found.gap == 0
    assert len(found.devices) == problem.count == len(set(found.devices))
    assert list(dict.fromkeys(m for m, _ in found.devices)) == list(found.ring)
    assert found.link_seconds == ring_link(problem, found.ring)
    if wide is None:
        return float("inf")
    assert wide.bound <= right * (1 + 1e-9)
    assert wide.merit >= right * (1 - 1e-12)
    return wide.merit / right - 1


@pytest.mark.parametrize("by", ["speed", "cost"])
def test_always_the_best_of_small_fleets(by: str) -> None:
    rng = random.Random(11)
    gaps = []
    for _ in range(120):
        size = rng.randrange(1, 8)
        problem = fleet(
            rng,
            size,
            rng.randrange(1, size + 2),
            by,
            dense=rng.choice([0.3, 0.6, 1.0]),
            several=rng.random() < 0.3,
            other=rng.choice([None, None, 0.05]),
        )
        if sum(map(len, problem.machines)) <= 9:
            gaps.append(check(problem))
    found = [gap for gap in gaps if gap is not None]
    assert len(found) > 40
    assert max(found) < 0.05
    assert any(gap is None for gap in gaps)


@pytest.mark.parametrize("by", ["speed", "cost"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_always_the_best_of_twelve(by: str, count: int) -> None:
    rng = random.Random(count)
    for dense in (0.4, 1.0):
        gap = check(fleet(rng, 12, count, by, dense=dense))
        assert gap is None or gap < 0.05


def test_a_slow_machine_and_a_slow_link_are_left_out() -> None:
    """Four machines in a square of fast links (0.01 s) with slow diagonals (1 s), and a fifth that
    computes slowly. The ring over the four avoids the diagonals: 1 + 6 × 0.01 s."""
    links = {(0, 1): 0.01, (1, 2): 0.01, (2, 3): 0.01, (0, 3): 0.01, (0, 2): 1.0, (1, 3): 1.0}
    links |= {(m, 4): 0.01 for m in range(4)}
    machines = [[Device(1.0)]] * 4 + [[Device(5.0)]]
    found = search(Problem(machines, links, 4, 6))
    assert found is not None
    assert sorted(found.ring) == [0, 1, 2, 3]
    assert abs(found.ring[0] - found.ring[2]) == 2  # the order goes along the sides
    assert found.merit == pytest.approx(1.06)
    # Three have no way around a diagonal; the slow machine instead of it would cost 4 s more.
    three = search(Problem(machines, links, 3, 4))
    assert three is not None
    assert three.merit == pytest.approx(1 + 4 * 1.0)
    cheap_links = {pair: seconds * 10 for pair, seconds in links.items()}
    three = search(Problem(machines, cheap_links, 3, 4))
    assert three is not None
    assert 4 in three.ring


def test_whole_machines_are_paid_for() -> None:
    """Two devices on a machine of 3 cost 3; one on each of two machines of 2 cost 4."""
    machines = [[Device(1.0), Device(1.0)], [Device(1.0)], [Device(1.0)]]
    links = {(0, 1): 0.0, (1, 2): 0.0, (0, 2): 0.0}
    found = search(Problem(machines, links, 2, 2, "cost", [3.0, 2.0, 2.0]))
    assert found is not None
    assert found.ring == (0,)
    assert found.money == 3.0
    found = search(Problem(machines, links, 2, 2, "cost", [5.0, 2.0, 2.0]))
    assert found is not None
    assert sorted(found.ring) == [1, 2]
    assert found.money == 4.0


@pytest.mark.parametrize(
    ("size", "count", "dense", "most"),
    [(1000, 8, 0.006, 0.15), (300, 16, 0.03, 0.15), (200, 8, 1.0, 0.03), (200, 64, 1.0, 0.03)],
)
def test_large_fleets_by_speed_are_within_a_few_percent_of_the_bound(
    size: int, count: int, dense: float, most: float
) -> None:
    rng = random.Random(size + count)
    found = large(fleet(rng, size, count, "speed", dense=dense))
    assert found is not None
    assert len(found.devices) == count
    assert found.gap < most


def test_fourteen_machines_by_the_large_search_against_the_exact_one() -> None:
    rng = random.Random(5)
    for by in ("speed", "cost"):
        problem = fleet(rng, 13, 6, by, dense=0.6)
        right, wide = exact(problem), large(problem)
        assert right is not None
        assert wide is not None
        assert right.merit <= wide.merit <= 1.05 * right.merit
        assert wide.bound <= right.merit * (1 + 1e-9)


def test_a_planted_cheap_ring_is_found_in_a_large_fleet() -> None:
    """Eight machines at a tenth of the price whose links to each other are the only fast ones."""
    rng = random.Random(3)
    size, cheap = 300, sorted(rng.sample(range(300), 8))
    links = {pair: 0.5 for pair in itertools.combinations(range(size), 2) if rng.random() < 0.05}
    links |= dict.fromkeys(itertools.combinations(cheap, 2), 0.01)
    prices = [0.1 if m in cheap else 1.0 for m in range(size)]
    problem = Problem([[Device(1.0)]] * size, links, 8, 14, "cost", prices)
    found = large(problem)
    assert found is not None
    assert sorted(found.ring) == cheap
    assert found.merit == pytest.approx((1 + 14 * 0.01) * 0.8)
    assert found.gap < 1e-9


def graph(size: int, edges: list[tuple[int, int]]) -> list[int]:
    links = [0] * size
    for a, b in edges:
        links[a] |= 1 << b
        links[b] |= 1 << a
    return links


def test_rings_need_two_links_of_each() -> None:
    """A triangle with a tail, and a path: only the triangle can hold a ring."""
    links = graph(7, [(0, 1), (1, 2), (0, 2), (2, 3), (4, 5), (5, 6)])
    assert candidates(links, 0b1111111, [1] * 7, 3) == [0b0000111]
    assert candidates(links, 0b1111111, [1] * 7, 4) == []
    assert candidates(links, 0b1111111, [2] * 7, 4) == [0b0000111]
    (ring, *_) = find_rings(links, 0b0000111, [1] * 7, 3)
    assert sorted(ring) == [0, 1, 2]
    # A ring of nine has none of six, and one of nine.
    nine = graph(9, [(i, (i + 1) % 9) for i in range(9)])
    assert list(find_rings(nine, 0b111111111, [1] * 9, 6)) == []
    assert sorted(next(find_rings(nine, 0b111111111, [1] * 9, 9))) == list(range(9))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="0 devices"):
        Problem([[Device(1.0)]], {}, 0, 0)
    with pytest.raises(ValueError, match="lower machine first"):
        Problem([[Device(1.0)]], {(1, 0): 1.0}, 1, 0)
    assert search(Problem([[Device(1.0)]], {}, 2, 2)) is None
    assert search(Problem([], {}, 1, 0)) is None
