"""Devices and links for a pick, made by hand."""

from __future__ import annotations

from typing import Any

from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.ring_time import Link
from pichak_coordinator.stored_links import StoredLinks
from pichak_core.plan import Plan

MIB = 2**20


def row(name: str, seconds: float = 1.0, batch: int = 4, **more: Any) -> Row:
    """`batch` rows of 100 scored tokens in `seconds`; a step of 24 rows; 8 MiB of gradient."""
    plan = Plan().set("micro_batch", batch, "ramp").set("seconds_per_step", seconds, "timed")
    plan.set("scored_tokens_per_second", batch * 100 / seconds, "timed", unit="scored tokens/s")
    plan.set("target_tokens", more.pop("target", 2400.0), "noise scale")
    if more.pop("counted", True):
        plan.set("gradient_bytes", 8 * MIB, "counted", unit="bytes")
    host = more.pop("host", name)
    device = more.pop("device", "cpu")
    return Row(NodeRecord(f"id-{host}", host, device=device), plan=plan, **more)


def mesh(*names: str, mb_s: float = 100.0, rtt_ms: float = 0.0, **other: float) -> StoredLinks:
    """All pairs alike, but those of `other`: ``a_b=10.0``."""
    links = {}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            rate = other.get(f"{a}_{b}", mb_s)
            links[f"id-{a}", f"id-{b}"] = Link(rate, rtt_ms, "measured")
    return StoredLinks(links)


def ramp(**seconds: float) -> dict[str, Any]:
    tried = [
        {"batch": int(size[1:]), "seconds": 2 * time, "verdict": "ok"}
        for size, time in seconds.items()
    ]
    tried.append({"batch": 3, "seconds": 0.002, "verdict": "slow"})
    return {"passes": 2, "tried": tried}
