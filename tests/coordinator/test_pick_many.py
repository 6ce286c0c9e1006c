"""A team's predicted pace against its closed form, and what is told instead of assumed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pichak_coordinator.members import gradient_of, members_of, rows_of_step
from pichak_coordinator.pick_many import CannotPickError, Wish, pick_many
from pichak_coordinator.prices import NO_PRICES, PriceBook
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.ring_time import Link
from pichak_coordinator.stored_links import Reduced, StoredLinks
from pichak_coordinator.team import Team
from pichak_core.measure._collective_math import Point
from pichak_core.measurement import Unmeasured
from pichak_core.plan import CONSTANT, Plan, Value

MIB = 2**20
FAULT = Finding("computes_differently", "fail", "wrong bits", state="confirmed")
DOUBT = Finding("slower_than_peers", "warn", "slow disk")


def row(name: str, seconds: float = 1.0, batch: int = 4, **more: Any) -> Row:
    """`batch` rows of 100 scored tokens in `seconds`; a step of 24 rows; 8 MiB of gradient."""
    plan = Plan().set("micro_batch", batch, "ramp").set("seconds_per_step", seconds, "timed")
    plan.set("scored_tokens_per_second", batch * 100 / seconds, "timed", unit="scored tokens/s")
    plan.set("target_tokens", more.pop("target", 2400.0), "noise scale")
    if more.pop("counted", True):
        plan.set("gradient_bytes", 8 * MIB, "counted", unit="bytes")
    host = more.pop("host", name)
    device = more.pop("device", "cpu")
    return Row(NodeRecord(f"id-{host}", host, device=device), plan=plan, **more)


def mesh(*names: str, mb_s: float = 100.0, rtt_ms: float = 0.0, **other: float) -> StoredLinks:
    """All pairs alike, but those of `other`: ``a_b=10.0``."""
    links = {}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            rate = other.get(f"{a}_{b}", mb_s)
            links[f"id-{a}", f"id-{b}"] = Link(rate, rtt_ms, "measured")
    return StoredLinks(links)


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


def ramp(**seconds: float) -> dict[str, Any]:
    tried = [
        {"batch": int(size[1:]), "seconds": 2 * time, "verdict": "ok"}
        for size, time in seconds.items()
    ]
    tried.append({"batch": 3, "seconds": 0.002, "verdict": "slow"})
    return {"passes": 2, "tried": tried}


def test_a_rest_is_charged_as_the_smallest_size_that_ran_and_holds_it() -> None:
    """13 rows in micro-batches of 8 s: one of 8 and 5 left. Sizes 2, 6 ran in 0.3 and 0.7 s of one
    pass; a size that did not pass is not believed."""
    (member,), _ = members_of([row("a", 1.0, 8, ramp=ramp(b2=0.3, b6=0.7))])
    assert member.step_seconds(8) == 1.0
    assert member.step_seconds(13) == pytest.approx(1.7)
    assert member.step_seconds(2) == pytest.approx(0.3)
    assert member.step_seconds(3) == pytest.approx(0.7)
    assert member.step_seconds(7) == 1.0
    assert member.step_seconds(26) == pytest.approx(3.3)
    assert member.describe(13) == (
        "13 rows: 1 × 1 s for micro-batches of 8 + 0.7 s for the last 5, as long as 6 took in the "
        "ramp"
    )
    (single,), _ = members_of([row("a", 1.5, 1)])
    assert single.describe(1) == "1 row: 1 × 1.5 s for micro-batches of 1"
    # A rest never costs more than a whole one.
    (slow,), _ = members_of([row("a", 1.0, 8, ramp=ramp(b2=5.0))])
    assert slow.step_seconds(1) == 1.0
    (bare,), _ = members_of([row("a", 1.0, 8, ramp={"tried": [{"batch": "x"}, 3]})])
    assert bare.step_seconds(9) == 2.0


def test_rows_of_a_step() -> None:
    members, _ = members_of([row("a", target=2400.0), row("b", target=2410.0), row("c")])
    found = rows_of_step(members)
    assert found is not None
    assert found == 24
    assert found.measured
    given = rows_of_step(members, 7)
    assert given is not None
    assert given == 7
    assert not given.measured
    bare = Row(
        NodeRecord("n"),
        plan=Plan()
        .set("micro_batch", 2, "ramp")
        .set("seconds_per_step", 1.0, "timed")
        .set("tokens_per_second", 100.0, "timed", unit="tokens/s"),
    )
    found_members, _ = members_of([bare])
    assert rows_of_step(found_members) is None
    assert gradient_of(found_members) is None
    with pytest.raises(CannotPickError, match="--batch-rows"):
        pick_many([bare], StoredLinks(), NO_PRICES, Wish(1))


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
