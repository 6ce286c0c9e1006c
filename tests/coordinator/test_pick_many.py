"""A team's predicted pace against its closed form, and what is told instead of assumed."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from pick_rows import MIB, mesh, ramp, row

from pichak_coordinator.pick_many import CannotPickError, Wish, pick_many
from pichak_coordinator.prices import NO_PRICES, PriceBook
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.ring_time import Link
from pichak_coordinator.stored_links import Reduced, StoredLinks
from pichak_coordinator.team import Team
from pichak_core.measure._collective_math import Point
from pichak_core.measurement import Unmeasured
from pichak_core.plan import CONSTANT, Value

FAULT = Finding("computes_differently", "fail", "wrong bits", state="confirmed")
DOUBT = Finding("slower_than_peers", "warn", "slow disk")


def hosts(team: Team) -> list[str]:
    return sorted(member.row.node.host for member in team.members)


def number(figure: Value | Unmeasured) -> float:
    assert isinstance(figure, Value), figure
    return float(figure)


def test_the_prediction_in_closed_form() -> None:
    """24 rows over 3 are 8 each: 2 micro-batches of 4. The slowest takes 2 × 1.5 s. The ring's
    4 steps of 8 MiB ÷ 3 at 50 MB/s, and 2 ms of latency each. 2,400 tokens a step."""
    rows = [row("a"), row("b", 1.5), row("c", 0.5)]
    team = pick_many(rows, mesh(*"abc", mb_s=50.0, rtt_ms=4.0), NO_PRICES, Wish(3))
    reduce = 4 * (0.002 + 8 * MIB / 3 / 50e6)
    assert team.rows_each == 8
    assert number(team.compute_seconds) == pytest.approx(3.0)
    assert number(team.reduce_seconds) == pytest.approx(reduce)
    assert number(team.step_seconds) == pytest.approx(3.0 + reduce)
    assert number(team.tokens_per_second) == pytest.approx(2400 / (3.0 + reduce))
    assert team.bottleneck.startswith("b: its own part takes 3 s, the next slowest's (a) 2 s")
    assert "slowest member, b: 8 rows: 2 × 1.5 s" in team.compute_seconds.source
    assert team.gap == 0
    assert team.constants == ()
    assert isinstance(team.step_seconds, Value)
    assert team.step_seconds.measured
    json.dumps(team.as_dict(), allow_nan=False)


def test_the_node_behind_a_slow_link_is_left_out_though_it_is_the_fastest() -> None:
    rows = [row("a"), row("b", 1.1), row("c", 1.2), row("d", 0.5)]
    links = mesh(*"abcd", a_d=1.0, b_d=1.0, c_d=1.0)
    assert hosts(pick_many(rows, links, NO_PRICES, Wish(3))) == ["a", "b", "c"]
    # Without much to send it is the best of them.
    light = Wish(3, gradient_bytes=1000)
    assert "d" in hosts(pick_many(rows, links, NO_PRICES, light))
    four = pick_many(rows, links, NO_PRICES, Wish(4))
    assert four.bottleneck.startswith("the network: the all-reduce is ")
    assert "– d" in four.bottleneck or "d –" in four.bottleneck
    # Two of those at 1 MB/s are slower than the fastest alone.
    pair = pick_many([rows[0], rows[3]], links, NO_PRICES, Wish(2))
    assert any("d alone is faster" in note for note in pair.notes)


def test_one_device_reduces_nothing() -> None:
    team = pick_many([row("a"), row("b", 0.5)], StoredLinks(), NO_PRICES, Wish(1))
    assert hosts(team) == ["b"]
    assert number(team.reduce_seconds) == 0
    assert number(team.tokens_per_second) == pytest.approx(800)


def test_links_that_were_not_measured_are_told_and_not_assumed() -> None:
    rows = [row("a"), row("b", 1.1), row("c", 1.2)]
    team = pick_many(rows, StoredLinks(), NO_PRICES, Wish(2))
    assert hosts(team) == ["a", "b"]
    assert isinstance(team.step_seconds, Unmeasured)
    assert isinstance(team.tokens_per_second, Unmeasured)
    # 24 rows over 2 are 12 each, 3 × 1.1 s.
    assert "at most 727.3 tokens/s" in team.tokens_per_second.detail
    assert any("pichak net --pairs all" in note for note in team.notes)
    # Of measured links a slower team is made before a faster one of unknown ones.
    assert hosts(pick_many(rows, mesh("b", "c"), NO_PRICES, Wish(2))) == ["b", "c"]


def test_sets_without_measured_links_are_left_out_and_that_is_said() -> None:
    """Three fast ones with a link between two of them: the only ring of measured links of three
    goes over the slow ones; 4 of the 10 pairs are known."""
    rows = [row(name, seconds) for name, seconds in zip("abcde", (1, 1, 1, 5, 6), strict=True)]
    links = mesh("c", "d", "e").links | mesh("a", "b").links
    known = "of the 10 pairs among the 5 machines that could be picked, 4 have a measured link"
    team = pick_many(rows, StoredLinks(links), NO_PRICES, Wish(3))
    assert hosts(team) == ["c", "d", "e"]
    assert team.compared == "measured_links"
    assert team.gap == 0
    (note,) = (note for note in team.notes if note.startswith(known))
    for word in ("left out", "pichak net --pairs all", "--assume-link-mbit"):
        assert word in note
    record = team.as_dict()
    assert record["compared"] == "measured_links"
    assert record["link_pairs"] == {"machines": 5, "pairs": 10, "measured": 4}
    # Assumed links leave no set out; who that concerns is said.
    wish = Wish(3, assumed=Link(50.0, 0.0, f"{CONSTANT}: given", measured=False))
    assumed = pick_many(rows, StoredLinks(links), NO_PRICES, wish)
    assert hosts(assumed) == ["a", "b", "c"]
    assert assumed.compared == "every_set"
    assert any(note.startswith(known) and "for the others" in note for note in assumed.notes)
    # No ring of measured links at all: by their own parts alone, and one note says so.
    four = pick_many(rows, StoredLinks(links), NO_PRICES, Wish(4))
    assert four.compared == "own_parts"
    assert len([note for note in four.notes if known in note]) == 1
    # One device needs no link; nor is one said where all were measured. Who may not be picked, and
    # links to them, are not counted.
    one = pick_many(rows, StoredLinks(links), NO_PRICES, Wish(1))
    assert one.compared == "every_set"
    assert one.as_dict()["link_pairs"] is None
    assert not any("measured link" in note for note in one.notes)
    whole = pick_many(rows, StoredLinks(links), NO_PRICES, Wish(2, without=frozenset("ab")))
    assert whole.compared == "every_set"
    assert whole.as_dict()["link_pairs"] == {"machines": 3, "pairs": 3, "measured": 3}
    assert not any("measured link" in note for note in whole.notes)
    single = pick_many(rows[:2], StoredLinks(), NO_PRICES, Wish(2))
    text = "of the 1 pair among the 2 machines that could be picked, 0 have"
    assert any(text in note for note in single.notes)


def test_an_assumed_link_is_a_constant_and_listed() -> None:
    rows = [row("a"), row("b")]
    assumed = Link(12.5, 0.0, f"{CONSTANT}: --assume-link-mbit 100", measured=False)
    team = pick_many(rows, StoredLinks(), NO_PRICES, Wish(2, assumed=assumed))
    assert number(team.reduce_seconds) == pytest.approx(8 * MIB / 12.5e6)
    assert isinstance(team.step_seconds, Value)
    assert not team.step_seconds.measured
    ((name, value),) = team.constants
    assert name == "link a – b"
    assert value == 12.5
    # What was measured goes before what is assumed.
    measured = pick_many(rows, mesh("a", "b"), NO_PRICES, Wish(2, assumed=assumed))
    assert number(measured.reduce_seconds) == pytest.approx(8 * MIB / 100e6)
    assert measured.constants == ()


def test_a_gradient_that_nobody_counted() -> None:
    rows = [row("a", counted=False), row("b", counted=False)]
    team = pick_many(rows, mesh("a", "b"), NO_PRICES, Wish(2))
    assert isinstance(team.reduce_seconds, Unmeasured)
    assert any("--gradient-mib" in note for note in team.notes)
    given = pick_many(rows, mesh("a", "b"), NO_PRICES, Wish(2, gradient_bytes=10**8))
    assert number(given.reduce_seconds) == pytest.approx(1.0)
    assert [name for name, _ in given.constants] == ["gradient_bytes"]


def test_an_all_reduce_that_was_measured_over_just_these_goes_before_the_model() -> None:
    rows = [row("a"), row("b"), row("c", 9.0)]
    points = (Point(4 * MIB, 0.3, None, 5), Point(16 * MIB, 1.2, None, 5))
    links = mesh(*"abc")
    made = Reduced(("id-a", "id-b"), points, "20260101T0000")
    links = StoredLinks(links.links, {frozenset(made.nodes): made})
    team = pick_many(rows, links, NO_PRICES, Wish(2))
    # Half-way on the line between the points: 0.3 + 0.9 × 4/12.
    assert number(team.reduce_seconds) == pytest.approx(0.6)
    assert isinstance(team.reduce_seconds, Value)
    assert "20260101T0000" in team.reduce_seconds.source
    three = pick_many(rows, links, NO_PRICES, Wish(3))
    assert number(three.reduce_seconds) == pytest.approx(4 / 3 * 8 * MIB / 100e6)


def test_confirmed_faults_are_never_picked_silently_and_doubts_are_told() -> None:
    rows = [row("bad", 0.1, findings=(FAULT,)), row("odd", findings=(DOUBT,)), row("ok")]
    links = mesh("bad", "ok", "odd")
    team = pick_many(rows, links, NO_PRICES, Wish(2))
    assert hosts(team) == ["odd", "ok"]
    assert any(s.startswith("bad: a confirmed fault: computes_differently") for s in team.left_out)
    assert any("odd is not above suspicion: slower_than_peers" in note for note in team.notes)
    with pytest.raises(CannotPickError, match=r"2 of 3 can be picked.*--allow-fault"):
        pick_many(rows, links, NO_PRICES, Wish(3))
    for name in ("bad", "id-bad", "all"):
        team = pick_many(rows, links, NO_PRICES, Wish(3, allow=frozenset({name})))
        assert any(note.startswith("beware: bad has a confirmed fault") for note in team.notes)
    team = pick_many(rows, links, NO_PRICES, Wish(1, without=frozenset({"odd"})))
    assert hosts(team) == ["ok"]
    assert any("odd: left out as asked" in s for s in team.left_out)


def test_the_cheapest_team_per_token() -> None:
    """a and b: 3 s a step at 2.0 an hour; c and d: 6 s at 0.5. A million tokens is 416.7 steps."""
    rows = [row("a"), row("b"), row("c", 2.0), row("d", 2.0), row("e", 0.1)]
    book = PriceBook(hosts={"a": 1.0, "b": 1.0, "c": 0.25, "d": 0.25})
    links = mesh(*"abcde", mb_s=1e9)
    team = pick_many(rows, links, book, Wish(2, by="cost"))
    assert hosts(team) == ["c", "d"]
    assert number(team.price_per_hour) == 0.5
    assert number(team.cost_per_million) == pytest.approx(1e6 / 2400 * 6 / 3600 * 0.5)
    assert isinstance(team.price_per_hour, Value)
    assert not team.price_per_hour.measured
    assert "host c" in team.price_per_hour.source
    assert any(s == "e: no price is given for it" for s in team.left_out)
    fast = pick_many(rows, links, book, Wish(1))
    assert hosts(fast) == ["e"]
    assert isinstance(fast.cost_per_million, Unmeasured)


def test_devices_of_one_machine_share_its_price_and_that_is_said() -> None:
    rows = [row(f"x{i}", host="x", device=f"cuda:{i}") for i in range(2)]
    rows += [row("y", 0.9, host="y", device="cuda:0")]
    book = PriceBook(hosts={"x": 3.0, "y": 2.0})
    team = pick_many(rows, StoredLinks(), book, Wish(2, by="cost"))
    assert hosts(team) == ["x", "x"]
    assert number(team.price_per_hour) == 3.0
    assert any("on one machine" in note and "not modelled" in note for note in team.notes)
    assert isinstance(team.reduce_seconds, Unmeasured)
    three = pick_many(rows, mesh("x", "y"), book, Wish(3))
    # The ring over two machines has one link; of three members each sends a third in 4 steps.
    assert number(three.reduce_seconds) == pytest.approx(4 * 8 * MIB / 3 / 100e6)
    assert number(three.price_per_hour) == 5.0


def test_a_device_is_priced_by_its_model_each() -> None:
    rows = [
        Row(
            NodeRecord("id-x", "x", device=f"cuda:{i}", gpu_model="H100", device_name="H100"),
            plan=row("x").plan,
        )
        for i in range(2)
    ]
    team = pick_many(rows, StoredLinks(), PriceBook(devices={"h100": 1.5}), Wish(2))
    assert number(team.price_per_hour) == 3.0


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_set_of_affine_members_is_that_of_brute_force(count: int) -> None:
    """Everyone's step takes f + c·b; the next larger size would say otherwise who is fastest."""
    rng = random.Random(count)
    for _ in range(10):
        names, laws, rows = "abcdefg", {}, []
        for name in names:
            fixed, each = rng.uniform(0, 0.2), rng.uniform(0.01, 0.03)
            low, whole = rng.randrange(2, 6), rng.randrange(12, 60)
            rungs = {f"b{low}": fixed + each * low}
            laws[name] = fixed, each
            rows.append(row(name, fixed + each * whole, whole, ramp=ramp(**rungs)))
        links = {
            (f"id-{a}", f"id-{b}"): Link(rng.uniform(50, 500), 0.0, "measured")
            for a, b in itertools.combinations(names, 2)
        }
        each_rows = 24 // count

        def step(ring: tuple[str, ...], laws: Any = laws, links: Any = links) -> float:
            pairs = [tuple(sorted(p)) for p in zip(ring, (*ring[1:], ring[0]), strict=True)]
            slowest = min(links[f"id-{a}", f"id-{b}"].mb_s for a, b in pairs)
            own = max(laws[name][0] + laws[name][1] * (24 // count) for name in ring)
            return own + 2 * (count - 1) / count * 8 * MIB / (slowest * 1e6)

        right = min(step(ring) for ring in itertools.permutations(names, count))
        team = pick_many(rows, StoredLinks(links), NO_PRICES, Wish(count))
        assert team.rows_each == each_rows
        assert number(team.step_seconds) == pytest.approx(right, rel=1e-9)
        assert team.compared == "every_set"


def test_what_was_not_measured_cannot_be_picked() -> None:
    rows = [row("a"), Row(NodeRecord("n-b", "b"), error="the node died"), Row(NodeRecord("n-c"))]
    with pytest.raises(CannotPickError, match=r"1 of 3 can be picked.*the node died"):
        pick_many(rows, StoredLinks(), NO_PRICES, Wish(2))
    with pytest.raises(CannotPickError, match="0 of 0"):
        pick_many([], StoredLinks(), NO_PRICES, Wish(1))


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = [row(name, 1.0 + 0.1 * (index % 3)) for index, name in enumerate("abcdefg")]
    links = mesh(*"abcdefg", a_b=20.0, c_d=20.0)
    right = pick_many(rows, links, NO_PRICES, Wish(4)).as_dict()
    for turn in (3, 5):
        again = pick_many(rows[turn:] + rows[:turn], links, NO_PRICES, Wish(4)).as_dict()
        assert again == right
