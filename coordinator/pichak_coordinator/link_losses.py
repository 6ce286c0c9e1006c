"""What is lost on links that are not full: of a node, or in one direction of a link. Pure."""

from __future__ import annotations

from pichak_coordinator.links import LinkMatrix, Pair, number
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.records import Finding
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number

#: Lost at a quarter of the link's own rate: a share that a healthy wire does not reach by far.
LOSS_PERCENT = 0.1
LOSS_SEGMENTS = 3


def loss_findings(matrix: LinkMatrix) -> list[NetFinding]:
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
