"""What a disk probe reads: the user's files, or one of its own that nothing can leave behind."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pichak_core.devices.direct_io import OsCalls, ReadFile, UnnamedFile, open_buffered, open_direct
from pichak_core.devices.extents import Extents, written_extents

#: What must stay free on the disk beside the probe's own file: a tenth of it, within these bounds.
FREE_MARGIN_BYTES = 1 << 30
_LEAST_MARGIN_BYTES = 64 << 20
_MARGIN_SHARE = 0.1

#: More files than this teach nothing more and use up descriptors; they are taken evenly.
MAX_FILES = 64

# What opening a file without a name gives where it cannot be opened again (9p, some FUSE).
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENXIO})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Not a multiple of a page, so that no page of one block repeats in another.
_SHIFT = 4099


class DiskError(ValueError):
    """Nothing to read, or no room to write: what, where, and what to do."""


@dataclass(frozen=True)
class Target:
    """Paths that can be opened, and which of their bytes were ever written."""

    paths: tuple[str, ...]
    extents: tuple[Extents, ...]
    place: Path
    own: bool

    @property
    def size(self) -> int:
        """Bytes in all files together."""
        return sum(extents.size for extents in self.extents)


def files_to_read(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Path], Path | None]:
    """The user's files, or the one directory in which to write; `DiskError` for anything else."""
    given = [Path(path) for path in paths]
    if not given:
        raise DiskError("no path was given; name files to read, or a directory to write in")
    for path in given:
        if not path.exists():
            raise DiskError(f"{path} does not exist; name files to read, or a directory")
    directories = [path for path in given if path.is_dir()]
    if directories and len(given) > 1:
        raise DiskError(
            f"{directories[0]} is a directory among {len(given)} paths; "
            "name either files to read, or one directory to write in"
        )
    if directories:
        return [], directories[0]
    for path in given:
        if not path.is_file():
            raise DiskError(f"{path} is not a regular file; name files on the disk, or a directory")
    given = each_once(given)
    if len(given) > MAX_FILES:
        given = [given[index * len(given) // MAX_FILES] for index in range(MAX_FILES)]
    return given, None


def each_once(files: Sequence[Path]) -> list[Path]:
    """The first path of each file: one given twice, also by a link, is read once."""
    seen: set[tuple[int, int]] = set()
    kept = []
    for file in files:
        found = file.stat()
        identity = found.st_dev, found.st_ino
        # Some filesystems number no files.
        if found.st_ino and identity in seen:
            continue
        seen.add(identity)
        kept.append(file)
    return kept


def users_target(files: Sequence[Path]) -> Target:
    """The user's files with their written ranges. `DiskError` when there is nothing to read."""
    extents = []
    for file in files:
        fd = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            extents.append(written_extents(fd, os.fstat(fd).st_size))
        finally:
            os.close(fd)
    target = Target(tuple(str(f) for f in files), tuple(extents), files[0].resolve().parent, False)
    where = files[0] if len(files) == 1 else f"the {len(files)} files"
    if target.size == 0:
        raise DiskError(f"{where}: empty, nothing to read; name files with content")
    if not any(e.written for e in extents):
        raise DiskError(
            f"{where}: {target.size:,} bytes of holes and nothing written; "
            "reading holes measures memory, so name files with content"
        )
    return target


def room_for(directory: Path, wanted: int, least: int) -> int:
    """How many of the `wanted` bytes may be written to `directory`: all of them, or what there is
    room for, but not less than the smaller of `wanted` and `least`.

    Raises `DiskError` when the disk could not keep its margin free.
    """
    least = min(wanted, least)
    usage = shutil.disk_usage(directory)
    margin = free_margin(usage.total)
    room = min(wanted, usage.free - margin)
    if room < least:
        raise DiskError(
            f"{directory} has {usage.free / 1e6:,.0f} MB free, and a probe needs "
            f"{least / 1e6:,.0f} MB of it while {margin / 1e6:,.0f} MB stay free; "
            "free some, or name files to read instead"
        )
    return room


def free_margin(total_bytes: int) -> int:
    """What a probe leaves free on a disk of that size."""
    return min(FREE_MARGIN_BYTES, max(_LEAST_MARGIN_BYTES, int(_MARGIN_SHARE * total_bytes)))


@contextmanager
def own_target(
    directory: Path,
    size: int,
    block: int,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Target]:
    """Write up to `size` bytes that neither compress nor repeat, for about `seconds`, and fsync.

    Stops early, with less, when the time is up or the space is used up, by whomever: the margin
    stays free. The file has no name and is gone at the end, whatever the end is.
    """
    file = UnnamedFile(directory)
    try:
        written = _fill(file.fd, size, block, seconds, clock, lambda: _room_left(directory))
        if written < block:
            raise DiskError(f"{directory} is full: not one block of {block:,} bytes fitted")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        extents = written_extents(file.fd, written)
        yield Target((file.path,), (extents,), directory, True)
    finally:
        file.close()


def open_all(
    target: Target, *, direct: bool, stack: ExitStack, system: OsCalls = os
) -> list[ReadFile]:
    """Every file of the target, closed by `stack`: a refusal at close comes up there."""
    files: list[ReadFile] = []
    for path in target.paths:
        try:
            opened = (open_direct if direct else open_buffered)(path, system=system)
        except OSError as error:
            if target.own and error.errno in _GONE:
                raise DiskError(
                    f"{target.place}: its file system does not keep a file without a name "
                    "readable; name files to read instead"
                ) from error
            raise
        stack.callback(opened.close)
        files.append(opened)
    return files


def _room_left(directory: Path) -> bool:
    usage = shutil.disk_usage(directory)
    return usage.free > free_margin(usage.total)


def _fill(
    fd: int,
    size: int,
    block: int,
    seconds: float,
    clock: Callable[[], float],
    room_left: Callable[[], bool] = lambda: True,
) -> int:
    count = size // block
    # One pool of random bytes serves many blocks, each shifted against the last one: a draw of its
    # own for each would take longer than the writing. It is never much larger than a block.
    each = max(1, block // _SHIFT)
    pool = memoryview(b"")
    deadline = clock() + seconds
    written = 0
    # Synced piece by piece, so that a slow disk cannot hide behind the cache until the time is up.
    piece = max(1, (32 << 20) // block)
    try:
        for index in range(count):
            if index and clock() >= deadline:
                break
            place = index % each
            if place == 0:
                pool = memoryview(os.urandom(block + _SHIFT * min(each, count - index)))
            _write_all(fd, pool[place * _SHIFT : place * _SHIFT + block])
            written += block
            if index % piece == piece - 1:
                os.fsync(fd)
                if not room_left():
                    break
    except OSError as error:
        if error.errno not in _FULL:
            raise
        os.ftruncate(fd, written)
    os.fsync(fd)
    return written


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
