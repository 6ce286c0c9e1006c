"""The arithmetic of an all-reduce: bandwidths, and the time for a gradient of another size. Pure.

    algorithm bandwidth = S / t
    bus bandwidth       = S / t × 2 (n − 1) / n

for S bytes on each of n ranks in t seconds. The factor is what each rank must send at least, so
that bus bandwidth is held against the speed of a link whatever n is (NVIDIA/nccl-tests,
doc/PERFORMANCE.md, "Bus bandwidth", AllReduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Beyond the largest measured size by more than this, a prediction would be a guess.
FARTHEST = 16


@dataclass(frozen=True)
class Point:
    """All-reduces of one size: bytes on each rank, and seconds of each, the slowest rank's."""

    size_bytes: int
    seconds: float
    spread_seconds: float | None
    samples: int

    def alg_mb_s(self) -> float:
        """Algorithm bandwidth in MB/s (10^6 bytes)."""
        return self.size_bytes / self.seconds / 1e6

    def bus_mb_s(self, ranks: int) -> float:
        """Bus bandwidth in MB/s (10^6 bytes)."""
        return self.alg_mb_s() * bus_factor(ranks)

    def as_dict(self, ranks: int) -> dict[str, Any]:
        return {
            "bytes": self.size_bytes,
            "seconds": self.seconds,
            "spread_seconds": self.spread_seconds,
            "samples": self.samples,
            "alg_mb_s": self.alg_mb_s(),
            "bus_mb_s": self.bus_mb_s(ranks),
        }


def bus_factor(ranks: int) -> float:
    """2(n − 1)/n; `ValueError` below two ranks, where nothing is reduced."""
    if ranks < 2:
        raise ValueError(f"an all-reduce needs two ranks, not {ranks}")
    return 2.0 * (ranks - 1) / ranks


def sizes_up_to(largest_bytes: int, smallest_bytes: int = 4096, factor: int = 16) -> list[int]:
    """Message sizes to try: powers of `factor` apart, and `largest_bytes` itself at the end; whole
    numbers of 4 bytes."""
    if largest_bytes < 4:
        raise ValueError(f"{largest_bytes} bytes hold no float32")
    largest = largest_bytes - largest_bytes % 4
    sizes, size = [], smallest_bytes
    # A size within a factor of two of the largest would say the same twice.
    while 2 * size <= largest:
        sizes.append(size)
        size *= factor
    return [*sizes, largest]


def predicted_seconds(points: Sequence[Point], size_bytes: int) -> tuple[float, str]:
    """(seconds of an all-reduce of `size_bytes`, how that is known).

    Between two measured sizes, and beyond the largest, on the line through the two nearest: small
    ones cost a latency, so that time is not proportional to size. `ValueError` where that would be
    a guess: no points, one point, no bytes, or more than `FARTHEST` times the largest size.
    """
    if not points or size_bytes <= 0:
        raise ValueError("nothing was measured to predict from" if not points else "no bytes")
    ordered = sorted(points, key=lambda point: point.size_bytes)
    for point in ordered:
        if point.size_bytes == size_bytes:
            return point.seconds, "measured at this size"
    if size_bytes < ordered[0].size_bytes:
        return ordered[0].seconds, "that of the smallest measured size"
    largest = ordered[-1].size_bytes
    if len(ordered) < 2 or size_bytes > FARTHEST * largest:
        raise ValueError(
            f"{size_bytes:,} bytes are too far from the {largest:,} that were measured"
        )
    above = next((i for i, p in enumerate(ordered) if p.size_bytes > size_bytes), len(ordered) - 1)
    seconds = on_line(ordered[above - 1], ordered[above], size_bytes)
    if size_bytes < largest:
        return seconds, "between two measured sizes"
    return seconds, f"beyond the {largest:,} bytes that were measured, by the last two sizes"


def on_line(low: Point, high: Point, size_bytes: int) -> float:
    """Seconds at `size_bytes` on the line through two points, which never falls."""
    slope = (high.seconds - low.seconds) / (high.size_bytes - low.size_bytes)
    base = high if size_bytes > high.size_bytes else low
    return base.seconds + max(0.0, slope) * (size_bytes - base.size_bytes)


def step_seconds(compute_seconds: Sequence[float], reduce_seconds: float) -> float:
    """A synchronous training step: the slowest node's own step, then the all-reduce of the
    gradients. An upper bound: where they overlap it is shorter."""
    if not compute_seconds:
        raise ValueError("no node's step was measured")
    return max(compute_seconds) + reduce_seconds
