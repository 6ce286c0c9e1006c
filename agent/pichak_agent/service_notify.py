"""What systemd is told of a service: datagrams to the socket that it names (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(text: str, variables: Mapping[str, str] = os.environ) -> bool:
    """Send ``READY=1``, ``WATCHDOG=1``, ``STATUS=…`` or ``STOPPING=1``, several as lines; False
    where no service manager listens."""
    address = variables.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        # A name in Linux's abstract space.
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(text.encode("utf-8", "replace"), address)
    except OSError:
        return False
    return True


def watchdog_seconds(variables: Mapping[str, str] = os.environ) -> float | None:
    """How often ``WATCHDOG=1`` is to be sent: half of what the unit allows; None when it is not
    watched."""
    try:
        allowed = int(variables.get("WATCHDOG_USEC", "")) / 1e6
        whose = int(variables.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return allowed / 2 if allowed > 0 and whose == os.getpid() else None
