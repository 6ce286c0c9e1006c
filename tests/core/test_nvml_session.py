"""The process that keeps NVML open: asked, slow, hung, dead; with fake drivers on its path."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pichak_core.devices.nvml_session import Answer, NvmlSession, Request
from pichak_core.measurement import Reason

RECORDINGS = Path(__file__).parents[1] / "data" / "nvml"

#: A driver for one GPU. `ODD` is what its power query does at its `ODD_AT`-th call.
FAKE = """
import os, time
class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value
calls = 0
def nvmlInit():
    if ODD == "init": raise NVMLError(999)
    if ODD == "hang at init": time.sleep(600)
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return "GPU-fake"
def nvmlDeviceGetPowerUsage(handle):
    global calls
    calls += 1
    if calls >= ODD_AT:
        if ODD == "hang": time.sleep(600)
        if ODD == "die": os.abort()
        if ODD == "exit": os._exit(3)
        if ODD == "lost": raise NVMLError(15)
        if ODD == "noise": print("NVRM: something", flush=True)
    return 50_000 + calls
"""


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    sessions: list[NvmlSession] = []

    def start(odd: str = "", at: int = 2) -> NvmlSession:
        text = f"ODD, ODD_AT = {odd!r}, {at}\n{FAKE}"
        (tmp_path / "pynvml.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        sessions.append(NvmlSession())
        return sessions[-1]

    yield start
    for session in sessions:
        session.close(patience_seconds=0.0)
        assert not session.alive


def ask(session: NvmlSession, request: Request, budget: float = 20.0) -> Answer:
    session.ask(request, budget)
    end = time.monotonic() + budget + 10
    while (answer := session.collect()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return answer


def test_it_answers_again_and_again_without_starting_anew(drive) -> None:  # type: ignore[no-untyped-def]
    session = drive()
    answers = [ask(session, "full"), ask(session, "live"), ask(session, "live")]
    assert [a.report.gap for a in answers] == [None] * 3
    assert [a.report.gpus[0].values["power_watts"] for a in answers] == [50.001, 50.002, 50.003]
    assert answers[0].report.gpus[0].values["uuid"] == "GPU-fake"
    assert "uuid" not in answers[1].report.gpus[0].values
    assert answers[0].cpu_seconds > 0
    assert session.alive


def test_nobody_waits_for_an_answer(drive) -> None:  # type: ignore[no-untyped-def]
    session = drive("hang", at=1)
    session.ask("full", 20.0)
    assert session.collect() is None
    assert session.waiting
    session.ask("live", 20.0)  # one at a time: nothing happens
    assert session.collect() is None


@pytest.mark.parametrize(("odd", "at"), [("hang", 1), ("hang", 2), ("hang at init", 1)])
def test_one_that_hangs_is_killed_and_told(drive, odd: str, at: int) -> None:  # type: ignore[no-untyped-def]
    session = drive(odd, at)
    if at == 2:
        assert ask(session, "full").report.gap is None
    answer = ask(session, "live" if at == 2 else "full", budget=1.0)
    assert answer.ended
    assert answer.report.gap is not None
    assert answer.report.gap.reason is Reason.TIMED_OUT
    assert not session.alive
    assert session.collect() is None


@pytest.mark.parametrize(("odd", "reason"), [("die", Reason.LOST), ("exit", Reason.FAILED)])
def test_one_that_dies_says_how(drive, odd: str, reason: Reason) -> None:  # type: ignore[no-untyped-def]
    session = drive(odd)
    assert ask(session, "full").report.gap is None
    answer = ask(session, "live")
    assert answer.ended
    assert answer.report.gap is not None
    assert answer.report.gap.reason is reason
    assert ("signal 6" if odd == "die" else "exit code 3") in answer.report.gap.detail


def test_a_lost_card_is_not_touched_again(drive) -> None:  # type: ignore[no-untyped-def]
    session = drive("lost")
    assert ask(session, "full").report.gpus[0].lost is None
    lost = [ask(session, "live").report.gpus[0] for _ in range(2)]
    assert all(gpu.lost and gpu.lost.reason is Reason.LOST for gpu in lost)
    # The second was not read: what had been read before the error is the first's.
    assert lost[0].values == lost[1].values


def test_an_nvml_that_does_not_start(drive) -> None:  # type: ignore[no-untyped-def]
    answer = ask(drive("init"), "full")
    assert answer.ended
    assert answer.report.gap is not None
    assert answer.report.gap.reason is Reason.LOST


def test_what_the_library_prints_is_no_answer(drive) -> None:  # type: ignore[no-untyped-def]
    session = drive("noise", at=1)
    assert ask(session, "full").report.gpus[0].values["power_watts"] == 50.001


def test_its_parents_end_is_its_own(drive) -> None:  # type: ignore[no-untyped-def]
    session = drive()
    ask(session, "full")
    session.close(patience_seconds=5.0)
    assert session._process.returncode == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("version_mismatch", Reason.FAILED),
        ("jetson_stub", Reason.NO_DEVICE),
    ],
)
def test_recordings_without_a_gpu(name: str, reason: Reason) -> None:
    session = NvmlSession(RECORDINGS / f"{name}.json")
    try:
        answer = ask(session, "full")
        assert answer.report.gap is not None
        assert answer.report.gap.reason is reason
    finally:
        session.close()


def test_a_recording_that_falls_off_the_bus() -> None:
    session = NvmlSession(RECORDINGS / "falls_off_bus.json")
    try:
        lost = [[g.lost is not None for g in ask(session, "full").report.gpus] for _ in range(4)]
        assert lost[0] == [False, False]
        assert lost[-1] == [False, True]
    finally:
        session.close()
    assert session._process.returncode == 0 or os.name == "nt"
