"""One ramp on its way: what was tried, what it means, what to keep."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pichak_core.tune.ramp_result import DoesNotFit, LimitedBy, NoStepError, Rung, Verdict
from pichak_core.tune.ramp_search import EdgeSearch, Sample
from pichak_core.tune.ramp_story import gib, rows_text, why_nothing_fits
from pichak_core.tune.ramp_trial import Attempt, StepRunner
from pichak_core.tune.ramp_verdict import Judge

#: Consecutive steps at a kept size. Optimizer state appears at the first one.
STEADY_STEPS = 3
#: A smaller size is timed further only if its first step is within this of the largest one's.
WORTH_TIMING = 1.15
#: Sizes whose seconds a row differ by less are as fast; the larger one is kept.
TIE = 0.01
#: Memory held between steps may grow by this share of the capacity before it is called a leak.
LEAK_SHARE = 0.01

_LIMIT_OF: dict[Verdict, LimitedBy] = {
    "refused": "memory",
    "over capacity": "paging",
    "over headroom": "headroom",
    "paging": "paging",
    "slow": "paging",
    "host memory": "host memory",
    "kernel": "kernel",
    "no step": "no step",
}


#: Times its size up to which a step's pace is taken for that of a larger one (a constant).
FAR = 4


@dataclass(frozen=True)
class Steady:
    """Consecutive steps at one size: the peak over them in bytes, and their seconds."""

    rows: int
    peak_bytes: int
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Median seconds a row."""
        return statistics.median(self.seconds) / self.rows

    @property
    def noise(self) -> float:
        """Slowest less fastest, in seconds a row."""
        return (max(self.seconds) - min(self.seconds)) / self.rows

    def beats(self, other: Steady) -> bool:
        """Whether it is faster a row by more than what either timing, or a tie, explains."""
        gain = other.rate - self.rate
        return gain > self.noise + other.noise and gain > TIE * other.rate

    def with_more(self, again: Steady) -> Steady:
        """Both timings together."""
        peak = max(self.peak_bytes, again.peak_bytes)
        return Steady(self.rows, peak, self.seconds + again.seconds)


