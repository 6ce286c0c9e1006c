"""Which parts of a file were ever written: holes and reserved space read as zeros, at memory speed.

FIEMAP (Documentation/filesystems/fiemap.rst) tells them apart exactly and needs no root;
``SEEK_HOLE`` (lseek(2)) is the second best: a preallocated range whose zeros lie in the cache
counts as data there. Without either the whole file is taken as written, and `method` says so.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

FS_IOC_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_EXTENTS_A_CALL = 512

EXTENT_LAST = 0x1
EXTENT_ENCODED = 0x8
EXTENT_UNWRITTEN = 0x800


@dataclass(frozen=True)
class Extents:
    """`written`: sorted, disjoint ``(start, end)`` in bytes. `encoded`: compressed or encrypted."""

    size: int
    written: tuple[tuple[int, int], ...]
    method: str
    encoded: bool = False

    @property
    def written_bytes(self) -> int:
        """Bytes that a disk has to be asked for."""
        return sum(end - start for start, end in self.written)


@dataclass(frozen=True)
class RawExtent:
    """One fiemap_extent: byte range in the file, and FIEMAP_EXTENT_* flags."""

    start: int
    length: int
    flags: int


def written_extents(fd: int, size: int) -> Extents:
    """The written ranges of an open file of `size` bytes, by the best method it allows."""
    try:
        raw = _fiemap(fd, size)
        return extents_from_fiemap(raw, size)
    except (OSError, ImportError):  # the file system, or the platform, has no FIEMAP
        pass
    if hasattr(os, "SEEK_DATA"):
        try:
            return Extents(size, tuple(_seek_ranges(fd, size)), "SEEK_HOLE")
        except OSError:
            pass
    return Extents(size, ((0, size),) if size else (), "not known")


def extents_from_fiemap(raw: list[RawExtent], size: int) -> Extents:
    """Written ranges: what is mapped and not merely reserved, neighbours joined, cut at `size`."""
    ranges: list[tuple[int, int]] = []
    for extent in sorted(raw, key=lambda e: e.start):
        start, end = extent.start, min(extent.start + extent.length, size)
        if extent.flags & EXTENT_UNWRITTEN or start >= end:
            continue
        if ranges and ranges[-1][1] >= start:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((start, end))
    return Extents(size, tuple(ranges), "FIEMAP", any(e.flags & EXTENT_ENCODED for e in raw))


def parse_fiemap(answer: bytes) -> list[RawExtent]:
    """The extents in a struct fiemap that the kernel filled in."""
    mapped = _HEADER.unpack_from(answer)[3]
    found = []
    for index in range(mapped):
        fields = _EXTENT.unpack_from(answer, _HEADER.size + index * _EXTENT.size)
        found.append(RawExtent(fields[0], fields[2], fields[5]))
    return found


def _fiemap(fd: int, size: int) -> list[RawExtent]:
    from fcntl import ioctl

    found: list[RawExtent] = []
    position = 0
    while position < size:
        request = bytearray(_HEADER.size + _EXTENTS_A_CALL * _EXTENT.size)
        _HEADER.pack_into(request, 0, position, size - position, 0, 0, _EXTENTS_A_CALL, 0)
        ioctl(fd, FS_IOC_FIEMAP, request)
        part = parse_fiemap(bytes(request))
        found += part
        if not part or part[-1].flags & EXTENT_LAST:
            break
        position = part[-1].start + part[-1].length
    return found


def _seek_ranges(fd: int, size: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here to the end
                break
            raise
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start >= end:
            break
        ranges.append((start, end))
        position = end
    return ranges
