"""Lengths and scored stretches of many rows in a few bytes each, and what a cut does to them."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pichak_core.tune.encoding import TokenRow

#: Two-sided 90 % of a normal distribution.
_Z_90 = 1.645


@dataclass(frozen=True)
class Cut:
    """What is left of the rows when each is cut after `seq_len` tokens.

    `scored` of `scored_before` tokens stay; `scored_squared` sums the square of what stays of each
    row. `losing` rows lose scored tokens and `emptied` rows all of theirs; `unscored` rows have
    none left, those that never had any included. `first_emptied` is the index of the first emptied
    row (-1: none). `truncated` rows are longer than `seq_len`.
    """

    seq_len: int
    scored: int
    scored_squared: int
    scored_before: int
    losing: int
    emptied: int
    unscored: int
    truncated: int
    first_emptied: int


class RowLengths:
    """Row lengths in tokens and the spans that a completion loss scores, for every row seen.

    The first token of a row has nothing to be predicted from, so it is never scored.
    """

    def __init__(self) -> None:
        self.lengths = array("Q")
        self._own_lengths = array("Q")
        self.completions = array("Q")
        self.places = array("Q")
        self._with_completion = 0
        self._bounds = array("Q")
        self._ends = array("Q")

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, row: TokenRow, place: int) -> None:
        """Take in one row, which stands at `place` in the file; its ids are not kept."""
        self.lengths.append(row.longest)
        self._own_lengths.append(row.length)
        self.places.append(place)
        scored = 0
        for start, end in row.spans:
            first = max(1, start)
            if first < end:
                scored += end - first
                self._bounds.append(first)
                self._bounds.append(end)
        self._with_completion += bool(row.spans)
        self.completions.append(scored)
        self._ends.append(len(self._bounds))

    def with_completion(self) -> int:
        """Rows that have at least one token of a completion, scored or not."""
        return self._with_completion

    def cut(self, seq_len: int, policy: str) -> Cut:
        """Scored is what `policy` scores: the spans, or every token; never a row's first."""
        scored = squared = before = losing = emptied = unscored = truncated = begin = 0
        first_emptied = -1
        for index, (longest, length, completion, end) in enumerate(
            zip(self.lengths, self._own_lengths, self.completions, self._ends, strict=True)
        ):
            truncated += longest > seq_len
            if policy == "all_tokens":
                whole, left = max(0, length - 1), max(0, min(length, seq_len) - 1)
            elif length <= seq_len:
                whole = left = completion
            else:
                bounds = self._bounds[begin:end]
                whole = completion
                left = sum(
                    max(0, min(stop, seq_len) - start)
                    for start, stop in zip(bounds[::2], bounds[1::2], strict=True)
                )
            begin = end
            scored, squared, before = scored + left, squared + left * left, before + whole
            losing += left < whole
            unscored += not left
            if whole and not left:
                emptied += 1
                first_emptied = index if first_emptied < 0 else first_emptied
        return Cut(
            seq_len, scored, squared, before, losing, emptied, unscored, truncated, first_emptied
        )


def quantile(rising: Sequence[int], q: float) -> int:
    """The smallest value that at least a share `q` of the values do not exceed (nearest rank)."""
    return rising[_rank(len(rising), q)]


def quantile_interval(rising: Sequence[int], q: float) -> tuple[int, int]:
    """A 90 % interval of the q-quantile of what the values were drawn from, by order statistics.

    The number of values below the quantile is binomial; its normal approximation gives the ranks
    (Conover, Practical Nonparametric Statistics, 3.2).
    """
    n = len(rising)
    half = _Z_90 * math.sqrt(n * q * (1 - q))
    low = max(0, math.floor(n * q - half) - 1)
    high = min(n - 1, math.ceil(n * q + half))
    return rising[low], rising[high]


def mean_interval(total: int, squared: int, n: int) -> tuple[float, float]:
    """A 90 % interval of the mean that n values with this sum and sum of squares were drawn from.

    By the normal approximation; of one value alone it is unknown, and the value is given.
    """
    mean = total / n
    half = _Z_90 * math.sqrt(max(0.0, squared / n - mean * mean) / max(1, n - 1))
    return max(0.0, mean - half), mean + half


def histogram(rising: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(from, below, rows) in bins of half an octave, from the shortest row's to the longest's."""
    bars: list[tuple[int, int, int]] = []
    done, bin_number = 0, 0
    while done < len(rising):
        low, below = _edge(bin_number), _edge(bin_number + 1)
        end = bisect_left(rising, below)
        if low < below and (bars or end > done):
            bars.append((low, below, end - done))
        done, bin_number = end, bin_number + 1
    return tuple(bars)


def _edge(bin_number: int) -> int:
    return math.ceil(2 ** (bin_number / 2))


def _rank(n: int, q: float) -> int:
    # 0.95 * 100 is a little over 95 in binary, which must not move the rank.
    return min(n - 1, max(0, math.ceil(q * n - 1e-9) - 1))
