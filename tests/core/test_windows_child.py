"""All cards' counters at once: the sums, the process that reads them, and how it ends.

The libraries of Windows are stand-ins (`fake_windows`); the process and its pipes are real.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_windows import (
    CARD,
    GHOSTS,
    INTEL,
    LAPTOP,
    SECOND,
    FakeWindows,
    name,
    nvidia,
    row,
    rows_of,
)

from pichak_core.devices import gpu_counter_session, processes
from pichak_core.devices.windows_adapters import Adapter
from pichak_core.devices.windows_cards import CardMemory, card_memories
from pichak_core.devices.windows_child import (
    REOPEN_SECONDS,
    CounterAnswer,
    CounterSession,
    Server,
    request,
)
from pichak_core.devices.windows_counters import (
    ADAPTER_DEDICATED,
    ADAPTER_SHARED,
    PROCESS_DEDICATED,
    PROCESS_SHARED,
    CounterItem,
    CounterPath,
)
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.testing import GIB, MIB, FakeClock

Rows = dict[CounterPath, list[CounterItem]]


def cards(rows: Rows, adapters: list[Adapter], *pids: int) -> list[CardMemory]:
    found = card_memories(rows, adapters, frozenset(pids))
    assert not isinstance(found, Unmeasured), found
    return found


def test_a_card_with_placeholders_beside_an_integrated_gpu() -> None:  # field case 40
    rows: Rows = {
        PROCESS_DEDICATED: [
            row(name(CARD, 77), GIB),
            row(name(GHOSTS[0], 77), 0),
            row(name(INTEL, 77), 0),
            row(name(CARD, 7), 5 * GIB),
            row(name(CARD, 4), 6 * GIB),
        ],
        PROCESS_SHARED: [
            row(name(CARD, 77), 10 * MIB),
            row(name(GHOSTS[0], 77), 0),
            row(name(INTEL, 77), 78 * MIB),
            row(name(CARD, 7), 3 * GIB),
            row(name(CARD, 4), 0),
        ],
        ADAPTER_DEDICATED: [row(name(CARD), 12 * GIB), row(name(INTEL), 0)],
        ADAPTER_SHARED: [row(name(CARD), 4 * GIB), row(name(INTEL), 900 * MIB)],
    }
    (card,) = cards(rows, LAPTOP, 77, 7, 8)
    # 8 is on no card: absent, not zero; 4 was not asked for.
    expected = {77: (GIB, 10 * MIB), 7: (5 * GIB, 3 * GIB)}
    assert card == CardMemory((1, 0, 0), 12 * GIB, 4 * GIB, expected)
    assert CardMemory.from_wire(json.loads(json.dumps(card.to_wire()))) == card


def test_two_cards_are_told_apart_by_their_address() -> None:
    rows = rows_of(GIB, MIB)
    for path, extra in rows_of(2 * GIB, 0, luid=GHOSTS[1]).items():
        rows[path] += extra
    found = cards(rows, [nvidia(GHOSTS[1], SECOND), nvidia(CARD)], 77)
    assert [(card.address, card.processes) for card in found] == [
        ((1, 0, 0), {77: (GIB, MIB)}),
        (SECOND, {77: (2 * GIB, 0)}),
    ]


@pytest.mark.parametrize("value", [(-1, 0), (2**62, 0), (GIB, 0xC0000BC6)])
def test_what_is_no_size_is_left_out_and_the_rest_stays(value: tuple[int, int]) -> None:
    # field case 14, 39
    rows = rows_of(GIB, MIB)
    rows[PROCESS_DEDICATED] = [row(name(CARD, 77), *value), row(name(CARD, 5), GIB)]
    rows[PROCESS_SHARED] += [row(name(CARD, 5), 0)]
    rows[ADAPTER_SHARED] = [row(name(CARD), *value)]
    (card,) = cards(rows, LAPTOP, 77, 5)
    assert card == CardMemory((1, 0, 0), 2 * GIB, None, {5: (GIB, 0)})


@pytest.mark.parametrize(
    ("rows", "adapters", "reason", "words"),
    [
        ({}, LAPTOP, Reason.NOT_SUPPORTED, "missing or damaged"),
        (rows_of(1, 1) | {PROCESS_SHARED: []}, LAPTOP, Reason.NOT_SUPPORTED, "Shared Usage"),
        (rows_of(1, 1), LAPTOP[:1], Reason.NO_DEVICE, "TCC mode has none, and does not spill"),
    ],
)
def test_without_counters_or_cards_it_is_unknown(
    rows: Rows, adapters: list[Adapter], reason: Reason, words: str
) -> None:
    found = card_memories(rows, adapters, {77})
    assert isinstance(found, Unmeasured)
    assert found.reason is reason
    assert found.detail.startswith("spill unknown: ")
    assert words in found.detail


# --- the server --------------------------------------------------------------------------------


def test_a_query_stays_open_and_is_renewed() -> None:
    clock, windows = FakeClock(), FakeWindows({77: (GIB, 0)})
    server = windows.server(clock)
    for _ in range(3):
        (card,) = server.answer("[77]")["cards"]
        assert card[3] == [[77, GIB, 0]]
        clock.advance(1.0)
    assert (windows.opened, windows.pdh.open) == (1, 1)
    clock.advance(REOPEN_SECONDS)
    assert "cards" in server.answer("[77]")
    assert (windows.opened, windows.pdh.open) == (2, 1)
    server.close()
    assert windows.pdh.open == 0


def test_counters_that_vanish_are_a_gap_and_a_new_query_finds_them_again() -> None:
    windows = FakeWindows({77: (GIB, 0)})
    server = windows.server(FakeClock())
    assert "cards" in server.answer("[77]")
    windows.status = 0xC0000BC6
    name, reason, detail = server.answer("[77]")["gap"]
    assert (name, reason) == ("gpu.process_memory", "failed")
    assert detail == "spill unknown: PdhCollectQueryData failed with 0xC0000BC6 (invalid data)"
    assert windows.pdh.open == 0
    windows.status = 0
    assert "cards" in server.answer("[77]")
    assert windows.opened == 2


def test_adapters_that_a_driver_restart_renamed_are_followed() -> None:  # field case 40
    windows = FakeWindows({77: (GIB, 0)})
    server = windows.server(FakeClock())
    server.answer("[77]")
    windows.luid = GHOSTS[0]
    windows.processes = {77: (3 * GIB, 0)}
    (card,) = server.answer("[77]")["cards"]
    assert card[3] == [[77, 3 * GIB, 0]]


def test_a_system_without_the_libraries_is_unknown() -> None:  # field case 39
    def missing() -> Any:
        raise OSError("[WinError 126] the module could not be found")

    def old() -> Any:
        raise AttributeError("function 'D3DKMTEnumAdapters2' not found")

    for adapters, reason in ((missing, "failed"), (old, "not supported")):
        gap = Server(adapters, clock=FakeClock()).answer("[]")["gap"]
        assert gap[1] == reason
        assert gap[2].startswith("spill unknown: ")


# --- the process -------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    path = tmp_path / "windows.json"
    monkeypatch.setenv("FAKE_WINDOWS", str(path))

    def tell(**what: Any) -> None:
        path.write_text(json.dumps({"processes": {"77": [GIB, MIB]}, **what}))

    tell()
    return tell


def answered(session: CounterSession, seconds: float = 30.0) -> CounterAnswer:
    end = time.monotonic() + seconds
    while (answer := session.collect()) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return answer


def test_a_real_process_answers_again_and_again(told: Callable[..., None]) -> None:
    session = CounterSession("fake_windows_child")
    try:
        for dedicated in (GIB, 2 * GIB):
            told(processes={"77": [dedicated, MIB]})
            session.ask(request({77, 78}), 30.0)
            answer = answered(session)
            assert answer.gap is None
            assert not answer.ended
            (card,) = answer.cards
            assert card.processes == {77: (dedicated, MIB)}
            assert card.dedicated == dedicated + GIB  # everybody's
        assert answer.seconds > 0
    finally:
        session.close()
    assert not session.alive


def test_one_that_hangs_is_given_up_with_its_process(told: Callable[..., None]) -> None:
    session = CounterSession("fake_windows_child")
    session.ask(request({77}), 30.0)
    assert answered(session).gap is None
    told(does="hang")
    session.ask(request({77}), 0.1)
    answer = answered(session)
    assert answer.ended
    assert answer.cards == ()
    assert answer.gap is not None
    assert answer.gap.reason is Reason.TIMED_OUT
    assert answer.gap.detail == (
        "spill unknown: Windows' GPU memory counters gave no answer within 0.1 s"
    )
    assert not session.alive
    assert processes.started_at(session.pid) is None


def test_one_that_dies_says_how(told: Callable[..., None]) -> None:
    told(does="die")
    session = CounterSession("fake_windows_child")
    session.ask(request({77}), 30.0)
    answer = answered(session)
    assert answer.ended
    assert answer.gap is not None
    assert "the process that reads Windows' GPU memory counters died with exit code 3" in (
        answer.gap.detail
    )
    session.close()


@pytest.mark.skipif(os.name == "nt", reason="the libraries are there")
def test_where_the_libraries_are_not_it_is_a_gap() -> None:
    session = CounterSession()
    session.ask(request(set()), 30.0)
    answer = answered(session)
    assert answer.gap is not None
    assert answer.gap.reason is Reason.NOT_SUPPORTED
    assert not answer.ended
    session.close()


def test_they_are_read_on_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sys.platform == "win32" or gpu_counter_session() is None
    monkeypatch.setattr("pichak_core.devices._sys.platform", "win32")
    assert gpu_counter_session() is CounterSession
