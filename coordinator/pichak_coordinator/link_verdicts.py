"""What is wrong with a fleet's links: readings in, findings out. Pure.

Blame goes where the evidence points. A node whose links are *all* bad in one direction is named
itself, and its links are not; a link is named when both of its ends do better elsewhere; two groups
of nodes that are far from each other are told as such and accuse nobody. Nodes are compared by the
best of their links (the fastest rate, the shortest round trip), which a bad neighbour cannot spoil;
links by what their two ends can do:

    rate:        r(s→t) / min(best sent by s, best received by t), against the fleet's median
    round trip:  t(a, b) − max(best of a, best of b), against the fleet's median

Both use the median and MAD with a floor, and leave the judged one out. Two nodes are never compared
with each other; what is absolute (a connection that cannot be opened, loss, two directions that
differ, a NAT) holds for two as well. A finding seen once is suspected; `confirmed` marks those that
a second probe saw again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pichak_coordinator.link_reach import reach_findings
from pichak_coordinator.links import LinkMatrix, Pair, number, unordered
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.records import Confidence, Finding
from pichak_core.measurement import MAD_TO_SIGMA, Measurement
from pichak_core.plan import format_number

#: A rate below the others' by less than this accuses nobody: TCP over one kind of link scatters.
RATE_FLOOR = 0.25
#: A round trip above the others' by less than this many ms (or this share) accuses nobody.
DELAY_FLOOR_MS = 1.0
DELAY_FLOOR_SHARE = 0.5
SIGMAS = 3.0
#: Lost at a quarter of the link's own rate: a share that a healthy wire does not reach by far.
LOSS_PERCENT = 0.1
LOSS_SEGMENTS = 3
#: The slower direction of a link at less than this share of the faster one is told.
ASYMMETRY = 0.6
#: Fewer others than this are few to compare with.
_FEW = 5


def judge_links(matrix: LinkMatrix) -> list[NetFinding]:
    """Every finding of one probe, the worst first."""
    found = reach_findings(matrix)
    delays = _delays(matrix)
    losses = _losses(matrix)
    slow = _rates(matrix)
    reasons = _explained([*delays, *losses])
    found += delays + losses
    found += [told for each in slow if (told := _with_reason(each, reasons)) is not None]
    found += _asymmetries(matrix, [*delays, *losses, *slow])
    return sorted(found, key=lambda each: (each.finding.order, each.nodes))


def confirmed(
    first: Sequence[NetFinding], second: Sequence[NetFinding], both: Sequence[NetFinding]
) -> list[NetFinding]:
    """The findings of the first probe that the second saw again.

    Told with the figures of `both` probes together, where they are a finding of these too (the
    second probe looks at some links only), else with the second's.
    """
    told = {each.key: each for each in [*second, *both]}
    again = {each.key for each in second}
    return [
        replace(told[each.key], finding=replace(told[each.key].finding, state="confirmed"))
        for each in first
        if each.key in again
    ]


def to_look_at_again(
    findings: Sequence[NetFinding], matrix: LinkMatrix, most_links: int = 4
) -> list[Pair]:
    """The links of a second probe: each accused link, and of an accused node up to `most_links`."""
    pairs: dict[Pair, None] = {}
    for each in findings:
        if each.link is not None:
            pairs[unordered(*each.link)] = None
        elif len(each.nodes) == 1:
            for pair in matrix.measured_links(each.nodes[0])[:most_links]:
                pairs[pair] = None
    return list(pairs)


@dataclass(frozen=True)
class _Against:
    """A value against others: how much worse it is than their median, and the limit of that."""

    value: float
    median: float
    others: int
    excess: float
    limit: float

    @property
    def bad(self) -> bool:
        return self.excess > self.limit

    @property
    def confidence(self) -> Confidence:
        return "normal" if self.others >= _FEW else "low"

    def evidence(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "median_of_others": self.median,
            "others": self.others,
            "excess": self.excess,
            "limit": self.limit,
        }


def _rate_against(value: float, others: Sequence[float]) -> _Against | None:
    """Shares of the others' median; None for fewer than two others."""
    if len(others) < 2:
        return None
    middle, sigma = _median_and_sigma(others)
    if middle <= 0:
        return None
    limit = max(RATE_FLOOR, SIGMAS * sigma / middle)
    return _Against(value, middle, len(others), (middle - value) / middle, limit)


