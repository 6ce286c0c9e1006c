"""What a service says, and where: to a person once, to its state's file and to systemd always.

A sentence that comes again is no news until a long time has passed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from pichak_agent.service_files import ServiceFiles, ServiceState
from pichak_agent.service_notify import notify

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


class Voice:
    """Tells in which state a service is, and why."""

    def __init__(
        self,
        state: ServiceState,
        files: ServiceFiles,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self._files, self._say, self._news = files, say, News(clock)
        self._mentioned: set[str] = set()

    def tell(self, state: str, why: str) -> None:
        """Enter `state`, and say why, if that is news."""
        if (state, why) == (self.state.state, self.state.why):
            return
        if self._news.is_news(why):
            self._say(why)
        self.enter(state, why)

    def mention(self, problems: Sequence[str]) -> None:
        """Say each problem when it arises; one that was gone and is back is news again."""
        for problem in problems:
            if problem not in self._mentioned:
                self._say(f"problem: {problem}")
        self._mentioned = set(problems)

    def enter(self, state: str, why: str) -> None:
        """Enter `state` without a word to a person."""
        if state != self.state.state:
            self.state.since_unix = time.time()
        self.state.state, self.state.why = state, why
        self._files.write(self.state)
        notify(f"STATUS={why}")

    def new_chapter(self) -> None:
        """What was said before is news again."""
        self._news.forget()
