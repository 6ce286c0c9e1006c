"""Memory and descriptors over time, and whether they grow."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

MIB = 1024**2


def pss_bytes(pid: int) -> int | None:
    """The process's share of memory, shared pages divided among their holders."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def descriptors(pid: int) -> int | None:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None


class Curve:
    """One process: (seconds, PSS in MiB, descriptors)."""

    def __init__(self, name: str, pid: int, began: float) -> None:
        self.name, self.pid = name, pid
        self.points: list[tuple[float, float, int]] = []
        self._began = began

    def sample(self) -> bool:
        memory, count = pss_bytes(self.pid), descriptors(self.pid)
        if memory is None or count is None:
            return False
        self.points.append((time.monotonic() - self._began, memory / MIB, count))
        return True

    def growth(self, warm_up_seconds: float) -> dict[str, Any] | None:
        """What memory and descriptors grew by after the warm-up, by the Theil-Sen line; None when
        the process did not live for as long again as its warm-up."""
        if not self.points:
            return None
        first = self.points[0][0] + warm_up_seconds
        late = [point for point in self.points if point[0] >= first]
        span = late[-1][0] - late[0][0] if late else 0.0
        if len(late) < 8 or span < warm_up_seconds:
            return None
        memory = theil_sen([(t, mib) for t, mib, _ in late]) * span
        count = theil_sen([(t, float(n)) for t, _, n in late]) * span
        return {
            "seconds": round(span),
            "pss_mib_median": round(statistics.median(p[1] for p in late), 1),
            "pss_mib_growth": round(memory, 2),
            "descriptors_median": statistics.median(p[2] for p in late),
            "descriptors_most": max(p[2] for p in late),
            "descriptors_growth": round(count, 2),
        }

    def thinned(self, most: int = 60) -> list[list[float]]:
        step = max(1, len(self.points) // most)
        return [[round(t), round(mib, 1), n] for t, mib, n in self.points[::step]]


def theil_sen(points: list[tuple[float, float]]) -> float:
    """The median slope over all pairs of at most 400 points; single spikes do not bend it."""
    step = max(1, len(points) // 400)
    used = points[::step]
    slopes = [
        (y2 - y1) / (x2 - x1)
        for i, (x1, y1) in enumerate(used)
        for x2, y2 in used[i + 1 :]
        if x2 > x1
    ]
    return statistics.median(slopes) if slopes else 0.0