def _delay_against(value: float, others: Sequence[float], base: float = 0.0) -> _Against | None:
    """Milliseconds over the others' median; `base` is what the share of the floor is taken of."""
    if len(others) < 2:
        return None
    middle, sigma = _median_and_sigma(others)
    limit = max(DELAY_FLOOR_MS, DELAY_FLOOR_SHARE * max(base, middle), SIGMAS * sigma)
    return _Against(value, middle, len(others), value - middle, limit)


def _median_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    middle = statistics.median(values)
    return middle, MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


# -- round trips ----------------------------------------------------------------------------------


def _delays(matrix: LinkMatrix) -> list[NetFinding]:
    """By each link's shortest exchange: a busy host lengthens many of them, a long way all."""
    times: dict[Pair, float] = {}
    for pair, reading in matrix.rtt.items():
        if number(reading) is not None and isinstance(reading, Measurement):
            shortest = reading.detail.get("min_ms", reading.value)
            if isinstance(shortest, (int, float)):
                times[pair] = float(shortest)
    best = _best(times, lambda pair: pair, min)
    found: list[NetFinding] = []
    blamed: set[str] = set()
    for node, own in best.items():
        if _links_of(node, times) < 2:
            continue
        against = _delay_against(own, [v for other, v in best.items() if other != node])
        if against is not None and against.bad:
            blamed.add(node)
            sentence = (
                f"every link of {node} takes {format_number(own)} ms or more for a round trip; the "
                f"other nodes reach a neighbour in {format_number(against.median)} ms (median): "
                f"about {format_number(against.excess)} ms are added"
            )
            finding = Finding(
                "node_network_delay",
                "warn",
                sentence,
                against.evidence(),
                confidence=against.confidence,
                metric="network.rtt_ms",
            )
            found.append(NetFinding((node,), finding))
    rest = {pair: time for pair, time in times.items() if blamed.isdisjoint(pair)}
    best = _best(rest, lambda pair: pair, min)
    over = {pair: time - max(best[pair[0]], best[pair[1]]) for pair, time in rest.items()}
    accused: list[NetFinding] = []
    for pair, excess in over.items():
        base = max(best[pair[0]], best[pair[1]])
        against = _delay_against(excess, [v for p, v in over.items() if p != pair], base)
        if against is not None and against.bad:
            a, b = pair
            sentence = (
                f"a round trip between {a} and {b} takes {format_number(rest[pair])} ms at best; "
                f"both reach another node in {format_number(base)} ms or less"
            )
            evidence = {**against.evidence(), "rtt_min_ms": rest[pair], "best_elsewhere_ms": base}
            finding = Finding(
                "link_delay",
                "warn",
                sentence,
                evidence,
                confidence=against.confidence,
                metric=f"network.{a}-{b}.rtt_ms",
            )
            accused.append(NetFinding(pair, finding, pair))
    return found + _grouped(accused, rest)


