"""Cut a JSON array of rows into its elements, chunk by chunk, as bytes.

The cutter looks at strings and brackets alone. Each element is parsed later on its own, so that a
bad one costs itself and not the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

_CHUNK_BYTES = 256 * 1024
_MAX_ELEMENT_BYTES = 64 * 1024 * 1024

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_STRING_END = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
#: A whole object with nothing nested in it, in one step: most rows are that.
_FLAT_OBJECT = re.compile(rb'\{[^"{}\[\]]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}\[\]]*)*\}', re.DOTALL)
_OPEN = ord("{")
_BETWEEN = b", \t\r\n"
_BOM = b"\xef\xbb\xbf"


def iter_elements(reader: IO[bytes], *, inside: bool = False) -> Iterator[tuple[int, bytes | None]]:
    """(offset of its first byte, bytes) of each element of the array that `reader` holds.

    `inside` says that `reader` stands at the start of an element already. Bytes are None for an
    element larger than 64 MiB. An array that ends early gives its last, broken element too, and
    arrays that follow one another (files joined together) are read as one.
    """
    cutter = _Cutter(reader.tell(), depth=1 if inside else 0)
    while chunk := reader.read(_CHUNK_BYTES):
        yield from cutter.feed(chunk)
    yield from cutter.finish()


class _Cutter:
    """Where the cut stands between two chunks.

    `buffer` starts at byte `base` of the file. `start` is where the open element begins in it
    (-1: between elements) and `offset` where in the file, `scanned` how far it has been looked at,
    `gap` where the text between two elements begins.
    """

    def __init__(self, base: int, depth: int) -> None:
        self.base, self.depth = base, depth
        self.buffer = b""
        self.start, self.offset, self.scanned, self.gap = -1, 0, 0, 0
        self.in_string = False
        self.too_large = False

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes | None]]:
        self.buffer += chunk
        if self.in_string and not self._leave_string():
            self._forget()
            return
        if self.start >= 0 and self.depth == 1:
            yield self._close(self.scanned)
        while token := _TOKEN.search(self.buffer, self.scanned):
            begin, end = token.span()
            kind = self.buffer[begin]
            if kind == _OPEN and self.depth == 1 and self.start < 0:
                flat = _FLAT_OBJECT.match(self.buffer, begin)
                if flat:
                    yield from self._scalars(begin)
                    yield self.base + begin, flat.group()
                    self.scanned = self.gap = flat.end()
                    continue
            opens = kind in b"[{"
            if self.start < 0 and kind not in b"]}" and self.depth > 0:
                yield from self._scalars(begin)
                self.start, self.offset = begin, self.base + begin
            if opens:
                self.depth += 1
                if self.depth == 1:
                    yield from self._scalars(begin)
                    self.gap = end
            elif kind in b"]}":
                if self.start < 0:
                    yield from self._scalars(begin)
                    self.gap = end
                self.depth = max(0, self.depth - 1)
            elif end == begin + 1:
                self.in_string = True
                self.scanned = end
                self._leave_string()
                break
            self.scanned = end
            if self.start >= 0 and self.depth == 1:
                yield self._close(end)
        if not self.in_string:
            self.scanned = len(self.buffer)
        self._forget()

    def finish(self) -> Iterator[tuple[int, bytes | None]]:
        """What an array that ends early leaves behind."""
        if self.start >= 0:
            yield self._close(len(self.buffer))
        yield from self._scalars(len(self.buffer))

    def _leave_string(self) -> bool:
        end = _STRING_END.match(self.buffer, self.scanned)
        if end:
            self.scanned, self.in_string = end.end(), False
            return True
        # A backslash at the very end belongs to the byte after it.
        tail = self.buffer[self.scanned :]
        odd = (len(tail) - len(tail.rstrip(b"\\"))) % 2
        self.scanned = len(self.buffer) - odd
        return False

    def _close(self, end: int) -> tuple[int, bytes | None]:
        element = None if self.too_large else self.buffer[self.start : end]
        self.start, self.gap, self.too_large = -1, end, False
        return self.offset, element

    def _scalars(self, end: int) -> list[tuple[int, bytes | None]]:
        """Numbers, nulls and stray text between two elements: rows too, if not usable ones."""
        at, between = self.gap, self.buffer[self.gap : end]
        self.gap = end
        if not between.strip(_BETWEEN):
            return []
        found: list[tuple[int, bytes | None]] = []
        for part in between.split(b","):
            word = part.strip()
            if word and word != _BOM:
                found.append((self.base + at + part.index(word), word))
            at += len(part) + 1
        return found

    def _forget(self) -> None:
        """Drop what no open element needs; a gap or an element past the limit is dropped too."""
        keep = self.start if self.start >= 0 else self.gap
        if len(self.buffer) - keep > _MAX_ELEMENT_BYTES:
            self.too_large = self.start >= 0
            keep = self.scanned
        self.buffer = self.buffer[keep:]
        self.base += keep
        self.scanned -= keep
        self.gap = max(0, self.gap - keep)
        if self.start >= 0:
            self.start = max(0, self.start - keep)
