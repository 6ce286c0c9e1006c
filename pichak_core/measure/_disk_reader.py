"""Keeping a fixed number of reads in flight, and the log of when each began and ended.

A depth of d is d threads, each with one aligned buffer and one read at a time; a read releases the
interpreter lock, so the device sees all d. Each worker walks its own stretch of the data.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pichak_core.devices.direct_io import ReadFile, align_up, aligned_buffer

#: Called with each block and a view of what was read; for checking content, not for measuring.
BlockHook = Callable[["Block", memoryview], None]


@dataclass(frozen=True)
class Block:
    """One read: index of the file, offset, and the bytes that must come (fewer at a file's end)."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True)
class Read:
    """One finished read: seconds on the reader's clock, and bytes."""

    start: float
    end: float
    bytes: int


@dataclass(frozen=True)
class Slice:
    """A stretch of time at one depth.

    From `begin` (every worker has finished its first read) to `end` (the first worker stopped
    issuing) all workers were busy; only that span is a measurement. Empty when `begin >= end`.
    """

    depth: int
    reads: tuple[Read, ...]
    begin: float
    end: float

    @property
    def bytes(self) -> int:
        """Everything that was read, also outside the span."""
        return sum(read.bytes for read in self.reads)


def cut_blocks(file: int, written: Sequence[tuple[int, int]], size: int, block: int) -> list[Block]:
    """The blocks of one file that are written throughout; the last one may be short.

    Offsets are multiples of `block`. `written` are ranges in bytes, disjoint and sorted.
    """
    blocks = []
    for start, end in written:
        offset = -(-start // block) * block
        while offset < end:
            length = min(block, size - offset)
            if offset + length > end:
                break
            blocks.append(Block(file, offset, length))
            offset += block
    return blocks


class Reader:
    """Reads `blocks` of open `files` at any depth. Keeps its place, so that data stays fresh.

    `block_bytes` is the largest block, a multiple of the alignment. `on_block` slows it down.
    Buffers are new in every slice: how their memory happens to lie changes the rate, and one
    lucky or unlucky piece must not colour a whole measurement.
    """

    def __init__(
        self,
        files: Sequence[ReadFile],
        blocks: Sequence[Block],
        block_bytes: int,
        *,
        on_block: BlockHook | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.files = files
        self.blocks = blocks
        self.bytes_read = 0
        self._block_bytes = block_bytes
        self._on_block = on_block
        self._clock = clock
        self._cursor = 0

    def run(
        self,
        depth: int,
        seconds: float,
        *,
        reads_each: int | None = None,
        huge_pages: bool = False,
    ) -> Slice:
        """Keep `depth` reads in flight for `seconds` after the last worker's first read.

        With `reads_each`, every worker does that many reads instead. `huge_pages` is a wish for
        the buffers. Raises the first error of a worker, after all of them have stopped.
        """
        buffers = [aligned_buffer(self._block_bytes, huge_pages=huge_pages) for _ in range(depth)]
        crew = _Crew(depth, seconds, reads_each, self._clock)
        logs: list[list[Read]] = [[] for _ in range(depth)]
        starts = [self._cursor + index * len(self.blocks) // depth for index in range(depth)]
        threads = [
            threading.Thread(
                target=self._work,
                args=(crew, starts[index], buffers[index], logs[index]),
                name=f"disk-{index}",
                daemon=True,
            )
            for index in range(depth)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # an interrupt lands in a join: no worker may outlive its files
            crew.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if crew.error is not None:
            raise crew.error
        self._cursor = (self._cursor + max(len(log) for log in logs)) % len(self.blocks)
        done = Slice(
            depth,
            tuple(read for log in logs for read in log),
            max(log[0].end for log in logs),
            min(*(log[-1].end for log in logs), crew.deadline),
        )
        self.bytes_read += done.bytes
        return done

    def drop_cache(self) -> None:
        """Advise the system to forget the files."""
        for file in self.files:
            file.drop_cache()

    def _work(self, crew: _Crew, start: int, buffer: mmap.mmap, log: list[Read]) -> None:
        try:
            step = 0
            while crew.goes_on(step):
                block = self.blocks[(start + step) % len(self.blocks)]
                step += 1
                log.append(self._read(block, buffer))
                if step == 1:
                    crew.first_read_done()
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that waits
            crew.fail(error)

    def _read(self, block: Block, buffer: mmap.mmap) -> Read:
        file = self.files[block.file]
        began = self._clock()
        got = file.read_into(buffer, block.offset, align_up(block.length))
        ended = self._clock()
        if got < block.length:
            raise OSError(
                f"{file.path} ended at byte {block.offset + got:,} while it was read: "
                f"it had {file.size:,} bytes; leave it alone during the measurement"
            )
        if self._on_block is not None:
            with memoryview(buffer) as view:
                self._on_block(block, view[: block.length])
        return Read(began, ended, block.length)


class _Crew:
    """What the workers of one slice share: when to stop, and what went wrong."""

    def __init__(
        self, depth: int, seconds: float, reads_each: int | None, clock: Callable[[], float]
    ) -> None:
        self.error: BaseException | None = None
        self.deadline = float("inf")
        self._waiting = depth
        self._seconds = seconds
        self._reads_each = reads_each
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = False

    def goes_on(self, step: int) -> bool:
        if self._stopped:
            return False
        if self._reads_each is not None:
            return step < self._reads_each
        return step == 0 or self._clock() < self.deadline

    def first_read_done(self) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0 and self._reads_each is None:
                self.deadline = self._clock() + self._seconds

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
        self.stop()

    def stop(self) -> None:
        self._stopped = True
