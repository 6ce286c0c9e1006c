"""The pick: right by brute force, honest about ties, faults, prices and gaps."""

from __future__ import annotations

import random

import pytest

from pichak_coordinator.pick import pick
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan

EXACT = {"seconds_per_step": 1.0, "seconds_spread": 0.0}
FAULT = Finding("computes_differently", "fail", "wrong bits", state="confirmed")


def row(name: str, speed: float | None = None, *, scored: bool = True, **more) -> Row:
    plan = None
    if speed is not None:
        key, unit = ("scored_tokens_per_second", "scored tokens/s")
        if not scored:
            key, unit = ("tokens_per_second", "tokens/s")
        plan = Plan().set(key, float(speed), "timed", unit=unit)
    more.setdefault("ramp", EXACT)
    return Row(NodeRecord(name, name.upper()), plan=plan, **more)


def test_the_fastest() -> None:
    found = pick([row("a", 1000), row("b", 1500), row("c", 900)])
    assert (found.node, found.tokens_per_second, found.by) == ("b", 1500, "speed")
    assert found.sentence == "Pick B: 1,500 scored tokens/s, 50% faster than A."
    assert found.as_dict()["why"] == found.sentence


def test_against_brute_force() -> None:
    rng = random.Random(7)
    for _ in range(200):
        size = rng.randrange(1, 9)
        speeds = {f"n{i}": rng.uniform(100, 10000) for i in range(size)}
        prices = {name: rng.uniform(0.1, 9) for name in speeds}
        rows = [row(name, speed) for name, speed in speeds.items()]
        assert pick(rows).node == max(speeds, key=speeds.__getitem__)
        cheapest = min(speeds, key=lambda n: prices[n] / speeds[n])
        found = pick(rows, prices=prices)
        assert (found.node, found.by) == (cheapest, "cost")
        cost = prices[cheapest] / (speeds[cheapest] * 3600) * 1e6
        assert found.cost_per_million == pytest.approx(cost)
        assert pick(rows, prices=prices, by="speed").node == max(speeds, key=speeds.__getitem__)


def test_the_order_of_the_rows_does_not_matter() -> None:
    rng = random.Random(9)
    rows = [row(f"n{i}", 1000.0 + i % 3, ramp=None) for i in range(12)]
    answers = set()
    for _ in range(20):
        rng.shuffle(rows)
        answers.add(pick(rows).sentence)
    assert len(answers) == 1


def test_a_tie_goes_to_the_lower_risk_and_says_so() -> None:
    """Spread 2 % of three timings is 1.45 % of standard error each; two of both are 4.1 %."""
    ramp = {"seconds_per_step": 1.0, "seconds_spread": 0.02}
    odd = Finding("slower_than_peers", "warn", "slow disk")
    fast = row("fast", 1030, ramp=ramp, findings=(odd,))
    clean = row("clean", 1000, ramp=ramp)
    found = pick([fast, clean])
    assert found.node == "clean"
    assert found.tied == ("FAST",)
    assert "as good as FAST within the noise, and with less against it" in found.sentence
    # 5 % are more than this noise: then the faster one is picked, suspicion or not.
    assert pick([row("fast", 1050, ramp=ramp, findings=(odd,)), clean]).node == "fast"
    # Between equals without anything against them, the faster.
    assert pick([row("fast", 1030, ramp=ramp), clean]).node == "fast"


def test_suspect_values_are_a_risk() -> None:
    odd = Fingerprint()
    odd.add(Measurement("disk.read_mb_s", 1e9, "MB/s", "s", suspect="page cache"))
    assert pick([row("a", 1000, fingerprint=odd), row("b", 1000)]).node == "b"


def test_without_a_known_noise_five_percent_is_a_tie() -> None:
    odd = Finding("small_shm", "warn", "64 MB", state="confirmed")
    second = row("b", 1000, ramp=None)
    assert pick([row("a", 1040, ramp=None, findings=(odd,)), second]).node == "b"
    assert pick([row("a", 1060, ramp=None, findings=(odd,)), second]).node == "a"


def test_a_confirmed_fault_is_passed_over_and_named() -> None:
    found = pick([row("bad", 2000, findings=(FAULT,)), row("good", 1000)])
    assert (found.node, found.passed_over) == ("good", ("BAD",))
    assert "passed over for a confirmed fault: BAD (computes_differently)" in found.sentence
    suspected = Finding("computes_differently", "fail", "wrong bits")
    assert pick([row("bad", 2000, findings=(suspected,)), row("good", 1000)]).node == "bad"


def test_a_fault_is_never_picked_silently() -> None:
    found = pick([row("bad", 2000, findings=(FAULT,)), row("dead", error="the node died")])
    assert found.node == "bad"
    assert "beware, it has a confirmed fault itself: computes_differently" in found.sentence
    assert "only one" in found.sentence


def test_nothing_measured_is_said() -> None:
    assert pick([]).node is None
    assert "no node answered" in pick([]).sentence
    found = pick([row("a"), row("b", error="the node died")])
    assert found.node is None
    assert found.sentence == (
        "Nothing to pick from: no node's training speed was measured (1 of 2 failed)."
    )


def test_scored_and_processed_tokens_are_never_compared() -> None:
    assert pick([row("a", 1000), row("b", 9000, scored=False)]).node == "a"
    found = pick([row("a", 1000, scored=False), row("b", 9000, scored=False)])
    assert (found.node, found.scored) == ("b", False)
    assert "9,000 tokens/s" in found.sentence
    # A price per token needs the scored ones.
    priced = pick([row("b", 9000, scored=False)], prices={"b": 1.0})
    assert priced.cost_per_million is None


def test_rows_without_a_price_cannot_win_by_cost() -> None:
    found = pick([row("a", 1000), row("b", 5000)], prices={"A": 3.6})
    assert (found.node, found.by) == ("a", "cost")
    assert found.cost_per_million == pytest.approx(1.0)  # 3.6 $ buy 3.6 M tokens
    assert "$1 per million scored tokens" in found.sentence
    assert "1 without a price left out" in found.sentence
    with pytest.raises(ValueError, match="has a price"):
        pick([row("a", 1000)], by="cost")
    # Prices for others only: speed decides.
    assert pick([row("a", 1000), row("b", 5000)], prices={"elsewhere": 1.0}).by == "speed"
