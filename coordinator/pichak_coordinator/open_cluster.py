"""Who answers at an address, and whether a Ray cluster there serves whoever asks: one question to
its head, without a token, or with one to learn whether it is the cluster's.

A client that has a token joins an open cluster without noticing. So the head is asked over plain
HTTP/2, as gRPC does, for its cluster id, which a cluster with authentication tells nobody without
its token (Ray 2.60: status 16). Nothing else is asked for, and Ray need not be imported.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_NO_MESSAGE = b"\x00\x00\x00\x00\x00"
#: More than any answer to the question has.
_MOST_BYTES = 65536
_HEADER_BYTES = 9
_BANNER_BYTES, _LEAST_BANNER_BYTES = 60, 4
_SEVEN_BITS = (1 << 7) - 1


Who = Literal["open", "asks for a token", "no head", "web server", "other", ""]


@dataclass(frozen=True)
class Answer:
    """Who answered: a head that serves whoever asks ("open") or that asked for a token, another
    service of gRPC ("no head": Ray's nodes have some, too), a web server, another program, or
    nobody that says who it is (TLS, no answer in time): "". `banner` is the beginning of what
    another program said."""

    who: Who = ""
    banner: str = ""


def ask(host: str, port: int, timeout_seconds: float = 5.0, token: str = "") -> Answer:
    """Put the question, and wait no longer than this for each piece of the answer. A head that is
    shown its own `token` is "open"; one that is shown another still "asks for a token"."""
    heard = bytearray()
    try:
        with socket.create_connection((host, port), timeout_seconds) as link:
            link.settimeout(timeout_seconds)
            link.sendall(_question(f"{host}:{port}", token))
            for kind, stream, payload in _frames(link, heard):
                if kind == _DATA and stream == 1:
                    return Answer("open")
                if kind == _HEADERS and b"grpc-status\x0216" in payload:
                    return Answer("asks for a token")
                if kind == _HEADERS and b"grpc-status\x0212" in payload:
                    return Answer("no head")  # 12: it knows no such question
    except OSError:
        pass  # what was heard until then may tell
    if not heard:
        heard += _said_to_http(host, port, timeout_seconds)
    return _stranger(bytes(heard))


def serves_without_token(host: str, port: int, timeout_seconds: float = 5.0) -> bool | None:
    """True when it answered, False when it asked for a token, None when it said neither."""
    return {"open": True, "asks for a token": False}.get(ask(host, port, timeout_seconds).who)


def _said_to_http(host: str, port: int, timeout_seconds: float) -> bytes:
    """What comes back to a request of the web. A server that leaves a question unread resets the
    connection, and its own answer goes with that."""
    try:
        with socket.create_connection((host, port), timeout_seconds) as link:
            link.settimeout(timeout_seconds)
            link.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            return link.recv(_BANNER_BYTES)
    except OSError:
        return b""


def _stranger(heard: bytes) -> Answer:
    """Who speaks in words where a head sends frames."""
    first = heard[:_BANNER_BYTES].split(b"\n")[0].strip()
    if first.startswith((b"HTTP/", b"<")):
        return Answer("web server")
    if len(first) >= _LEAST_BANNER_BYTES and all(32 <= byte < 127 for byte in first):
        return Answer("other", first.decode("ascii"))
    return Answer()


def _question(authority: str, token: str) -> bytes:
    headers = b"".join(
        _literal(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", _METHOD),
            (":authority", authority[:120]),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
    )
    if token:
        headers += _literal("authorization", f"Bearer {token}")
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, headers)
        + _frame(_DATA, _END_STREAM, 1, _NO_MESSAGE)
    )


def _literal(name: str, value: str) -> bytes:
    """A header that nobody may remember (RFC 7541, 6.2.3)."""
    key, text = name.encode(), value.encode("ascii", "replace")
    return b"\x10" + _counted(key) + _counted(text)


def _counted(text: bytes) -> bytes:
    """With its length before it (RFC 7541, 5.1 and 5.2), not Huffman-coded."""
    if len(text) < _SEVEN_BITS:
        return bytes([len(text)]) + text
    made, rest = bytearray([_SEVEN_BITS]), len(text) - _SEVEN_BITS
    while rest >= 1 << 7:
        made.append(rest % (1 << 7) + (1 << 7))
        rest >>= 7
    made.append(rest)
    return bytes(made) + text


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _frames(link: socket.socket, heard: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """(kind, stream, payload) of what arrives, until the answer's end; its beginning is `heard`."""
    held, taken = b"", 0
    while taken < _MOST_BYTES:
        while len(held) < _HEADER_BYTES or len(held) < _HEADER_BYTES + _length(held):
            piece = link.recv(4096)
            if not piece or len(held) > _MOST_BYTES:
                return
            held += piece
            heard += piece[: max(0, _BANNER_BYTES - len(heard))]
            if len(heard) >= _HEADER_BYTES and heard[3] != _SETTINGS:
                return  # with these a server of HTTP/2 begins: it is none
        kind, flags, stream = held[3], held[4], int.from_bytes(held[5:9], "big")
        end = _HEADER_BYTES + _length(held)
        yield kind, stream, held[_HEADER_BYTES:end]
        taken, held = taken + end, held[end:]
        if stream == 1 and flags & _END_STREAM:
            return


def _length(held: bytes) -> int:
    return int.from_bytes(held[:3], "big")
