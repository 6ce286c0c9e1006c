"""Round trips that are longer than they should be: a node's, a link's, or those between groups.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pichak_coordinator.link_compare import Others, best_of, links_of
from pichak_coordinator.links import LinkMatrix, Pair, number, unordered
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.records import Finding
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number


def delay_findings(matrix: LinkMatrix) -> list[NetFinding]:
    """By each link's shortest exchange: a busy host lengthens many of them, a long way all."""
    times: dict[Pair, float] = {}
    for pair, reading in matrix.rtt.items():
        if number(reading) is not None and isinstance(reading, Measurement):
            shortest = reading.detail.get("min_ms", reading.value)
            if isinstance(shortest, (int, float)):
                times[pair] = float(shortest)
    best = best_of(times, lambda pair: pair, min)
    nodes = Others(best)
    found: list[NetFinding] = []
    blamed: set[str] = set()
    for node, own in best.items():
        if links_of(node, times) < 2:
            continue
        against = nodes.delay(node)
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
    best = best_of(rest, lambda pair: pair, min)
    over = {pair: time - max(best[pair[0]], best[pair[1]]) for pair, time in rest.items()}
    links = Others(over)
    accused: list[NetFinding] = []
    for pair in over:
        base = max(best[pair[0]], best[pair[1]])
        against = links.delay(pair, base)
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
