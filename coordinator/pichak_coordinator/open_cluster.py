"""Whether a Ray cluster serves whoever asks: one question to its head, without a token.

A client that has a token joins an open cluster without noticing. So the head is asked over plain
HTTP/2, as gRPC does, for its cluster id, which a cluster with authentication tells nobody without
a token (Ray 2.60: status 16). Nothing else is asked for, and Ray need not be imported.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_NO_MESSAGE = b"\x00\x00\x00\x00\x00"
#: More than any answer to the question has.
_MOST_BYTES = 65536
_HEADER_BYTES = 9


def serves_without_token(host: str, port: int, timeout_seconds: float = 5.0) -> bool | None:
    """True when it answered, False when it asked for a token, None when it said neither (TLS,
    another program, no answer in time)."""
    try:
        with socket.create_connection((host, port), timeout_seconds) as link:
            link.settimeout(timeout_seconds)
            link.sendall(_question(f"{host}:{port}"))
            for kind, stream, payload in _frames(link):
                if kind == _DATA and stream == 1:
                    return True
                if kind == _HEADERS and b"grpc-status\x0216" in payload:
                    return False
    except OSError:
        return None
    return None


def _question(authority: str) -> bytes:
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
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, headers)
        + _frame(_DATA, _END_STREAM, 1, _NO_MESSAGE)
    )


def _literal(name: str, value: str) -> bytes:
    """A header that nobody is to remember (RFC 7541, 6.2.2), of at most 126 bytes each."""
    key, text = name.encode(), value.encode("ascii", "replace")
    return b"\x00" + bytes([len(key)]) + key + bytes([len(text)]) + text


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _frames(link: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """(kind, stream, payload) of what arrives, until the answer's end."""
    held, taken = b"", 0
    while taken < _MOST_BYTES:
        while len(held) < _HEADER_BYTES or len(held) < _HEADER_BYTES + _length(held):
            piece = link.recv(4096)
            if not piece or len(held) > _MOST_BYTES:
                return
            held += piece
        kind, flags, stream = held[3], held[4], int.from_bytes(held[5:9], "big")
        end = _HEADER_BYTES + _length(held)
        yield kind, stream, held[_HEADER_BYTES:end]
        taken, held = taken + end, held[end:]
        if stream == 1 and flags & _END_STREAM:
            return


def _length(held: bytes) -> int:
    return int.from_bytes(held[:3], "big")
