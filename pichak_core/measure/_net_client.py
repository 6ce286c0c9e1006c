"""The asking end of a link test: opens the connections, measures, and makes readings of it.

Both directions go through connections that this end opened, so that a link which can be opened from
one side only is measured all the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pichak_core.measure._net_flow import (
    Received,
    count_retransmissions,
    receive,
    send,
)
from pichak_core.measure._net_server import ECHO_BYTES
from pichak_core.measure._net_tcp import Sent
from pichak_core.measure._net_wire import (
    ANSWER_SECONDS,
    CONTROL,
    LinkError,
    exactly,
    open_channel,
    receive_message,
    send_message,
)

#: Seconds that what lies in buffers may take to arrive after the sender has stopped.
DRAIN_SECONDS = 20.0
_ECHOES_AT_ONCE = 10
_MARGIN_SECONDS = 5.0


@dataclass(frozen=True)
class Flow:
    """One direction of a throughput test, as both of its ends saw it."""

    sent: Sent
    received: Received
    seconds: float

    @property
    def problem(self) -> str:
        """Why its figures mean nothing; "" when they do."""
        for end in (self.sent, self.received):
            if end.error:
                return end.error
        there, here = sum(self.sent.totals), sum(self.received.totals)
        if self.sent.totals != self.received.totals:
            return f"the ends disagree: {there:,} bytes were sent and {here:,} arrived"
        return "" if here else "nothing arrived"


@dataclass(frozen=True)
class Place:
    """The addresses of one connection.

    `local` and `target` as this end has them, `seen_as` and `answered_by` as the other end does: a
    NAT on the way makes them differ. `target_is_local`: the target address is one of the other
    machine's own.
    """

    local: str
    seen_as: str
    target: str
    answered_by: str
    target_is_local: bool

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Place:
        """The inverse of `as_dict`; `ValueError` when it is not one."""
        local, seen_as, target, answered_by = (
            record.get(name) for name in ("local", "seen_as", "target", "answered_by")
        )
        texts = (local, seen_as, target, answered_by)
        if not all(isinstance(text, str) and len(text) <= 64 for text in texts):
            raise ValueError("addresses are text")
        here = bool(record.get("target_is_local"))
        return cls(str(local), str(seen_as), str(target), str(answered_by), here)


class LinkClient:
    """One session with a listener; a context manager. `LinkError` where the link fails."""

    def __init__(
        self,
        address: str,
        port: int,
        session: bytes,
        token: bytes,
        *,
        connect_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._where = (address, port)
        self._session, self._token = session, token
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._next = CONTROL
        self._told: dict[str, Any] = {}
        begun = clock()
        self._control = self._open()
        self.connect_ms = 1e3 * (clock() - begun)

    def __enter__(self) -> LinkClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                send_message(self._control, {"op": "end", **self._told})
        except OSError:
            pass
        finally:
            self._control.close()

    def tell(self, own_name: str, readings: Mapping[str, Any]) -> None:
        """What the listener hears at the end: who measured it, and what (`mirrored` turns it)."""
        self._told = {"peer": own_name, "readings": dict(readings)}

    def place(self) -> Place:
        """Through which addresses the connection goes."""
        send_message(self._control, {"op": "where"})
        said = receive_message(self._control)
        return Place.from_dict(
            {
                "local": self._control.getsockname()[0],
                "seen_as": said.get("seen_as"),
                "target": self._where[0],
                "answered_by": said.get("local"),
                "target_is_local": said.get("is_local"),
            }
        )

    def round_trips_ms(self, seconds: float, most: int, least: int = 10) -> list[float]:
        """Milliseconds of small exchanges, one at a time: `most`, or for `seconds`, but `least`."""
        times: list[float] = []
        end = self._clock() + seconds
        block = b"\0" * ECHO_BYTES
        self._echo(block, _ECHOES_AT_ONCE)  # the first ones find cold caches and sleeping cores
        while len(times) < least or (len(times) < most and self._clock() < end):
            times += self._echo(block, min(_ECHOES_AT_ONCE, most - len(times)))
        return times

    def _echo(self, block: bytes, count: int) -> list[float]:
        send_message(self._control, {"op": "echo", "count": count})
        times = []
        for _ in range(count):
            begun = self._clock()
            self._control.sendall(block)
            exactly(self._control, ECHO_BYTES)
            times.append(1e3 * (self._clock() - begun))
        return times

    def forward(self, seconds: float, streams: int, rate: float | None = None) -> Flow:
        """Send to the listener for `seconds` on `streams` connections; `rate` in bytes a second."""
        with ExitStack() as stack:
            socks, channels = self._channels(streams, stack)
            limit = seconds + DRAIN_SECONDS
            self._ask({"op": "receive", "channels": channels, "seconds": limit})
            sent = send(socks, seconds, rate)
            self._control.settimeout(limit + _MARGIN_SECONDS)
            received = _received(receive_message(self._control))
            self._control.settimeout(ANSWER_SECONDS)
            count_retransmissions(socks, sent)
        return Flow(sent, received, seconds)

    def backward(self, seconds: float, streams: int, rate: float | None = None) -> Flow:
        """Have the listener send to this end."""
        with ExitStack() as stack:
            socks, channels = self._channels(streams, stack)
            asked = {"op": "send", "channels": channels, "seconds": seconds, "rate": rate}
            send_message(self._control, asked)
            received = receive(socks, seconds + DRAIN_SECONDS)
            send_message(self._control, {"received": sum(received.totals)})
            sent = _sent(receive_message(self._control))
        return Flow(sent, received, seconds)

    def _ask(self, message: dict[str, Any]) -> None:
        """Ask, and wait until the listener is ready."""
        send_message(self._control, message)
        if not receive_message(self._control).get("ready"):
            raise LinkError("the listener is not ready")

    def _channels(self, count: int, stack: ExitStack) -> tuple[list[socket.socket], list[int]]:
        socks, channels = [], []
        for _ in range(count):
            channels.append(self._next)
            socks.append(self._open())
            stack.callback(socks[-1].close)
        return socks, channels

    def _open(self) -> socket.socket:
        channel = self._next
        self._next += 1
        address, port = self._where
        return open_channel(
            address, port, self._token, self._session, channel, seconds=self._connect_seconds
        )


def _sent(record: Mapping[str, Any]) -> Sent:
    """What the other end says that it sent; `LinkError` when it is not that."""
    try:
        return Sent(
            [int(count) for count in record["totals"]],
            [{str(k): int(v) for k, v in one.items()} for one in record["counters"]],
            float(record["cpu_seconds"]),
            float(record["wall_seconds"]),
            str(record["error"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LinkError(f"what was sent cannot be read: {error!r}") from error


def _received(record: Mapping[str, Any]) -> Received:
    try:
        return Received(
            [int(count) for count in record["totals"]],
            [(float(at), int(count)) for at, count in record["looks"]],
            float(record["cpu_seconds"]),
            float(record["wall_seconds"]),
            str(record["error"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LinkError(f"what was received cannot be read: {error!r}") from error
