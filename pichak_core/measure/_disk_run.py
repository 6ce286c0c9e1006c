"""One target of a disk measurement, read once with the cache bypassed, or again without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from pichak_core.devices.direct_io import (
    ALIGNMENT,
    OsCalls,
    aligned_buffer,
    huge_pages_on_request,
    open_direct,
)
from pichak_core.devices.disk_counters import DiskTraffic, read_counters, traffic
from pichak_core.devices.filesystems import FileSystem
from pichak_core.measure._disk_files import DiskError, Target, open_all
from pichak_core.measure._disk_reader import Reader, cut_blocks
from pichak_core.measure._disk_result import DiskResult
from pichak_core.measure._disk_sweep import SweepLog, sweep
from pichak_core.measure._disk_verdict import best_depth, depth_rate, suspicion, window_rates

#: Kept back for a look at the best depth with buffers in huge pages, which lasts this long.
_HUGE_PAGE_SHARE, _HUGE_PAGE_SPAN = 0.08, 0.2
#: Below this a device's own memory may hold all of the data.
_LITTLE_DATA = 64 << 20
#: From this share of short reads on, the rate is not one of whole blocks.
_MANY_SHORT = 0.1


class Run:
    """`measure()` it, then ask for the `result()`. `DiskError` where nothing of it can be read in
    whole blocks."""

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
        self._threads_because = ""
        blocks = [
            cut_blocks(index, extents.written, extents.size, block)
            for index, extents in enumerate(target.extents)
        ]
        self._blocks = [one for file in blocks for one in file]
        if not any(one.length == block for one in self._blocks):
            raise DiskError(_no_whole_block(target, block))

    def measure(self, seconds: float, *, direct: bool) -> None:
        """Sweep the depths; `BypassRefusedError` in whatever phase the cache was not bypassed."""
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
            self._threads_because = reader.threads_because

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
        """What was seen; `refusal` is why the cache was not bypassed, "" where it was."""
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
            else suspicion(
                self._filesystem,
                self._traffic,
                self._bytes_read,
                best,
                may_be_compressed=self._may_be_compressed(),
            ),
            own_file=self._target.own,
            files=len(self._target.paths),
            data_bytes=sum(block.length for block in self._blocks),
            block_bytes=self._block,
            bytes_read=self._bytes_read,
            huge_page_mb_s=None if refusal else self._huge_page_mb_s,
            traffic=self._traffic,
            skipped=dict(sorted(log.skipped.items())),
            notes=(*notes, *self._repetition_notes()),
            seconds=seconds,
        )

    def _may_be_compressed(self) -> bool:
        """An own file cannot be; ZFS does not say of others."""
        encoded = any(extents.encoded for extents in self._target.extents)
        return not self._target.own and (encoded or self._filesystem.kind == "zfs")

    def _repetition_notes(self) -> list[str]:
        data = sum(block.length for block in self._blocks)
        notes = []
        if self._threads_because:
            notes.append(
                f"{self._threads_because}, so a thread for each read kept them in flight: where "
                "there are few cores, great depths may read a few percent less than they could"
            )
        short = sum(block.length < self._block for block in self._blocks)
        if short > _MANY_SHORT * len(self._blocks):
            notes.append(
                f"{short} of the {len(self._blocks)} reads are shorter than the rest: they end "
                "their files, and make the rate lower than larger files would"
            )
        if data < _LITTLE_DATA and self._bytes_read >= 2 * data:
            notes.append(
                f"only {data / 1e6:,.1f} MB of data, read {self._bytes_read / data:,.0f} times: a "
                "cache of the device itself may have answered"
            )
        return notes


def _no_whole_block(target: Target, block: int) -> str:
    where = target.paths[0] if len(target.paths) == 1 else f"each of the {len(target.paths)} files"
    largest = max(extents.size for extents in target.extents)
    if largest < block:
        return (
            f"{where}: {largest:,} bytes are less than one read of {block:,}; "
            "name larger files, or use a smaller block"
        )
    return (
        f"{where}: no {block:,} bytes in a row from a multiple of that were ever written; "
        "name a file without holes, or use a smaller block"
    )


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
