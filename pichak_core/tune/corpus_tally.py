"""Counts what is wrong with the rows of a corpus, and where each kind was met first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from pichak_core.tune.row_formats import normalise
from pichak_core.tune.row_text import DEFECTS, Row
from pichak_core.tune.rows import RawRow


class Tally:
    """Defects by name, over rows that arrive in order.

    `drawn` rows were taken in. `waiting` holds the places of rows handed on by `rows_of` and not
    yet tokenised.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.waiting: deque[int] = deque()
        self._found: dict[str, list[int]] = {}

    def add(self, names: Sequence[str], place: int) -> None:
        """Count each of `names` once, met at `place`."""
        for name in names:
            found = self._found.setdefault(name, [0, place])
            found[0] += 1
            found[1] = min(found[1], place)

    def rows_of(self, drawn: Iterable[RawRow]) -> Iterator[Row]:
        """The rows that hold text; what cannot be used is counted here, and why."""
        for raw in drawn:
            self.drawn += 1
            if raw.defects:
                self.add(raw.defects, raw.place)
            if not raw.usable:
                continue
            row = normalise(raw.value)
            if row.segments:
                self.waiting.append(raw.place)
                yield row
            else:
                self.add(row.defects, raw.place)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """``{name: {"count", "first_line"}}``, the most frequent first."""
        ranked = sorted(self._found.items(), key=lambda item: (-item[1][0], item[0]))
        return {name: {"count": count, "first_line": place} for name, (count, place) in ranked}

    def describe(self, most: int, place: str) -> str:
        """The `most` frequent defects as a phrase; `place` is "line" or "row"."""
        return "; ".join(
            f"{found['count']:,} × {DEFECTS.get(name, name)}, "
            f"first at {place} {found['first_line']:,}"
            for name, found in list(self.as_dict().items())[:most]
        )
