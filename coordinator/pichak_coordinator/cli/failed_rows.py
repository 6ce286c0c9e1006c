"""Why rows failed, for a person: the same error once, with the nodes that it hit. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pichak_coordinator.records import Row

#: So many different errors are told, and of one so many nodes are named.
_MOST_ERRORS, _MOST_NAMES = 20, 5
#: Of so many errors it is shown what the jobs printed last, and so many lines of it.
_FEW, _MOST_PRINTED = 3, 24


def failed_lines(failed: Sequence[Row], *, every: bool) -> Iterator[tuple[str, str]]:
    """(line, style) of what is to be said; with `every` all errors, all names and all that was
    printed."""
    groups = _alike(failed)
    told = groups if every else groups[:_MOST_ERRORS]
    few = every or len(groups) <= _FEW
    for some in told:
        word, style = ("not finished", "yellow") if some[0].unfinished else ("failed", "red")
        alike = all(row.error == some[0].error for row in some)
        why = some[0].error if alike else reason(some[0])
        yield f"{names(some, every=every)} {word}: {why}", style
        for row in some if every else some[:1]:
            yield from _printed(row, row.node.label if len(some) > 1 else "", few=few)
    rest = sum(len(some) for some in groups[len(told) :])
    if rest:
        yield f"{rest} more failed (--all has them)", "red"


def reason(row: Row) -> str:
    """Its error without what differs from node to node: its own names, addresses, ids."""
    text = row.error or "it gave no reading, and no error was told"
    for name in sorted({row.node.host, row.node.address, row.node.node, row.node.alias} - {""}):
        text = text.replace(name, "…")
    return text


def names(rows: Sequence[Row], *, every: bool = False) -> str:
    """The first of them by name, and how many more."""
    most = len(rows) if every else _MOST_NAMES
    told = ", ".join(row.node.label for row in rows[:most])
    return told + (f" and {len(rows) - most:,} more" if len(rows) > most else "")


def _alike(failed: Sequence[Row]) -> list[list[Row]]:
    """Rows with the same error together: word for word, or but for their own names."""
    counts = Counter(row.error for row in failed)
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in failed:
        why = row.error if counts[row.error] > 1 else reason(row)
        groups.setdefault((row.unfinished, why), []).append(row)
    return list(groups.values())


def _printed(row: Row, whose: str, *, few: bool) -> Iterator[tuple[str, str]]:
    """What its failed jobs printed last; of many only that they did."""
    for kind, lines in row.printed.items():
        what = f"the {kind} of {whose}" if whose else f"its {kind}"
        if not few:
            yield f"  what {what} printed last is in --json (log_tail)", "dim"
            continue
        yield f"  {what} printed last:", "dim"
        for line in lines[-_MOST_PRINTED:]:
            yield f"    {line}", "dim"
