"""Whole rounds of a simulated fleet, put into a store as a real fleet's would be: jobs, outcomes,
judgement. Everything in them says that it is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.judging import judge_run
from pichak_coordinator.link_verdicts import judge_links
from pichak_coordinator.links import LinkMatrix, Pair, Reach
from pichak_coordinator.net_jobs import metric_name
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.records import Finding
from pichak_coordinator.request import ProfileRequest
from pichak_coordinator.simulated_fleet import DISK
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan, Value
from pichak_core.simulated_host import SIMULATED, SimulatedHost

#: How many hosts' results go into one transaction.
_BATCH = 200
_DEPTHS = (1, 2, 3, 4, 6, 8, 16, 32)
_SAID = f"{SIMULATED}: chosen"
#: MB/s that every host's wire carries in each direction.
_WIRE_MB_S = 2900.0


@dataclass
class Clock:
    """A time that only a simulation moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def hello_of(host: SimulatedHost, number: int) -> dict[str, Any]:
    """What the `number`-th host of a fleet would say of itself, its address included."""
    return {**host.hello(), "address": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}


def put_profile(
    store: Store,
    hosts: Sequence[SimulatedHost],
    clock: Clock,
    *,
    settings: Mapping[str, Any],
    silent: Set[str] = frozenset(),
    seen: Mapping[tuple[str, str], Sequence[Finding]] | None = None,
    say: Callable[[int], None] = lambda _: None,
) -> str:
    """One ``fleet profile`` of all `hosts` at the clock's time: fingerprint and ramp of each
    device, judged; a `silent` host gives nothing. `seen` are findings of probes before this one,
    for the second look. Returns the run; `say` hears how many hosts are in."""
    request = ProfileRequest(model="simulated", seq_len=1024)
    run = store.begin_run("fleet profile", {**request.settings(), **settings, "simulated": True})
    hellos = [hello_of(host, number) for number, host in enumerate(hosts, 1)]
    names = store.record_nodes(run, hellos)
    for first in range(0, len(hosts), _BATCH):
        with store.atomically():
            outcomes: list[bytes] = []
            for host, node in list(zip(hosts, names, strict=True))[first : first + _BATCH]:
                for number, device in enumerate(host.devices):
                    for job in _jobs(request, f"{run}-{node}", number, device):
                        store.record_job(run, job, node=node, device=device)
                        if host.host in silent:
                            error = "lost: the simulated host gives nothing any more"
                            store.set_job_state(job.job_id, "failed", attempt=1, error=error)
                        else:
                            outcomes.append(_answer(host, job, device, clock.now))
            store.record_outcomes(outcomes)
        say(min(len(hosts), first + _BATCH))
    judge_run(store, run, seen)
    store.finish_run(run)
    return run


def put_probes(
    store: Store,
    clock: Clock,
    depth: str,
    probes: Sequence[
        tuple[float, str, SimulatedHost, Mapping[str, Any], Mapping[str, Fingerprint]]
    ],
) -> str:
    """Probes of a watch as one run: (time, node, host, hello, device -> what was read) of each."""
    request = ProfileRequest(model="simulated")
    now = clock.now
    clock.now = probes[0][0]
    run = store.begin_run("fleet watch", {"depth": depth, "simulated": True})
    with store.atomically():
        for at, node, host, hello, found in probes:
            clock.now = at
            store.record_node(run, hello, node=node)
            for number, (device, fingerprint) in enumerate(found.items()):
                job = request.fingerprint_job(f"{run}-{node}-fingerprint-{number}", 1, device)
                store.record_job(run, job, node=node, device=device)
                result = {"fingerprint": fingerprint.to_dict(), "device": device}
                store.record_outcome(_outcome(host, job, result, at))
    store.finish_run(run)
    clock.now = now
    return run


def _jobs(request: ProfileRequest, name: str, number: int, device: str) -> Iterable[Job]:
    yield request.fingerprint_job(f"{name}-fingerprint-{number}", 1, device)
    yield request.ramp_job(f"{name}-ramp-{number}", 1, device, {}, None)


def _answer(host: SimulatedHost, job: Job, device: str, now: float) -> bytes:
    if job.kind == "fingerprint":
        fingerprint = with_curves(host.fingerprint(device, now))
        return _outcome(host, job, {"fingerprint": fingerprint.to_dict()}, now)
    return _outcome(host, job, host.ramp(_task(host, device), device, now), now)


def _outcome(host: SimulatedHost, job: Job, result: Mapping[str, Any], now: float) -> bytes:
    made = Outcome(
        *(job.job_id, job.attempt, job.kind, "ok", result),
        node=host.host,
        started_unix=now,
        simulated=True,
    )
    return encode(made)


def _task(host: SimulatedHost, device: str) -> Plan:
    """The host's task, with what else of a task a fleet's tools go by."""
    plan = host.task(device)
    plan.set("rows_total", Value(200_000, _SAID, unit="rows"))
    plan.set("target_tokens", Value(16_000.0, _SAID, unit="scored tokens"))
    plan.set("gradient_bytes", Value(540 * 2**20, _SAID, unit="bytes"))
    return plan


