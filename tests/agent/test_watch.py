"""How a finding is suspected, confirmed and resolved, whatever the rule."""

from __future__ import annotations

from collections.abc import Container, Iterator

import pytest

from pichak_agent.readings import Reading
from pichak_agent.watch import (
    CONFIRM_SECONDS,
    LOOK_SECONDS,
    REMEMBER_SECONDS,
    RESOLVE_SECONDS,
    Key,
    Sign,
    Watch,
)
from pichak_agent.watch_past import WINDOW_SECONDS, Window, growth


class Script:
    """A rule that sees its sign at the given seconds."""

    def __init__(self, *seen: range, sure: bool = False) -> None:
        self.seen, self.sure = seen, sure

    def __call__(self, window: Window, active: Container[Key]) -> Iterator[Sign]:
        now = int(window.now.steady_seconds)
        if any(now in span for span in self.seen):
            yield Sign("odd", "warn", "x", f"seen at {now}", {"at": now}, self.sure)


def states(rule: Script, seconds: int, step: int = 1) -> dict[int, str]:
    """State at each look's second where it changes; "" for no finding."""
    watch, found = Watch([rule]), dict[int, str]()
    last = ""
    for second in range(0, seconds, step):
        if watch.take(Reading(5e8 + second, float(second))):
            listed = watch.findings()
            now = listed[0].state if listed else ""
            if now != last:
                found[second] = last = now
    return found


def test_a_second_look_confirms_and_an_end_resolves() -> None:
    changes = states(Script(range(100, 301)), 2000)
    confirmed, resolved = 100 + int(CONFIRM_SECONDS), 300 + int(RESOLVE_SECONDS)
    assert changes == {100: "suspected", confirmed: "confirmed", resolved: "resolved"}


def test_what_is_seen_once_goes_without_a_trace() -> None:
    changes = states(Script(range(100, 101)), 400)
    assert changes == {100: "suspected", 100 + int(CONFIRM_SECONDS): ""}


def test_what_was_read_is_confirmed_at_once() -> None:
    assert states(Script(range(100, 101), sure=True), 130) == {100: "confirmed"}


def test_a_gap_shorter_than_its_end_is_none() -> None:
    gap = int(RESOLVE_SECONDS - LOOK_SECONDS)
    changes = states(Script(range(100, 201), range(200 + gap, 301)), 320)
    assert list(changes.values()) == ["suspected", "confirmed"]


def test_what_comes_back_within_the_hour_is_the_same_and_counted() -> None:
    watch = Watch([Script(range(0, 101), range(500, 601))])
    for second in range(700):
        watch.take(Reading(5e8 + second, float(second)))
    (found,) = watch.findings()
    assert (found.state, found.episodes, found.first_unix) == ("resolved", 2, 5e8 + 500)
    for second in range(700, 700 + int(REMEMBER_SECONDS) + 100, 10):
        watch.take(Reading(5e8 + second, float(second)))
    assert watch.findings() == []


def test_a_wall_clock_that_jumps_moves_no_deadline() -> None:
    watch = Watch([Script(range(0, 20))])
    for second in range(20):
        watch.take(Reading(5e8 - 1e6 * second, float(second)))  # the wall runs backwards
    assert [found.state for found in watch.findings()] == ["suspected"]


def test_the_worst_is_first() -> None:
    def rule(window: Window, active: Container[Key]) -> Iterator[Sign]:
        for code, severity in (("a", "info"), ("b", "fail"), ("c", "warn")):
            yield Sign(code, severity, "", "seen")  # type: ignore[arg-type]

    watch = Watch([rule])
    watch.take(Reading(1.0, 1.0))
    assert [found.sign.code for found in watch.findings()] == ["b", "c", "a"]


def test_the_window_and_the_list_are_bounded() -> None:
    def rule(window: Window, active: Container[Key]) -> Iterator[Sign]:
        sizes.append(len(window.readings))
        yield Sign("many", "warn", str(window.now.steady_seconds), "seen", sure=True)

    sizes: list[int] = []
    watch = Watch([rule])
    for second in range(4000):
        watch.take(Reading(float(second), float(second)))
    assert max(sizes) == WINDOW_SECONDS + 1
    assert len(watch.findings()) == 200


@pytest.mark.parametrize(
    ("points", "rate", "lasts"),
    [
        ([(t, 2.0 * t) for t in range(61)], 2.0, True),  # steady
        ([(t, 120.0 * (t >= 30)) for t in range(61)], 2.0, False),  # one burst
        ([(t, 4.0 * max(0, t - 30)) for t in range(61)], 2.0, False),  # half of the time
        ([(15 * t, 30.0 * t) for t in range(5)], 2.0, True),  # rarely read
    ],
)
def test_a_burst_does_not_last(points: list[tuple[float, float]], rate: float, lasts: bool) -> None:
    grown = growth(points)
    assert grown is not None
    assert grown.rate == rate
    assert grown.lasts(1.0) is lasts


def test_no_growth_is_told_of_a_counter_that_was_set_back_or_read_twice() -> None:
    assert growth([(0, 1.0), (1, 2.0)]) is None
    assert growth([(0, 1.0), (1, 2.0), (2, 0.0), (3, 9.0)]) is None