def _grouped(accused: list[NetFinding], measured: Mapping[Pair, float]) -> list[NetFinding]:
    """Accused links that are just the ways between groups of nodes become one note about these."""
    bad = {unordered(*each.link) for each in accused if each.link}
    groups = _components([pair for pair in measured if pair not in bad])
    where = {node: index for index, group in enumerate(groups) for node in group}
    across = {p for p in measured if where.get(p[0], -1) != where.get(p[1], -2)}
    if len(bad) < 2 or bad != across or len(groups) < 2 or min(map(len, groups)) < 2:
        return accused
    nearest = min(measured[pair] for pair in bad)
    listed = " and ".join(f"[{', '.join(group)}]" for group in groups)
    finding = Finding(
        "network_groups",
        "info",
        f"the nodes form {len(groups)} groups, {format_number(nearest)} ms or more apart: {listed}",
        {"groups": [list(group) for group in groups], "rtt_min_ms": nearest},
        metric="network.rtt_ms",
    )
    return [NetFinding(tuple(sorted(where)), finding)]


def _components(edges: Sequence[Pair]) -> list[list[str]]:
    groups: list[set[str]] = []
    for edge in edges:
        touched = [group for group in groups if not group.isdisjoint(edge)]
        groups = [group for group in groups if group.isdisjoint(edge)]
        groups.append(set(edge).union(*touched))
    return sorted(sorted(group) for group in groups)


# -- loss -----------------------------------------------------------------------------------------


def _losses(matrix: LinkMatrix) -> list[NetFinding]:
    shares: dict[Pair, float] = {}
    bad: dict[Pair, float] = {}
    for direction, reading in matrix.loss.items():
        share = number(reading)
        if share is None or not isinstance(reading, Measurement):
            continue
        shares[direction] = share
        if share >= LOSS_PERCENT and int(reading.detail.get("lost", 0)) >= LOSS_SEGMENTS:
            bad[direction] = share
    found: list[NetFinding] = []
    for side, verb in ((0, "sends"), (1, "receives")):
        for node in matrix.nodes:
            all_of_it = [d for d in shares if d[side] == node]
            if len(all_of_it) < 2 or not all(d in bad for d in all_of_it):
                continue
            lost = [bad[d] for d in all_of_it]
            for direction in all_of_it:
                del bad[direction]
                del shares[direction]
            sentence = (
                f"{format_number(min(lost))} to {format_number(max(lost))} % of what {node} {verb} "
                f"is lost on all of {len(lost)} links, at a quarter of their rate"
            )
            finding = Finding(
                "node_network_loss",
                "warn",
                sentence,
                {"percent": lost, "side": verb, "limit_percent": LOSS_PERCENT},
                metric=f"network.{verb}_loss_percent",
            )
            found.append(NetFinding((node,), finding))
    for (source, target), share in bad.items():
        sentence = (
            f"{format_number(share)} % of what {source} sends to {target} is lost, at a quarter of "
            "the link's rate"
        )
        finding = Finding(
            "link_loss",
            "warn",
            sentence,
            {"percent": share, "limit_percent": LOSS_PERCENT},
            metric=f"network.{source}-{target}.loss_percent",
        )
        found.append(NetFinding((source, target), finding, (source, target)))
    return found


# -- rates ----------------------------------------------------------------------------------------


def _rates(matrix: LinkMatrix) -> list[NetFinding]:
    rates = {d: r for d, reading in matrix.rate.items() if (r := number(reading)) is not None}
    found: list[NetFinding] = []
    for side, verb, preposition in ((0, "sends", "to"), (1, "receives", "from")):
        best = _best(rates, _at(side), max)
        for node, own in best.items():
            links = sum(direction[side] == node for direction in rates)
            against = _rate_against(own, [v for other, v in best.items() if other != node])
            if links < 2 or against is None or not against.bad:
                continue
            sentence = (
                f"{node} {verb} at {format_number(own)} MB/s or less {preposition} all of {links} "
                f"nodes; the other nodes do at up to {format_number(against.median)} MB/s (median)"
            )
            finding = Finding(
                "node_network_slow",
                "warn",
                sentence,
                {**against.evidence(), "side": verb},
                confidence=against.confidence,
                metric=f"network.{verb}_mb_s",
            )
            found.append(NetFinding((node,), finding))
    sent, taken = _best(rates, _at(0), max), _best(rates, _at(1), max)
    expected = {d: min(sent[d[0]], taken[d[1]]) for d in rates}
    ratios = {d: rates[d] / expected[d] for d in rates if expected[d] > 0}
    for direction, ratio in ratios.items():
        against = _rate_against(ratio, [v for d, v in ratios.items() if d != direction])
        if against is None or not against.bad:
            continue
        source, target = direction
        sentence = (
            f"{source} sends to {target} at {format_number(rates[direction])} MB/s; with other "
            f"nodes both reach {format_number(expected[direction])} MB/s"
        )
        evidence = {
            **against.evidence(),
            "mb_s": rates[direction],
            "expected_mb_s": expected[direction],
        }
        finding = Finding(
            "link_slow",
            "warn",
            sentence,
            evidence,
            confidence=against.confidence,
            metric=f"network.{source}-{target}.mb_s",
        )
        found.append(NetFinding(direction, finding, direction))
    return found


