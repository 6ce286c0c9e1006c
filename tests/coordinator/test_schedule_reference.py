"""What begins now against the rule taken literally: everybody that is due, in order, one by one."""

from __future__ import annotations

import math
import random

import pytest

from pichak_coordinator.schedule import HOUR, Charge, Depth, Entry, Policy, decide
from pichak_coordinator.timetable import QuietHours

NOW = 1_790_000_000.0


def drawn(
    seed: int,
) -> tuple[Policy, list[Entry], list[Charge], list[str]]:
    draw = random.Random(seed)
    policy = Policy(
        longest_seconds={"light": 60.0, "full": 90.0},
        budget_seconds=draw.choice([None, 600.0, 1800.0, 6000.0]),
        spread=draw.random() < 0.7,
        quiet=draw.choice([None, None, QuietHours.parse("22-06"), QuietHours.parse("0-24:00")]),
        most_at_once=draw.choice([1, 4, 64]),
    )
    entries = []
    for number in range(draw.choice([3, 40, 200])):
        due: dict[Depth, float] = {
            "light": NOW + draw.uniform(-900, 300),
            "full": NOW + draw.uniform(-900, 9000),
        }
        again: Depth | None = draw.choice(["light", "full"]) if draw.random() < 0.1 else None
        entries.append(Entry(f"n-{number}", due, devices=draw.choice([1, 1, 4]), again=again))
    charges = [
        Charge(NOW - draw.uniform(0, 5000), draw.choice([8.0, 60.0]))
        for _ in range(draw.randrange(30))
    ]
    running = [e.node for e in entries if draw.random() < 0.03]
    return policy, entries, charges, running


@pytest.mark.parametrize("seed", range(60))
def test_who_begins_is_whom_the_rule_names(seed: int) -> None:
    policy, entries, charges, running = drawn(seed)
    made = decide(policy, entries, charges, running, NOW)

    def begun(within: float) -> float:
        return sum(c.seconds for c in charges if c.started > NOW - within)

    budget = policy.budget_seconds
    left = math.inf if budget is None else budget - begun(HOUR)
    share = math.inf
    if budget is not None and policy.spread:
        share = budget * 5 / 6 / 6 - begun(600.0)
    due = [
        (e.again is None, -math.inf if e.again else min(e.due.values()), e.node, e)
        for e in entries
        if e.node not in running and (e.again or min(e.due.values()) <= NOW)
    ]
    expected: list[tuple[str, Depth, float]] = []
    waiting = 0
    for regular, _, node, entry in sorted(due, key=lambda d: d[:3]):
        if len(running) + len(expected) >= policy.most_at_once:
            break
        depth: Depth = entry.again or ("full" if entry.due["full"] <= NOW else "light")
        cost = policy.longest_seconds[depth] * entry.devices
        if policy.quiet is not None and policy.quiet.ends_after(NOW, cost) is not None:
            continue
        if waiting or cost > left or (regular and share <= 0):
            waiting += 1
            continue
        left, share = left - cost, share - cost
        expected.append((node, depth, cost))
    assert [(p.node, p.depth, p.longest_seconds) for p in made.probes] == expected
    assert made.waiting_for_budget == waiting
    assert made.look_again > NOW or waiting or len(expected) + len(running) >= policy.most_at_once
