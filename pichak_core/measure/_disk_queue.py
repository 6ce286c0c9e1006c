"""Reads in flight that the kernel holds: one thread, one slot for each read of the depth."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pichak_core.devices.direct_io import ALIGNMENT, ReadFile, align_up
from pichak_core.devices.kernel_queue import KernelQueue
from pichak_core.measure._disk_blocks import Block, BlockHook, Read, check_length


class ReadsOneByOneError(RuntimeError):
    """The file system carried out each read before it answered its submission: no depth."""


@dataclass
class QueuedReads:
    """One slice. `starts` are each slot's first block; a slot walks on from there.

    `seconds` count from the end of the first reads of all slots; with `reads_each`, every slot does
    that many reads instead. `run` fills `logs`, the reads of each slot, and `deadline`.
    """

    files: Sequence[ReadFile]
    blocks: Sequence[Block]
    starts: Sequence[int]
    buffers: Sequence[mmap.mmap]
    seconds: float
    reads_each: int | None
    clock: Callable[[], float]
    on_block: BlockHook | None

    def __post_init__(self) -> None:
        depth = len(self.buffers)
        self.deadline = float("inf")
        self.logs: list[list[Read]] = [[] for _ in range(depth)]
        self._begun: list[float] = [0.0] * depth
        self._block: list[Block] = [self.blocks[0]] * depth

    def run(self) -> None:
        """`QueueUnavailableError` where the system has no such queue, `ReadsOneByOneError` where it
        is none; else what a read raises. No read is in flight any more when this returns."""
        depth = len(self.buffers)
        with KernelQueue(depth) as queue:
            at_once = 0
            in_flight = depth
            for slot in range(depth):
                self._submit(queue, slot)
                ended = queue.finished(wait=False)
                at_once += any(done == slot for done, _ in ended)
                in_flight -= self._take(queue, ended)
            if depth > 1 and at_once > depth / 2:
                raise ReadsOneByOneError
            while in_flight:
                in_flight -= self._take(queue, queue.finished())

    def _take(self, queue: KernelQueue, ended: Sequence[tuple[int, int]]) -> int:
        """Log what ended, and go on in those slots; how many of them go on no more."""
        now = self.clock()
        idle = 0
        for slot, result in ended:
            self.logs[slot].append(self._end(slot, result, now))
            if self.reads_each is None and self.deadline == float("inf") and all(self.logs):
                self.deadline = self.clock() + self.seconds
            if self._goes_on(slot):
                self._submit(queue, slot)
            else:
                idle += 1
        return idle

    def _goes_on(self, slot: int) -> bool:
        if self.reads_each is not None:
            return len(self.logs[slot]) < self.reads_each
        return self.clock() < self.deadline

    def _submit(self, queue: KernelQueue, slot: int) -> None:
        block = self.blocks[(self.starts[slot] + len(self.logs[slot])) % len(self.blocks)]
        file = self.files[block.file]
        fd = file.queue_fd
        assert fd is not None  # noqa: S101 - the caller asked
        self._block[slot] = block
        self._begun[slot] = self.clock()
        try:
            queue.submit(slot, fd, self.buffers[slot], block.offset, align_up(block.length))
        except OSError as error:
            raise file.read_error(error.errno or errno.EIO) from error

    def _end(self, slot: int, result: int, now: float) -> Read:
        block, buffer = self._block[slot], self.buffers[slot]
        file = self.files[block.file]
        if result < 0:
            raise file.read_error(-result)
        if result < block.length and result % ALIGNMENT == 0:
            # The kernel gave a part of it: the rest, and the file's end, are asked for again.
            result = file.read_into(buffer, block.offset, align_up(block.length))
            now = self.clock()
        check_length(file, block, result)
        if self.on_block is not None:
            with memoryview(buffer) as view:
                self.on_block(block, view[: block.length])
        return Read(self._begun[slot], now, block.length)
