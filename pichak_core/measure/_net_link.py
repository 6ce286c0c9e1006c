"""One link between two machines, measured and told as readings.

First the round trip on an idle link, then the throughput of each direction, then what gets lost at
a quarter of that rate: a full link drops segments by design, one that is not full should not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pichak_core.measure import Depth
from pichak_core.measure._net_client import Flow, LinkClient
from pichak_core.measure._net_flow import WINDOW_SECONDS, rate_of, window_rates
from pichak_core.measure._net_interfaces import Interface, interface_of
from pichak_core.measure._net_tcp import loss_of
from pichak_core.measure._net_wire import LinkError
from pichak_core.measure._sampling import percentile
from pichak_core.measurement import (
    Measurement,
    Reading,
    Reason,
    Unmeasured,
    median_and_spread,
    reading_from_dict,
)

#: The parts of a link's name, after ``network.PEER.``.
RTT, SEND, RECEIVE = "rtt_ms", "send_mb_s", "receive_mb_s"
SEND_LOSS, RECEIVE_LOSS = "send_loss_percent", "receive_loss_percent"
PARTS = (RTT, SEND, SEND_LOSS, RECEIVE, RECEIVE_LOSS)

#: Loss is looked for at this share of the measured rate, and at no more than this many bytes/s.
PACED_SHARE = 0.25
PACED_BYTES_PER_SECOND = 40e6
#: Above a link's own speed by more than this, a rate is not one of this link.
_OVER = 1.05
_LEAST_WINDOWS = 3


@dataclass(frozen=True)
class LinkPlan:
    """How long and how much: connections at once, and seconds of each part."""

    streams: int = 4
    warm_up_seconds: float = 0.5
    flow_seconds: float = 2.0
    paced_seconds: float = 1.0
    rtt_seconds: float = 0.6
    round_trips: int = 200

    @property
    def seconds(self) -> float:
        """About how long a link takes."""
        return self.rtt_seconds + 2 * (self.flow_seconds + self.paced_seconds) + 1.0


PLANS: dict[Depth, LinkPlan] = {
    "quick": LinkPlan(),
    "full": LinkPlan(8, 1.0, 6.0, 3.0, 2.0, 1000),
}


def measure_link(
    link: LinkClient, prefix: str, plan: LinkPlan, *, progress: Callable[[str], None]
) -> Iterator[Reading]:
    """The readings of an open link, named ``PREFIX.rtt_ms`` and so on, in the order of `PARTS`.

    Each reading comes as soon as it is there; a part that fails is `Unmeasured` and costs nothing
    but itself, unless the connection is gone: then `LinkError` or `OSError` is raised.
    """
    progress("round trips")
    yield _round_trip(link.round_trips_ms(plan.rtt_seconds, plan.round_trips), f"{prefix}.{RTT}")
    interface = _own_interface(link.place().local)
    for part, lossy, say, run in (
        (SEND, SEND_LOSS, "sending", link.forward),
        (RECEIVE, RECEIVE_LOSS, "receiving", link.backward),
    ):
        progress(say)
        rate = _throughput(
            run(plan.flow_seconds, plan.streams), f"{prefix}.{part}", plan, interface
        )
        yield rate
        name = f"{prefix}.{lossy}"
        if isinstance(rate, Unmeasured):
            yield Unmeasured(name, Reason.FAILED, "the throughput before it was not measured")
            continue
        pace = min(PACED_SHARE * float(rate.value) * 1e6, PACED_BYTES_PER_SECOND)
        progress(f"{say} at a pace")
        yield _loss(run(plan.paced_seconds, 1, pace), name, pace)


def _own_interface(address: str) -> Interface | None:
    try:
        return interface_of(address)
    except (ImportError, OSError):
        return None


def _round_trip(times: list[float], name: str) -> Measurement:
    middle, spread = median_and_spread(times)
    return Measurement(
        name,
        middle,
        "ms",
        f"{len(times)} exchanges of 16 bytes on one open connection, one at a time, after a few "
        "that do not count; median",
        samples=len(times),
        spread=spread,
        detail={"p95_ms": percentile(times, 0.95), "min_ms": min(times)},
    )


def _throughput(flow: Flow, name: str, plan: LinkPlan, interface: Interface | None) -> Reading:
    if flow.problem:
        return Unmeasured(name, Reason.FAILED, flow.problem)
    rates = window_rates(
        flow.received.looks, warm_up_seconds=plan.warm_up_seconds, seconds=flow.seconds
    )
    if len(rates) < _LEAST_WINDOWS:
        return Unmeasured(
            name, Reason.FAILED, f"only {len(rates)} windows in {flow.seconds:g} s: too slow a host"
        )
    middle, spread = rate_of(rates)
    if middle <= 0:
        return Unmeasured(name, Reason.FAILED, "most windows brought nothing: the link stalls")
    return Measurement(
        name,
        middle,
        "MB/s",
        f"{plan.streams} connections for {flow.seconds:g} s, the first {plan.warm_up_seconds:g} s "
        f"left out; median of windows of {WINDOW_SECONDS:g} s at the receiver; both ends counted "
        f"{sum(flow.sent.totals):,} bytes; random data",
        samples=len(rates),
        spread=spread,
        suspect=_impossible(middle, interface),
        detail=_told(flow, interface),
    )


def _impossible(rate: float, interface: Interface | None) -> str:
    ceiling = interface.ceiling_mb_s if interface else None
    if interface is None or ceiling is None or rate <= _OVER * ceiling:
        return ""
    return (
        f"faster than {interface.name} can be ({interface.speed_mbit_s:,} Mbit/s): it did not "
        "cross that link"
    )


def _told(flow: Flow, interface: Interface | None) -> dict[str, Any]:
    """The parts behind a rate. A core that is busy all the time says that the host, not the link,
    may be what limits."""
    loss = loss_of(flow.sent.counters)
    return {
        "bytes": sum(flow.sent.totals),
        "sender_cores": _cores(flow.sent.cpu_seconds, flow.sent.wall_seconds),
        "receiver_cores": _cores(flow.received.cpu_seconds, flow.received.wall_seconds),
        "sent_again_percent": None if loss is None else loss.percent,
        "interface": interface.name if interface else None,
        "interface_mbit_s": (interface.speed_mbit_s or None) if interface else None,
        "mtu": (interface.mtu or None) if interface else None,
    }


def _cores(cpu_seconds: float, wall_seconds: float) -> float | None:
    return cpu_seconds / wall_seconds if wall_seconds > 0 else None


def _loss(flow: Flow, name: str, pace: float) -> Reading:
    if flow.problem:
        return Unmeasured(name, Reason.FAILED, flow.problem)
    loss = loss_of(flow.sent.counters)
    if loss is None:
        return Unmeasured(
            name, Reason.NOT_SUPPORTED, "the sending system does not count retransmissions"
        )
    return Measurement(
        name,
        loss.percent,
        "%",
        f"{loss.lost:,} of {loss.segments:,} TCP segments sent again at {pace / 1e6:.3g} MB/s, a "
        "quarter of the measured rate or less (TCP_INFO, less what the receiver had twice)",
        detail={"lost": loss.lost, "segments": loss.segments, "pace_mb_s": pace / 1e6},
    )


#: A link's part as its other end calls it.
_MIRRORED = {
    RTT: RTT,
    SEND: RECEIVE,
    RECEIVE: SEND,
    SEND_LOSS: RECEIVE_LOSS,
    RECEIVE_LOSS: SEND_LOSS,
}


def mirrored(peer: str, readings: Mapping[str, Any]) -> list[Reading]:
    """A link's readings as the listening end has them, from those of the client `peer`: what that
    one sent was received here. `ValueError` for what are no readings of a link."""
    if len(readings) > len(PARTS) or not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", peer):
        raise ValueError("not the readings of a link")
    made: list[Reading] = []
    for name, record in readings.items():
        part = _MIRRORED.get(name.rpartition(".")[2])
        if part is None:
            raise ValueError(f"{name[:60]!r} is no reading of a link")
        made.append(reading_from_dict(f"network.{peer}.{part}", record))
    return made


def unmeasured(prefix: str, reason: Reason, why: str) -> list[Reading]:
    """Every reading of a link that could not be had, each with the reason."""
    return [Unmeasured(f"{prefix}.{part}", reason, why) for part in PARTS]


__all__ = ["PARTS", "PLANS", "LinkError", "LinkPlan", "measure_link", "mirrored", "unmeasured"]
