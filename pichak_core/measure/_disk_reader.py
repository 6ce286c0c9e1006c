"""Keeping a fixed number of reads in flight.

Where the kernel holds reads in flight itself, one thread submits them (`_disk_queue`). Elsewhere a
depth of d is d threads, each with one aligned buffer and one read at a time; a read releases the
interpreter lock, so the device sees all d. Each slot or thread walks its own stretch of the data.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence

from pichak_core.devices.direct_io import ReadFile, align_up, aligned_buffer
from pichak_core.devices.kernel_queue import QueueUnavailableError
from pichak_core.measure._disk_blocks import (
    Block,
    BlockHook,
    Read,
    Slice,
    check_length,
    cut_blocks,
)
from pichak_core.measure._disk_queue import QueuedReads, ReadsOneByOneError

__all__ = ["Block", "Read", "Reader", "Slice", "cut_blocks"]


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
        #: Why the kernel does not hold the reads in flight although it was asked to; "" otherwise.
        self.threads_because = ""
        self._queues = all(file.queue_fd is not None for file in files)
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
        starts = [self._cursor + index * len(self.blocks) // depth for index in range(depth)]
        if self._queues:
            queued = QueuedReads(
                *(self.files, self.blocks, starts, buffers),
                *(seconds, reads_each, self._clock, self._on_block),
            )
            try:
                queued.run()
                return self._sliced(depth, queued.logs, queued.deadline)
            except QueueUnavailableError as error:
                self.threads_because = f"this system queues no reads ({error.strerror})"
            except ReadsOneByOneError:
                self.threads_because = "this file system carries out queued reads one by one"
            self._queues = False
        crew = _Crew(depth, seconds, reads_each, self._clock)
        logs: list[list[Read]] = [[] for _ in range(depth)]
        self._in_threads(crew, starts, buffers, logs)
        return self._sliced(depth, logs, crew.deadline)

    def _in_threads(
        self,
        crew: _Crew,
        starts: Sequence[int],
        buffers: Sequence[mmap.mmap],
        logs: Sequence[list[Read]],
    ) -> None:
        threads = [
            threading.Thread(
                target=self._work,
                args=(crew, start, buffer, log),
                name=f"disk-{index}",
                daemon=True,
            )
            for index, (start, buffer, log) in enumerate(zip(starts, buffers, logs, strict=True))
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

    def _sliced(self, depth: int, logs: Sequence[Sequence[Read]], deadline: float) -> Slice:
        self._cursor = (self._cursor + max(len(log) for log in logs)) % len(self.blocks)
        done = Slice(
            depth,
            tuple(read for log in logs for read in log),
            max(log[0].end for log in logs),
            min(*(log[-1].end for log in logs), deadline),
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
        check_length(file, block, got)
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
