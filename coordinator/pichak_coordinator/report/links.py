"""The directions between a fleet's machines as the store knows them: the newest of each pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pichak_coordinator.ingest import read_outcome
from pichak_coordinator.links import Reach
from pichak_coordinator.net_jobs import reach_answers
from pichak_coordinator.records import JobRecord, Row, Run
from pichak_coordinator.store_read import Reader
from pichak_coordinator.stored_links import peers_of
from pichak_core.measurement import Measurement, Reading

#: How many of the newest runs are looked at for links.
RUNS = 30

State = Literal["measured", "suspect", "unreachable", "not measured"]
Way = tuple[str, str]


@dataclass(frozen=True)
class Direction:
    """From one machine to another: `mb_s` where it was measured, else `why` not.

    A direction is *unreachable* when its source cannot open a connection to its target and nothing
    was measured through a connection that the other side opened; `closed` says that its own
    connection cannot be opened, also where the rate is known. A pair that nobody asked for is no
    `Direction` at all.
    """

    state: State
    run: str
    mb_s: float | None = None
    rtt_ms: float | None = None
    why: str = ""
    closed: str = ""
    simulated: bool = False


@dataclass(frozen=True)
class Directions:
    """`ways` by (source, target) of identities; `runs` are the tests that they are from, the newest
    first, with the time of each."""

    ways: Mapping[Way, Direction] = field(default_factory=dict)
    runs: Mapping[str, float] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """Who took part in a test."""
        return list(dict.fromkeys(node for way in self.ways for node in way))


def directions(store: Reader, nodes: Sequence[str]) -> Directions:
    """The newest word on each direction between `nodes`, from the last `RUNS` runs."""
    wanted = set(nodes)
    ways: dict[Way, Direction] = {}
    runs: dict[str, float] = {}
    for run in store.runs(RUNS):
        for way, found in _of_run(store, run).items():
            if wanted.issuperset(way) and way not in ways:
                ways[way] = found
                runs[run.run] = run.started_unix
    return Directions(ways, runs)


def _of_run(store: Reader, run: Run) -> dict[Way, Direction]:
    jobs = store.jobs(run.run)
    tested = [job.node for job in jobs if job.kind == "net_listen"]
    if len(tested) < 2:
        return {}
    rows = {row.node.node: row for row in store.rows_of(run.run, tested)}
    if not rows.keys() >= set(tested):
        return {}  # names of peers cannot be told apart without all of them
    peers = peers_of(tested, rows)
    shut = _closed(store, jobs, peers, rows)
    ways: dict[Way, Direction] = {
        way: Direction("unreachable", run.run, why=why, closed=why) for way, why in shut.items()
    }
    # A link that was looked at again has two jobs; their ids sort in the order of the looks.
    for job in (job for job in jobs if job.kind == "net_link"):
        data = store.outcome_bytes(job.job_id, 1)
        if data is None:
            continue
        parts = read_outcome(data)
        readings = parts.fingerprint
        for peer in {name.split(".")[1] for name in readings if name.count(".") == 2}:
            server = peers.get(peer)
            if server is None or server == job.node:
                continue
            rtt = readings.get(f"network.{peer}.rtt_ms")
            for part, way in (
                ("send_mb_s", (job.node, server)),
                ("receive_mb_s", (server, job.node)),
            ):
                ways[way] = _direction(
                    run.run,
                    readings.get(f"network.{peer}.{part}"),
                    rtt,
                    shut.get(way, ""),
                    parts.outcome.simulated,
                )
    return ways


def _closed(
    store: Reader,
    jobs: Sequence[JobRecord],
    peers: Mapping[str, str],
    rows: Mapping[str, Row],
) -> dict[Way, str]:
    """(client, server) -> why no connection can be opened, as the last look has it."""
    shut: dict[Way, str] = {}
    for job in (job for job in jobs if job.kind == "net_reach"):
        data = store.outcome_bytes(job.job_id, 1)
        if data is None or job.node not in rows:
            continue
        for peer, answer in reach_answers(read_outcome(data).outcome.result).items():
            server = peers.get(peer)
            if server is None:
                continue
            try:
                reach = Reach.from_job(job.node, server, answer)
            except ValueError:
                continue  # the test refused it too, and said so
            shut.pop((job.node, server), None)
            if not reach.open:
                shut[job.node, server] = reach.why or "no connection could be opened"
    return shut


def _direction(
    run: str, rate: Reading | None, rtt: Reading | None, closed: str, simulated: bool
) -> Direction:
    trip = _number(rtt)
    if not isinstance(rate, Measurement):
        why = rate.describe() if rate is not None else "not measured"
        state: State = "unreachable" if closed else "not measured"
        return Direction(state, run, rtt_ms=trip, why=why, closed=closed, simulated=simulated)
    if rate.suspect:
        return Direction("suspect", run, None, trip, rate.suspect, closed, simulated)
    return Direction("measured", run, _number(rate), trip, "", closed, simulated)


def _number(reading: Reading | None) -> float | None:
    if not isinstance(reading, Measurement) or reading.suspect:
        return None
    return None if isinstance(reading.value, (bool, str)) else float(reading.value)
