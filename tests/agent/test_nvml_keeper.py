"""Restarts with growing pauses, renewal, and what is handed out; sessions are scripted, time is
told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pichak_agent.nvml_keeper import FULL_SECONDS, RENEW_SECONDS, NvmlKeeper
from pichak_core.devices.gpus import Report
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_session import Answer, NvmlSession
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.testing import FakeClock


class Scripted:
    """Stands for a session: `reply` makes the report of a request, None for one that never comes
    back; `stuck` does not die."""

    def __init__(self, reply: Callable[[str], Report | None], *, stuck: bool = False) -> None:
        self.reply, self.stuck = reply, stuck
        self.asked: list[str] = []
        self.closed = False
        self.pid = id(self)
        self.listener_cpu_seconds = 0.0
        self._answer: Answer | None = None

    @property
    def alive(self) -> bool:
        return self.stuck or not self.closed

    @property
    def waiting(self) -> bool:
        return self._answer is not None

    def ask(self, request: Any, budget: float) -> None:
        self.asked.append(request)
        report = self.reply(request)
        if report is None:
            gap = Unmeasured("nvml", Reason.TIMED_OUT, f"no answer within {budget:g} s")
            report = Report(gap=gap)
        self._answer = Answer(request, report, ended=report.gap is not None, cpu_seconds=0.002)

    def collect(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self, patience_seconds: float = 2.0) -> None:
        self.closed = True


def good(request: str) -> Report:
    values: dict[str, Any] = {"power_watts": 50.0, "memory_used_bytes": 7}
    if request == "full":
        values |= {"uuid": "GPU-a", "power_limit_watts": 300.0}
    return Report({"driver_version": "1"}, [Gpu(0, values)])


def refused(reason: Reason) -> Callable[[str], Report]:
    return lambda _: Report(gap=Unmeasured("nvml", reason, f"it says {reason.value}"))


class Bench:
    def __init__(self, *replies: Callable[[str], Report | None], stuck: bool = False) -> None:
        self.clock = FakeClock(100.0)
        self.replies, self.stuck = list(replies), stuck
        self.sessions: list[Scripted] = []
        self.started_at: list[float] = []
        self.keeper = NvmlKeeper(self._start, clock=self.clock)

    def _start(self) -> NvmlSession:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.sessions.append(Scripted(reply, stuck=self.stuck))
        self.started_at.append(self.clock.now)
        return self.sessions[-1]  # type: ignore[return-value]

    def pass_seconds(self, seconds: int) -> list[Any]:
        states = []
        for _ in range(seconds):
            states.append(self.keeper.poll())
            self.clock.advance(1.0)
        return [state for state in states if state is not None]


def test_everything_now_and_then_and_what_moves_in_between() -> None:
    bench = Bench(good)
    states = bench.pass_seconds(int(3 * FULL_SECONDS))
    asked = bench.sessions[0].asked
    assert asked[0] == "full"
    assert asked.count("full") == 3
    assert [state.full for state in states[:2]] == [True, False]
    live = states[1].gpus[0]
    assert live.uuid == "GPU-a"
    assert live.facts["power_limit_watts"] == 300.0
    assert live.live == {"power_watts": 50.0, "memory_used_bytes": 7}
    assert states[0].gpus[0].live == live.live  # a full answer is told apart into both
    assert bench.keeper.system == {"driver_version": "1"}


def test_pauses_grow_and_an_answer_ends_them() -> None:
    bench = Bench(refused(Reason.FAILED))
    bench.pass_seconds(400)
    waits = [b - a for a, b in zip(bench.started_at, bench.started_at[1:], strict=False)]
    assert waits[:5] == pytest.approx([6, 11, 21, 41, 81], abs=1)
    assert bench.keeper.reason == "failed"
    bench.replies = [good]
    bench.pass_seconds(400)
    assert bench.keeper.gap == ""
    assert bench.keeper._tries == 0


def test_a_machine_without_a_driver_is_not_asked_all_the_time() -> None:
    bench = Bench(refused(Reason.NO_DEVICE))
    bench.pass_seconds(590)
    assert len(bench.sessions) == 1
    assert not bench.keeper.incidents  # that there is none is no incident


def test_a_hung_one_is_told_and_another_started() -> None:
    bench = Bench(lambda _: None, good)
    bench.pass_seconds(20)
    assert [text for _, text in bench.keeper.incidents] == ["no answer within 45 s"]
    assert bench.sessions[0].closed
    assert bench.keeper.gap == ""


def test_children_stuck_in_the_driver_are_not_heaped_up() -> None:
    bench = Bench(lambda _: None, stuck=True)
    bench.pass_seconds(3000)
    assert len(bench.sessions) == 3
    assert len(bench.keeper.pids) == 3
    assert "hang in the driver" in bench.keeper.gap
    assert bench.keeper.reason == Reason.TIMED_OUT.value


def test_another_takes_over_after_a_while() -> None:
    bench = Bench(good)
    states = bench.pass_seconds(int(RENEW_SECONDS) + 10)
    first, second = bench.sessions
    assert first.closed
    assert not second.closed
    assert second.asked[:2] == ["full", "live"]
    assert len(states) >= RENEW_SECONDS  # nobody missed a reading for it


def test_what_a_new_process_hears_is_told_while_the_old_one_reads() -> None:  # field case 5
    bench = Bench(good, refused(Reason.LOST))
    bench.pass_seconds(int(RENEW_SECONDS) + 10)
    assert bench.keeper.fresh_gap == "it says lost"
    assert bench.keeper.gap == ""
    assert not bench.sessions[0].closed
    assert bench.sessions[1].closed
    bench.replies = [good]
    bench.pass_seconds(int(RENEW_SECONDS / 2) + 10)
    assert bench.keeper.fresh_gap == ""
    assert bench.sessions[0].closed


def test_no_process_can_be_started() -> None:
    def fail() -> NvmlSession:
        raise OSError("too many open files")

    keeper = NvmlKeeper(fail, clock=FakeClock())
    assert keeper.poll() is None
    assert keeper.gap == "no child process: too many open files"


def test_its_end_ends_the_children() -> None:
    bench = Bench(good)
    bench.pass_seconds(3)
    bench.keeper.close()
    assert bench.sessions[0].closed
    assert bench.keeper.pids == []
