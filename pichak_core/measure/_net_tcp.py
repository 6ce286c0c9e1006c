"""What the system counts of a TCP connection: Linux's ``TCP_INFO``, where there is one.

The layout is that of ``struct tcp_info`` in ``include/uapi/linux/tcp.h``; it only ever grows at its
end, so that an older kernel gives fewer bytes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Field -> (offset, format) in `struct tcp_info`.
_FIELDS = {
    "rtt_us": (68, "I"),
    "total_retrans": (100, "I"),
    "min_rtt_us": (148, "I"),
    "data_segs_out": (156, "I"),
    "dsack_dups": (216, "I"),
}
_LENGTH = 256

#: Fewer lost segments than this say nothing: one may be an accident.
MIN_LOST = 3


@dataclass
class Sent:
    """What was sent: bytes of each connection, and the system's counters of each."""

    totals: list[int]
    counters: list[dict[str, int]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "totals": self.totals,
            "counters": self.counters,
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "error": self.error,
        }


@dataclass(frozen=True)
class Loss:
    """Segments sent, and those of them that were sent again because they were lost."""

    segments: int
    lost: int

    @property
    def percent(self) -> float:
        return 100.0 * self.lost / self.segments if self.segments else 0.0


def tcp_counters(sock: socket.socket) -> dict[str, int] | None:
    """The counters by name, those that this kernel has; None where the system has no TCP_INFO."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, option, _LENGTH))
    except OSError:
        return None


def parse_tcp_info(data: bytes) -> dict[str, int]:
    """`struct tcp_info` in this machine's byte order; fields past its end are left out."""
    return {
        name: struct.unpack_from(f"={code}", data, offset)[0]
        for name, (offset, code) in _FIELDS.items()
        if offset + struct.calcsize(f"={code}") <= len(data)
    }


def loss_of(counters: Sequence[Mapping[str, int]]) -> Loss | None:
    """What was lost: segments sent again less those that the receiver had got twice (it says so by
    DSACK, RFC 2883: they were late, not lost). None where the system does not count."""
    needed = ("total_retrans", "data_segs_out")
    if not counters or not all(name in one for one in counters for name in needed):
        return None
    segments = sum(one["data_segs_out"] for one in counters)
    again = sum(max(0, one["total_retrans"] - one.get("dsack_dups", 0)) for one in counters)
    return Loss(segments, min(again, segments)) if segments else None
