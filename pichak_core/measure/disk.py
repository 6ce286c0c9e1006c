"""How fast a disk reads at each queue depth, with the operating system's cache bypassed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pichak_core.devices.direct_io import (
    ALIGNMENT,
    BypassRefusedError,
    OsCalls,
    align_up,
)
from pichak_core.devices.filesystems import FileSystem, filesystem_of
from pichak_core.measure import Context, Depth, Probe, register
from pichak_core.measure._disk_files import (
    MAX_FILES,
    DiskError,
    Target,
    each_once,
    files_to_read,
    own_target,
    room_for,
    users_target,
)
from pichak_core.measure._disk_metrics import METRICS, readings
from pichak_core.measure._disk_result import DiskResult
from pichak_core.measure._disk_run import Run
from pichak_core.measurement import Reading

__all__ = [
    "BUDGET_SECONDS",
    "DEPTHS",
    "OWN_FILE_MIB",
    "DiskError",
    "DiskResult",
    "disk_queue_depth",
    "readings",
]

DEPTHS = (1, 2, 3, 4, 6, 8, 16, 32)
MIB = 1 << 20

#: By depth of the fingerprint: seconds in all, and MiB of an own file.
BUDGET_SECONDS: dict[Depth, float] = {"quick": 6.0, "full": 25.0}
OWN_FILE_MIB: dict[Depth, float] = {"quick": 256, "full": 1024}

#: Share of the budget for writing an own file, and the most it may take.
_WRITE_SHARE, _WRITE_SECONDS = 0.25, 5.0
#: Kept back for what is hard to foresee: the last reads in flight, closing, counters.
_RESERVE_SHARE = 0.03
_OWN_BLOCKS_AT_LEAST = 4
_MOST_BLOCK_MIB = 1024
#: A terabyte is more than any budget can write.
_MOST_CHUNK_MIB = 1 << 20


def disk_queue_depth(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    depths: Sequence[int] = DEPTHS,
    chunk_mb: float = 256,
    block_mb: float = 8,
    budget_seconds: float = 6.0,
    proc: Path = Path("/proc"),
    sys_root: Path = Path("/sys"),
    system: OsCalls = os,
    on_progress: Callable[[str], None] = lambda _: None,
) -> DiskResult:
    """Read rate (MB/s, 10^6 bytes) at each queue depth, past the page cache.

    `paths` are files to read (model shards are ideal: workers read different files at different
    offsets), or one directory, in which a file of `chunk_mb` MiB of incompressible data is
    written, synced, read and removed. One read is of `block_mb` MiB, rounded up to the alignment;
    a file that is smaller than that is refused. Takes about `budget_seconds`, writing included;
    what does not fit is named in `skipped`.

    Raises `DiskError` (a `ValueError`) when there is nothing to read or no room to write, and
    `OSError` when the disk itself fails. A path in memory or a cache that cannot be bypassed is no
    error: the result says so and does not rank.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    paths = list(paths)
    wanted = sorted(set(depths))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"depths {depths!r}: a depth is a number of reads in flight, 1 or more")
    if not 0 < budget_seconds < math.inf:
        raise ValueError(f"budget_seconds {budget_seconds:g}: a measurement needs some seconds")
    block = _block_bytes(block_mb)
    started = time.perf_counter()
    files, directory = files_to_read(paths)
    chunk = _chunk_bytes(chunk_mb, block) if directory else 0
    filesystem = _one_filesystem([directory] if directory else files, proc, sys_root)
    if filesystem.kind == "memory":
        return DiskResult(filesystem)
    notes = []
    if directory is None:
        distinct = len(each_once([Path(path) for path in paths]))
        if distinct < len(paths):
            notes.append(
                f"{len(paths)} paths name {distinct} different "
                f"{'file' if distinct == 1 else 'files'}, each read as one"
            )
        if distinct > MAX_FILES:
            notes.append(f"{MAX_FILES} of {distinct} files were read, evenly chosen")
    with ExitStack() as stack:
        if directory is None:
            target = users_target(files)
        else:
            on_progress("writing")
            size = room_for(directory, chunk, _OWN_BLOCKS_AT_LEAST * block)
            seconds = min(_WRITE_SECONDS, _WRITE_SHARE * budget_seconds)
            target = stack.enter_context(own_target(directory, size, block, seconds))
        notes += _data_notes(target, chunk)
        run = Run(target, wanted, block, filesystem, proc, sys_root, system, on_progress)
        end = started + (1 - _RESERVE_SHARE) * budget_seconds
        refusal = ""
        try:
            run.measure(end - time.perf_counter(), direct=True)
        except BypassRefusedError as error:
            refusal = f"{error.strerror} on {filesystem.type}"
            run.measure(max(1.0, end - time.perf_counter()), direct=False)
    return run.result(refusal, notes, time.perf_counter() - started)


def _block_bytes(block_mb: float) -> int:
    # The comparison is false for a NaN, too.
    if not 0 < block_mb <= _MOST_BLOCK_MIB:
        raise ValueError(
            f"block_mb {block_mb:g}: one read is above 0 and at most {_MOST_BLOCK_MIB:,} MiB"
        )
    return max(ALIGNMENT, align_up(int(block_mb * MIB)))


def _chunk_bytes(chunk_mb: float, block: int) -> int:
    """What is to be written: whole blocks."""
    if not 0 < chunk_mb <= _MOST_CHUNK_MIB:
        raise ValueError(
            f"chunk_mb {chunk_mb:g}: the file to write is above 0 and at most "
            f"{_MOST_CHUNK_MIB:,} MiB"
        )
    wanted = int(chunk_mb * MIB)
    if wanted < block:
        raise ValueError(
            f"chunk_mb {chunk_mb:g}: the file to write holds at least one read of "
            f"{block / MIB:g} MiB; use a larger chunk or a smaller block"
        )
    return wanted // block * block


def _one_filesystem(places: Sequence[Path], proc: Path, sys_root: Path) -> FileSystem:
    found = [filesystem_of(place, proc=proc, sys_root=sys_root) for place in places]
    for place, other in zip(places, found, strict=True):
        if other != found[0]:
            raise DiskError(
                f"{places[0]} lies on {found[0].describe()} and {place} on {other.describe()}; "
                "name files of one disk at a time"
            )
    return found[0]


def _data_notes(target: Target, wanted: int) -> list[str]:
    """What is special about the data; `wanted` is how many bytes were to be written, if any."""
    notes = []
    written = sum(extents.written_bytes for extents in target.extents)
    if written < target.size:
        notes.append(
            f"{1 - written / target.size:.0%} of the data are holes or reserved space and were "
            "not read"
        )
    if any(extents.encoded for extents in target.extents):
        notes.append("compressed on the disk: the rate is of the data, not of the device")
    if any(extents.method == "not known" for extents in target.extents):
        notes.append("whether the files have holes could not be told on this file system")
    if target.size < wanted:
        notes.append(
            f"{target.size / 1e6:,.0f} MB were written, not {wanted / 1e6:,.0f} MB: "
            "time or space ran out"
        )
    return notes


def _run(context: Context) -> Iterator[Reading]:
    result = disk_queue_depth(
        context.paths or (context.directory,),
        chunk_mb=OWN_FILE_MIB[context.depth],
        budget_seconds=context.budget_seconds,
        proc=context.proc,
        sys_root=context.sys,
    )
    yield from readings(result)


PROBE = register(Probe("disk", METRICS, _run, BUDGET_SECONDS))
