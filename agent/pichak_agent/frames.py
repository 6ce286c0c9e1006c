"""The pipe from child to runner: frames of progress, partial results and the one outcome.

A frame is ``b"PKF"``, one letter for its kind, its length as four bytes (big-endian), then that
many bytes: UTF-8 text for progress, a msgpack object for a partial result, an encoded `Outcome` for
the end. The mark makes stray bytes recognisable at once instead of as a length.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping
from typing import Any

from pichak_agent.messages import MAX_BYTES, MessageError, clip_text, pack_map, unpack_map

MARK = b"PKF"
PROGRESS, PARTIAL, OUTCOME = b"p", b"r", b"o"
_HEADER = struct.Struct(">3scI")
#: Everything one child may send, all frames together.
MAX_TOTAL_BYTES = 8 * MAX_BYTES
_MAX_PROGRESS_BYTES = 4096


class FrameError(ValueError):
    """What arrived is not frames, or too much of them: one sentence."""


class FrameReader:
    """Takes bytes as they come; keeps the last progress, the last partial result, the outcome.

    What follows the outcome is ignored: a job ends once.
    """

    def __init__(self, *, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self.outcome: bytes | None = None
        self.progress = ""
        self._partial = b""
        self._buffer = bytearray()
        self._total = 0
        self._max_total = max_total_bytes

    def feed(self, data: bytes) -> list[str]:
        """Take bytes; the progress texts among them. `FrameError` when they are not frames."""
        if self.outcome is not None:
            return []
        self._total += len(data)
        if self._total > self._max_total:
            raise FrameError(
                f"flooded its result pipe: more than {self._max_total:,} bytes without an outcome"
            )
        self._buffer += data
        texts: list[str] = []
        while self.outcome is None and len(self._buffer) >= _HEADER.size:
            mark, kind, length = _HEADER.unpack_from(self._buffer)
            if mark != MARK or kind not in (PROGRESS, PARTIAL, OUTCOME):
                seen = bytes(self._buffer[:16])
                raise FrameError(f"wrote to its result pipe what is no frame: {seen!r}…")
            if length > MAX_BYTES:
                raise FrameError(
                    f"a frame of {length:,} bytes is more than the limit of {MAX_BYTES:,}"
                )
            if len(self._buffer) < _HEADER.size + length:
                break
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            if kind == PROGRESS:
                self.progress = payload[:_MAX_PROGRESS_BYTES].decode("utf-8", "replace")
                texts.append(self.progress)
            elif kind == PARTIAL:
                self._partial = payload
            else:
                self.outcome = payload
        return texts

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end in the middle of a frame."""
        return self.outcome is None and bool(self._buffer)

    def partial(self) -> dict[str, Any]:
        """The last partial result; empty when there is none or it cannot be read."""
        if not self._partial:
            return {}
        try:
            return unpack_map(self._partial)
        except MessageError:
            return {}


class FrameWriter:
    """The child's end. Threads may share it; a closed pipe raises `OSError`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._main_is_sending = False
        self._waiting: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """For a signal handler: raise `error`, but never in the middle of a frame."""
        if self._main_is_sending:
            self._waiting = error
        else:
            raise error

    def progress(self, text: str) -> None:
        """One line about what is being done now."""
        line = clip_text(" ".join(text.split()), 1000)
        self._send(PROGRESS, line.encode("utf-8", "replace")[:_MAX_PROGRESS_BYTES])

    def partial(self, result: Mapping[str, Any]) -> None:
        """What the job would return if it ended now; replaces the one before."""
        self._send(PARTIAL, pack_map(result))

    def outcome(self, encoded: bytes) -> None:
        """The end."""
        self._send(OUTCOME, encoded)

    def _send(self, kind: bytes, payload: bytes) -> None:
        data = memoryview(_HEADER.pack(MARK, kind, len(payload)) + payload)
        with self._lock:
            # Python runs signal handlers in the main thread only.
            in_main = threading.current_thread() is threading.main_thread()
            self._main_is_sending = in_main
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            finally:
                self._main_is_sending = False
        if in_main and self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            raise waiting
