"""An all-reduce over the nodes of a fleet: ranks started, one deadline for all, and a name for who
broke it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pichak_agent.messages import Job
from pichak_coordinator.cluster import Lease
from pichak_coordinator.links import LinkMatrix, number
from pichak_coordinator.net_desk import Desk, Finished
from pichak_coordinator.net_jobs import SLACK_SECONDS, NetNode, port_in
from pichak_core.measure import Depth
from pichak_core.measure._collective_math import Point, predicted_seconds, sizes_up_to
from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured

Backend = Literal["gloo", "nccl"]

BUS = "collective.bus_mb_s"
#: Seconds that the all-reduces may take.
SECONDS: dict[Depth, float] = {"quick": 15.0, "full": 60.0}
#: Until rank 0 listens: its process imports torch first.
STORE_SECONDS = 90.0
#: A rank that waits for the others, or inside an all-reduce, gives up after this.
RANK_SECONDS = 60.0
#: After one rank has failed, how long the others may take to say so.
_AFTER_FAILURE_SECONDS = 15.0


@dataclass
class Collective:
    """What an all-reduce gave: `reading` is the bus bandwidth or why there is none, `points` the
    curve, `gaps` a sentence for each node that was left out or that broke it."""

    nodes: tuple[str, ...]
    reading: Reading
    points: tuple[Point, ...] = ()
    backend: str = "gloo"
    gaps: list[str] = field(default_factory=list)

    def gradient_seconds(self, size_bytes: int) -> tuple[float, str] | None:
        """(seconds of an all-reduce of a gradient of this size, how that is known), or None."""
        if not self.points or (isinstance(self.reading, Measurement) and self.reading.suspect):
            return None
        try:
            return predicted_seconds(self.points, size_bytes)
        except ValueError:
            return None

    def as_dict(self, matrix: LinkMatrix, gradient_bytes: int) -> dict[str, Any]:
        """JSON-ready form."""
        predicted = self.gradient_seconds(gradient_bytes)
        slowest = slowest_link(matrix, self.nodes)
        return {
            "nodes": list(self.nodes),
            "backend": self.backend,
            "bus_mb_s": self.reading.as_dict(),
            "gradient_bytes": gradient_bytes,
            "gradient_seconds": predicted[0] if predicted else None,
            "slowest_link": {"from": slowest[0], "to": slowest[1], "mb_s": slowest[2]}
            if slowest
            else None,
            "gaps": list(self.gaps),
        }


def slowest_link(matrix: LinkMatrix, nodes: Sequence[str]) -> tuple[str, str, float] | None:
    """(from, to, MB/s) of the slowest measured direction between these nodes: no ring over them
    all-reduces faster than its slowest link."""
    rates = {
        direction: rate
        for direction, reading in matrix.rate.items()
        if set(direction) <= set(nodes) and (rate := number(reading)) is not None
    }
    if not rates:
        return None
    (source, target), rate = min(rates.items(), key=lambda item: item[1])
    return source, target, rate


def all_reduce(
    desk: Desk,
    nodes: Sequence[NetNode],
    *,
    gradient_bytes: int,
    depth: Depth = "quick",
    backend: Backend = "gloo",
    leases: Mapping[str, Lease] | None = None,
) -> Collective:
    """Run it over `nodes`, rank 0 on the first. Always returns within its deadlines.

    `leases` by node name are the GPUs that ``nccl`` ranks hold.
    """
    names = tuple(node.name for node in nodes)
    if len(nodes) < 2:
        why = "an all-reduce needs two nodes that can reach each other"
        return Collective(names, Unmeasured(BUS, Reason.NOT_ASKED, why), backend=backend)
    desk.say(f"{backend} all-reduce over {len(nodes)} nodes")
    shared = {
        "ranks": len(nodes),
        "store_address": nodes[0].node.address,
        "name": secrets.token_hex(16),
        "sizes": sizes_up_to(gradient_bytes),
        "seconds": SECONDS[depth],
        "backend": backend,
        "device": "cpu" if backend == "gloo" else "cuda:0",
        "timeout_seconds": RANK_SECONDS,
    }
    limit = SECONDS[depth] + 2 * RANK_SECONDS + SLACK_SECONDS

    def start(rank: int, node: NetNode, port: int) -> str:
        params = {**shared, "rank": rank, "address": node.node.address, "port": port}
        if leases is not None:
            params["visible_devices"] = leases[node.name].visible_devices
        # No lock: a rank that waited for another one's would wait for ever.
        job = Job(desk.job_id("all-reduce"), 1, "collective", params, limit, lock="")
        desk.submit(node, job)
        return job.job_id

    jobs = {start(0, nodes[0], 0): nodes[0]}
    done: dict[str, Finished] = {}
    port = _store_port(desk, next(iter(jobs)), done)
    if port:
        jobs |= {start(rank, node, port): node for rank, node in enumerate(nodes[1:], 1)}
        _wait(desk, jobs, done, limit)
    for job_id in jobs.keys() - done.keys():
        done[job_id] = desk.give_up(job_id, "it did not end in time")
    return _concluded(jobs, done, names, backend)


def _store_port(desk: Desk, job_id: str, done: dict[str, Finished]) -> int:
    end = desk.clock() + STORE_SECONDS
    while job_id not in done and desk.clock() < end:
        desk.poll(done)
        port = port_in(desk.dispatcher.progress().get(job_id, ""))
        if port:
            return port
    return 0


def _wait(desk: Desk, jobs: Mapping[str, NetNode], done: dict[str, Finished], limit: float) -> None:
    end = desk.clock() + limit
    while not done.keys() >= jobs.keys() and desk.clock() < end:
        desk.poll(done)
        if any(_broken(finished) for finished in done.values()):
            end = min(end, desk.clock() + _AFTER_FAILURE_SECONDS)


def _broken(finished: Finished) -> str:
    """Why a rank gave no reading; "" when it did."""
    if finished.error:
        return finished.error
    try:
        reading = _readings(finished).get(BUS)
    except (ValueError, TypeError) as error:
        return f"its readings were refused: {error}"
    if isinstance(reading, Measurement):
        return ""
    return reading.describe() if reading is not None else "it gave no reading"


def _readings(finished: Finished) -> Fingerprint:
    record = finished.result.get("fingerprint")
    return Fingerprint.from_dict(record) if isinstance(record, Mapping) else Fingerprint()


def _concluded(
    jobs: Mapping[str, NetNode],
    done: Mapping[str, Finished],
    names: tuple[str, ...],
    backend: str,
) -> Collective:
    broken = {job_id: why for job_id, f in done.items() if (why := _broken(f))}
    if not broken:
        reading = _readings(done[next(iter(jobs))])[BUS]
        points = points_of(reading)
        return Collective(names, reading, points, backend)
    culprit = who_broke([(jobs[j].name, done[j], why) for j, why in broken.items()])
    gaps = [f"{jobs[job_id].name}: {why}" for job_id, why in broken.items()]
    return Collective(names, Unmeasured(BUS, Reason.FAILED, culprit), (), backend, gaps)


def who_broke(failures: Sequence[tuple[str, Finished, str]]) -> str:
    """One sentence naming the node that broke an all-reduce. When one rank goes, all fail: a node
    that was lost is the cause, then one whose process died, then one that never answered, and only
    then the first that had an error."""

    def order(failure: tuple[str, Finished, str]) -> int:
        _, finished, _ = failure
        if finished.lost:
            return 0
        if finished.outcome is None:
            return 2
        return 1 if finished.outcome.status in ("killed", "refused") else 3

    name, _, why = min(failures, key=order)
    return f"{name} broke it: {' '.join(why.split())[:400]}"


def points_of(reading: Reading) -> tuple[Point, ...]:
    """The curve behind a reading; none where what the node sent is not one."""
    curve = reading.detail.get("curve") if isinstance(reading, Measurement) else None
    try:
        return tuple(
            Point(
                int(entry["bytes"]),
                float(entry["seconds"]),
                None if entry["spread_seconds"] is None else float(entry["spread_seconds"]),
                int(entry["samples"]),
            )
            for entry in curve or ()
        )
    except (KeyError, TypeError, ValueError):
        return ()
