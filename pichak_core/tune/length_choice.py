"""The row length of a run, from the lengths of its rows, and the sentence that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pichak_core.plan import format_number
from pichak_core.tune.row_lengths import Cut, RowLengths, quantile_interval
from pichak_core.tune.row_lengths import quantile as quantile_of

#: Row lengths that a run is rounded up to: a constant.
BUCKETS = (256, 512, 1024, 2048, 4096, 8192, 16384)
#: A length at which more than this share of the rows would lose every scored token is passed over
#: for the next bucket (a constant).
MAX_EMPTIED_SHARE = 0.05


@dataclass(frozen=True)
class Choice:
    """The chosen length's `cut`, the length `wanted` by the quantile with its 90 % sampling
    interval (`low`, `high`), and the shorter lengths that were `passed` over."""

    cut: Cut
    wanted: int
    low: int
    high: int
    passed: tuple[Cut, ...]
    over_last: int
    source: str


#: One tail of a 90 % interval.
_TAIL = 0.05


def choose_length(
    lengths: RowLengths,
    policy: str,
    *,
    quantile: float,
    buckets: Sequence[int],
    rows_total: int,
    rows_drawn: int,
    seed: int,
) -> Choice:
    """The first bucket that holds the quantile and leaves enough rows something to score.

    `lengths` are those of the usable rows among `rows_drawn`, drawn from the file's `rows_total`.
    """
    complete = rows_drawn >= rows_total
    rising = sorted(lengths.lengths)
    edges = sorted(buckets)
    wanted = quantile_of(rising, quantile)
    low, high = (wanted, wanted) if complete else quantile_interval(rising, quantile)
    fitting = [edge for edge in edges if edge >= wanted] or edges[-1:]
    passed: list[Cut] = []
    for edge in fitting:
        cut = lengths.cut(edge, policy)
        if cut.emptied <= MAX_EMPTIED_SHARE * len(lengths) or edge == fitting[-1]:
            break
        passed.append(cut)
    over_last = sum(length > edges[-1] for length in rising)
    interval = "" if complete else f" ({_interval(low, high, len(rising), quantile)})"
    of = _drawn(len(rising), rows_drawn, rows_total, seed)
    source = (
        f"the {100 * quantile:.4g} % quantile of the length of {of} is {_count(wanted, 'token')}"
    )
    bucket = "rounded up to" if wanted <= edges[-1] else "cut to the last bucket,"
    source += f"{interval}, {bucket} {_n(fitting[0])} (the bucket edges are a constant)"
    sentences = _consequences(cut, passed, len(rising), rows_drawn, over_last, edges[-1])
    return Choice(cut, wanted, low, high, tuple(passed), over_last, "; ".join([source, *sentences]))


def _consequences(
    cut: Cut, passed: Sequence[Cut], rows: int, rows_drawn: int, over_last: int, last: int
) -> list[str]:
    said = []
    if passed:
        said.append(
            f"raised to {_n(cut.seq_len)}, because at {_n(passed[-1].seq_len)} "
            f"{_share(passed[-1].emptied, rows)} of the rows would keep no scored token"
        )
    if not cut.truncated:
        which = f"{_n(rows)} usable rows" if rows < rows_drawn else f"{_n(rows)} rows read"
        said.append(f"none of the {which} is cut" if rows > 1 else "it is not cut")
    else:
        lost = _share(cut.scored_before - cut.scored, cut.scored_before)
        said.append(
            f"{_share(cut.truncated, rows)} of the rows lose their tail, "
            f"{_share(cut.losing, rows)} lose scored tokens ({lost} of all scored tokens)"
        )
    if cut.emptied:
        keep = "keeps" if cut.emptied == 1 else "keep"
        said.append(f"{_count(cut.emptied, 'row')} {keep} no scored token")
    if over_last:
        are = "is" if over_last == 1 else "are"
        said.append(f"{_count(over_last, 'row')} {are} longer than the last bucket, {_n(last)}")
    return said


def _drawn(usable: int, drawn: int, total: int, seed: int) -> str:
    """The rows that the lengths are of, as a phrase."""
    if drawn < total:
        rows = f"{_n(usable)} usable of {_n(drawn)}" if usable < drawn else _n(drawn)
        noun = "row" if drawn == 1 else "rows"
        return f"{rows} {noun} drawn uniformly from {_n(total)} (seed {seed})"
    if usable < total:
        return f"the {_count(usable, 'usable row')} of {_n(total)}"
    return "the only row" if total == 1 else f"all {_n(total)} rows"


def _count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{_n(number)} {noun}" if number == 1 else f"{_n(number)} {noun}s"


def _interval(low: int, high: int, rows: int, quantile: float) -> str:
    """The longest row drawn bounds the quantile at 95 % only if q^n is below 5 %; with fewer rows
    there is no upper end."""
    if quantile**rows > _TAIL:
        are = "is" if rows == 1 else "are"
        return (
            f"90 % interval {_n(low)} or more: {_count(rows, 'row')} {are} too few for an upper end"
        )
    return f"90 % interval {_n(low)} to {_n(high)}"


def _n(number: int) -> str:
    return format_number(number)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "none"
