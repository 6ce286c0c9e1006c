"""Which batch size to run next, given what the sizes run so far have shown. No device, no clock.

The memory of a training step is ``peak(b) = max(optimizer phase, a + c·b)`` up to the allocator's
rounding. Two peaks above the knee give c, and with it the edge; a prediction only chooses what to
run next, and the edge is known when one size fits and the next one does not.

A prediction may miss, and the memory of a step need not be affine. So plain doubling and bisecting
is replayed beside the search: a step of it that the known answers already imply costs nothing, and
`SPARE_CALLS` is how far the search may fall behind it. Its worst case on any monotone memory is
therefore that of doubling and bisecting plus `SPARE_CALLS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Calls that predictions may cost beyond what doubling and bisecting would have needed.
SPARE_CALLS = 2
#: A prediction reaches at most this many times the largest size that fits, unless told otherwise.
LONGEST_LEAP = 16
#: Peaks within this share of the smallest are the optimizer phase: there the batch does not show.
FLAT = 0.001


@dataclass(frozen=True)
class Sample:
    """The peaks of one size that ran: bytes allocated (fitted), bytes reserved (verified)."""

    rows: int
    allocated: int
    reserved: int


class EdgeSearch:
    """Finds the largest size that fits, in rows, between 1 and `ceiling`.

    `start` is the first size without a `first_guess`. `budget_bytes` is what a reserved peak may
    reach. `floor_bytes` is what is held between steps (weights, optimizer state), a lower bound on
    a; it may be set when it becomes known. With `safe_bytes`, a size whose predicted peak passes
    it is never proposed, `first_guess` is not trusted, and `stopped_on_prediction` says that this
    ended the search. A prediction reaches at most `longest_leap` times `low`. `ceiling` may be
    lowered on the way, never below `low`.

    Ask `next_size()`, run it, tell `record()`; None means that the edge is known.
    """

    def __init__(
        self,
        *,
        start: int,
        ceiling: int,
        budget_bytes: int,
        first_guess: int | None = None,
        floor_bytes: int = 0,
        safe_bytes: int | None = None,
        longest_leap: int = LONGEST_LEAP,
    ) -> None:
        if not 1 <= start <= ceiling:
            raise ValueError(f"start {start} is not within 1..{ceiling}")
        self.start = start
        self.ceiling = ceiling
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.safe_bytes = safe_bytes
        self.longest_leap = longest_leap
        self.calls = 0
        self.stopped_on_prediction = False
        trusted = first_guess is not None and safe_bytes is None
        self._first_guess = max(1, min(first_guess or 1, ceiling)) if trusted else None
        self._fits: set[int] = set()
        self._fails: set[int] = set()
        self._samples: dict[int, Sample] = {}
        self._misses = 0  # sizes in a row that did not fit
        self._climbs = 0  # sizes in a row that fitted although the fit put the edge below them

    @property
    def low(self) -> int:
        """The largest size known to fit; 0 while there is none."""
        return max((size for size in self._fits if size < self.high), default=0)

    @property
    def high(self) -> int:
        """The smallest size known not to fit; ``ceiling + 1`` while none was seen."""
        return min(min(self._fails, default=self.ceiling + 1), self.ceiling + 1)

    def record(self, rows: int, *, fits: bool, sample: Sample | None = None) -> None:
        """Tell the outcome of a size; `sample` where it ran to its end. A later outcome of the
        same size replaces the earlier one."""
        self.calls += 1
        self._fits.discard(rows)
        self._fails.discard(rows)
        (self._fits if fits else self._fails).add(rows)
        if sample is not None:
            self._samples[rows] = sample
        self._misses = 0 if fits else self._misses + 1
        if not fits:
            self._climbs = 0

    def next_size(self) -> int | None:
        """The size to run next, or None when the edge lies between `low` and ``low + 1``."""
        low, high = self.low, self.high
        self.stopped_on_prediction = False
        if high - low <= 1:
            return None
        answered, plain = self._doubling_and_bisecting(low, high)
        guess = self._guess(low, high) if self.calls - answered < SPARE_CALLS else None
        size = plain if guess is None else guess
        if size is not None and self.safe_bytes is not None and low:
            size = self._safe(size, low, self.safe_bytes)
            self.stopped_on_prediction = size is None
        return size

    def predicted_peak(self, rows: int) -> float | None:
        """Reserved bytes that `rows` are expected to reach (an upper bound while no slope is
        known); None before anything ran."""
        if not self._samples:
            return None
        last, slope = self._last(), self.slope_bytes()
        return last.reserved + (slope or self._steepest()) * (rows - last.rows)

    def slope_bytes(self) -> float | None:
        """Bytes that a row adds, from the outermost two peaks above the knee; None without."""
        rising = self._rising()
        if len(rising) < 2:
            return None
        slope = (rising[-1].allocated - rising[0].allocated) / (rising[-1].rows - rising[0].rows)
        return slope if slope > 0 else None

    def _doubling_and_bisecting(self, low: int, high: int) -> tuple[int, int | None]:
        """(its steps that `low` and `high` answer, its next step; None when it has ended)."""
        answered, fits, size = 0, 0, self.start
        while size <= low:
            answered += 1
            fits = size
            if size == self.ceiling:
                return answered, None
            size = min(2 * size, self.ceiling)
        if size < high:
            return answered, size
        answered += 1
        fails = size
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if middle <= low:
                fits = middle
            elif middle >= high:
                fails = middle
            else:
                return answered, middle
            answered += 1
        return answered, None

    def _guess(self, low: int, high: int) -> int | None:
        if self._first_guess is not None and self.calls < 2:
            if not self.calls:
                return self._first_guess
            return low + 1 if low else high - 1
        if not self._samples or not low:
            return None
        last, slope = self._last(), self.slope_bytes()
        if slope is None:
            # No two peaks above the knee yet. The peak at x rows bounds c from above, c <=
            # (peak - floor) / x, and the rise between two sizes bounds it from below.
            room = self.budget_bytes - last.reserved
            nearest = last.rows + math.floor(room / self._steepest())
            if nearest > 2 * low < self.longest_leap * low:
                return min(nearest, self.longest_leap * low, high - 1)
            farthest = last.rows + math.floor(room / self._shallowest())
            near = min(max(low + 1, nearest), high - 1)
            return near if farthest < min(2 * low, high) else None
        edge = self._aim(min(self._edge(slope), self.longest_leap * low), slope)
        if edge >= high:
            # Did not fit where the fit saw room: step down, further each time.
            return max(low + 1, high - (1 << max(0, self._misses - 1)))
        if edge <= low:
            self._climbs += 1
            return min(low + (1 << max(0, self._climbs - 3)), high - 1)
        return edge

    def _edge(self, slope: float) -> int:
        """The largest size whose reserved peak stays within the budget, at `slope` bytes a row.

        Where the allocator hands out segments larger than a row needs, reserved peaks move in
        steps of a granule: the last step within the budget decides, not the peak of one size.
        """
        last = self._last()
        peaks = list(self._samples.values())
        jumps = {abs(peak.reserved - last.reserved) for peak in peaks} - {0}
        granule = math.gcd(*jumps) if len(jumps) > 1 else 0
        slacks = [peak.reserved - peak.allocated for peak in peaks]
        # Affine peaks share a divisor too, and then the slack hardly varies.
        if granule <= slope or not granule / 8 <= max(slacks) - min(slacks) < granule:
            return last.rows + math.floor((self.budget_bytes - last.reserved) / slope)
        offset = 0 if max(slacks) < granule else min(slacks)
        steps = (self.budget_bytes - last.reserved) // granule
        top = last.reserved + steps * granule - offset
        return last.rows + math.floor((top - last.allocated) / slope)

    def _aim(self, edge: int, slope: float) -> int:
        """Short of a far `edge`, by what rounding may hide in the slope: the largest rounding that
        the peaks do not exclude is their common divisor."""
        last, rising = self._last(), self._rising()
        jumps = {abs(peak.allocated - last.allocated) for peak in self._samples.values()} - {0}
        doubt = min(1.0, math.gcd(*jumps) / (slope * (rising[-1].rows - rising[0].rows)))
        return last.rows + math.floor((edge - last.rows) / (1 + doubt) + 0.5)

    def _safe(self, size: int, low: int, safe_bytes: int) -> int | None:
        """The largest size in (`low`, `size`] that is predicted to stay within `safe_bytes`."""
        while size > low:
            peak, last = self.predicted_peak(size), self._last()
            if peak is None or peak <= safe_bytes:
                return size
            rise = (peak - last.reserved) / (size - last.rows)
            size = min(size - 1, last.rows + math.floor((safe_bytes - last.reserved) / rise))
        return None

    def _last(self) -> Sample:
        """The sample nearest to the edge from below, else the smallest."""
        low = self.low
        below = [rows for rows in self._samples if rows <= low]
        return self._samples[max(below) if below else min(self._samples)]

    def _rising(self) -> list[Sample]:
        """Samples above the knee, by rows: those that peak above the lowest one."""
        lowest = min(sample.allocated for sample in self._samples.values())
        return [
            self._samples[rows]
            for rows in sorted(self._samples)
            if self._samples[rows].allocated > lowest * (1 + FLAT)
        ]

    def _steepest(self) -> float:
        last = self._last()
        return max(1.0, (last.allocated - self.floor_bytes) / last.rows)

    def _shallowest(self) -> float:
        """The rise a row up to the last size: less than c while the first size is below the knee,
        and next to nothing where no rise was seen."""
        last, first = self._last(), self._samples[min(self._samples)]
        if last.rows == first.rows:
            return 1.0
        return max(1.0, (last.allocated - first.allocated) / (last.rows - first.rows))
