"""How fast a disk reads at each queue depth, with the operating system's cache bypassed."""

from __future__ import annotations

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
    aligned_buffer,
    huge_pages_on_request,
    open_direct,
)
from pichak_core.devices.filesystems import (
    DiskTraffic,
    FileSystem,
    filesystem_of,
    read_counters,
    traffic,
)
from pichak_core.measure import Context, Depth, Probe, register
from pichak_core.measure._disk_files import (
    MAX_FILES,
    DiskError,
    Target,
    files_to_read,
    open_all,
    own_target,
    room_for,
    users_target,
)
from pichak_core.measure._disk_metrics import METRICS, readings
from pichak_core.measure._disk_reader import Reader, cut_blocks
from pichak_core.measure._disk_result import DiskResult
from pichak_core.measure._disk_sweep import SweepLog, sweep
from pichak_core.measure._disk_verdict import (
    best_depth,
    depth_rate,
    suspicion,
    window_rates,
)
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
#: Kept back for a look at the best depth with buffers in huge pages, which lasts this long.
_HUGE_PAGE_SHARE, _HUGE_PAGE_SPAN = 0.08, 0.2
_OWN_BLOCKS_AT_LEAST = 4


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
    written, synced, read and removed. One read is of `block_mb` MiB, rounded up to the alignment.
    Takes about `budget_seconds`, writing included; what does not fit is named in `skipped`.

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
    if not 0 < block_mb <= 1024 or chunk_mb < block_mb:
        raise ValueError(
            f"block_mb {block_mb:g} and chunk_mb {chunk_mb:g}: "
            "a block is above 0 and at most 1,024 MiB, and a chunk holds at least one"
        )
    block = max(ALIGNMENT, align_up(int(block_mb * MIB)))
    started = time.perf_counter()
    files, directory = files_to_read(paths)
    filesystem = _one_filesystem([directory] if directory else files, proc, sys_root)
    if filesystem.kind == "memory":
        return DiskResult(filesystem)
    notes = []
    if len(paths) > MAX_FILES:
        notes.append(f"{MAX_FILES} of {len(paths)} files were read, evenly chosen")
    with ExitStack() as stack:
        if directory is None:
            target = users_target(files)
        else:
            on_progress("writing")
            size = room_for(directory, int(chunk_mb * MIB), _OWN_BLOCKS_AT_LEAST * block)
            seconds = min(_WRITE_SECONDS, _WRITE_SHARE * budget_seconds)
            target = stack.enter_context(own_target(directory, size, block, seconds))
        notes += _data_notes(target, int(chunk_mb * MIB) // block * block if directory else 0)
        run = _Run(target, wanted, block, filesystem, proc, sys_root, system, on_progress)
        end = started + (1 - _RESERVE_SHARE) * budget_seconds
        refusal = ""
        try:
            run.measure(end - time.perf_counter(), direct=True)
        except BypassRefusedError as error:
            refusal = f"{error.strerror} on {filesystem.type}"
            run.measure(max(1.0, end - time.perf_counter()), direct=False)
    return run.result(refusal, notes, time.perf_counter() - started)


class _Run:
    """One target, measured once with the cache bypassed, or again without."""

    def __init__(
        self,
        target: Target,
        depths: Sequence[int],
        block: int,
        filesystem: FileSystem,
        proc: Path,
        sys_root: Path,
        system: OsCalls,
        on_progress: Callable[[str], None],
    ) -> None:
        self._target = target
        self._depths = depths
        self._block = block
        self._filesystem = filesystem
        self._roots = {"proc": proc, "sys_root": sys_root}
        self._system = system
        self._on_progress = on_progress
        self._log = SweepLog()
        self._traffic = DiskTraffic()
        self._bytes_read = 0
        self._huge_page_mb_s: float | None = None
        blocks = [
            cut_blocks(index, extents.written, extents.size, block)
            for index, extents in enumerate(target.extents)
        ]
        self._blocks = [one for file in blocks for one in file]
        if not self._blocks:
            raise DiskError(
                f"{target.paths[0]}: no {block:,} bytes in a row were ever written; "
                "name a file without holes, or use a smaller block"
            )

    def measure(self, seconds: float, *, direct: bool) -> None:
        if direct:
            for path in self._target.paths:
                _check_bypass(path, self._system)
        with ExitStack() as stack:
            files = open_all(self._target, direct=direct, stack=stack, system=self._system)
            reader = Reader(files, self._blocks, self._block)
            before = read_counters(self._filesystem, **self._roots)
            look = direct and huge_pages_on_request(self._roots["sys_root"])
            self._log = sweep(
                reader,
                self._depths,
                self._block,
                seconds * (1 - _HUGE_PAGE_SHARE) if look else seconds,
                before_slice=(lambda: None) if direct else reader.drop_cache,
                on_progress=self._on_progress,
            )
            if look:
                self._look_at_huge_pages(reader, _HUGE_PAGE_SHARE * seconds)
            after = read_counters(self._filesystem, **self._roots)
            self._traffic = traffic(before, after)
            self._bytes_read = reader.bytes_read

    def _look_at_huge_pages(self, reader: Reader, seconds: float) -> None:
        rates = {d: r for d, r in self._log.rates().items() if d in self._log.revisited}
        if not rates:
            return
        depth = best_depth(rates)
        if 2 * depth * self._block / 1e6 / rates[depth] + _HUGE_PAGE_SPAN > seconds:
            return
        self._on_progress("huge pages")
        seen = window_rates(reader.run(depth, _HUGE_PAGE_SPAN, huge_pages=True), 1)
        self._huge_page_mb_s = seen[0] if seen else None

    def result(self, refusal: str, notes: Sequence[str], seconds: float) -> DiskResult:
        log = self._log
        rates = {d: depth_rate(d, log.windows[d], log.latencies[d]) for d in sorted(log.windows)}
        best = None
        if rates:
            best = rates[best_depth({depth: rates[depth].mb_s for depth in log.revisited})]
        return DiskResult(
            filesystem=self._filesystem,
            rates=tuple(rates.values()),
            best=best,
            bypassed=not refusal,
            refusal=refusal,
            suspect=""
            if refusal
            else suspicion(self._filesystem, self._traffic, self._bytes_read, best),
            own_file=self._target.own,
            files=len(self._target.paths),
            data_bytes=sum(block.length for block in self._blocks),
            block_bytes=self._block,
            bytes_read=self._bytes_read,
            huge_page_mb_s=None if refusal else self._huge_page_mb_s,
            traffic=self._traffic,
            skipped=dict(sorted(log.skipped.items())),
            notes=tuple(notes),
            seconds=seconds,
        )


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


def _check_bypass(path: str, system: OsCalls) -> None:
    """Open, read head and tail, close: a refusal shows before any time is spent measuring."""
    buffer = aligned_buffer(ALIGNMENT)
    file = open_direct(path, system=system)
    try:
        file.read_into(buffer, 0, ALIGNMENT)
        if file.size % ALIGNMENT:
            file.read_into(buffer, file.size // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    finally:
        file.close()


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
