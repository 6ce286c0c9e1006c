"""An all-reduce over several machines, as data-parallel training does one after every step.

One machine alone has nothing to reduce: `pichak net` and the fleet's commands run it on the nodes
they chose, each node's part in a job of its own, and then it is a reading like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._collective_run import Reduced, Ring, all_reduce
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured

BUS = Metric("collective.bus_mb_s", "MB/s", "bus bandwidth of an all-reduce over the fleet")
ALG = Metric("collective.alg_mb_s", "MB/s", "bytes all-reduced over the fleet in a second")
TIME = Metric("collective.all_reduce_ms", "ms", "one all-reduce of the largest size")

#: Where a job puts its `Ring` in `Context.cache`.
RING = "collective.ring"


def run(context: Context) -> Iterable[Reading]:
    ring = context.cache.get(RING)
    if ring is None:
        why = "an all-reduce needs two machines or more: `pichak net` runs it over a cluster"
        for metric in (BUS, ALG, TIME):
            yield Unmeasured(metric.name, Reason.NOT_ASKED, why)
        return
    yield from readings(ring, all_reduce(ring))


def readings(ring: Ring, reduced: Reduced) -> list[Reading]:
    """What an all-reduce gave, at the largest size that was run; the curve is in `detail`."""
    metrics = (BUS, ALG, TIME)
    if not reduced.points:
        return [Unmeasured(m.name, Reason.TIMED_OUT, "no size was run in time") for m in metrics]
    last = reduced.points[-1]
    source = (
        f"{ring.backend} all-reduce of {last.size_bytes:,} bytes of fp32 on each of {ring.ranks} "
        f"ranks over {reduced.interface}; the slowest rank of each of {last.samples} repetitions, "
        "median; sums checked"
    )
    detail = {
        "ranks": ring.ranks,
        "backend": ring.backend,
        "interface": reduced.interface,
        "curve": [point.as_dict(ring.ranks) for point in reduced.points],
        "skipped_bytes": list(reduced.skipped),
    }
    relative = None if last.spread_seconds is None else last.spread_seconds / last.seconds
    bus, alg = last.bus_mb_s(ring.ranks), last.alg_mb_s()
    made: list[Reading] = []
    for metric, value, formula in (
        (BUS, bus, "bus bandwidth = bytes/s × 2(n − 1)/n (nccl-tests, PERFORMANCE.md)"),
        (ALG, alg, "bytes over seconds"),
        (TIME, 1e3 * last.seconds, "its time"),
    ):
        made.append(
            Measurement(
                metric.name,
                value,
                metric.unit,
                f"{source}; {formula}",
                samples=last.samples,
                spread=None if relative is None else relative * value,
                suspect=reduced.wrong,
                detail=detail if metric is BUS else {},
            )
        )
    return made


register(Probe("collective", (BUS, ALG, TIME), run, {"quick": 10.0, "full": 40.0}))
