"""The listening end of link tests: serves whoever proves that it has a token of this listener.

One listener serves many sessions, one after the other or at once; each connection of a session is
admitted once. It ends by itself when nobody has proved itself for a while.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from pichak_core.measure._net_flow import count_retransmissions, receive, send
from pichak_core.measure._net_wire import (
    ANSWER_SECONDS,
    CONTROL,
    LinkError,
    StrangerError,
    exactly,
    greet,
    receive_message,
    send_message,
    token_of,
)

#: Bytes of one echo.
ECHO_BYTES = 16
#: Seconds that a stranger may hold a connection open.
_HANDSHAKE_SECONDS = 5.0
#: Connections that may be unproven at once; more are closed unread.
_MAX_UNPROVEN = 64
_MAX_CHANNELS = 64
_MAX_SECONDS = 120.0
_MAX_ECHOES = 10_000
_ACCEPT_SECONDS = 0.2


class _Session:
    """The connections of one test."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.channels: dict[int, socket.socket] = {}
        self.ended = False


class Listener:
    """A listening socket on `address`, its port chosen by the system.

    Where `address` is none of this machine's (it lies behind a NAT), every interface is listened
    on, and `is_local` is False. `on_told` gets (peer, readings) that a client tells at its end, as
    they came. `OSError` when nothing can be listened on.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_told: Callable[[Any, Any], None] = lambda _peer, _readings: None,
    ) -> None:
        self.address = address
        self.is_local = True
        self.served = 0
        self.refused = 0
        self._key = key
        self._clock = clock
        self._on_told = on_told
        self._lock = threading.Lock()
        self._used: set[tuple[bytes, int]] = set()
        self._sessions: dict[bytes, _Session] = {}
        self._unproven = threading.Semaphore(_MAX_UNPROVEN)
        self._last_busy = clock()
        self._sock = self._bind(address)
        self.port = int(self._sock.getsockname()[1])

    def _bind(self, address: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return _listening(family, address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self.is_local = False
            return _listening(family, "")

    def serve(self, seconds: float, idle_seconds: float) -> None:
        """Serve for at most `seconds`, or until nobody has proved itself for `idle_seconds`."""
        end = self._clock() + seconds
        self._sock.settimeout(_ACCEPT_SECONDS)
        while (now := self._clock()) < end:
            with self._lock:
                if self._sessions:
                    self._last_busy = now
            if now - self._last_busy > idle_seconds:
                return
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError:
                # The descriptor table is full, or the peer was gone before it was accepted.
                time.sleep(_ACCEPT_SECONDS)
                continue
            if self._unproven.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(sock,), daemon=True).start()
            else:
                self._refuse(sock)

    def close(self) -> None:
        """Listen no more, and close what is open."""
        self._sock.close()
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            for sock in list(session.channels.values()):
                # A thread that waits on it would not notice that it is closed.
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _refuse(self, sock: socket.socket) -> None:
        with self._lock:
            self.refused += 1
        sock.close()

    def _meet(self, sock: socket.socket) -> None:
        opened: list[bytes] = []

        def admit(session: bytes, channel: int) -> bool:
            if not self._admit(session, channel):
                return False
            opened.extend([session] if channel == CONTROL else [])
            return True

        try:
            sock.settimeout(_HANDSHAKE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            name, channel = greet(sock, lambda s: token_of(self._key, s), admit)
        except (OSError, LinkError):
            self._refuse(sock)
            for name in opened:
                self._end(name)
            return
        finally:
            self._unproven.release()
        sock.settimeout(ANSWER_SECONDS)
        if channel != CONTROL:
            self._join(sock, name, channel)
            return
        self.served += 1
        session = self._sessions[name]
        session.channels[CONTROL] = sock
        try:
            self._talk(sock, session)
        except (OSError, LinkError, ValueError, KeyError, TypeError):
            # The client went away or said what is no request: its test has ended.
            pass
        finally:
            self._end(name)

    def _admit(self, session: bytes, channel: int) -> bool:
        """A control channel opens its session, once; the others need one that is open."""
        with self._lock:
            if (session, channel) in self._used:
                return False
            if channel == CONTROL:
                self._sessions[session] = _Session()
            elif session not in self._sessions:
                return False
            self._used.add((session, channel))
            return True

    def _end(self, name: bytes) -> None:
        with self._lock:
            session = self._sessions.pop(name)
            self._last_busy = self._clock()
        with session.changed:
            session.ended = True
            for sock in session.channels.values():
                sock.close()

    def _join(self, sock: socket.socket, name: bytes, channel: int) -> None:
        with self._lock:
            session = self._sessions.get(name)
        if session is None:
            sock.close()
            return
        with session.changed:
            if session.ended:
                sock.close()
                return
            session.channels[channel] = sock
            session.changed.notify_all()

    def _talk(self, sock: socket.socket, session: _Session) -> None:
        while True:
            # Between two requests the client measures on its own; it is not rushed.
            sock.settimeout(_MAX_SECONDS)
            asked = receive_message(sock)
            sock.settimeout(ANSWER_SECONDS)
            operation = asked["op"]
            if operation == "where":
                here, there = sock.getsockname(), sock.getpeername()
                send_message(
                    sock, {"local": here[0], "seen_as": there[0], "is_local": self.is_local}
                )
            elif operation == "echo":
                for _ in range(min(int(asked["count"]), _MAX_ECHOES)):
                    sock.sendall(exactly(sock, ECHO_BYTES))
            elif operation in ("receive", "send"):
                self._flow(sock, session, asked)
            else:
                if "readings" in asked:
                    self._on_told(asked.get("peer"), asked["readings"])
                return

    def _flow(self, sock: socket.socket, session: _Session, asked: dict[str, Any]) -> None:
        channels = [int(channel) for channel in asked["channels"]][:_MAX_CHANNELS]
        if CONTROL in channels:
            raise LinkError("the control channel carries no flow")
        seconds = min(float(asked["seconds"]), _MAX_SECONDS)
        rate = asked.get("rate")
        with ExitStack() as stack:
            socks = self._wait_for(session, channels)
            for each in socks:
                stack.callback(each.close)
            if asked["op"] == "receive":
                send_message(sock, {"ready": True})
                send_message(sock, receive(socks, seconds).as_dict())
                return
            sent = send(socks, seconds, None if rate is None else float(rate))
            sock.settimeout(_MAX_SECONDS)
            receive_message(sock)  # the client has everything
            count_retransmissions(socks, sent)
            send_message(sock, sent.as_dict())

    def _wait_for(self, session: _Session, channels: Sequence[int]) -> list[socket.socket]:
        def here() -> bool:
            return all(channel in session.channels for channel in channels)

        with session.changed:
            if not session.changed.wait_for(here, ANSWER_SECONDS):
                raise StrangerError("its connections did not come")
            return [session.channels.pop(channel) for channel in channels]


def _listening(family: int, address: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock
