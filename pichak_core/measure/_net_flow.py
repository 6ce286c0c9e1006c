"""Bytes through connections as fast as they go, or at a pace: sending, receiving, and the rates.

The receiver's clock counts: what has arrived has crossed the link, what was sent may still lie in a
buffer. What is sent is random, so that nothing on the way can compress it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pichak_core.measure._net_tcp import Sent, tcp_counters
from pichak_core.measurement import median_and_spread

#: Bytes of one write; a paced flow uses `PACED_BYTES`.
BLOCK_BYTES = 256 * 1024
PACED_BYTES = 16 * 1024
_RANDOM_BYTES = 4 * 1024 * 1024
#: Unsent bytes that may lie in a socket: what a slow link could not take for minutes stays here.
_UNSENT_BYTES = 512 * 1024
WINDOW_SECONDS = 0.1
#: Seconds in which nothing moves, after which a flow is given up.
STALL_SECONDS = 10.0
#: Linux's TCP_NOTSENT_LOWAT, which the socket module does not name in every version.
_NOTSENT_LOWAT = 25


@dataclass
class Received:
    """What arrived: bytes of each connection, and (seconds, bytes so far) at each look."""

    totals: list[int]
    looks: list[tuple[float, int]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "totals": self.totals,
            "looks": [[round(at, 6), count] for at, count in self.looks],
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "error": self.error,
        }


def send(
    socks: Sequence[socket.socket], seconds: float, bytes_per_second: float | None = None
) -> Sent:
    """Send random bytes on every connection for `seconds`, then end each one's direction.

    `bytes_per_second` paces them, all connections together. Never raises: `Sent.error` says what
    went wrong.
    """
    data = memoryview(os.urandom(_RANDOM_BYTES))
    made = Sent([0] * len(socks))
    errors: list[str] = []
    started_cpu, started = time.process_time(), time.monotonic()
    end = started + seconds
    pace = None if bytes_per_second is None else bytes_per_second / len(socks)

    def one(index: int, sock: socket.socket) -> None:
        offset = (index * 997 * 1024) % (_RANDOM_BYTES // 2)
        block = BLOCK_BYTES if pace is None else PACED_BYTES
        try:
            sock.settimeout(STALL_SECONDS)
            _bound_unsent(sock)
            while (now := time.monotonic()) < end:
                if pace is not None:
                    due = started + made.totals[index] / pace
                    if due > now:
                        time.sleep(min(due, end) - now)
                        continue
                count = sock.send(data[offset : offset + block])
                made.totals[index] += count
                offset = (offset + count) % (_RANDOM_BYTES - block)
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            errors.append(f"sending broke off: {error}")

    _in_threads(one, socks)
    made.wall_seconds = time.monotonic() - started
    made.cpu_seconds = time.process_time() - started_cpu
    made.error = errors[0] if errors else ""
    return made


def count_retransmissions(socks: Sequence[socket.socket], sent: Sent) -> None:
    """Ask the system what it had to send again. After the receiver has told its total: until then
    something may still be on its way."""
    for sock in socks:
        counters = tcp_counters(sock)
        if counters is not None:
            sent.counters.append(counters)


def receive(socks: Sequence[socket.socket], limit_seconds: float) -> Received:
    """Take bytes from every connection until each ends, or `limit_seconds` are over.

    Never raises: `Received.error` says what went wrong.
    """
    made = Received([0] * len(socks))
    errors: list[str] = []
    done = threading.Event()
    started_cpu, started = time.process_time(), time.monotonic()
    end = started + limit_seconds

    def one(index: int, sock: socket.socket) -> None:
        buffer = bytearray(BLOCK_BYTES)
        try:
            sock.settimeout(STALL_SECONDS)
            while time.monotonic() < end:
                count = sock.recv_into(buffer)
                if not count:
                    return
                made.totals[index] += count
            errors.append(f"it was not over within {limit_seconds:g} s")
        except OSError as error:
            errors.append(f"receiving broke off: {error}")

    def look() -> None:
        while not done.is_set():
            made.looks.append((time.monotonic() - started, sum(made.totals)))
            done.wait(WINDOW_SECONDS)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    _in_threads(one, socks)
    done.set()
    looking.join()
    made.looks.append((time.monotonic() - started, sum(made.totals)))
    made.wall_seconds = time.monotonic() - started
    made.cpu_seconds = time.process_time() - started_cpu
    made.error = errors[0] if errors else ""
    return made


def window_rates(
    looks: Sequence[tuple[float, int]], *, warm_up_seconds: float, seconds: float
) -> list[float]:
    """MB/s (10^6 bytes) of each window between two looks.

    Counted from the first byte: what lies within `warm_up_seconds` of it is left out, and so is
    what came later than `seconds`, when the sender had stopped and buffers ran empty.
    """
    begun = next((at for at, count in looks if count > 0), None)
    if begun is None:
        return []
    first, last = begun + warm_up_seconds, begun + seconds
    inside = [(at, count) for at, count in looks if first <= at <= last]
    return [
        (after - before) / (t1 - t0) / 1e6
        for (t0, before), (t1, after) in itertools.pairwise(inside)
        if t1 > t0
    ]


def rate_of(rates: Sequence[float]) -> tuple[float, float | None]:
    """Median and spread of window rates; `ValueError` without any."""
    return median_and_spread(rates)


def _in_threads(work: Any, socks: Sequence[socket.socket]) -> None:
    threads = [
        threading.Thread(target=work, args=(i, sock), daemon=True) for i, sock in enumerate(socks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _bound_unsent(sock: socket.socket) -> None:
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None and hasattr(socket, "TCP_INFO"):
        option = _NOTSENT_LOWAT
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES)
