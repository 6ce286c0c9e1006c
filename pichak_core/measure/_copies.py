"""Timed copies along one path, each of new content that is checked at its other end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pichak_core.measure._mover import WORD, Mover, fill, next_round
from pichak_core.measure._sampling import collect
from pichak_core.measurement import median_and_spread
from pichak_core.plan import format_number

if TYPE_CHECKING:
    import torch

#: Between host and device, and within the device.
PATHS = ("h2d_pinned", "d2h_pinned", "h2d_pageable", "d2h_pageable", "d2d")
NAMES: dict[str, str] = {
    "h2d_pinned": "to the GPU, pinned",
    "d2h_pinned": "from the GPU, pinned",
    "h2d_pageable": "to the GPU, pageable",
    "d2h_pageable": "from the GPU, pageable",
    "d2d": "within the GPU",
}

LEAST_SAMPLES = 7
_WARM_UP_ROUNDS = 2
TOGETHER_ROUNDS = 5
#: Device events and wall clock agree within this share, or within what asking and waiting cost.
_CLOCKS_AGREE, _CALL_SECONDS = 0.15, 200e-6


@dataclass(frozen=True)
class Copies:
    """Copies of `size_bytes` along `path`: seconds of each by the wall clock, from asking to its
    end, and by the device's own clock where it has one. Of all `rounds`, warm-up included, `wrong`
    arrived with other content than was sent."""

    path: str
    size_bytes: int
    wall_seconds: tuple[float, ...]
    event_seconds: tuple[float, ...] = ()
    wrong: int = 0
    rounds: int = 0

    @property
    def rates(self) -> list[float]:
        """MB/s of each copy by the wall clock, which no clock of the device can flatter. With both
        directions at once it sees only the end of the slower one: there the device's counts."""
        both = self.path.endswith("_both") and self.event_seconds
        counted = self.event_seconds if both else self.wall_seconds
        return [self.size_bytes / max(seconds, 1e-9) / 1e6 for seconds in counted]

    @property
    def mb_s(self) -> float:
        """The median of `rates`."""
        return median_and_spread(self.rates)[0]

    @property
    def spread(self) -> float | None:
        return median_and_spread(self.rates)[1]

    @property
    def event_mb_s(self) -> float | None:
        """The median by the device's clock."""
        if not self.event_seconds:
            return None
        return statistics.median(self.size_bytes / max(s, 1e-9) / 1e6 for s in self.event_seconds)

    @property
    def clocks_differ(self) -> str:
        """What to say when the two clocks disagree by more than a call costs; "" otherwise."""
        if self.event_mb_s is None or self.path.endswith("_both"):
            return ""
        wall, event = (statistics.median(s) for s in (self.wall_seconds, self.event_seconds))
        if abs(wall - event) <= max(_CLOCKS_AGREE * wall, _CALL_SECONDS):
            return ""
        return (
            f"{NAMES.get(self.path, self.path)}: {format_number(self.event_mb_s)} MB/s by the "
            f"GPU's clock and {format_number(self.mb_s)} MB/s by the wall clock"
        )

    @property
    def wrong_content(self) -> str:
        """Why the rate counts for nothing; "" when every copy arrived as it was sent."""
        if not self.wrong:
            return ""
        return f"{self.wrong} of {self.rounds or len(self.wall_seconds)} copies arrived wrong"

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for `Measurement.detail`."""
        return {
            "size_bytes": self.size_bytes,
            "event_mb_s": self.event_mb_s,
            "wall_seconds": list(self.wall_seconds),
            "event_seconds": list(self.event_seconds),
            "wrong": self.wrong,
        }


@dataclass
class Buffers:
    """Memory for all paths at one size: two pinned and one pageable on the host, two on the
    device."""

    words: int
    pinned: list[torch.Tensor]
    pageable: torch.Tensor
    card: list[torch.Tensor]

    @classmethod
    def of(cls, mover: Mover, size_bytes: int) -> Buffers:
        words = max(1, size_bytes // WORD)
        return cls(
            words,
            [mover.host(words, pinned=True) for _ in range(2)],
            mover.host(words, pinned=False),
            [mover.card(words) for _ in range(2)],
        )

    def ends(self, path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(source, target, a third buffer on the target's side for what must arrive). Within the
        device the source itself is that."""
        first, second = self.card
        host, other = (
            (self.pinned[0], self.pageable)
            if path.endswith("pinned")
            else (self.pageable, self.pinned[0])
        )
        if path == "d2d":
            return first, second, first
        return (host, first, second) if path.startswith("h2d") else (first, host, other)


@dataclass
class _Log:
    wall: list[float] = field(default_factory=list)
    event: list[float] = field(default_factory=list)
    wrong: int = 0