def with_curves(found: Fingerprint) -> Fingerprint:
    """The same with a read rate for each queue depth, which rises to the best one and then falls a
    little."""
    read, best = found.get(DISK), found.number("disk.read_best_depth")
    if not isinstance(read, Measurement) or not best or isinstance(read.value, (str, bool)):
        return found
    rates = [
        {
            "depth": depth,
            "mb_s": read.value * (_rise(depth) / _rise(int(best)) if depth <= best else 0.97),
            "spread": None if read.spread is None else read.spread,
            "samples": read.samples,
        }
        for depth in _DEPTHS
    ]
    made = Fingerprint(found)
    made.add(replace(read, detail={**read.detail, "rates": rates}))
    return made


def _rise(depth: int) -> float:
    return depth / (depth + 2.0)


# -- network --------------------------------------------------------------------------------------


def put_network(
    store: Store,
    hosts: Sequence[SimulatedHost],
    clock: Clock,
    *,
    seed: int = 0,
    pairs: Iterable[Pair] | None = None,
    slow: Mapping[str, float] | None = None,
    closed: Set[Pair] = frozenset(),
) -> str:
    """One ``pichak net`` over `hosts` (host names differ): all pairs, or the given ones.

    `slow` hosts send at a share of their wire, and nobody can open a connection along a `closed`
    (client, server). What is odd is judged by the same rules as in a real test.
    """
    run = store.begin_run("net", {"simulated": True})
    hellos = [hello_of(host, number) for number, host in enumerate(hosts, 1)]
    names = [host.host for host in hosts]
    identity = dict(zip(names, store.record_nodes(run, hellos), strict=True))
    by_name = {host.host: host for host in hosts}
    draw = random.Random(f"{seed}/net/{clock.now}")  # noqa: S311 - repeatable
    matrix = LinkMatrix(tuple(names))
    wanted = list(pairs) if pairs is not None else matrix.links
    count = iter(range(10**9))

    def job_of(kind: str, node: str, params: Mapping[str, Any] | None = None) -> Job:
        name = f"{run}-net-{next(count):06d}-{kind.removeprefix('net_')}"
        job = Job(name, 1, kind, params or {}, 60.0)
        store.record_job(run, job, node=identity[node], device="")
        return job

    def keep(job: Job, node: str, result: Mapping[str, Any]) -> None:
        store.record_outcome(_outcome(by_name[node], job, result, clock.now))

    asked: dict[str, list[str]] = {name: [] for name in names}
    for one, other in wanted:
        asked[one].append(other)
        asked[other].append(one)
    with store.atomically():
        for name in names:
            keep(job_of("net_listen", name), name, {"listener": {"refused": 0}})
        for name in names:
            answers = [_reach(name, peer, (name, peer) in closed) for peer in asked[name]]
            matrix = matrix.with_reach(answers)
            told = {metric_name(a.server): a.as_dict() for a in answers}
            keep(job_of("net_reach", name), name, {"reach": told})
        for one, other in wanted:
            way = next((w for w in ((one, other), (other, one)) if w not in closed), None)
            if way is None:
                matrix = matrix.with_gap(one, other, Reason.FAILED, "closed both ways")
                continue
            readings = _link(by_name[way[0]], by_name[way[1]], slow or {}, draw)
            matrix = matrix.with_link(*way, readings)
            keep(job_of("net_link", way[0]), way[0], {"fingerprint": readings.to_dict()})
        for each in _seen_twice(judge_links(matrix)):
            for name in each.nodes:
                store.record_findings(run, identity[name], "", [each.finding])
    store.finish_run(run)
    return run


def _seen_twice(found: Sequence[NetFinding]) -> list[NetFinding]:
    """A simulated link is the same at every look: what was seen once repeats."""
    return [replace(each, finding=_sure(each.finding)) for each in found]


def _sure(finding: Finding) -> Finding:
    return finding if finding.severity == "info" else replace(finding, state="confirmed")


def _reach(client: str, server: str, shut: bool) -> Reach:
    why = "timed out after 3 s: a firewall drops it" if shut else ""
    return Reach(client, server, not shut, why, connect_ms=None if shut else 0.3)


def _link(
    client: SimulatedHost, server: SimulatedHost, slow: Mapping[str, float], draw: random.Random
) -> Fingerprint:
    prefix = f"network.{metric_name(server.host)}"
    made = Fingerprint()
    rtt = 0.18 * max(0.5, 1 + 0.05 * draw.gauss(0, 1))
    made.add(
        Measurement(
            *(f"{prefix}.rtt_ms", rtt, "ms", SIMULATED, 200, 0.05 * rtt),
            detail={"p95_ms": 1.4 * rtt, "min_ms": 0.9 * rtt},
        )
    )
    for part, source in (("send", client), ("receive", server)):
        rate = _WIRE_MB_S * slow.get(source.host, 1.0) * max(0.5, 1 + 0.02 * draw.gauss(0, 1))
        name = f"{prefix}.{part}_mb_s"
        made.add(Measurement(name, rate, "MB/s", SIMULATED, 9, 0.02 * rate))
        made.add(
            Unmeasured(
                f"{prefix}.{part}_loss_percent", Reason.NOT_ASKED, "nothing is simulated of it"
            )
        )
    return made
