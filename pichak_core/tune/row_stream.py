"""A file's bytes, decompressed where its first bytes say that it is compressed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PARQUET_MAGIC = b"PAR1"

#: Compressed bytes unpacked at a time: little, as they may hold a thousand times as many.
_PACKED_BYTES = 8192

#: What the first bytes of other common files look like: never read as text.
_FOREIGN = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7-zip",
    b"ARROW1": "Arrow",
    b"\x89HDF": "HDF5",
    b"\x93NUMPY": "NumPy",
    b"SQLite format 3": "SQLite",
    b"%PDF": "PDF",
}
_OTHER_UNICODE = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


#: C0 controls that no text has: all but BEL, BS, TAB, LF, VT, FF, CR, ESC and the separators.
_CONTROLS = bytes(set(range(28)) - {*range(7, 14), 27})


class CorpusError(ValueError):
    """A corpus that cannot be read: what, where, and what to do."""


class Stream:
    """`reader` gives the decompressed bytes; `position` counts the bytes of the file itself."""

    def __init__(self, raw: IO[bytes], reader: IO[bytes]) -> None:
        self.raw, self.reader = raw, reader
        self.seekable = raw is reader

    def position(self) -> int:
        """Bytes of the file (compressed, where it is) that have been read."""
        return self.raw.tell()


@contextmanager
def open_stream(path: Path) -> Iterator[Stream]:
    """Open a plain, gzip or zstandard file by its first bytes, whatever its name.

    Raises `OSError` when it cannot be opened, `CorpusError` when its compressed data is broken or
    zstandard is not installed.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CorpusError(
            f"{path} is a pipe or a device, and rows are read more than once: write them to a file "
            "first"
        )
    with path.open("rb", buffering=0) as raw:
        magic = raw.read(4)
        raw.seek(0)
        file = cast("IO[bytes]", raw)
        try:
            if magic.startswith(GZIP_MAGIC):
                yield Stream(file, cast("IO[bytes]", gzip.GzipFile(fileobj=file)))
            elif magic == ZSTD_MAGIC:
                yield from _zstandard(path, file)
            else:
                yield Stream(file, file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorpusError(
                f"{path}: the compressed data is damaged or ends early ({error}); "
                "copy or download the file again"
            ) from error


def _zstandard(path: Path, file: IO[bytes]) -> Iterator[Stream]:
    try:
        import zstandard
    except ImportError as error:
        raise CorpusError(
            f"{path} is compressed with zstandard: pip install zstandard, or unpack it (zstd -d)"
        ) from error
    try:
        yield Stream(file, cast("IO[bytes]", _ZstdReader(file, zstandard)))
    except zstandard.ZstdError as error:
        raise CorpusError(
            f"{path}: the compressed data is damaged ({error}); copy or download the file again"
        ) from error


class _ZstdReader:
    """`read` and `tell` over every frame of a zstandard file.

    The package's own stream reader takes a file that ends inside a frame for a whole one.
    """

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file = file
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame: Any = None
        self._ready = b""
        self._given = 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end. `EOFError` when the file ends inside a frame."""
        parts, held = [self._ready], len(self._ready)
        while held < size and (packed := self._file.read(_PACKED_BYTES)):
            while packed:
                self._frame = self._frame or self._unpacker.decompressobj()
                parts.append(self._frame.decompress(packed))
                held += len(parts[-1])
                packed = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
        if not held and self._frame is not None:
            raise EOFError("the last frame is not complete")
        whole = b"".join(parts)
        given, self._ready = whole[:size], whole[size:]
        self._given += len(given)
        return given

    def tell(self) -> int:
        """Bytes given so far."""
        return self._given


def refuse_foreign(path: Path, head: bytes) -> None:
    """Raise `CorpusError` when `head` is not the start of UTF-8 text."""
    for magic, name in _OTHER_UNICODE.items():
        if head.startswith(magic):
            raise CorpusError(
                f"{path} is {name}, not UTF-8: convert it (iconv -f {name} -t UTF-8 FILE > NEW)"
            )
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            raise CorpusError(
                f"{path} is a {name} file: give JSON Lines, a JSON array, plain text "
                "(each also as .gz or .zst) or parquet"
            )


def looks_binary(head: bytes) -> bool:
    """More than 1 % NULs or 5 % control characters, lines of nothing but NULs left out.

    Compressed, encrypted or random bytes hold 7 % such characters; UTF-16 is half NULs.
    """
    lines = [line for line in head.split(b"\n") if line.strip(b"\0\r")]
    text = b"\n".join(lines)
    if not text:
        return 0 in head
    controls = len(text) - len(text.translate(None, _CONTROLS))
    return text.count(0) * 100 > len(text) or controls * 20 > len(text)
