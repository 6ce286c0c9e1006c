"""From logged reads to rates, and from rates to sentences. Pure: numbers in, words out.

MB is 10^6 bytes. A window is a fraction of a second at one depth; a depth's windows are in the
order of time and spread over the whole probe, so that a credit that runs out shows in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pichak_core.devices.disk_counters import DiskTraffic
from pichak_core.devices.filesystems import FileSystem
from pichak_core.measure._disk_reader import Slice
from pichak_core.measurement import median_and_spread
from pichak_core.plan import format_number

#: A disk has slowed down, and its late window counts alone, below this share of the early one.
BURST_RATIO = 0.8

#: Faster than this from pass to pass looks like a cache that fills, not like a disk.
GROWTH_RATIO = 2.0

#: A smaller depth within this share of the top rate is the better choice: it needs less memory.
SAME_RATE = 0.02

#: More depth loses when the deepest falls below this share of the best.
LOSES_BELOW = 0.9

#: From this factor on it is worth saying what buffers in huge pages would give.
WORTH_HUGE_PAGES = 1.15

#: No file system on one machine reads faster (four PCIe 5.0 drives side by side do not).
IMPOSSIBLE_MB_S = 60_000.0

#: A device that saw less than this share of the delivered bytes did not deliver the rest.
SEEN_SHARE = 0.7

#: The same for data that may be compressed on the device: nothing shrinks to less than this.
SEEN_SHARE_COMPRESSED = 0.1


@dataclass(frozen=True)
class DepthRate:
    """What one depth gave. `windows` are MB/s in time order; `early`/`late` are the medians of
    their first and last third (at least two), None below four windows. `mb_s` is bytes over time in
    `samples` windows (a stall counts): all, or the late ones alone where the disk slowed down on
    the way; `median_mb_s` is their median and `spread` its scaled MAD. Latencies are of one block.
    """

    depth: int
    windows: tuple[float, ...]
    mb_s: float
    median_mb_s: float
    spread: float | None
    samples: int
    early_mb_s: float | None
    late_mb_s: float | None
    p50_ms: float
    p99_ms: float
    reads: int

    @property
    def slowed(self) -> bool:
        """The late window is clearly below the early one: burst credits ran out."""
        return _slowed(self.windows)

    @property
    def grew(self) -> bool:
        """The late window is far above all early ones: a cache is filling."""
        if self.early_mb_s is None or self.late_mb_s is None:
            return False
        early = self.windows[: _third(self.windows)]
        return self.late_mb_s > max(GROWTH_RATIO * self.early_mb_s, *early)

    def as_dict(self) -> dict[str, object]:
        """Plain containers, for JSON."""
        return {
            "depth": self.depth,
            "mb_s": self.mb_s,
            "median_mb_s": self.median_mb_s,
            "spread": self.spread,
            "samples": self.samples,
            "early_mb_s": self.early_mb_s,
            "late_mb_s": self.late_mb_s,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "reads": self.reads,
            "windows": list(self.windows),
        }


def window_rates(piece: Slice, count: int) -> list[float]:
    """MB/s in `count` equal windows of a slice's span; none when it has no span.

    A read counts in a window by the share of its duration that lies there, so that a window may be
    shorter than a read. In the span all workers are busy and their reads interleave: unbiased.
    """
    if piece.end <= piece.begin or count < 1:
        return []
    width = (piece.end - piece.begin) / count
    rates = []
    for index in range(count):
        low = piece.begin + index * width
        high = low + width
        moved = sum(
            read.bytes * (min(read.end, high) - max(read.start, low)) / (read.end - read.start)
            for read in piece.reads
            if read.start < high and read.end > low
        )
        rates.append(moved / width / 1e6)
    return rates


def quantile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: for fewer than 100 samples, p99 is the largest."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def depth_rate(depth: int, windows: Sequence[float], latencies: Sequence[float]) -> DepthRate:
    """Sum up one depth: `windows` in MB/s in time order, `latencies` in seconds."""
    early = late = None
    if len(windows) >= 4:
        third = _third(windows)
        early, late = statistics.median(windows[:third]), statistics.median(windows[-third:])
    counted = windows[-_third(windows) :] if _slowed(windows) else windows
    middle, spread = median_and_spread(counted)
    return DepthRate(
        depth,
        tuple(windows),
        statistics.fmean(counted),
        middle,
        spread,
        len(counted),
        early,
        late,
        quantile(latencies, 0.50) * 1e3,
        quantile(latencies, 0.99) * 1e3,
        len(latencies),
    )


def contenders(rates: Mapping[int, float], *, within: float = 0.15, most: int = 3) -> list[int]:
    """Depths worth more time: at most `most`, within a share of the top; by depth."""
    top = max(rates.values())
    close = sorted((d for d in rates if rates[d] >= (1 - within) * top), key=lambda d: -rates[d])
    return sorted(close[:most])


def best_depth(rates: Mapping[int, float]) -> int:
    """The smallest depth whose rate is within `SAME_RATE` of the top."""
    top = max(rates.values())
    return min(depth for depth, rate in rates.items() if rate >= (1 - SAME_RATE) * top)


def depth_sentence(rates: Sequence[DepthRate], best: DepthRate, block: str) -> str:
    """Which depth to use, what depth buys, and whether more of it loses."""
    first = rates[0]
    how = "one read" if best.depth == 1 else f"{best.depth} reads"
    text = f"best with {how} of {block} in flight: {_mb(best.mb_s)}"
    if best.slowed:  # most other depths were measured before that, and compare with nothing
        return text
    if first.depth == 1 < best.depth:
        text += f" ({best.mb_s / first.mb_s:.2f}x the {_mb(first.mb_s)} of one at a time)"
    deeper = [rate for rate in rates if rate.depth > best.depth]
    if not deeper:
        return text
    deepest = deeper[-1]
    change = f"{deepest.depth} give {_mb(deepest.mb_s)} ({deepest.mb_s / best.mb_s - 1:+.0%})"
    # One slow depth accuses nobody: all deeper ones must be below, too.
    if deepest.mb_s < LOSES_BELOW * best.mb_s and all(
        rate.mb_s < (1 - SAME_RATE) * best.mb_s for rate in deeper
    ):
        return f"{text}; more depth loses: {change}"
    return f"{text}; more depth does not help: {change}"


def burst_sentence(best: DepthRate) -> str:
    """What the early and the late window say; "" when they agree or are not known."""
    if not best.slowed or best.early_mb_s is None or best.late_mb_s is None:
        return ""
    return (
        f"it slowed down from {_mb(best.early_mb_s)} to {_mb(best.late_mb_s)} while it was "
        "measured, as a volume does whose burst credits run out: plan on the late rate"
    )


def buffer_sentence(best: DepthRate, huge_page_mb_s: float | None) -> str:
    """Whether the pages of ordinary buffers are the limit; "" when they are not, or not known."""
    if huge_page_mb_s is None or huge_page_mb_s < WORTH_HUGE_PAGES * best.mb_s:
        return ""
    return (
        f"the same reads into huge pages: {_mb(huge_page_mb_s)} "
        f"({huge_page_mb_s / best.mb_s:.2f}x); ordinary buffers lie in many small pages, and "
        "these, not the disk, are the limit here"
    )


def suspicion(
    filesystem: FileSystem,
    moved: DiskTraffic,
    delivered: int,
    best: DepthRate | None,
    *,
    may_be_compressed: bool = False,
) -> str:
    """Why the result cannot be a disk's speed, "" when nothing speaks against it.

    Growth from pass to pass accuses only where no counter vouches that a device was read: on a
    shared disk a neighbour that stops looks the same.
    """
    counters = (
        (moved.own_read, filesystem.block_device or "the device", "a cache answered"),
        (
            moved.physical_read,
            "all disks of this machine together",
            "a cache answered, or a disk elsewhere",
        ),
    )
    share = SEEN_SHARE_COMPRESSED if may_be_compressed else SEEN_SHARE
    for read, whose, meaning in counters:
        if read is not None and read < share * delivered:
            return (
                f"{format_number(delivered / 1e6)} MB were delivered, and {whose} read only "
                f"{format_number(read / 1e6)} MB: {meaning}"
            )
    if any(read is not None for read, _, _ in counters):
        return ""
    if best is not None and best.mb_s > IMPOSSIBLE_MB_S:
        return (
            f"{_mb(best.mb_s)} is more than storage gives, and no disk counter is readable here "
            "to vouch for it"
        )
    if filesystem.kind == "zfs":
        return "ZFS may answer from its ARC, and no disk counter is readable here to tell"
    if best is not None and best.grew:
        return f"{growth_sentence(best)}, and no disk counter is readable here to tell"
    return ""


def growth_sentence(best: DepthRate) -> str:
    """What growth from pass to pass may be; "" where there is none."""
    if not best.grew or best.early_mb_s is None or best.late_mb_s is None:
        return ""
    return (
        f"reads got faster from pass to pass ({_mb(best.early_mb_s)}, later "
        f"{_mb(best.late_mb_s)}): a cache fills, or other load went away"
    )


def filesystem_note(filesystem: FileSystem) -> str:
    """What has to be known to read a rate on this kind of file system; "" for a plain disk."""
    name = filesystem.describe()
    if filesystem.type == "unknown":
        return "the file system is not known here: it may be memory or a cache"
    return {
        "memory": f"{name}: memory, not a disk",
        "network": f"{name}: a network file system; the server's cache may answer",
        "host share": f"{name}: shared by the host, whose cache may answer",
        "layered": f"{name}: a layered file system; what lies under it was read",
        "zfs": f"{name}: ZFS caches in its ARC and honours O_DIRECT from OpenZFS 2.3 on",
        "user space": f"{name}: a file system in user space, which may cache",
        "unknown": f"{name}: a file system of unknown kind, which may be memory or a cache",
        "disk": f"{name}: a disk image; the cache of its file may answer"
        if (filesystem.block_device or PurePosixPath(filesystem.source).name).startswith("loop")
        else "",
    }[filesystem.kind]


def _slowed(windows: Sequence[float]) -> bool:
    """Late below `BURST_RATIO` of early, by median and by mean, and below every single early
    window: not just noise."""
    if len(windows) < 4:
        return False
    third = _third(windows)
    early, late = windows[:third], windows[-third:]
    most = min(BURST_RATIO * statistics.median(early), *early)
    return max(statistics.median(late), statistics.fmean(late)) < most


def _third(windows: Sequence[float]) -> int:
    return max(2, len(windows) // 3)


def _mb(rate: float) -> str:
    return f"{format_number(rate)} MB/s"
