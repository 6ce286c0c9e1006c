"""What a service says once: a sentence that comes again is no news until a long time has passed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

#: A state that lasts is told again this often.
AGAIN_SECONDS = 3600.0
_MOST = 100
#: What differs each time in words that say the same: numbers, addresses in memory, folders of ours.
_VARYING = re.compile(r"pichak-ray-\w+|0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")


class News:
    """Which sentences were said, and when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def is_news(self, sentence: str) -> bool:
        """Whether it has to be said; it counts as said then."""
        form, now = _VARYING.sub("#", sentence), self._clock()
        if now - self._said.get(form, float("-inf")) < AGAIN_SECONDS:
            return False
        self._said[form] = now
        while len(self._said) > _MOST:
            del self._said[min(self._said, key=lambda each: self._said[each])]
        return True

    def forget(self) -> None:
        """A new chapter: everything is news again."""
        self._said.clear()
