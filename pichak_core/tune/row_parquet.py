"""The rows of a parquet file, read with pyarrow a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pichak_core.tune.row_bytes import OnBytes, RowCount
from pichak_core.tune.row_stream import CorpusError
from pichak_core.tune.rows import FileKind, RawRow

_BATCH_ROWS = 256


class ParquetRows:
    """A parquet file as rows of columns; columns of bytes (pictures, sound) are left out."""

    kind: FileKind = "parquet"

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise CorpusError(
                f"{path} is parquet: pip install pyarrow, or save it as JSON Lines"
            ) from error
        self.path = path
        self._broken: Any = pa.ArrowException
        try:
            self._file: Any = pq.ParquetFile(path)
            self._columns = [f.name for f in self._file.schema_arrow if not _holds_bytes(f.type)]
        except pa.ArrowException as error:
            raise CorpusError(
                f"{path}: not a readable parquet file ({error}); write or download it again"
            ) from error

    def count(self, on_bytes: OnBytes | None = None) -> RowCount:
        """From the file's own footer; nothing is read."""
        if on_bytes:
            size = self.path.stat().st_size
            on_bytes(size, size)
        return RowCount(rows=int(self._file.metadata.num_rows))

    def __iter__(self) -> Iterator[RawRow]:
        yield from self._group_rows(range(self._file.num_row_groups), 0, None)

    def fetch(self, rows: Sequence[int]) -> Iterator[tuple[int, RawRow]]:
        """(row number from 0, row); reads only the row groups that hold one of them."""
        wanted = sorted(set(rows))
        total = self.count().rows
        if wanted and not 0 <= wanted[0] <= wanted[-1] < total:
            raise IndexError(f"{self.path} has {total} rows")
        ends: list[int] = []
        for group in range(self._file.num_row_groups):
            size = self._file.metadata.row_group(group).num_rows
            ends.append(size + (ends[-1] if ends else 0))

        def group_of(row: int) -> int:
            return next(i for i, end in enumerate(ends) if row < end)

        for group, members in groupby(wanted, group_of):
            first = ends[group - 1] if group else 0
            for row in self._group_rows([group], first, set(members)):
                yield row.place - 1, row

    def _group_rows(
        self, groups: Sequence[int], first: int, wanted: set[int] | None
    ) -> Iterator[RawRow]:
        number = first
        try:
            for batch in self._file.iter_batches(
                _BATCH_ROWS, row_groups=list(groups), columns=self._columns
            ):
                for at in range(batch.num_rows):
                    if wanted is None or number in wanted:
                        yield _row(batch, at, number + 1)
                    number += 1
        except (self._broken, OSError) as error:
            raise CorpusError(
                f"{self.path}: damaged after row {number} ({error}); write or download it again"
            ) from error


def _row(batch: Any, at: int, place: int) -> RawRow:
    try:
        return RawRow(place, batch.slice(at, 1).to_pylist()[0])
    except UnicodeDecodeError:
        return RawRow(place, None, ("invalid_utf8",), usable=False)


def _holds_bytes(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return True
    if pa.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
