"""What a file system's disk has read: the word of the device against that of the cache.

Counters come from ``/sys/dev/block/MAJOR:MINOR/stat`` and ``/proc/diskstats``, in sectors of 512
bytes whatever the device's own (Documentation/admin-guide/iostats.rst); where a container shows
neither, from its control group. None of it needs root. Parsers take text; the roots are parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pichak_core.devices.cgroups import io_read_bytes
from pichak_core.devices.filesystems import FileSystem

SECTOR_BYTES = 512

# Their reads are another device's reads, or no device's at all.
_NOT_PHYSICAL = re.compile(r"(loop|ram|zram|dm-|md)\d")


@dataclass(frozen=True)
class Counters:
    """Bytes that a block device has read and written since it appeared."""

    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class DiskCounters:
    """The file system's own block device, and all physical disks together; None: not readable.

    The sum stands in where the own device is unknown (several disks in a pool, a layered file
    system) or not physical (a loop device, whose reads another cache may have answered).
    """

    own: Counters | None = None
    physical: Counters | None = None


@dataclass(frozen=True)
class DiskTraffic:
    """What the counters grew by between two readings, in bytes."""

    own_read: int | None = None
    own_written: int | None = None
    physical_read: int | None = None


def parse_block_stat(text: str) -> Counters | None:
    """One line of ``/sys/dev/block/*/stat`` (11 to 17 fields), None if it is not one."""
    fields = text.split()
    if len(fields) < 11 or not all(f.isdigit() for f in fields[:11]):
        return None
    return Counters(int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES)


def parse_diskstats(text: str) -> dict[str, Counters]:
    """``/proc/diskstats``: kernel name to counters."""
    found = {}
    for line in text.splitlines():
        fields = line.split(maxsplit=3)
        counters = parse_block_stat(fields[3]) if len(fields) == 4 else None
        if counters is not None:
            found[fields[2]] = counters
    return found


def physical_disks(names: Sequence[str]) -> list[str]:
    """Whole disks: without partitions, and without devices that are made of others or of memory."""
    disks = [name for name in names if not _NOT_PHYSICAL.match(name)]
    return [name for name in disks if not any(_is_partition(name, disk) for disk in disks)]


def read_counters(
    filesystem: FileSystem, *, proc: Path = Path("/proc"), sys_root: Path = Path("/sys")
) -> DiskCounters:
    """The counters that can say whether reads on `filesystem` reached a disk of this machine."""
    if filesystem.kind in {"network", "host share", "memory"}:
        return DiskCounters()
    table = parse_diskstats(_read(proc / "diskstats"))
    own = parse_block_stat(_read(sys_root / f"dev/block/{filesystem.device}/stat"))
    if own is None:
        own = table.get(filesystem.block_device)
    if filesystem.block_device.startswith("loop"):
        own = None  # it also counts what the cache of its backing file answered
    if filesystem.kind in {"user space", "unknown"}:
        own = None  # whatever stands behind it; the disks of this machine are the only witnesses
    disks = [table[name] for name in physical_disks(list(table))]
    total = Counters(sum(d.bytes_read for d in disks), sum(d.bytes_written for d in disks))
    if own is None and not disks:
        # A container that is shown no devices still counts what its own group reads.
        group = io_read_bytes(proc, sys_root)
        return DiskCounters(None, Counters(sum(group.values()), 0) if group else None)
    return DiskCounters(own, total if disks else None)


def traffic(before: DiskCounters, after: DiskCounters) -> DiskTraffic:
    """What happened between two readings; None for a counter that does not count at all.

    Some devices count nothing (statistics switched off; NVMe multipath before Linux 6.4): a counter
    that still stands at zero after a mounted file system was read says nothing.
    """
    own_read = own_written = physical = None
    if before.own and after.own and after.own.bytes_read > 0:
        own_read = after.own.bytes_read - before.own.bytes_read
        own_written = after.own.bytes_written - before.own.bytes_written
    if before.physical and after.physical and after.physical.bytes_read > 0:
        physical = after.physical.bytes_read - before.physical.bytes_read
    return DiskTraffic(own_read, own_written, physical)


def _is_partition(name: str, disk: str) -> bool:
    rest = name[len(disk) :]
    pattern = r"p\d+" if disk[-1:].isdigit() else r"\d+"
    return name.startswith(disk) and re.fullmatch(pattern, rest) is not None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
