"""How a disk probe spends its seconds: every depth once or twice, then the best ones again.

The deepest queue over a slow disk needs longer for one round of reads than a small budget has; a
depth whose round does not fit is left out and named, never measured half.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pichak_core.measure._disk_reader import Block, Slice
from pichak_core.measure._disk_verdict import contenders, window_rates

#: Share of the time for the pass over all depths; the rest goes to the contenders.
_SWEEP_SHARE = 0.6
#: A depth is left out when its pass would run beyond this share.
_SWEEP_LIMIT = 0.8
#: From this many seconds on, all depths are visited twice, up and down.
_TWO_PASSES_SECONDS = 12.0
_LEAST_SPAN = 0.1
_LONGEST_SPAN = 1.0
_REVISIT_SPAN = 0.45
_WINDOW_SECONDS = 0.15
#: A depth whose buffers need more is left out: a probe must not push others out of memory.
_MOST_BUFFER_BYTES = 1 << 30


class SliceReader(Protocol):
    """What a sweep needs of a `Reader`."""

    @property
    def blocks(self) -> Sequence[Block]: ...

    def run(self, depth: int, seconds: float) -> Slice: ...


@dataclass
class SweepLog:
    """What was seen at each depth, in time order. `skipped` says why a depth is missing.

    `windows` are MB/s, `latencies` seconds a block inside the spans; `revisited` are the depths
    that were still measured at the end, so that their late windows are late.
    """

    windows: dict[int, list[float]] = field(default_factory=dict)
    latencies: dict[int, list[float]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    revisited: list[int] = field(default_factory=list)

    def add(self, piece: Slice) -> None:
        """Keep one slice. One without a span adds nothing."""
        span = piece.end - piece.begin
        rates = window_rates(piece, max(1, round(span / _WINDOW_SECONDS)))
        if not rates:
            return
        self.windows.setdefault(piece.depth, []).extend(rates)
        self.latencies.setdefault(piece.depth, []).extend(
            read.end - read.start for read in piece.reads if read.end > piece.begin
        )

    def rates(self) -> dict[int, float]:
        """MB/s by depth so far."""
        return {depth: statistics.fmean(rates) for depth, rates in self.windows.items()}


def sweep(
    reader: SliceReader,
    depths: Sequence[int],
    block_bytes: int,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    before_slice: Callable[[], None] = lambda: None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> SweepLog:
    """Measure `depths` (ascending) for about `seconds` in total.

    `before_slice` runs before each; the first depth is measured whatever it takes.
    """
    log = SweepLog()
    started = clock()

    def lost_seconds(depth: int) -> float:
        """A slice's first and last round of reads, outside its span; from the best rate so far."""
        rates = log.rates()
        return 2 * depth * block_bytes / 1e6 / max(rates.values()) if rates else 0.0

    def visit(depth: int, span: float) -> None:
        on_progress(f"depth {depth}")
        before_slice()
        log.add(reader.run(depth, span))

    for depth in depths:
        if depth > len(reader.blocks):
            log.skipped[depth] = f"there are only {len(reader.blocks)} blocks to read"
        elif depth > 1 and depth * block_bytes > _MOST_BUFFER_BYTES:
            log.skipped[depth] = f"it needs {depth * block_bytes / 1e6:,.0f} MB of buffers"
    usable = [depth for depth in depths if depth not in log.skipped]
    slack = (_SWEEP_LIMIT - _SWEEP_SHARE) * seconds
    passes = 2 if seconds >= _TWO_PASSES_SECONDS else 1
    for number in range(passes):
        until = started + _SWEEP_SHARE * seconds * (number + 1) / passes
        order = usable if number % 2 == 0 else [d for d in reversed(usable) if d in log.windows]
        for position, depth in enumerate(order):
            left = until - clock()
            needed = lost_seconds(depth) + _LEAST_SPAN
            if log.windows and clock() + needed > until + slack:
                if depth not in log.windows:
                    log.skipped[depth] = f"it needs {needed:.2g} s, more than was left for it"
                continue
            rest = order[position:]
            span = (left - sum(lost_seconds(other) for other in rest)) / len(rest)
            visit(depth, min(_LONGEST_SPAN, max(_LEAST_SPAN, span)))
    _revisit(log, lost_seconds, visit, lambda: started + seconds - clock())
    return log


def _revisit(
    log: SweepLog,
    lost_seconds: Callable[[int], float],
    visit: Callable[[int, float], None],
    left: Callable[[], float],
) -> None:
    if not log.windows:
        return
    log.revisited = contenders(log.rates())
    while True:
        fitting = [d for d in log.revisited if left() >= lost_seconds(d) + _LEAST_SPAN]
        for depth in fitting:
            span = min(_REVISIT_SPAN, left() - lost_seconds(depth))
            if span >= _LEAST_SPAN:
                visit(depth, span)
        if not fitting:
            return
