"""Which links are tested together, and who is blamed: from fleets whose faults are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pichak_coordinator.link_verdicts import confirmed, judge_links, to_look_at_again
from pichak_coordinator.links import (
    ALL_UP_TO,
    SAMPLED_ROUNDS,
    LinkMatrix,
    Reach,
    into_rounds,
    schedule,
    tournament,
    unordered,
)
from pichak_coordinator.netfinding import NetFinding
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

# -- rounds ---------------------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return [f"h{i:03d}" for i in range(1, count + 1)]


def no_node_twice(rounds: list[list[tuple[str, str]]]) -> bool:
    return all(len({n for pair in r for n in pair}) == 2 * len(r) for r in rounds)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 33, 100])
def test_a_tournament_has_every_pair_once_and_no_node_twice_in_a_round(count: int) -> None:
    nodes = names(count)
    rounds = tournament(nodes)
    pairs = [unordered(*pair) for r in rounds for pair in r]
    assert sorted(pairs) == sorted(itertools.combinations(nodes, 2))
    assert no_node_twice(rounds)
    # n − 1 rounds are the least for an even n, n for an odd one.
    assert len([r for r in rounds if r]) == (0 if count < 2 else count - 1 + count % 2)


@pytest.mark.parametrize("count", [4, 5, 8, 33])
def test_each_node_opens_about_as_many_links_as_it_answers(count: int) -> None:
    opened = dict.fromkeys(names(count), 0)
    for client, _ in (pair for r in tournament(names(count)) for pair in r):
        opened[client] += 1
    middle = (count - 1) / 2
    assert all(abs(n - middle) <= max(2.0, 0.4 * middle) for n in opened.values())


@pytest.mark.parametrize("count", [4, 5, 6, 7, 12, 31])
def test_a_ring_gives_each_node_its_two_neighbours(count: int) -> None:
    nodes = names(count)
    rounds = schedule(nodes, "ring")
    pairs = {unordered(*pair) for r in rounds for pair in r}
    assert pairs == {unordered(nodes[i], nodes[(i + 1) % count]) for i in range(count)}
    assert no_node_twice(rounds)
    assert len(rounds) == 2 + count % 2


def test_a_large_fleet_is_sampled_and_each_node_is_in_as_many_tests() -> None:
    nodes = names(40)
    rounds = schedule(nodes)
    assert no_node_twice(rounds)
    assert len(rounds) == SAMPLED_ROUNDS
    counts = [sum(node in pair for r in rounds for pair in r) for node in nodes]
    assert counts == [SAMPLED_ROUNDS] * 40
    assert schedule(nodes, seed=1) != rounds
    assert len([p for r in schedule(nodes, "all") for p in r]) == 40 * 39 // 2
    assert len([p for r in schedule(names(ALL_UP_TO)) for p in r]) == ALL_UP_TO * 11 // 2


def test_two_nodes_of_one_name_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="one name"):
        schedule(["a", "a", "b"])


def test_any_pairs_fit_into_rounds() -> None:
    draw = random.Random(3)
    every = list(itertools.combinations(names(9), 2))
    for _ in range(50):
        pairs = draw.sample(every, draw.randint(0, len(every)))
        rounds = into_rounds(pairs)
        assert no_node_twice(rounds)
        assert sorted(p for r in rounds for p in r) == sorted(pairs)


# -- fleets ---------------------------------------------------------------------------------------

Direction = Callable[[str, str], float]


def measured(name: str, value: float, unit: str, **detail: Any) -> Measurement:
    return Measurement(name, value, unit, "made", samples=15, spread=0.01 * value, detail=detail)


def fleet(
    nodes: list[str],
    rate: Direction = lambda _s, _t: 118.0,
    trip: Direction = lambda _a, _b: 0.1,
    loss: Direction = lambda _s, _t: 0.0,
    closed: Callable[[str, str], bool] = lambda _c, _s: False,
    noise: float = 0.0,
    seed: int = 0,
) -> LinkMatrix:
    """Every link measured: MB/s, ms and percent from the functions, rates within ± `noise`."""
    draw = random.Random(seed)

    def noisy(value: float) -> float:
        return value * (1 + noise * draw.uniform(-1, 1))

    matrix = LinkMatrix(tuple(nodes))
    for a, b in itertools.combinations(nodes, 2):
        readings = Fingerprint()
        trips = noisy(trip(a, b))
        readings.add(measured("network.b.rtt_ms", 2 * trips, "ms", min_ms=trips, p95_ms=3 * trips))
        for part, source, target in (("send", a, b), ("receive", b, a)):
            readings.add(measured(f"network.b.{part}_mb_s", noisy(rate(source, target)), "MB/s"))
            share = loss(source, target)
            readings.add(
                measured(f"network.b.{part}_loss_percent", share, "%", lost=round(20 * share))
            )
        matrix = matrix.with_link(a, b, readings)
        matrix = matrix.with_reach(
            Reach(c, s, not closed(c, s), "no answer within 5 s" if closed(c, s) else "")
            for c, s in ((a, b), (b, a))
        )
    return matrix


def blamed(matrix: LinkMatrix, notes: bool = False) -> set[tuple[str, tuple[str, ...]]]:
    found = judge_links(matrix)
    return {(f.finding.code, f.nodes) for f in found if notes or f.finding.severity != "info"}


@pytest.mark.parametrize("count", [2, 3, 4, 8, 20])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_fleet_accuses_nobody(count: int, seed: int) -> None:
    assert blamed(fleet(names(count), noise=0.1, seed=seed), notes=True) == set()


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_node_that_sends_slowly_is_blamed_and_none_of_its_links(count: int) -> None:
    slow = fleet(names(count), rate=lambda s, _: 11.9 if s == "h002" else 118.0, noise=0.05)
    assert blamed(slow, notes=True) == {("node_network_slow", ("h002",))}
    (found,) = judge_links(slow)
    assert "h002 sends at" in found.finding.sentence
    assert found.finding.confidence == ("normal" if count > 5 else "low")


def test_a_node_that_receives_slowly_is_blamed_for_that() -> None:
    slow = fleet(names(6), rate=lambda _, t: 11.9 if t == "h002" else 118.0)
    (found,) = judge_links(slow)
    assert found.nodes == ("h002",)
    assert "h002 receives at" in found.finding.sentence


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_single_slow_link_is_blamed_and_neither_of_its_nodes(count: int) -> None:
    slow = fleet(
        names(count), rate=lambda s, t: 12.0 if (s, t) == ("h001", "h002") else 118.0, noise=0.05
    )
    assert blamed(slow, notes=True) == {("link_slow", ("h001", "h002"))}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_one_node_of_a_few_that_is_a_fifth_slower(count: int) -> None:
    # field case 103: fleets of 2, 3 and 8; a fifth is within what links of one kind scatter.
    slower = fleet(names(count), rate=lambda s, t: 94.0 if "h001" in (s, t) else 118.0)
    assert blamed(slower, notes=True) == set()


def at(rate: float) -> Direction:
    return lambda _source, _target: rate


def test_two_nodes_accuse_neither_whatever_their_speed() -> None:
    # field case 103
    for rate in (1.0, 118.0, 12_000.0):
        assert blamed(fleet(names(2), rate=at(rate))) == set()
    assert blamed(fleet(names(2), trip=lambda _a, _b: 250.0)) == set()


def test_two_directions_that_differ_are_told_of_two_nodes_too() -> None:
    lopsided = fleet(names(2), rate=lambda s, _: 11.2 if s == "h001" else 125.0)
    (found,) = judge_links(lopsided)
    assert (found.finding.code, found.nodes) == ("link_asymmetric", ("h001", "h002"))
    assert "11.2 MB/s" in found.finding.sentence


def test_directions_within_the_noise_are_not_asymmetric() -> None:
    readings = Fingerprint()
    for part, value in (("send", 50.0), ("receive", 110.0)):
        readings.add(
            Measurement(f"network.b.{part}_mb_s", value, "MB/s", "made", samples=9, spread=20.0)
        )
    assert blamed(LinkMatrix(("a", "b")).with_link("a", "b", readings)) == set()


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_far_node_is_blamed_and_none_of_its_links(count: int) -> None:
    far = fleet(names(count), trip=lambda a, b: 30.1 if "h002" in (a, b) else 0.1, noise=0.3)
    assert blamed(far, notes=True) == {("node_network_delay", ("h002",))}


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_single_far_link_is_blamed_and_neither_of_its_nodes(count: int) -> None:
    far = fleet(names(count), trip=lambda a, b: 30.1 if (a, b) == ("h001", "h002") else 0.1)
    assert blamed(far, notes=True) == {("link_delay", ("h001", "h002"))}


@pytest.mark.parametrize("left", range(2, 9))
def test_two_sites_are_two_groups_and_nobody_is_accused(left: int) -> None:
    nodes = names(10)
    site = {node: index < left for index, node in enumerate(nodes)}
    two = fleet(nodes, trip=lambda a, b: 0.2 if site[a] == site[b] else 25.0, noise=0.1)
    assert blamed(two) == set()
    for each in judge_links(two):
        assert each.finding.code == "network_groups"
        assert sorted(map(len, each.finding.evidence["groups"])) == sorted([left, 10 - left])


def test_a_busy_host_whose_exchanges_are_late_now_and_then_is_not_far() -> None:
    """Its median is long and its shortest is not."""
    matrix = fleet(names(6))
    slow = {
        pair: measured("rtt_ms", 9.0 if "h001" in pair else 0.2, "ms", min_ms=0.1)
        for pair in matrix.rtt
    }
    assert blamed(LinkMatrix(matrix.nodes, matrix.reach, slow, matrix.rate, matrix.loss)) == set()


@pytest.mark.parametrize("side", [0, 1])
def test_a_lossy_node_is_blamed_for_its_side(side: int) -> None:
    lossy = fleet(names(5), loss=lambda s, t: 2.0 if (s, t)[side] == "h003" else 0.0)
    (found,) = judge_links(lossy)
    assert (found.finding.code, found.nodes) == ("node_network_loss", ("h003",))
    assert ("sends", "receives")[side] in found.finding.sentence


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_lossy_direction_is_blamed_alone(count: int) -> None:
    lossy = fleet(names(count), loss=lambda s, t: 2.0 if (s, t) == ("h001", "h002") else 0.0)
    assert blamed(lossy, notes=True) == {("link_loss", ("h001", "h002"))}


def test_one_lost_segment_is_an_accident() -> None:
    assert blamed(fleet(names(4), loss=lambda s, _: 0.12 if s == "h001" else 0.0)) == set()


def test_a_low_rate_where_much_is_lost_is_a_note() -> None:
    lossy = fleet(
        names(6),
        rate=lambda s, _: 40.0 if s == "h003" else 118.0,
        loss=lambda s, _: 2.0 if s == "h003" else 0.0,
    )
    assert blamed(lossy) == {("node_network_loss", ("h003",))}
    assert ("node_network_slow", ("h003",)) in blamed(lossy, notes=True)


def test_everything_at_once_is_told_apart() -> None:
    nodes = names(7)
    ill = fleet(
        nodes,
        rate=lambda s, _: 11.9 if s == "h002" else 118.0,
        trip=lambda a, b: 30.1 if "h003" in (a, b) else 0.1,
        loss=lambda s, _: 2.0 if s == "h004" else 0.0,
        closed=lambda _, s: s == "h005",
        noise=0.05,
    )
    assert blamed(ill, notes=True) == {
        ("node_network_slow", ("h002",)),
        ("node_network_delay", ("h003",)),
        ("node_network_loss", ("h004",)),
        ("node_unreachable", ("h005",)),
    }


def test_a_fleet_of_a_hundred_with_every_pair_is_judged_and_its_slow_node_named() -> None:
    # 4,950 links; one node sends slowly, one link is slow.
    big = fleet(
        names(100),
        rate=lambda s, t: 11.9 if s == "h042" or (s, t) == ("h001", "h002") else 118.0,
        noise=0.1,
    )
    assert blamed(big, notes=True) == {
        ("node_network_slow", ("h042",)),
        ("link_slow", ("h001", "h002")),
    }


def test_a_suspect_rate_judges_nothing_and_is_not_judged() -> None:
    matrix = fleet(names(6))
    way = ("h001", "h002")
    wrong = Measurement("x", 9e6, "MB/s", "made", suspect="faster than its card")
    spoiled = LinkMatrix(
        matrix.nodes, matrix.reach, matrix.rtt, {**matrix.rate, way: wrong}, matrix.loss
    )
    assert blamed(spoiled, notes=True) == set()


# -- who reaches whom -----------------------------------------------------------------------------


def test_a_link_that_opens_one_way_says_which_way() -> None:
    shut = fleet(names(2), closed=lambda c, _: c == "h001")
    (found,) = judge_links(shut)
    assert found.finding.code == "link_unreachable"
    assert found.finding.sentence == (
        "h001 cannot open a connection to h002 (no answer within 5 s); h002 can open one to h001"
    )


def test_a_node_that_nobody_reaches_is_one_finding() -> None:
    (found,) = judge_links(fleet(names(5), closed=lambda _, s: s == "h004"))
    assert (found.finding.code, found.nodes) == ("node_unreachable", ("h004",))
    assert "none of 4 nodes can open a connection to h004" in found.finding.sentence
    assert "it can open one to 4 of 4: unreachable in one direction" in found.finding.sentence


def test_a_node_that_reaches_nobody_is_one_finding() -> None:
    (found,) = judge_links(fleet(names(5), closed=lambda c, _: c == "h004"))
    assert "h004 can open a connection to none of 4 nodes" in found.finding.sentence
    assert "4 of 4 can open one to it" in found.finding.sentence


def test_a_node_that_is_cut_off_is_one_finding() -> None:
    (found,) = judge_links(fleet(names(5), closed=lambda c, s: "h004" in (c, s)))
    assert "h004 is cut off" in found.finding.sentence


def test_a_single_closed_way_accuses_the_link() -> None:
    assert blamed(fleet(names(5), closed=lambda c, s: (c, s) == ("h001", "h004"))) == {
        ("link_unreachable", ("h001", "h004"))
    }


def reached(client: str, server: str, **changes: Any) -> Reach:
    parts: dict[str, Any] = {"local": f"10.0.0.{client[-1]}", "target": f"10.0.0.{server[-1]}"}
    parts["seen_as"] = parts["local"]
    return Reach(client, server, True, **{**parts, **changes})


def test_a_nat_between_two_nodes_is_noticed() -> None:
    nodes = names(3)
    matrix = LinkMatrix(tuple(nodes)).with_reach(
        reached(c, s, **({"seen_as": "203.0.113.9"} if c == "h002" else {}))
        for c, s in itertools.permutations(nodes, 2)
    )
    (found,) = judge_links(matrix)
    assert (found.finding.code, found.nodes) == ("address_behind_nat", ("h002",))
    assert "every node sees it as 203.0.113.9 while it uses 10.0.0.2" in found.finding.sentence


def test_an_address_that_is_not_the_nodes_own_is_noticed() -> None:
    matrix = LinkMatrix(("h001", "h002")).with_reach(
        [reached("h001", "h002", target="203.0.113.9", target_is_local=False)]
    )
    (found,) = judge_links(matrix)
    assert found.nodes == ("h002",)
    assert "203.0.113.9 is on none of its interfaces" in found.finding.sentence


@pytest.mark.parametrize(
    "record", [None, [], {"open": "yes"}, {"open": True, "place": 3}, {"why": "x"}]
)
def test_an_answer_that_is_none_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match="h001"):
        Reach.from_job("h001", "h002", record)


# -- the second look ------------------------------------------------------------------------------


def test_only_what_is_seen_twice_is_confirmed() -> None:
    nodes = names(6)
    ill = fleet(nodes, rate=lambda s, _: 11.9 if s == "h002" else 118.0)
    both = fleet(
        nodes,
        rate=lambda s, t: 11.9 if s == "h002" or (s, t) == ("h004", "h005") else 118.0,
    )
    first, again = judge_links(both), judge_links(ill)
    sure = confirmed(first, again, again)
    assert [(f.finding.code, f.nodes, f.finding.state) for f in sure] == [
        ("node_network_slow", ("h002",), "confirmed")
    ]
    assert all(f.finding.state == "suspected" for f in first)


def test_the_second_look_goes_to_what_is_accused() -> None:
    nodes = names(8)
    matrix = fleet(
        nodes, rate=lambda s, t: 9.0 if s == "h002" or (s, t) == ("h004", "h005") else 118.0
    )
    pairs = to_look_at_again(judge_links(matrix), matrix)
    assert ("h004", "h005") in pairs
    assert sum("h002" in pair for pair in pairs) == 4
    assert len(pairs) == 5


def test_the_second_look_judges_with_its_own_readings_of_the_accused() -> None:
    """A node that was slow once is not kept guilty by the links that were not looked at again."""
    nodes = names(6)
    first = fleet(nodes, rate=lambda s, _: 11.9 if s == "h002" else 118.0)
    pairs = to_look_at_again(judge_links(first), first)
    stale = [p for p in first.links if "h002" in p]
    second = first.without(stale)
    assert not second.measured_links("h002")
    healthy = fleet(nodes)
    for a, b in pairs:
        readings = Fingerprint()
        for part, way in (("send", (a, b)), ("receive", (b, a))):
            readings.add(measured(f"network.x.{part}_mb_s", _value(healthy.rate[way]), "MB/s"))
        readings.add(measured("network.x.rtt_ms", 0.2, "ms", min_ms=0.1))
        second = second.with_link(a, b, readings)
    assert judge_links(second) == []


def _value(reading: Any) -> float:
    assert isinstance(reading, Measurement)
    return float(reading.value)


# -- the record -----------------------------------------------------------------------------------


def test_what_was_not_measured_says_so_and_what_was_not_asked_too() -> None:
    matrix = LinkMatrix(("a", "b", "c")).with_gap("b", "a", Reason.LOST, "a: the node died")
    links: Mapping[str, Any] = {f"{r['a']}{r['b']}": r for r in matrix.as_dicts()}
    assert set(links) == {"ab", "ac", "bc"}
    for name in ("rtt_ms", "a_to_b_mb_s", "b_to_a_mb_s", "a_to_b_loss_percent"):
        assert links["ab"][name] == {"unmeasured": "lost", "detail": "a: the node died"}
        assert links["ac"][name]["unmeasured"] == "not asked for"
    assert matrix.skipped() == [("a", "c"), ("b", "c")]


def test_directions_are_not_swapped() -> None:
    readings = Fingerprint()
    readings.add(measured("network.a.send_mb_s", 10.0, "MB/s"))
    readings.add(measured("network.a.receive_mb_s", 20.0, "MB/s"))
    (link,) = LinkMatrix(("a", "b")).with_link("b", "a", readings).as_dicts()
    # b is the client: what it sends goes from b to a.
    assert link["b_to_a_mb_s"]["value"] == 10.0
    assert link["a_to_b_mb_s"]["value"] == 20.0


def test_a_gap_of_one_part_leaves_the_others() -> None:
    matrix = fleet(names(3))
    readings = Fingerprint()
    readings.add(Unmeasured("network.x.send_mb_s", Reason.FAILED, "the ends disagree"))
    matrix = matrix.with_link("h001", "h002", readings)
    assert isinstance(matrix.rate["h001", "h002"], Unmeasured)
    assert isinstance(matrix.rate["h002", "h001"], Measurement)
    assert blamed(matrix) == set()


def test_findings_have_keys_that_tell_directions_apart() -> None:
    keys = {
        NetFinding(pair, finding.finding, pair).key
        for pair in (("a", "b"), ("b", "a"))
        for finding in judge_links(fleet(names(3), loss=lambda *_: 2.0))
    }
    assert len(keys) > 1
