"""The links and all-reduces that a store holds of a fleet, by the nodes' identities.

A profile tests links at its end and ``pichak net`` alone; a pick takes the newest reading of each
pair, from whichever run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pichak_coordinator.ingest import read_outcome
from pichak_coordinator.links import number, unordered
from pichak_coordinator.net_collective import BUS, points_of
from pichak_coordinator.net_jobs import metric_name, names_of
from pichak_coordinator.records import Row
from pichak_coordinator.ring_time import Link
from pichak_coordinator.store_read import Reader
from pichak_core.measure._collective_math import Point, predicted_seconds
from pichak_core.measurement import Fingerprint, Measurement

#: How many of the newest runs are looked at for links.
_RUNS = 30


@dataclass(frozen=True)
class Reduced:
    """An all-reduce that was measured over `nodes`, rank 0 first, in the run `run`."""

    nodes: tuple[str, ...]
    points: tuple[Point, ...]
    run: str

    def seconds(self, gradient_bytes: int) -> tuple[float, str] | None:
        """(seconds, how that is known) of one of a gradient's size; None where it is too far from
        what was measured."""
        try:
            return predicted_seconds(self.points, gradient_bytes)
        except ValueError:
            return None


@dataclass(frozen=True)
class StoredLinks:
    """What is known of the links: `links` by unordered pair of identities, `reduced` by the set of
    nodes. A pair whose reading is suspect, or of which a part is missing, is not among them."""

    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    reduced: Mapping[frozenset[str], Reduced] = field(default_factory=dict)

    def between(self, one: str, other: str) -> Link | None:
        """The link of two nodes, None where it was not measured."""
        return self.links.get(unordered(one, other))


def stored_links(store: Reader, nodes: Sequence[str]) -> StoredLinks:
    """The newest link of each pair of these nodes, and the newest all-reduce of each set of them,
    from the last `_RUNS` runs."""
    wanted = set(nodes)
    links: dict[tuple[str, str], Link] = {}
    reduced: dict[frozenset[str], Reduced] = {}
    for run in store.runs(_RUNS):
        found = _links_of(store, run.run, wanted)
        for pair, link in found.links.items():
            links.setdefault(pair, link)
        for members, made in found.reduced.items():
            reduced.setdefault(members, made)
    return StoredLinks(links, reduced)


def _links_of(store: Reader, run: str, wanted: set[str]) -> StoredLinks:
    jobs = store.jobs(run)
    # Job ids of a test sort in the order of its nodes.
    tested = [job.node for job in jobs if job.kind == "net_listen"]
    if len(tested) < 2 or not wanted & set(tested):
        return StoredLinks()
    rows = {row.node.node: row for row in store.rows_of(run, tested)}
    present = [node for node in tested if node in rows]
    if len(present) < len(tested):
        return StoredLinks()
    peers = peers_of(tested, rows)
    links: dict[tuple[str, str], Link] = {}
    # A link that was looked at again has two jobs; their ids sort in the order of the looks.
    for job in (job for job in jobs if job.kind == "net_link" and job.node in wanted):
        data = store.outcome_bytes(job.job_id, 1)
        if data is None:
            continue
        parts = read_outcome(data)
        readings = parts.fingerprint
        for peer in {name.split(".")[1] for name in readings if name.count(".") == 2}:
            server = peers.get(peer)
            link = _link(readings, peer, run, parts.outcome.simulated)
            if link is not None and server in wanted and server != job.node:
                links[unordered(job.node, server)] = link
    ranks = [job for job in jobs if job.kind == "collective"]
    made = _reduced([job.node for job in ranks], rows, run)
    whole = made is not None and all(job.state == "done" for job in ranks)
    return StoredLinks(links, {frozenset(made.nodes): made} if made and whole else {})


def peers_of(tested: Sequence[str], rows: Mapping[str, Row]) -> dict[str, str]:
    """What a peer is called in the names of readings -> its identity."""
    places = [(rows[node].node.host, rows[node].node.address) for node in tested]
    names = [metric_name(name) for name in names_of(places)]
    return {name: node for name, node in zip(names, tested, strict=True) if names.count(name) == 1}


def _link(readings: Fingerprint, peer: str, run: str, simulated: bool) -> Link | None:
    parts = [
        number(readings.get(f"network.{peer}.{part}"))
        for part in ("send_mb_s", "receive_mb_s", "rtt_ms")
    ]
    send, receive, rtt = parts
    if send is None or receive is None or rtt is None or min(send, receive) <= 0 or rtt < 0:
        return None
    how = "simulated, no machine was measured:" if simulated else "measured"
    return Link(min(send, receive), rtt, f"{how} in {run}, the slower direction")


def _reduced(nodes: Sequence[str], rows: Mapping[str, Row], run: str) -> Reduced | None:
    if len(nodes) < 2 or nodes[0] not in rows:
        return None
    reading = rows[nodes[0]].fingerprint.get(BUS)
    if not isinstance(reading, Measurement) or reading.suspect:
        return None
    points = points_of(reading)
    return Reduced(tuple(nodes), points, run) if points else None
