"""A store with a profile and a network test, filled by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan

MIB = 2**20
#: Seconds of a micro-batch of 4 rows, 20 scored tokens each.
SECONDS = {"alpha": 1.0, "beta": 1.1, "gamma": 0.2, "delta": 1.3}
#: The way to gamma is slow.
SLOW = 2.0


def plan(seconds: float) -> Plan:
    made = Plan("builtin:gpt-1m", "train.jsonl", "cpu")
    made.set("micro_batch", 4, "4 ran", unit="rows").set("rows_total", 36000, "counted")
    made.set("supervised_per_row", 20.0, "counted", unit="scored tokens")
    made.set("target_tokens", 480.0, "the measured noise scale", unit="scored tokens")
    made.set("gradient_bytes", 12 * MIB, "counted", unit="bytes")
    made.set("seconds_per_step", seconds, "timed", unit="s")
    return made.set("scored_tokens_per_second", 80 / seconds, "timed", unit="scored tokens/s")


def finish(store: Store, run: str, job_id: str, kind: str, node: str, device: str, result: Any):
    job = Job(job_id, 1, kind, {}, 9.0)
    store.record_job(run, job, node=node, device=device)
    store.record_outcome(encode(Outcome(job_id, 1, kind, "ok", result)))
    store.set_job_state(job_id, "done", attempt=1)


def fingerprint(prefix: str, **values: float) -> dict[str, Any]:
    made = Fingerprint()
    for name, value in values.items():
        made.add(Measurement(f"{prefix}.{name}", value, "", "timed"))
    return {"fingerprint": made.to_dict()}


def begin(store: Store, command: str, hosts: Sequence[str]) -> tuple[str, dict[str, str]]:
    run = store.begin_run(command, {})
    hellos = [
        {"machine_id": f"m-{host}", "host": host, "address": f"10.0.0.{i}"}
        for i, host in enumerate(hosts)
    ]
    return run, dict(zip(hosts, store.record_nodes(run, hellos), strict=True))


def profile(store: Store) -> tuple[str, dict[str, str]]:
    run, nodes = begin(store, "fleet profile", list(SECONDS))
    for host, node in nodes.items():
        result = {"plan": plan(SECONDS[host]).to_dict()}
        finish(store, run, f"{run}-ramp-{host}", "ramp", node, "cpu", result)
    return run, nodes


def network(
    store: Store,
    run: str,
    nodes: Mapping[str, str],
    rates: Mapping[tuple[str, str], float],
    reduced: Sequence[str] = (),
) -> None:
    count = itertools.count()

    def job_id(what: str) -> str:
        return f"{run}-net-{next(count):05d}-{what}"

    for node in nodes.values():
        finish(store, run, job_id("listen"), "net_listen", node, "", {"listener": {}})
    for (a, b), rate in rates.items():
        found = fingerprint(f"network.{b}", send_mb_s=rate, receive_mb_s=2 * rate, rtt_ms=1.0)
        finish(store, run, job_id("link"), "net_link", nodes[a], "", found)
    for rank, host in enumerate(reduced):
        bus = Measurement(
            "collective.bus_mb_s",
            50.0,
            "MB/s",
            "timed",
            detail={
                "curve": [
                    {"bytes": s * MIB, "seconds": s * 0.05, "spread_seconds": None, "samples": 3}
                    for s in (1, 16)
                ]
            },
        )
        made = Fingerprint()
        if rank == 0:
            made.add(bus)
        result = {"fingerprint": made.to_dict()}
        finish(store, run, job_id("all-reduce"), "collective", nodes[host], "", result)


def all_pairs(hosts: Sequence[str], rate: float = 60.0) -> dict[tuple[str, str], float]:
    return {p: SLOW if "gamma" in p else rate for p in itertools.combinations(hosts, 2)}
