"""Who can open a connection to whom, and by which addresses: answers in, findings out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pichak_coordinator.links import LinkMatrix, Reach
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.records import Finding


def reach_findings(matrix: LinkMatrix) -> list[NetFinding]:
    """Connections that cannot be opened, and NATs. Nothing here is relative: two nodes suffice."""
    return _closed(matrix) + _translated(matrix)


def _closed(matrix: LinkMatrix) -> list[NetFinding]:
    shut = {pair: reach for pair, reach in matrix.reach.items() if not reach.open}
    found: list[NetFinding] = []
    for node in matrix.nodes:
        towards = [r for pair, r in matrix.reach.items() if pair[1] == node]
        away = [r for pair, r in matrix.reach.items() if pair[0] == node]
        none_in = len(towards) > 1 and not any(r.open for r in towards)
        none_out = len(away) > 1 and not any(r.open for r in away)
        if not none_in and not none_out:
            continue
        for reach in (towards if none_in else []) + (away if none_out else []):
            shut.pop((reach.client, reach.server), None)
        found.append(_node(node, towards, away, none_in=none_in, none_out=none_out))
    for (client, server), reach in shut.items():
        back = matrix.reach.get((server, client))
        tail = ""
        if back is not None:
            can = "can" if back.open else "cannot either"
            tail = f"; {server} {can} open one to {client}"
        finding = Finding(
            "link_unreachable",
            "fail",
            f"{client} cannot open a connection to {server} ({reach.why}){tail}",
            {"why": reach.why, "two_way": back is not None and not back.open},
            metric=f"network.{client}-{server}.reach",
        )
        found.append(NetFinding((client, server), finding, (client, server)))
    return found


def _node(
    node: str, towards: Sequence[Reach], away: Sequence[Reach], *, none_in: bool, none_out: bool
) -> NetFinding:
    if none_in and none_out:
        sentence = f"{node} is cut off: no node can open a connection to it, nor it to any"
        metric, why = "network.reach", _reasons(towards)
    elif none_in:
        outward = sum(reach.open for reach in away)
        sentence = (
            f"none of {len(towards)} nodes can open a connection to {node} ({_reasons(towards)}); "
            f"it can open one to {outward} of {len(away)}: unreachable in one direction"
        )
        metric, why = "network.reach_in", _reasons(towards)
    else:
        inward = sum(reach.open for reach in towards)
        sentence = (
            f"{node} can open a connection to none of {len(away)} nodes ({_reasons(away)}); "
            f"{inward} of {len(towards)} can open one to it: reachable in one direction only"
        )
        metric, why = "network.reach_out", _reasons(away)
    return NetFinding(
        (node,), Finding("node_unreachable", "fail", sentence, {"why": why}, metric=metric)
    )


def _reasons(reaches: Sequence[Reach]) -> str:
    return "; ".join(dict.fromkeys(r.why for r in reaches if not r.open))


def _translated(matrix: LinkMatrix) -> list[NetFinding]:
    found: list[NetFinding] = []
    for node in matrix.nodes:
        sent = [r for pair, r in matrix.reach.items() if pair[0] == node and r.open]
        asked = [r for pair, r in matrix.reach.items() if pair[1] == node and r.open]
        foreign = [r for r in asked if not r.target_is_local]
        changed = [r for r in sent if r.translated]
        if not foreign and not changed:
            continue
        parts = []
        if foreign:
            parts.append(f"its address {foreign[0].target} is on none of its interfaces")
        if changed:
            seen = ", ".join(sorted({r.seen_as for r in changed}))
            whom = "every node" if len(changed) == len(sent) else f"{len(changed)} nodes"
            parts.append(f"{whom} sees it as {seen} while it uses {changed[0].local}")
        finding = Finding(
            "address_behind_nat",
            "warn",
            f"{node} is behind a NAT: {' and '.join(parts)}; all-reduce libraries need one address "
            "by which every node knows the other",
            {
                "advertised": foreign[0].target if foreign else "",
                "local": sorted({r.local for r in changed}),
                "seen_as": sorted({r.seen_as for r in changed}),
            },
            metric="network.address",
        )
        found.append(NetFinding((node,), finding))
    return found
