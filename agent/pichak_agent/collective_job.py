"""The job of one rank of an all-reduce over several machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pichak_agent.child_jobs import Partial, Progress, RefusedError
from pichak_core.measure import Context, probes, run_one
from pichak_core.measure._collective_run import Ring
from pichak_core.measure.collective import RING
from pichak_core.measurement import Fingerprint

_PARAMS = {
    "rank",
    "ranks",
    "address",
    "store_address",
    "port",
    "name",
    "sizes",
    "seconds",
    "backend",
    "device",
    "timeout_seconds",
    "visible_devices",
}


def collective_job(
    params: Mapping[str, Any], *, progress: Progress, partial: Partial
) -> dict[str, Any]:
    """``{"fingerprint": the readings of the measurement "collective"}`` of rank `rank` of `ranks`.

    Rank 0 has port 0 and tells the one that the system chose in its progress line "store on port
    N"; the others are given it.
    """
    del partial  # one rank's part of an all-reduce that failed says nothing
    unknown = sorted(set(params) - _PARAMS)
    if unknown:
        raise RefusedError(f"an all-reduce takes no parameter {unknown[0][:40]!r}")
    try:
        ring = Ring(
            rank=int(params["rank"]),
            ranks=int(params["ranks"]),
            address=str(params["address"]),
            store_address=str(params["store_address"]),
            port=int(params["port"]),
            name=str(params["name"]),
            sizes=tuple(int(size) for size in params["sizes"]),
            seconds=float(params["seconds"]),
            backend=str(params.get("backend", "gloo")),
            device=str(params.get("device", "cpu")),
            timeout_seconds=float(params.get("timeout_seconds", 60.0)),
            on_port=lambda port: progress(f"store on port {port}"),
            progress=progress,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"an all-reduce cannot be made of this: {error}") from error
    context = Context(device=ring.device, cache={RING: ring})
    found = Fingerprint()
    for reading in run_one(probes()["collective"], context):
        found.add(reading)
    return {"fingerprint": found.to_dict()}
