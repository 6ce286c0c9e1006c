"""Keeps the process that reads Windows' GPU memory counters: asks it as often as it is worth its
cost, starts it again with growing pauses. Nothing here waits for the counters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pichak_agent.readings import ProcessId
from pichak_core.devices.windows_cards import CardMemory
from pichak_core.devices.windows_child import CounterSession, request

#: For the first answer, which starts a Python and loads the provider, and for a later one.
START_BUDGET_SECONDS, BUDGET_SECONDS = 30.0, 10.0
#: Of one core, and of the clock: what reading them may take. Windows counts a process's CPU time in
#: steps of 1/64 s, so only the mean of many readings says what one costs.
CPU_SHARE, CLOCK_SHARE = 0.0015, 0.1
INTERVAL_SECONDS, LONGEST_INTERVAL_SECONDS = 1.0, 15.0
_COSTS = 64
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 5.0, 300.0
#: Killed children that are stuck in the driver; past this many none is started beside them.
_MOST_STUCK = 3


@dataclass(frozen=True)
class Counted:
    """One answer: the cards, the processes that were asked for, and the steady times between which
    the counters were read."""

    cards: tuple[CardMemory, ...]
    processes: frozenset[ProcessId]
    asked_at: float
    read_by: float


class CounterKeeper:
    """`start` makes a session (`OSError` when it cannot). Call `poll` about once a second."""

    def __init__(
        self,
        start: Callable[[], CounterSession],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._clock = start, clock
        self._session: CounterSession | None = None
        self._stuck: list[CounterSession] = []
        self._asked: frozenset[ProcessId] = frozenset()
        self._asked_at = 0.0
        self._fresh = True
        self._tries = 0
        self._not_before = float("-inf")
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._child_cpu = self._starting_cpu = self._gone_cpu = 0.0
        #: Why the counters say nothing; "" while they answer.
        self.gap = ""
        #: Between two readings now.
        self.interval_seconds = INTERVAL_SECONDS
        #: (unix time, sentence) of each child that hung or died.
        self.incidents: deque[tuple[float, str]] = deque(maxlen=20)

    @property
    def pids(self) -> list[int]:
        """The children that live."""
        return [s.pid for s in (self._session, *self._stuck) if s is not None and s.alive]

    @property
    def starting_cpu_seconds(self) -> float:
        """CPU time of the children until their first answers."""
        return self._starting_cpu

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the children, and listening to them, has cost."""
        listening = self._session.listener_cpu_seconds if self._session is not None else 0.0
        return self._child_cpu + self._starting_cpu + self._gone_cpu + listening

    def poll(self, processes: Collection[ProcessId]) -> Counted | None:
        """What the counters said since the last call, None when nothing new; asks them again, for
        the cards and these processes, when it is time."""
        now = self._clock()
        self._stuck = [session for session in self._stuck if session.alive]
        counted = self._collect(now)
        if self._session is None and now >= self._not_before:
            self._open(now)
        session = self._session
        if session is not None and not session.waiting and now >= self._not_before:
            self._asked, self._asked_at = frozenset(processes), now
            self._not_before = now + self.interval_seconds
            budget = START_BUDGET_SECONDS if self._fresh else BUDGET_SECONDS
            session.ask(request({process.pid for process in processes}), budget)
        return counted

    def close(self) -> None:
        """End the child."""
        if self._session is not None:
            self._session.close()
        self._session = None

    def _open(self, now: float) -> None:
        if len(self._stuck) >= _MOST_STUCK:
            self.gap = (
                f"spill unknown: {len(self._stuck)} processes that read the GPU memory counters "
                "hang in the driver"
            )
            self._not_before = now + _LONGEST_RETRY_SECONDS
            return
        try:
            self._session, self._fresh = self._start(), True
        except OSError as error:
            self._failed(now, f"spill unknown: no child process: {error}")

    def _collect(self, now: float) -> Counted | None:
        session = self._session
        answer = session.collect() if session is not None else None
        if session is None or answer is None:
            return None
        if self._fresh:
            self._starting_cpu += answer.cpu_seconds
        else:
            self._child_cpu += answer.cpu_seconds
            self._costs.append(answer.cpu_seconds)
            each = sum(self._costs) / len(self._costs)
            wanted = max(INTERVAL_SECONDS, each / CPU_SHARE, answer.seconds / CLOCK_SHARE)
            self.interval_seconds = min(LONGEST_INTERVAL_SECONDS, wanted)
        self._fresh = False
        gap = answer.gap
        if gap is None:
            self._tries = 0
            self.gap = ""
            return Counted(answer.cards, self._asked, self._asked_at, now)
        if answer.ended:
            self.incidents.append((time.time(), gap.detail))
            session.close(patience_seconds=0.0)
            self._gone_cpu += session.listener_cpu_seconds
            if session.alive:
                self._stuck.append(session)
            self._session = None
        self._failed(now, gap.detail)
        return None

    def _failed(self, now: float, detail: str) -> None:
        self.gap = detail
        wait = _FIRST_RETRY_SECONDS * 2.0 ** min(self._tries, 10)
        self._not_before = now + min(_LONGEST_RETRY_SECONDS, wait)
        self._tries += 1
