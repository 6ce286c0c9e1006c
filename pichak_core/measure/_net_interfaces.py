"""Which of this machine's network interfaces has an address, and what it claims to be."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Interface:
    """`speed_mbit_s` is what the driver claims, 0 where it claims nothing. A software interface (a
    veth, a tunnel) claims what it likes: `hardware` says whether a device stands behind it."""

    name: str
    mtu: int
    speed_mbit_s: int
    hardware: bool

    @property
    def ceiling_mb_s(self) -> float | None:
        """MB/s (10^6 bytes) that the hardware cannot exceed; None where that is not known."""
        return self.speed_mbit_s / 8 if self.hardware and self.speed_mbit_s > 0 else None


def interface_of(address: str, sys: Path = Path("/sys")) -> Interface | None:
    """The interface that has `address`; None where none has. `ImportError` without psutil."""
    import psutil

    wanted = address.partition("%")[0].lower()
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if entry.address.partition("%")[0].lower() == wanted:
                stats = psutil.net_if_stats().get(name)
                return Interface(
                    name,
                    stats.mtu if stats else 0,
                    stats.speed if stats else 0,
                    (sys / "class" / "net" / name / "device").exists(),
                )
    return None
