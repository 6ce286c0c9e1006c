"""Rings in a graph of usable links: one that holds enough devices, or a proof that none does.

Machines are numbers, sets of them are bits of an integer, lower numbers are preferred. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: Steps of one search from one start; a search that needs more is given up.
BUDGET = 3000
_STARTS = 8
#: A ring over more than this share of what there is must not leave machines behind.
_TIGHT = 0.5
_LOOKED_AT = 48


def bits(mask: int) -> Iterator[int]:
    """The members of a set, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def candidates(
    links: Sequence[int], allowed: int, capacity: Sequence[int], count: int
) -> list[int]:
    """The sets of `allowed` in which alone a ring over three machines or more may hold `count`
    devices, which needs two links of each; an empty list proves that there is none."""
    alive, before = allowed, -1
    while alive != before:
        before = alive
        for one in bits(before):
            if (links[one] & alive).bit_count() < 2:
                alive ^= 1 << one
    found = []
    while alive:
        part = front = alive & -alive
        while front:
            reached = 0
            for one in bits(front):
                reached |= links[one]
            front = reached & alive & ~part
            part |= front
        alive &= ~part
        if part.bit_count() >= 3 and sum(capacity[one] for one in bits(part)) >= count:
            found.append(part)
    return found


def find_rings(
    links: Sequence[int], part: int, capacity: Sequence[int], count: int
) -> Iterator[list[int]]:
    """Rings of three to `count` machines of `part` that hold `count` devices, at most one from each
    of some starts. That there is none is no proof: each search has its budget."""
    tight = count > _TIGHT * sum(capacity[one] for one in bits(part))
    every = list(bits(part))
    starts = every[:_STARTS]
    if tight:
        starts = sorted(every, key=lambda one: (links[one] & part).bit_count())[:_STARTS]
    for start in starts:
        ring = _from(start, links, part, capacity, count, tight)
        if ring is not None:
            yield preferred(ring, links, part, capacity)


def preferred(
    ring: Sequence[int], links: Sequence[int], part: int, capacity: Sequence[int]
) -> list[int]:
    """The same ring, each machine replaced by the most preferred that can stand in its place."""
    made = list(ring)
    used = sum(1 << one for one in made)
    changed = True
    while changed:
        changed = False
        for at, one in enumerate(made):
            before, after = made[at - 1], made[(at + 1) % len(made)]
            better = links[before] & links[after] & part & ~used & ((1 << one) - 1)
            for other in bits(better):
                if capacity[other] >= capacity[one]:
                    used ^= (1 << one) | (1 << other)
                    made[at] = other
                    changed = True
                    break
    return made


def _from(
    start: int, links: Sequence[int], part: int, capacity: Sequence[int], count: int, tight: bool
) -> list[int] | None:
    near = _distances(start, links, part, count)
    path, used, holds = [start], 1 << start, capacity[start]
    open_ways = [links[start] & part & ~used & near[min(count - 1, len(near) - 1)]]
    for _ in range(BUDGET):
        if not open_ways[-1]:
            # Back: this way leads nowhere.
            open_ways.pop()
            last = path.pop()
            used ^= 1 << last
            holds -= capacity[last]
            if not path:
                return None
            continue
        new = _next(open_ways[-1], links, part & ~used, tight)
        open_ways[-1] ^= 1 << new
        path.append(new)
        used |= 1 << new
        holds += capacity[new]
        if len(path) >= 3 and holds >= count and links[new] >> start & 1:
            return path
        left = count - len(path)
        ways = links[new] & part & ~used & near[min(left, len(near) - 1)] if left > 0 else 0
        open_ways.append(ways)
    return None


def _next(ways: int, links: Sequence[int], free: int, tight: bool) -> int:
    """The most preferred, or, where few may be left behind, the one with the fewest ways on."""
    if not tight:
        return (ways & -ways).bit_length() - 1
    some = [one for one, _ in zip(bits(ways), range(_LOOKED_AT), strict=False)]
    return min(some, key=lambda one: (links[one] & free).bit_count())


def _distances(start: int, links: Sequence[int], part: int, most: int) -> list[int]:
    """[d]: the set of those within d links of the start."""
    within = [1 << start]
    front = 1 << start
    while len(within) <= most and front:
        reached = 0
        for one in bits(front):
            reached |= links[one]
        front = reached & part & ~within[-1]
        within.append(within[-1] | front)
    return within