def _asymmetries(matrix: LinkMatrix, known: Sequence[NetFinding]) -> list[NetFinding]:
    """Links whose directions differ for a reason that no finding has named."""
    nodes = {each.nodes[0] for each in known if each.link is None and len(each.nodes) == 1}
    links = {unordered(*each.link) for each in known if each.link is not None}
    found: list[NetFinding] = []
    for a, b in matrix.links:
        there, back = matrix.rate.get((a, b)), matrix.rate.get((b, a))
        to_b, to_a = number(there), number(back)
        if to_b is None or to_a is None or {a, b} & nodes or (a, b) in links:
            continue
        slower, faster = min(to_a, to_b), max(to_a, to_b)
        noise = SIGMAS * sum(r.spread or 0.0 for r in (there, back) if isinstance(r, Measurement))
        if slower >= ASYMMETRY * faster or faster - slower <= noise:
            continue
        source, target = (a, b) if to_b < to_a else (b, a)
        sentence = (
            f"{source} sends to {target} at {format_number(slower)} MB/s, {target} to {source} at "
            f"{format_number(faster)} MB/s"
        )
        evidence = {"slower_mb_s": slower, "faster_mb_s": faster, "noise_mb_s": noise}
        finding = Finding(
            "link_asymmetric",
            "warn",
            sentence,
            evidence,
            metric=f"network.{source}-{target}.mb_s",
        )
        found.append(NetFinding((source, target), finding, (source, target)))
    return found


def _explained(findings: Sequence[NetFinding]) -> dict[str, str]:
    """Node -> the finding of delay or loss that slows TCP on its links."""
    return {
        each.nodes[0]: each.finding.code
        for each in findings
        if each.link is None and len(each.nodes) == 1
    }


def _with_reason(each: NetFinding, reasons: Mapping[str, str]) -> NetFinding | None:
    """A low rate of a node whose delay or loss may explain it is a note; one of its links, nothing:
    the links of such a node scatter."""
    why = next((reasons[node] for node in each.nodes if node in reasons), None)
    if why is None:
        return each
    if each.link is not None:
        return None
    what = "delay" if why == "node_network_delay" else "loss"
    sentence = f"{each.finding.sentence}; the {what} found there may explain it"
    return replace(each, finding=replace(each.finding, severity="info", sentence=sentence))


def _best(
    values: Mapping[Pair, float],
    nodes_of: Callable[[Pair], tuple[str, ...]],
    better: Callable[[float, float], float],
) -> dict[str, float]:
    """Node -> the best value among those that count for it."""
    made: dict[str, float] = {}
    for pair, value in values.items():
        for node in nodes_of(pair):
            made[node] = better(made[node], value) if node in made else value
    return made


def _at(side: int) -> Callable[[Pair], tuple[str, ...]]:
    """The node at one side of a direction: 0 sends, 1 receives."""
    return lambda direction: (direction[side],)


def _links_of(node: str, values: Mapping[Pair, float]) -> int:
    return sum(node in pair for pair in values)
