"""How long to wait before the next try: longer each time, and not all nodes at once. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FIRST_SECONDS = 1.0
MOST_SECONDS = 30.0
_GROWTH = 2.0


@dataclass
class Backoff:
    """Waits that double from `first_seconds` up to `most_seconds`, each drawn from its upper half,
    so that the nodes of a fleet whose head came back do not knock at the same moment."""

    first_seconds: float = FIRST_SECONDS
    most_seconds: float = MOST_SECONDS
    draw: random.Random = field(default_factory=random.SystemRandom)
    _next: float = 0.0

    def wait(self) -> float:
        """Seconds until the next try."""
        ceiling = min(self.most_seconds, self._next or self.first_seconds)
        self._next = ceiling * _GROWTH
        return ceiling * self.draw.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It went well: the next wait is the first again."""
        self._next = 0.0
