"""The bytes of a corpus file, cut into rows without holding the file.

Rows are cut at LF bytes alone: U+2028, U+0085 and a lone CR inside a string are text, which
`str.splitlines` gets wrong. `Mark`s, one a chunk, let a row be found again by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Literal, NamedTuple

from pichak_core.tune.json_array import iter_elements
from pichak_core.tune.row_stream import open_stream

CHUNK_BYTES = 256 * 1024
#: A larger row is counted and not read, so that memory stays flat whatever the file holds.
MAX_ROW_BYTES = 64 * 1024 * 1024

Layout = Literal["lines", "array"]
#: Called with (bytes of the file read so far, bytes in the file).
OnBytes = Callable[[int, int], None]


class Piece(NamedTuple):
    """One row's bytes and its 1-based place: its line, or its number in a JSON array.

    `data` is None for a row larger than `MAX_ROW_BYTES`, and empty for a blank line.
    """

    place: int
    data: bytes | None


@dataclass(frozen=True)
class Mark:
    """Row number `row` (from 0, blank lines not counted) is the next one from byte `offset` on."""

    row: int
    place: int
    offset: int


@dataclass
class RowCount:
    """What counting found: rows, blank lines, the place of the first blank one, and the marks."""

    rows: int = 0
    blank: int = 0
    first_blank: int = 0
    marks: list[Mark] = field(default_factory=lambda: [Mark(0, 1, 0)])


class ByteRows:
    """The rows of a plain or compressed file, as bytes.

    `layout` is "lines" or "array" (a JSON array of rows). Plain files are read by seeking;
    a compressed one is read through once for each call of `fetch`.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.layout: Layout = layout
        self._count: RowCount | None = None

    def count(self, on_bytes: OnBytes | None = None) -> RowCount:
        """Count the rows, once; memory does not grow with the file but for a mark each 256 KiB."""
        if self._count is None:
            size = self.path.stat().st_size
            with open_stream(self.path) as stream:
                tick = (lambda: on_bytes(stream.position(), size)) if on_bytes else _nothing
                counted = _count_lines if self.layout == "lines" else _count_elements
                self._count = counted(stream.reader, tick)
                if not stream.seekable:
                    self._count.marks = self._count.marks[:1]
        return self._count

    def __iter__(self) -> Iterator[Piece]:
        """Every row in order, blank lines included (as empty bytes)."""
        yield from self._from(Mark(0, 1, 0))

    def fetch(self, rows: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        """(row number, piece) of the rows asked for, in the file's order.

        `rows` are numbers from 0 over the rows that are not blank; out of range raises IndexError.
        """
        counted = self.count()
        wanted = sorted(set(rows))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < counted.rows:
            raise IndexError(f"{self.path} has {counted.rows} rows")
        for mark, group in groupby(wanted, _MarkOf(counted.marks)):
            yield from _pick(self._from(mark), mark.row, group)

    def _from(self, mark: Mark) -> Iterator[Piece]:
        with open_stream(self.path) as stream:
            if mark.offset:
                stream.reader.seek(mark.offset)
            if self.layout == "lines":
                yield from iter_lines(stream.reader, mark.place)
                return
            elements = iter_elements(stream.reader, inside=mark.offset > 0)
            for place, (_, data) in enumerate(elements, mark.place):
                yield Piece(place, data)


def iter_lines(reader: IO[bytes], place: int = 1) -> Iterator[Piece]:
    """The lines from where `reader` stands, without their LF; `place` numbers the first."""
    held: list[bytes] = []
    size = 0
    while chunk := reader.read(CHUNK_BYTES):
        parts = chunk.split(b"\n")
        for part in parts[:-1]:
            if size:
                size += len(part)
                held.append(part)
                yield Piece(place, b"".join(held) if size <= MAX_ROW_BYTES else None)
                held, size = [], 0
            else:
                yield Piece(place, part)
            place += 1
        size += len(parts[-1])
        if size <= MAX_ROW_BYTES:
            held.append(parts[-1])
        else:
            held.clear()
    if size:
        yield Piece(place, b"".join(held) if size <= MAX_ROW_BYTES else None)


def is_blank(line: bytes) -> bool:
    """Nothing but ASCII white space."""
    return not line or line.isspace()


class _MarkOf:
    """The last mark at or before each of a rising run of row numbers."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.marks, self.at = marks, 0

    def __call__(self, row: int) -> Mark:
        while self.at + 1 < len(self.marks) and self.marks[self.at + 1].row <= row:
            self.at += 1
        return self.marks[self.at]


def _pick(
    pieces: Iterator[Piece], first: int, wanted: Iterable[int]
) -> Iterator[tuple[int, Piece]]:
    row = first - 1
    for number in wanted:
        for piece in pieces:
            row += piece.data is None or not is_blank(piece.data)
            if row == number:
                yield number, piece
                break


def _count_lines(reader: IO[bytes], tick: Callable[[], None]) -> RowCount:
    counted = RowCount()
    place, offset, open_is_blank = 1, 0, True
    while chunk := reader.read(CHUNK_BYTES):
        parts = chunk.split(b"\n")
        offset += len(chunk)
        parts[0] = parts[0] if open_is_blank else b"x"
        closed = parts[:-1]
        # Two passes in C are several times quicker than a loop over the lines.
        blank = closed.count(b"") + sum(map(bytes.isspace, closed))
        if blank and not counted.blank:
            counted.first_blank = place + next(i for i, p in enumerate(closed) if is_blank(p))
        counted.blank += blank
        counted.rows += len(closed) - blank
        place += len(closed)
        open_is_blank = is_blank(parts[-1])
        if closed:
            counted.marks.append(Mark(counted.rows, place, offset - len(parts[-1])))
        tick()
    counted.rows += not open_is_blank
    return counted


def _count_elements(reader: IO[bytes], tick: Callable[[], None]) -> RowCount:
    counted = RowCount()
    for start, _ in iter_elements(reader):
        # Elements are found more slowly than lines, so that the marks stand closer.
        if start - counted.marks[-1].offset >= CHUNK_BYTES // 4:
            counted.marks.append(Mark(counted.rows, counted.rows + 1, start))
            tick()
        counted.rows += 1
    return counted


def _nothing() -> None:
    return None