@dataclass
class Ramp:
    """Runs what `search` proposes until the edge is known and holds. `ceiling_is` says what ends
    the ramp at the search's ceiling."""

    runner: StepRunner
    search: EdgeSearch
    judge: Judge
    ceiling_is: LimitedBy
    step_seconds_limit: float | None
    say: Callable[[str], None]
    tried: list[Rung] = field(default_factory=list)
    steady: dict[int, Steady] = field(default_factory=dict)
    timed: list[Steady] = field(default_factory=list)
    steps_run: int = 0
    refusals: int = 0
    out_of_time: bool = False
    _phases: dict[int, str | None] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)
    _timed_again: set[int] = field(default_factory=set)

    def find_edge(self) -> int:
        """The largest size that fits, shown by consecutive steps. `DoesNotFit` without one."""
        while True:
            size = self._next_size()
            if size is not None:
                self.steps_run += 1
                attempt = self.runner.attempt(size, smaller_ran=bool(self.search.low))
                self._record(*self.judge.verdict(attempt))
            elif not self.search.low:
                raise self._nothing_fits()
            elif self._holds(self.search.low):
                return self.search.low

    def fastest(self, largest: int) -> int:
        """The size with the best measured rows/s: `largest`, unless another one is better, twice,
        by more than the noise of both timings."""
        best = self.steady[largest]
        for size in self._candidates(largest):
            steady = self._timed(size)
            if steady is None or not steady.beats(best):
                continue
            again, reference = self._timed(size), self._timed(best.rows)
            if again is not None and reference is not None and again.beats(reference):
                best = steady.with_more(again)
        if not best.peak_bytes:
            best = self._with_peak(best)
        elif best.rows != largest:
            seconds = statistics.median(best.seconds)
            why = f"timed for speed, {len(best.seconds)} times: {seconds:.3g} s"
            self._tell(Rung(best.rows, best.peak_bytes, seconds, "ok", why))
        if best.peak_bytes:
            self.steady[best.rows] = best
        return best.rows if best.peak_bytes else largest

    def limited_by(self) -> LimitedBy:
        """What lies behind the largest size that fits."""
        if self.search.stopped_on_prediction:
            return "prediction"
        if self.out_of_time:
            return "time"
        failed = [rung for rung in self.tried if rung.batch == self.search.high]
        return _LIMIT_OF[failed[-1].verdict] if failed else self.ceiling_is

    def notes(self) -> tuple[str, ...]:
        """What a person should know beside the numbers."""
        notes = []
        # The first call allocates what stays: only growth behind it is a leak.
        growth = self._held[-1] - self._held[1] if len(self._held) > 2 else 0
        if growth > LEAK_SHARE * self.judge.capacity_bytes:
            notes.append(
                f"memory held between steps grew by {gib(growth)} over {len(self._held)} sizes: "
                "something keeps tensors alive (a list of losses, a cache), and the ramp answers "
                "for what was left; run it in a process of its own"
            )
        limit = self.step_seconds_limit
        slow = [s for s in self.steady.values() if limit and statistics.median(s.seconds) > limit]
        if slow and limit:
            size = max(slow, key=lambda steady: steady.rows)
            notes.append(
                f"a step of {rows_text(size.rows)} took {statistics.median(size.seconds):.3g} s, "
                f"more than the {limit:g} s allowed: smaller sizes had promised less"
            )
        peaks = {rung.peak_bytes for rung in self.tried if rung.peak_bytes is not None}
        if len(self.tried) > 2 and len(peaks) == 1:
            notes.append(
                "the peak is the same at every size: either the optimizer's step needs more than "
                "any batch that was run, or the step function does not build as many rows as asked"
            )
        return tuple(notes)

    def _next_size(self) -> int | None:
        size, low = self.search.next_size(), self.search.low
        self.out_of_time = False
        if size is None or self.step_seconds_limit is None or low not in self.judge.rates:
            return size
        # A larger size needs no more seconds a row: its fixed costs are shared by more of them.
        longest = int(self.step_seconds_limit / self.judge.rates[low])
        if size > longest and low not in self._timed_again:
            # One slow step ends nothing: the first one also warms up, and a neighbour may be busy.
            self._time_again(low)
            longest = int(self.step_seconds_limit / self.judge.rates[low])
        self.out_of_time = size > longest and longest <= low
        if self.out_of_time:
            return None
        # A small size's pace says little of one many times its own (its tensors fit the caches).
        return min(size, longest, max(FAR * low, longest // FAR))

    def _time_again(self, rows: int) -> None:
        """The faster of this size's first timing and another one, unwatched where that slows."""
        self._timed_again.add(rows)
        again = self.runner.attempt(rows, watched=not self.runner.backend.watch_slows)
        if again.refusal is None and again.seconds:
            rate = again.seconds[-1] / rows
            self.judge.rates[rows] = min(self.judge.rates[rows], rate)

    def _record(self, verdict: Verdict, why: str, attempt: Attempt) -> None:
        ran = attempt.refusal is None and verdict not in ("refused", "kernel", "no step")
        rows, peak = attempt.rows, attempt.peak
        seconds = statistics.median(attempt.seconds) if ran else None
        self._tell(Rung(rows, peak.reserved if ran else None, seconds, verdict, why))
        self._phases[rows] = attempt.phase
        self.refusals += verdict in ("refused", "kernel") or attempt.refusal is not None
        self._held.append(peak.held)
        self.search.floor_bytes = peak.held
        sample = Sample(rows, peak.allocated, peak.reserved) if ran else None
        self.search.record(rows, fits=verdict == "ok", sample=sample)

    def _holds(self, rows: int) -> bool:
        """Whether `rows` fits over consecutive steps; if not, that is recorded."""
        attempt = self.runner.attempt(rows, repeats=STEADY_STEPS)
        verdict, why, attempt = self.judge.verdict(attempt)
        if verdict == "no step":
            raise NoStepError(f"{rows_text(rows)} trained once and then no more: {why}")
        if verdict != "ok":
            self._record(verdict, f"over {STEADY_STEPS} consecutive steps: {why}", attempt)
            return False
        seconds = attempt.seconds
        if self.runner.backend.watch_slows:
            seconds = self.runner.attempt(rows, repeats=STEADY_STEPS, watched=False).seconds
        self.steady[rows] = Steady(rows, attempt.peak.reserved, seconds)
        return True

    def _candidates(self, largest: int) -> list[int]:
        """Sizes that may be faster: half, a quarter, and the fastest of the search, if its times
        mean anything and beat the largest's."""
        sizes = {largest // 2, largest // 4}
        smaller = [size for size in self.judge.rates if size < largest]
        if smaller and not self.runner.backend.watch_slows:
            fastest = min(smaller, key=lambda size: self.judge.rates[size])
            if self.judge.rates[fastest] < self.steady[largest].rate:
                sizes.add(fastest)
        return sorted(sizes - {0, largest}, reverse=True)

    def _timed(self, rows: int) -> Steady | None:
        """`rows` over consecutive steps behind one to warm up, or None when that does not show
        it worth timing or it does not run. The peak is 0 where watching would have slowed it."""
        watched = not self.runner.backend.watch_slows
        first = self.runner.attempt(rows, watched=watched)
        slowest = WORTH_TIMING * min(steady.rate for steady in self.steady.values())
        if first.refusal is not None or first.seconds[0] / rows > slowest:
            return None
        attempt = self.runner.attempt(rows, repeats=STEADY_STEPS, watched=watched)
        if attempt.refusal is not None or attempt.peak.reserved > self.judge.budget_bytes:
            return None
        steady = Steady(rows, attempt.peak.reserved, attempt.seconds)
        self.timed.append(steady)
        return steady

    def _with_peak(self, steady: Steady) -> Steady:
        """The peak over consecutive steps; 0 when they did not fit after all."""
        attempt = self.runner.attempt(steady.rows, repeats=STEADY_STEPS)
        verdict, why, _ = self.judge.verdict(attempt)
        self._tell(Rung(steady.rows, attempt.peak.reserved, None, verdict, why))
        return replace(steady, peak_bytes=attempt.peak.reserved if verdict == "ok" else 0)

    def _nothing_fits(self) -> DoesNotFit:
        least = min(rung.batch for rung in self.tried)
        smallest = [rung for rung in self.tried if rung.batch == least][-1]
        phase = self._phases[smallest.batch]
        message = why_nothing_fits(
            smallest,
            phase,
            capacity=gib(self.judge.capacity_bytes),
            budget_bytes=self.judge.budget_bytes,
        )
        return DoesNotFit(
            message,
            phase=phase,
            limited_by=_LIMIT_OF[smallest.verdict],
            tried=tuple(self.tried),
        )

    def _tell(self, rung: Rung) -> None:
        self.tried.append(rung)
        self.say(f"{rows_text(rung.batch)}: {rung.verdict} ({rung.why})")
