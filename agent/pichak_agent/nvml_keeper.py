"""Keeps a process that reads NVML: starts it again with growing pauses, renews it now and then, and
hands out what it read as GPU readings. Nothing here waits for NVML."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pichak_agent.readings import GpuReading
from pichak_core.devices.gpus import Report
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_session import Answer, NvmlSession, Request
from pichak_core.measurement import Reason
from pichak_core.plan import Scalar

#: Of everything that is known of the GPUs (identity, limits, error counters, processes).
FULL_SECONDS = 30.0
#: The child's first answer may need a card to wake; a later one is quick.
START_BUDGET_SECONDS, FULL_BUDGET_SECONDS, LIVE_BUDGET_SECONDS = 45.0, 20.0, 10.0
#: A container that lost its right to its GPUs keeps the ones that are open: only a process that
#: starts now sees it. It also bounds what the driver's library leaks.
RENEW_SECONDS = 900.0
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 5.0, 600.0
#: Killed children that are stuck in the driver; past this many none is started beside them.
_MOST_STUCK = 3
#: No library or no package: that does not change by itself soon.
_SETTLED = frozenset({Reason.NO_DEVICE, Reason.NOT_INSTALLED, Reason.NOT_SUPPORTED})


@dataclass(frozen=True)
class GpuState:
    """One answer. `full`: the GPUs' facts are of this answer."""

    gpus: tuple[GpuReading, ...] = ()
    full: bool = False


