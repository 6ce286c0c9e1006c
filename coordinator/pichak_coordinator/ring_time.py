"""How long a ring all-reduce takes over measured links. Pure.

n members hold S bytes each. In 2(n − 1) steps each sends S/n bytes to the next one and waits for
as much from the one before (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009). All links work at once, so that a step takes as long as its
slowest link:

    t(link) = latency + S / (n × rate)              latency: half of a round trip
    T       = 2(n − 1) × max over the ring's links of t(link)

Without latencies that is 2(n − 1)/n × S over the slowest rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pichak_core.plan import format_number


@dataclass(frozen=True)
class Link:
    """What is known of the way between two machines. `mb_s` (10^6 bytes a second) is the slower
    direction's, `rtt_ms` a round trip; `source` says from where."""

    mb_s: float
    rtt_ms: float
    source: str
    measured: bool = True

    def __post_init__(self) -> None:
        if not self.mb_s > 0 or not self.rtt_ms >= 0:
            raise ValueError(f"{self.mb_s} MB/s and {self.rtt_ms} ms are no link")

    def step_seconds(self, gradient_bytes: int, members: int) -> float:
        """Seconds of one of the ring's steps over this link."""
        return self.rtt_ms / 2e3 + gradient_bytes / members / (self.mb_s * 1e6)

    def describe(self) -> str:
        return f"{format_number(self.mb_s)} MB/s, round trip {format_number(self.rtt_ms)} ms"


def ring_steps(members: int) -> int:
    """2(n − 1); 0 for one member, which reduces nothing."""
    if members < 1:
        raise ValueError(f"{members} members")
    return 2 * (members - 1)


def ring_seconds(gradient_bytes: int, members: int, links: Iterable[Link]) -> float:
    """Seconds of an all-reduce over the ring of these links; 0 for one member."""
    slowest = max((link.step_seconds(gradient_bytes, members) for link in links), default=0.0)
    return ring_steps(members) * slowest
