"""How often the counters are asked, and what becomes of a process that hangs; sessions are
scripted, time is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pichak_agent.counter_keeper import (
    CPU_SHARE,
    LONGEST_INTERVAL_SECONDS,
    Counted,
    CounterKeeper,
)
from pichak_agent.readings import ProcessId
from pichak_core.devices.windows_cards import CardMemory
from pichak_core.devices.windows_child import CounterAnswer, CounterSession
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.testing import FakeClock

CARD = CardMemory((1, 0, 0), 5, 6, {7: (1, 2)})
WHO = frozenset({ProcessId(7, "a")})


def good() -> CounterAnswer:
    return CounterAnswer((CARD,), cpu_seconds=0.001, seconds=0.002)


def hung() -> CounterAnswer:
    answer = CounterAnswer(ended=True)
    answer.fail(Reason.TIMED_OUT, "no answer")
    return answer


def gone() -> CounterAnswer:
    return CounterAnswer(gap=Unmeasured("m", Reason.FAILED, "spill unknown: no counter set"))


class Scripted:
    """Stands for a session."""

    def __init__(self, reply: Callable[[], CounterAnswer], stuck: bool) -> None:
        self.reply, self.stuck = reply, stuck
        self.budgets: list[float] = []
        self.asked: list[str] = []
        self.closed = False
        self.pid, self.listener_cpu_seconds = id(self), 0.0
        self._answer: CounterAnswer | None = None

    @property
    def alive(self) -> bool:
        return self.stuck or not self.closed

    @property
    def waiting(self) -> bool:
        return self._answer is not None

    def ask(self, request: str, budget: float) -> None:
        self.asked.append(request)
        self.budgets.append(budget)
        self._answer = self.reply()

    def collect(self) -> CounterAnswer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self, patience_seconds: float = 2.0) -> None:
        self.closed = True


class Bench:
    def __init__(self, *replies: Callable[[], CounterAnswer], stuck: bool = False) -> None:
        self.clock, self.replies, self.stuck = FakeClock(100.0), list(replies), stuck
        self.sessions: list[Scripted] = []
        self.started_at: list[float] = []
        self.keeper = CounterKeeper(self._start, clock=self.clock)

    def _start(self) -> CounterSession:
        self.sessions.append(Scripted(self._reply, self.stuck))
        self.started_at.append(self.clock.now)
        return self.sessions[-1]  # type: ignore[return-value]

    def _reply(self) -> CounterAnswer:
        return (self.replies.pop(0) if len(self.replies) > 1 else self.replies[0])()

    def pass_seconds(self, seconds: int) -> list[Counted]:
        made = []
        for _ in range(seconds):
            counted = self.keeper.poll(WHO)
            made += [counted] if counted is not None else []
            self.clock.advance(1.0)
        return made


def test_they_are_asked_once_a_second_and_only_the_first_answer_may_take_long() -> None:
    bench = Bench(good)
    made = bench.pass_seconds(21)
    assert len(made) == 20
    assert made[0] == Counted((CARD,), WHO, 100.0, 101.0)
    (session,) = bench.sessions
    assert session.budgets[:3] == [30.0, 10.0, 10.0]
    assert set(session.asked) == {"[7]"}
    assert bench.keeper.cpu_seconds == pytest.approx(0.020)
    assert bench.keeper.starting_cpu_seconds == pytest.approx(0.001)
    assert bench.keeper.gap == ""


@pytest.mark.parametrize(
    ("cpu", "seconds", "interval"),
    [(0.006, 0.01, 4.0), (0.001, 0.6, 6.0), (1.0, 0.01, LONGEST_INTERVAL_SECONDS)],
)
def test_what_costs_more_is_asked_less_often(cpu: float, seconds: float, interval: float) -> None:
    bench = Bench(lambda: CounterAnswer((CARD,), cpu_seconds=cpu, seconds=seconds))
    made = bench.pass_seconds(601)
    assert bench.keeper.interval_seconds == pytest.approx(interval)
    assert len(made) == pytest.approx(600 / interval, rel=0.05)
    if interval < LONGEST_INTERVAL_SECONDS:
        assert bench.keeper.cpu_seconds / 600 <= CPU_SHARE * 1.1


def test_a_clock_of_64_steps_a_second_sets_no_pace_of_its_own() -> None:
    """Windows' CPU times: most readings seem free, and some cost 1/64 s."""
    costs = [1 / 64 if n % 16 == 0 else 0.0 for n in range(400)]
    bench = Bench(lambda: CounterAnswer((CARD,), cpu_seconds=costs.pop()))
    bench.pass_seconds(300)
    assert bench.keeper.interval_seconds == pytest.approx(1.0, abs=0.2)


def test_one_that_hangs_is_told_and_another_started_with_growing_pauses() -> None:
    bench = Bench(hung)
    bench.pass_seconds(120)
    waits = [b - a for a, b in zip(bench.started_at, bench.started_at[1:], strict=False)]
    assert waits == pytest.approx([6, 11, 21, 41], abs=1)
    assert all(session.closed for session in bench.sessions[:-1])
    told = {text for _, text in bench.keeper.incidents}
    assert told == {bench.keeper.gap} == {"spill unknown: no answer"}
    bench.replies = [good]
    assert bench.pass_seconds(200)
    assert bench.keeper.gap == ""


def test_processes_stuck_in_the_driver_are_not_heaped_up() -> None:
    bench = Bench(hung, stuck=True)
    bench.pass_seconds(2000)
    assert len(bench.sessions) == 3
    assert len(bench.keeper.pids) == 3
    assert "3 processes that read the GPU memory counters hang" in bench.keeper.gap


def test_counters_that_are_gone_are_asked_again_in_the_same_process() -> None:
    bench = Bench(good, gone, gone, good)
    made = bench.pass_seconds(6)
    assert len(made) == 1
    assert bench.keeper.gap == "spill unknown: no counter set"
    assert not bench.keeper.incidents
    assert len(bench.pass_seconds(20)) > 1
    assert bench.keeper.gap == ""
    assert len(bench.sessions) == 1


def test_no_process_can_be_started() -> None:
    def fail() -> CounterSession:
        raise OSError("too many open files")

    keeper = CounterKeeper(fail, clock=FakeClock())
    assert keeper.poll(WHO) is None
    assert keeper.gap == "spill unknown: no child process: too many open files"


def test_its_end_ends_the_process() -> None:
    bench = Bench(good)
    bench.pass_seconds(3)
    bench.keeper.close()
    assert bench.sessions[0].closed
    assert bench.keeper.pids == []
