"""Which rows of a file to read: uniformly over the whole of it, with a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Iterator


def draw_rows(rows_total: int, sample: int | None, seed: int) -> list[int]:
    """Row numbers of a uniform sample without repeats, rising; all of them for `sample=None`.

    The same seed and total give the same rows.
    """
    if sample is None or sample >= rows_total:
        return list(range(rows_total))
    return sorted(random.Random(seed).sample(range(rows_total), sample))  # noqa: S311


class Shuffle:
    """The numbers 0 … n-1 in a random order, drawn one at a time.

    A Fisher-Yates shuffle that keeps only the cells it has moved: memory grows with what was drawn
    and not with n.
    """

    def __init__(self, n: int, seed: int) -> None:
        self._left = n
        self._moved: dict[int, int] = {}
        self._random = random.Random(seed)  # noqa: S311

    def take(self, count: int) -> list[int]:
        """The next `count` numbers; fewer at the end, none after it."""
        return list(self._take(min(count, self._left)))

    def _take(self, count: int) -> Iterator[int]:
        for _ in range(count):
            self._left -= 1
            at = self._random.randrange(self._left + 1)
            drawn = self._moved.get(at, at)
            self._moved[at] = self._moved.pop(self._left, self._left)
            if at == self._left:
                self._moved.pop(at, None)
            yield drawn