def time_path(
    mover: Mover,
    buffers: Buffers,
    path: str,
    *,
    budget_seconds: float,
    samples: int | None = None,
    seed: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Copies:
    """Copy along `path` until the median is known well enough or the budget is spent, or exactly
    `samples` times. At least seven times, but for a link so slow that this would take three times
    the budget. Two copies on the same path go before; raises what the device raises."""
    source, target, expected = buffers.ends(path)
    changing = [source] if expected is source else [source, expected]
    for buffer in changing:
        fill(buffer, seed)
    log = _Log()

    def sample() -> float:
        next_round(changing)
        mover.wait()
        begun = clock()
        first = mover.mark()
        mover.copy(target, source)
        second = mover.mark()
        mover.wait()
        log.wall.append(max(clock() - begun, 1e-9))
        by_device = mover.seconds(first, second)
        if by_device is not None:
            log.event.append(by_device)
        log.wrong += not _same(target, expected)
        return log.wall[-1]

    for _ in range(_WARM_UP_ROUNDS):
        sample()
    log.wall.clear()
    log.event.clear()
    if samples is None:
        collect(sample, budget_seconds=budget_seconds, clock=clock, minimum=LEAST_SAMPLES)
    else:
        for _ in range(samples):
            sample()
    rounds = _WARM_UP_ROUNDS + len(log.wall)
    return Copies(path, buffers.words * WORD, tuple(log.wall), tuple(log.event), log.wrong, rounds)


def time_both_ways(
    mover: Mover,
    buffers: Buffers,
    *,
    rounds: int = LEAST_SAMPLES,
    copies: int = 4,
    seed: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Copies, Copies]:
    """(to the device, from it) while both run at once, pinned. A round is `copies` copies each way
    on a lane of its own; seconds are of one copy."""
    up, down = (buffers.pinned[0], buffers.card[0]), (buffers.card[1], buffers.pinned[1])
    for source in (up[0], down[0]):
        fill(source, seed)
    logs = (_Log(), _Log())
    for number in range(rounds + 1):
        next_round([up[0], down[0]])
        mover.wait()
        begun = clock()
        marks = []
        for lane in (0, 1):
            marks.append([mover.mark(lane)])
        for _ in range(copies):
            mover.copy(up[1], up[0], lane=0)
            mover.copy(down[1], down[0], lane=1)
        for lane in (0, 1):
            marks[lane].append(mover.mark(lane))
        mover.wait()
        wall = max(clock() - begun, 1e-9) / copies
        # Both sources hold the same words, so what arrived on either side must be the other source.
        wrong = (not _same(up[1], down[0]), not _same(down[1], up[0]))
        for log, pair, bad in zip(logs, marks, wrong, strict=True):
            log.wrong += bad
            if number == 0:  # the warm-up
                continue
            log.wall.append(wall)
            seconds = mover.seconds(*pair)
            if seconds is not None:
                log.event.append(seconds / copies)
    size = buffers.words * WORD
    made = [
        Copies(f"{name}_both", size, tuple(log.wall), tuple(log.event), log.wrong, rounds + 1)
        for name, log in zip(("h2d", "d2h"), logs, strict=True)
    ]
    return made[0], made[1]


@dataclass(frozen=True)
class Together:
    """MB/s of each device's pinned copies, alone and while all of `devices` copied at once."""

    direction: str
    devices: tuple[str, ...]
    alone_mb_s: tuple[float, ...]
    together_mb_s: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Together over alone, a device each."""
        return tuple(t / a for t, a in zip(self.together_mb_s, self.alone_mb_s, strict=True))


def time_together(
    movers: Sequence[Mover],
    every: Sequence[Buffers],
    direction: Literal["h2d", "d2h"],
    *,
    rounds: int = TOGETHER_ROUNDS,
    copies: int = 4,
    clock: Callable[[], float] = time.perf_counter,
) -> Together:
    """Each device by itself, then all at once, alternating; medians of `rounds`."""
    alone: list[list[float]] = [[] for _ in movers]
    together: list[list[float]] = [[] for _ in movers]

    def go(some: Sequence[int]) -> list[float]:
        for index in some:
            movers[index].wait()
        begun = clock()
        starts = [movers[index].mark() for index in some]
        for _ in range(copies):
            for index in some:
                host, card = every[index].pinned[0], every[index].card[0]
                target, source = (card, host) if direction == "h2d" else (host, card)
                movers[index].copy(target, source)
        ends = [movers[index].mark() for index in some]
        for index in some:
            movers[index].wait()
        wall = clock() - begun
        rates = []
        for index, first, second in zip(some, starts, ends, strict=True):
            seconds = movers[index].seconds(first, second)
            moved = copies * every[index].words * WORD
            rates.append(moved / max(wall if seconds is None else seconds, 1e-9) / 1e6)
        return rates

    go(range(len(movers)))
    for _ in range(rounds):
        for index in range(len(movers)):
            alone[index] += go([index])
        for index, rate in enumerate(go(range(len(movers)))):
            together[index].append(rate)
    return Together(
        direction,
        tuple(mover.device for mover in movers),
        tuple(statistics.median(rates) for rates in alone),
        tuple(statistics.median(rates) for rates in together),
    )


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    import torch

    return bool(torch.equal(left, right))