class NvmlKeeper:
    """`start` makes a session (`OSError` when it cannot). Call `poll` about once a second."""

    def __init__(
        self,
        start: Callable[[], NvmlSession],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._clock = start, clock
        self._session: NvmlSession | None = None
        self._fresh: NvmlSession | None = None
        self._stuck: list[NvmlSession] = []
        self._tries = 0
        self._not_before = float("-inf")
        self._full_at = self._born = float("-inf")
        self._facts: dict[int, Gpu] = {}
        self._child_cpu = self._starting_cpu = self._gone_cpu = 0.0
        #: How long NVML took for the last answer.
        self.seconds = 0.0
        #: Versions of the driver.
        self.system: dict[str, Scalar] = {}
        #: Why NVML says nothing, and that reason's name; "" while it answers.
        self.gap = self.reason = ""
        #: Why a process that starts now could not open it, while an older one still reads.
        self.fresh_gap = ""
        #: (unix time, sentence) of each child that hung or died.
        self.incidents: deque[tuple[float, str]] = deque(maxlen=20)

    @property
    def pids(self) -> list[int]:
        """The children that live."""
        sessions = [self._session, self._fresh, *self._stuck]
        return [s.pid for s in sessions if s is not None and s.alive]

    @property
    def starting_cpu_seconds(self) -> float:
        """CPU time of the children until their first answers."""
        return self._starting_cpu

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the children, and listening to them, has cost."""
        listening = sum(
            s.listener_cpu_seconds for s in (self._session, self._fresh) if s is not None
        )
        return self._child_cpu + self._starting_cpu + self._gone_cpu + listening

    def poll(self) -> GpuState | None:
        """What NVML said since the last call, or None when it said nothing new; asks it again."""
        now = self._clock()
        self._stuck = [session for session in self._stuck if session.alive]
        state = self._collect(now)
        self._renew(now)
        if self._session is None and now >= self._not_before:
            self._open(now)
        session = self._session
        if session is not None and not session.waiting:
            first = self._full_at == float("-inf")
            full = first or now - self._full_at >= FULL_SECONDS
            budget = FULL_BUDGET_SECONDS if full else LIVE_BUDGET_SECONDS
            session.ask("full" if full else "live", START_BUDGET_SECONDS if first else budget)
            if full and not first:
                self._full_at = now
        return state

    def close(self) -> None:
        """End the children."""
        for session in (self._session, self._fresh):
            if session is not None:
                session.close()
        self._session = self._fresh = None

    def _open(self, now: float) -> None:
        if len(self._stuck) >= _MOST_STUCK:
            self.gap = f"{len(self._stuck)} processes that read NVML hang in the driver"
            self.reason = Reason.TIMED_OUT.value
            self._not_before = now + _LONGEST_RETRY_SECONDS
            return
        try:
            self._session = self._start()
        except OSError as error:
            self._failed(now, f"no child process: {error}", Reason.FAILED)
            return
        self._full_at, self._born = float("-inf"), now

    def _collect(self, now: float) -> GpuState | None:
        session = self._session
        answer = session.collect() if session is not None else None
        if session is None or answer is None:
            return None
        if self._full_at == float("-inf"):
            self._starting_cpu += answer.cpu_seconds
        else:
            self._child_cpu += answer.cpu_seconds
            self.seconds = answer.seconds
        report = answer.report
        if report.gap is None:
            self._tries = 0
            self.gap = self.reason = ""
            if answer.request == "full":
                self._remember(report, now)
            return self._state(report, answer.request)
        self._drop(session, answer, now)
        # A card took the process down: those that answered before it are known.
        return self._state(report, "live")

    def _remember(self, report: Report, now: float) -> None:
        if self._full_at == float("-inf"):
            self._full_at = now
        self._facts = {gpu.index: gpu for gpu in report.gpus if gpu.lost is None}
        self.system = dict(report.system)

    def _drop(self, session: NvmlSession, answer: Answer, now: float) -> None:
        gap = answer.report.gap
        assert gap is not None  # noqa: S101
        if answer.ended and gap.reason in (Reason.TIMED_OUT, Reason.LOST, Reason.FAILED):
            self.incidents.append((time.time(), gap.detail))
        session.close(patience_seconds=0.0)
        self._retire(session)
        self._session = None
        self._failed(now, gap.detail, gap.reason)

    def _failed(self, now: float, detail: str, reason: Reason) -> None:
        self.gap, self.reason = detail, reason.value
        wait = _FIRST_RETRY_SECONDS * 2.0 ** min(self._tries, 10)
        longest = _LONGEST_RETRY_SECONDS
        self._not_before = now + (longest if reason in _SETTLED else min(longest, wait))
        self._tries += 1

    def _renew(self, now: float) -> None:
        """Start another child beside the one that works; it takes over when it can."""
        fresh = self._fresh
        if fresh is None:
            due = self._session is not None and now - self._born >= RENEW_SECONDS
            if due and len(self._stuck) < _MOST_STUCK:
                self._born = now
                try:
                    self._fresh = self._start()
                except OSError as error:
                    self.fresh_gap = f"no child process: {error}"
                    return
                self._fresh.ask("full", START_BUDGET_SECONDS)
            return
        answer = fresh.collect()
        if answer is None:
            return
        self._fresh = None
        gap = answer.report.gap
        if gap is not None:
            self.fresh_gap = gap.detail
            self._born = now - RENEW_SECONDS / 2
            fresh.close(patience_seconds=0.0)
            self._retire(fresh)
            return
        self.fresh_gap = ""
        self._starting_cpu += answer.cpu_seconds
        old, self._session = self._session, fresh
        self._full_at = now
        self._remember(answer.report, now)
        if old is not None:
            old.close()
            self._retire(old)

    def _retire(self, session: NvmlSession) -> None:
        self._gone_cpu += session.listener_cpu_seconds
        if session.alive:
            self._stuck.append(session)

    def _state(self, report: Report, request: Request) -> GpuState:
        gpus = tuple(self._reading(gpu) for gpu in report.gpus)
        return GpuState(gpus, request == "full")

    def _reading(self, gpu: Gpu) -> GpuReading:
        known = self._facts.get(gpu.index)
        facts: Mapping[str, Scalar] = known.values if known is not None else {}
        uuid = str(gpu.values.get("uuid") or facts.get("uuid") or "")
        live = gpu.values if not gpu.values or "uuid" not in gpu.values else _live(gpu.values)
        return GpuReading(gpu.index, uuid, live, facts, gpu.lost.describe() if gpu.lost else "")


def _live(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in values.items() if name in _MOVING}


def _moving() -> frozenset[str]:
    from pichak_core.devices.nvml_fields import QUERIES

    memory = {f"memory_{part}_bytes" for part in ("total", "used", "free", "reserved")}
    return frozenset({query.field for query in QUERIES if query.live} | memory)


_MOVING = _moving()
