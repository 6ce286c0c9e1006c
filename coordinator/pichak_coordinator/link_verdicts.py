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

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pichak_coordinator.link_compare import SIGMAS, Others, at_side, best_of
from pichak_coordinator.link_delays import delay_findings
from pichak_coordinator.link_losses import loss_findings
from pichak_coordinator.link_reach import reach_findings
from pichak_coordinator.links import LinkMatrix, Pair, number, unordered
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.records import Finding
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number

#: The slower direction of a link at less than this share of the faster one is told.
ASYMMETRY = 0.6


def judge_links(matrix: LinkMatrix) -> list[NetFinding]:
    """Every finding of one probe, the worst first."""
    found = reach_findings(matrix)
    delays = delay_findings(matrix)
    losses = loss_findings(matrix)
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


def _rates(matrix: LinkMatrix) -> list[NetFinding]:
    rates = {d: r for d, reading in matrix.rate.items() if (r := number(reading)) is not None}
    found: list[NetFinding] = []
    for side, verb, preposition in ((0, "sends", "to"), (1, "receives", "from")):
        best = best_of(rates, at_side(side), max)
        nodes = Others(best)
        for node, own in best.items():
            links = sum(direction[side] == node for direction in rates)
            against = nodes.rate(node)
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
    sent, taken = best_of(rates, at_side(0), max), best_of(rates, at_side(1), max)
    expected = {d: min(sent[d[0]], taken[d[1]]) for d in rates}
    ratios = {d: rates[d] / expected[d] for d in rates if expected[d] > 0}
    directions = Others(ratios)
    for direction in ratios:
        against = directions.rate(direction)
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
