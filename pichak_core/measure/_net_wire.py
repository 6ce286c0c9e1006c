"""The handshake of a link test, and its messages.

Both ends know a token that was made for this one test. Neither sends it: each proves that it has it
by an HMAC-SHA256 over random bytes of both, so that whoever listens in learns nothing that opens a
second connection. A connection that cannot prove itself is closed before it is served.

    server: MARK, 16 random bytes
    client: session (8 bytes), channel (2 bytes), 16 random bytes, proof (32 bytes)
    server: proof (32 bytes)

Channel 0 carries messages (4 bytes of length, JSON); the others carry bytes of a throughput test.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any

#: Rises when the wire changes.
MARK = b"pichakL1"
NONCE_BYTES = 16
SESSION_BYTES = 8
PROOF_BYTES = 32
CONTROL = 0
#: Seconds that opening a connection may take: a first packet that was lost is sent again after 1 s
#: and 3 s.
CONNECT_SECONDS = 5.0
#: Seconds that any one answer of the other end may take.
ANSWER_SECONDS = 10.0
_MAX_MESSAGE = 256 * 1024
_CHANNEL = struct.Struct("!H")
_LENGTH = struct.Struct("!I")


class LinkError(RuntimeError):
    """A link that cannot be tested: what happened, and what it means."""


class StrangerError(LinkError):
    """The other end did not prove that it belongs to this test."""


def token_of(key: bytes, session: bytes) -> bytes:
    """The token of one session with the listener that holds `key`."""
    return hmac.digest(key, b"session" + session, "sha256")


def proof(token: bytes, side: bytes, *parts: bytes) -> bytes:
    """What `side` (``client``, ``server``) answers to the random bytes of both."""
    return hmac.new(token, side + b"".join(parts), sha256).digest()


def exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes; `LinkError` when the connection ends before, `TimeoutError` when none come."""
    made = bytearray()
    while len(made) < count:
        piece = sock.recv(count - len(made))
        if not piece:
            raise LinkError("the other end closed the connection")
        made += piece
    return bytes(made)


def greet(
    sock: socket.socket, find_token: Callable[[bytes], bytes], admit: Callable[[bytes, int], bool]
) -> tuple[bytes, int]:
    """The server's half: (session, channel) of a client that has proved itself.

    `admit` is asked once the proof is right: a channel of a session is admitted once.
    `StrangerError` for everybody else, who gets no answer.
    """
    mine = os.urandom(NONCE_BYTES)
    sock.sendall(MARK + mine)
    said = exactly(sock, SESSION_BYTES + _CHANNEL.size + NONCE_BYTES + PROOF_BYTES)
    head, theirs = said[:-PROOF_BYTES], said[-PROOF_BYTES:]
    session = head[:SESSION_BYTES]
    (channel,) = _CHANNEL.unpack_from(head, SESSION_BYTES)
    token = find_token(session)
    if not hmac.compare_digest(theirs, proof(token, b"client", mine, head)):
        raise StrangerError("it did not prove that it belongs to this test")
    if not admit(session, channel):
        raise StrangerError("its token was used before")
    sock.sendall(proof(token, b"server", mine, head))
    return session, channel


def introduce(sock: socket.socket, token: bytes, session: bytes, channel: int) -> None:
    """The client's half; `StrangerError` when the other end is not the listener of this test."""
    try:
        if exactly(sock, len(MARK)) != MARK:
            raise StrangerError("another program answers there")
        theirs = exactly(sock, NONCE_BYTES)
        mine = session + _CHANNEL.pack(channel) + os.urandom(NONCE_BYTES)
        sock.sendall(mine + proof(token, b"client", theirs, mine))
        answer = exactly(sock, PROOF_BYTES)
    except TimeoutError as error:
        raise StrangerError("the connection opens, but nobody answers on it") from error
    except StrangerError:
        raise
    except (LinkError, ConnectionError) as error:
        raise StrangerError("the connection opens and is closed at once") from error
    if not hmac.compare_digest(answer, proof(token, b"server", theirs, mine)):
        raise StrangerError("another program answers there")


def open_channel(
    address: str,
    port: int,
    token: bytes,
    session: bytes,
    channel: int,
    *,
    seconds: float = CONNECT_SECONDS,
) -> socket.socket:
    """A connection to the listener that has proved itself; `LinkError` says why there is none."""
    try:
        sock = socket.create_connection((address, port), seconds)
    except OSError as error:
        raise LinkError(why_no_connection(error, seconds)) from error
    try:
        sock.settimeout(max(seconds, ANSWER_SECONDS))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(sock, token, session, channel)
    except BaseException:
        sock.close()
        raise
    return sock


def why_no_connection(error: OSError, seconds: float) -> str:
    """What a failed `connect` says about the way there."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"no answer within {seconds:g} s: a firewall drops it, or there is no way there"
    if error.errno == errno.ECONNREFUSED:
        return "refused: a firewall rejects it, or another machine has this address"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route to it, or no machine has this address"
    return f"no connection: {error.strerror or error}"


def send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    """One message on the control channel."""
    data = json.dumps(message, allow_nan=False).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(sock: socket.socket) -> dict[str, Any]:
    """The next message; `LinkError` when it is none, `TimeoutError` when none comes."""
    (length,) = _LENGTH.unpack(exactly(sock, _LENGTH.size))
    if length > _MAX_MESSAGE:
        raise LinkError(f"a message of {length:,} bytes is longer than {_MAX_MESSAGE:,}")
    try:
        message = json.loads(exactly(sock, length))
    except ValueError as error:
        raise LinkError(f"a message that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise LinkError("a message that is not an object")
    return message
