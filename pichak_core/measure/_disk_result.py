"""The result of a disk measurement, and the page that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pichak_core.devices.disk_counters import DiskTraffic
from pichak_core.devices.filesystems import FileSystem
from pichak_core.measure._disk_verdict import (
    DepthRate,
    buffer_sentence,
    burst_sentence,
    depth_sentence,
    filesystem_note,
    growth_sentence,
)
from pichak_core.plan import format_number


@dataclass(frozen=True)
class DiskResult:
    """Read rates by queue depth. Only with `ranks` is `best.mb_s` a speed of the disk.

    `best` is chosen among the depths that were still measured at the end. `bypassed` is False when
    the page cache could not be bypassed; `refusal` then says where, and the rates are a cache's.
    `suspect` says why the rates cannot be the disk's. `skipped` maps a depth that was not measured
    to the reason. `huge_page_mb_s` is the rate at the best depth into buffers of huge pages, a hint
    and not the headline, None where there are none to ask for. Bytes are bytes; `seconds` is what
    everything took, writing included.
    """

    filesystem: FileSystem
    rates: tuple[DepthRate, ...] = ()
    best: DepthRate | None = None
    bypassed: bool = False
    refusal: str = ""
    suspect: str = ""
    own_file: bool = False
    files: int = 0
    data_bytes: int = 0
    block_bytes: int = 0
    bytes_read: int = 0
    huge_page_mb_s: float | None = None
    traffic: DiskTraffic = field(default_factory=DiskTraffic)
    skipped: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def mb_s(self) -> dict[int, float]:
        """MB/s by depth."""
        return {rate.depth: rate.mb_s for rate in self.rates}

    @property
    def is_memory(self) -> bool:
        """The path lies in memory; nothing was read."""
        return self.filesystem.kind == "memory"

    @property
    def ranks(self) -> bool:
        """A rate of this disk that may be compared with others'."""
        return self.bypassed and self.best is not None and not self.suspect

    @property
    def block(self) -> str:
        """The size of one read, for a sentence."""
        return f"{format_number(self.block_bytes / 2**20)} MiB"

    @property
    def what_was_read(self) -> str:
        """``an own file of 268 MB`` / ``3 files of 9,120 MB``."""
        size = f"{format_number(round(self.data_bytes / 1e6))} MB"
        if self.own_file:
            return f"an own file of {size} of incompressible data"
        return f"{self.files} files of {size}" if self.files > 1 else f"a file of {size}"

    @property
    def verdict(self) -> str:
        """One sentence that says what the numbers mean, or why there are none."""
        if self.is_memory:
            return f"{filesystem_note(self.filesystem)}; name a path on the disk"
        if self.best is None:
            return "nothing was measured: not one round of reads fitted in the time"
        if not self.bypassed:
            return (
                f"cached: cache not bypassed ({self.refusal}), so the "
                f"{format_number(self.best.mb_s)} MB/s of buffered reads may be the cache's "
                "and are not a speed of this disk"
            )
        text = depth_sentence(self.rates, self.best, self.block)
        if self.suspect:
            return f"suspect: {self.suspect}; what was seen: {text}"
        return "; ".join(part for part in (text, burst_sentence(self.best)) if part)

    def describe(self) -> str:
        """The verdict, the rates by depth, and what has to be known beside them."""
        lines = [self.verdict]
        for rate in self.rates:
            spread = "" if rate.spread is None else f" ± {format_number(rate.spread)}"
            lines.append(
                f"  depth {rate.depth:>2}  {format_number(rate.mb_s):>7} MB/s{spread}"
                f"  p99 {format_number(rate.p99_ms)} ms"
            )
        return "\n".join(lines + [f"  {note}" for note in self.facts()])

    def facts(self) -> list[str]:
        """What has to be known beside the rates, a sentence each."""
        note = filesystem_note(self.filesystem)
        facts = [f"file system: {note or self.filesystem.describe()}"]
        if self.best is None:
            return facts + list(self.notes)
        facts.append(
            f"read: {self.what_was_read}; cache "
            f"{'bypassed' if self.bypassed else f'not bypassed ({self.refusal})'}"
        )
        facts.append(
            f"one {self.block} read at depth {self.best.depth}: p50 "
            f"{format_number(self.best.p50_ms)} ms, p99 {format_number(self.best.p99_ms)} ms "
            f"({self.best.reads} reads)"
        )
        if self.best.early_mb_s is not None and self.best.late_mb_s is not None:
            facts.append(
                f"depth {self.best.depth}: early {format_number(self.best.early_mb_s)} MB/s, "
                f"late {format_number(self.best.late_mb_s)} MB/s"
            )
        if self.ranks:
            hints = growth_sentence(self.best), buffer_sentence(self.best, self.huge_page_mb_s)
            facts += [hint for hint in hints if hint]
        facts += [f"depth {depth} not measured: {why}" for depth, why in self.skipped.items()]
        return facts + list(self.notes)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form: everything, with the verdict; `best` is a depth or None."""
        return {
            "verdict": self.verdict,
            "best_depth": self.best.depth if self.best else None,
            "best_mb_s": self.best.mb_s if self.best else None,
            "ranks": self.ranks,
            "bypassed": self.bypassed,
            "refusal": self.refusal,
            "suspect": self.suspect,
            "is_memory": self.is_memory,
            "filesystem": asdict(self.filesystem),
            "rates": [rate.as_dict() for rate in self.rates],
            "skipped": {str(depth): why for depth, why in self.skipped.items()},
            "own_file": self.own_file,
            "files": self.files,
            "data_bytes": self.data_bytes,
            "block_bytes": self.block_bytes,
            "bytes_read": self.bytes_read,
            "huge_page_mb_s": self.huge_page_mb_s,
            "traffic": asdict(self.traffic),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
