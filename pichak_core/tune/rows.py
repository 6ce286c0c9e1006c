"""Read a corpus row by row: JSON Lines, a JSON array, plain text (each also .gz or .zst), parquet.

What is wrong with a row is named and counted with its place; it never ends the run, and no row is
dropped without being counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pichak_core.tune.row_bytes import ByteRows, OnBytes, Piece, RowCount, is_blank
from pichak_core.tune.row_stream import (
    PARQUET_MAGIC,
    CorpusError,
    looks_binary,
    open_stream,
    refuse_foreign,
)
from pichak_core.tune.surrogates import spells_surrogates, without_surrogates

BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 64 * 1024
_HEAD_LINES = 32

FileKind = Literal["JSON Lines", "JSON array", "plain text", "parquet"]


class RawRow(NamedTuple):
    """One row as the file holds it.

    `place` is its line from 1, or its number from 1 in a JSON array or parquet file. `value` is
    text, or what JSON decodes to. `usable` is False when it could not be read at all; `defects`
    then names why.
    """

    place: int
    value: Any
    defects: tuple[str, ...] = ()
    usable: bool = True


class RowFile(Protocol):
    """A corpus file that can be counted, read through, and read at chosen rows."""

    path: Path
    kind: FileKind

    def count(self, on_bytes: OnBytes | None = None) -> RowCount:
        """Count its rows without keeping them."""

    def __iter__(self) -> Iterator[RawRow]:
        """Every row that is not blank, in order."""

    def fetch(self, rows: Sequence[int]) -> Iterator[tuple[int, RawRow]]:
        """(row number from 0, row) of the rows asked for, in the file's order."""


def open_rows(path: str | Path) -> RowFile:
    """The corpus at `path`, its kind told from its content and not from its name.

    Raises `OSError` when it cannot be opened and `CorpusError` when it is not a corpus.
    """
    path = Path(path)
    with open_stream(path) as stream:
        head = _read_head(stream.reader)
    if head.startswith(PARQUET_MAGIC):
        from pichak_core.tune.row_parquet import ParquetRows

        return ParquetRows(path)
    refuse_foreign(path, head)
    if looks_binary(head) and not _holds_rows(head):
        raise CorpusError(
            f"{path} holds NUL bytes or other control characters where text should be, so it is "
            "binary or UTF-16: give JSON Lines, a JSON array, plain text or parquet"
        )
    kind = sniff(head, whole=len(head) < _HEAD_BYTES)
    if kind is None:
        raise CorpusError(
            f"{path} begins with a JSON object that runs over several lines: write one row a line "
            "(jq -c . FILE, or jq -c '.data[]' FILE) or one JSON array of rows"
        )
    return DecodedRows(path, kind)


class DecodedRows:
    """The rows of a file of text, decoded one by one."""

    def __init__(self, path: Path, kind: FileKind) -> None:
        self.path = path
        self.kind: FileKind = kind
        self._pieces = ByteRows(path, "array" if kind == "JSON array" else "lines")

    def count(self, on_bytes: OnBytes | None = None) -> RowCount:
        return self._pieces.count(on_bytes)

    def __iter__(self) -> Iterator[RawRow]:
        for piece in self._pieces:
            if piece.data is None or not is_blank(piece.data):
                yield self._decode(piece)

    def fetch(self, rows: Sequence[int]) -> Iterator[tuple[int, RawRow]]:
        for number, piece in self._pieces.fetch(rows):
            yield number, self._decode(piece)

    def _decode(self, piece: Piece) -> RawRow:
        if piece.data is None:
            return RawRow(piece.place, None, ("too_large",), usable=False)
        if not piece.data.strip(b"\0\r"):
            return RawRow(piece.place, None, ("only_nuls",), usable=False)
        if self.kind == "plain text":
            text, defects = decode_text(piece.data)
            return RawRow(piece.place, text, defects)
        return decode_json(piece.data, piece.place)


def decode_text(data: bytes) -> tuple[str, tuple[str, ...]]:
    """The text of a line, without its BOM and CR; invalid UTF-8 becomes U+FFFD."""
    defects: list[str] = []
    if data.endswith(b"\r"):
        data = data[:-1]
        defects.append("crlf")
    if data.startswith(BOM):
        data = data[len(BOM) :]
        defects.append("bom")
    try:
        return data.decode("utf-8"), tuple(defects)
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), (*defects, "invalid_utf8")


def decode_json(data: bytes, place: int) -> RawRow:
    """A row of JSON; lone surrogates (which no encoder takes) become U+FFFD."""
    text, defects = decode_text(data)
    try:
        value = _value(text)
        if spells_surrogates(text):
            value, replaced = without_surrogates(value)
            defects += ("lone_surrogate",) * replaced
    except (ValueError, RecursionError):
        name = "invalid_json" if text.strip() else "empty_row"
        return RawRow(place, None, (*defects, name), usable=False)
    return RawRow(place, value, defects)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # An integer of more digits than Python reads by default is valid JSON: keep its text.
        return json.loads(text, parse_int=_int_or_text)


def _int_or_text(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


def sniff(head: bytes, *, whole: bool) -> FileKind | None:
    """Whether a file that begins with `head` holds JSON rows, one JSON array, or text.

    `whole` says that `head` is all of it. Rows that look like JSON and are broken count as JSON.
    None for one JSON object spread over lines, which has no rows that could be told.
    """
    text = head.removeprefix(BOM).lstrip()
    lines = [line for line in text.split(b"\n") if not is_blank(line) and line.strip(b"\0\r")]
    if not whole and len(lines) > 1:
        lines.pop()
    if text.startswith(b"["):
        one_line = _loads(lines[0])
        if isinstance(one_line, list) and len(lines) > 1:
            return "JSON Lines"
        if isinstance(one_line, list) or text[1:].lstrip()[:1] in (b"{", b"[", b'"', b"]"):
            return "JSON array"
    lines = lines[:_HEAD_LINES]
    values = [_loads(line) for line in lines]
    like_rows = 2 * sum(line.lstrip()[:1] in (b"{", b"[") for line in lines) >= len(lines)
    begins_object = text.startswith(b"{") and text[1:].lstrip().startswith(b'"')
    if begins_object and (lines[0].strip() == b"{" or not (like_rows or values[0])):
        return None
    if begins_object or any(isinstance(value, (dict, list)) for value in values):
        return "JSON Lines" if like_rows else "plain text"
    all_strings = bool(values) and all(isinstance(value, str) for value in values)
    return "JSON Lines" if all_strings else "plain text"


def _holds_rows(head: bytes) -> bool:
    """Whether a line near the start is a JSON row; a number alone can be chance."""
    lines = head.removeprefix(BOM).split(b"\n")[:_HEAD_LINES]
    return any(isinstance(_loads(line), (dict, list, str)) for line in lines)


def _read_head(reader: Any) -> bytes:
    head = b""
    while len(head) < _HEAD_BYTES and (chunk := reader.read(_HEAD_BYTES - len(head))):
        head += chunk
    return head


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


__all__ = ["CorpusError", "DecodedRows", "RawRow", "RowFile", "open_rows"]
