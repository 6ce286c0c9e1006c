"""What this machine's own TCP can do without a wire: two connections' ends on the loopback.

A link between two machines (`pichak net`) cannot be faster than this: one that comes near it is
limited by the host and not by the network.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._net_client import LinkClient
from pichak_core.measure._net_link import LinkPlan, measure_link
from pichak_core.measure._net_server import Listener
from pichak_core.measure._net_wire import CONNECT_SECONDS, SESSION_BYTES, token_of
from pichak_core.measurement import Measurement, Reading, Unmeasured

RATE = Metric("host.tcp_loopback_mb_s", "MB/s", "this machine's TCP to itself, without a wire")
RTT = Metric("host.tcp_loopback_us", "us", "a small exchange of this machine with itself")

_LOOPBACK = "127.0.0.1"


def run(context: Context) -> Iterable[Reading]:
    key, session = os.urandom(32), os.urandom(SESSION_BYTES)
    share = context.budget_seconds
    plan = LinkPlan(2, 0.1 * share, 0.5 * share, 0.0, 0.2 * share, 500)
    listener = Listener(_LOOPBACK, key)
    serving = threading.Thread(target=listener.serve, args=(4 * share + 10, 5.0), daemon=True)
    serving.start()
    try:
        with LinkClient(
            _LOOPBACK,
            listener.port,
            session,
            token_of(key, session),
            connect_seconds=CONNECT_SECONDS,
        ) as link:
            readings = measure_link(link, "loopback", plan, progress=lambda _: None)
            yield _round_trip(next(readings))
            yield _renamed(next(readings))
    finally:
        listener.close()


def _round_trip(reading: Reading) -> Reading:
    if isinstance(reading, Unmeasured):
        return Unmeasured(RTT.name, reading.reason, reading.detail)
    return Measurement(
        RTT.name,
        1e3 * float(reading.value),
        RTT.unit,
        f"{reading.source}, from this machine to itself",
        samples=reading.samples,
        spread=None if reading.spread is None else 1e3 * reading.spread,
        detail={name.replace("_ms", "_us"): 1e3 * ms for name, ms in reading.detail.items()},
    )


def _renamed(reading: Reading) -> Reading:
    if isinstance(reading, Unmeasured):
        return Unmeasured(RATE.name, reading.reason, reading.detail)
    return Measurement(
        RATE.name,
        reading.value,
        RATE.unit,
        f"{reading.source}; both ends in one process of this machine",
        samples=reading.samples,
        spread=reading.spread,
        detail=reading.detail,
    )


register(Probe("network", (RTT, RATE), run, {"quick": 1.0, "full": 3.0}))
