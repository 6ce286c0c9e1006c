"""What is read, and the log of it: blocks, reads, and the slice of time that they fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pichak_core.devices.direct_io import ReadFile

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


def check_length(file: ReadFile, block: Block, got: int) -> None:
    """`OSError` where a read of `block` gave fewer bytes than it has."""
    if got < block.length:
        raise OSError(
            f"{file.path} ended at byte {block.offset + got:,} while it was read: "
            f"it had {file.size:,} bytes; leave it alone during the measurement"
        )
