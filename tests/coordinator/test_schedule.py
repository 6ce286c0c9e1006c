"""The schedule's promises, over random fleets, probes and clocks; figures by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pichak_coordinator import schedule
from pichak_coordinator.schedule import (
    HOUR,
    JITTER,
    LONGEST,
    SHORTEST,
    Charge,
    Entry,
    Policy,
    begun,
    decide,
    ended,
    first,
    jumped,
    resumed,
)
from pichak_coordinator.timetable import Cron, QuietHours, TimetableError

MINUTE, DAY = 60.0, 86400.0


def run(
    policy: Policy,
    nodes: int,
    hours: float,
    seed: int,
    *,
    step: float = 20.0,
    sleep: tuple[float, float] | None = None,
    took: float | None = None,
    look_again: float = 0.2,
) -> tuple[list[tuple[float, str, str, float]], dict[str, Entry]]:
    """A fleet under a fake clock: (start, node, depth, seconds it took) of every probe. Costs,
    noise and ends are drawn; with `sleep` (from, to) nobody looks in between. `took` is each
    probe's share of the longest (drawn), `look_again` how many ask for a second look."""
    draw = random.Random(seed)
    now, end = 1e9, 1e9 + hours * HOUR
    entries = {f"n{i}": first(policy, f"n{i}", now) for i in range(nodes)}
    charges: dict[str, Charge] = {}
    running: dict[str, tuple[float, schedule.Probe, float]] = {}
    started: list[tuple[float, str, str, float]] = []
    looked = now
    while now < end:
        if sleep and now - 1e9 >= sleep[0] and looked - 1e9 < sleep[0]:
            now = 1e9 + sleep[1]
        if jumped(looked, now):
            entries = {e.node: e for e in resumed(policy, entries.values(), now)}
        looked = now
        for node, (over, probe, seconds) in list(running.items()):
            if over <= now:
                del running[node]
                charges[f"{node}/{over - seconds}"] = Charge(over - seconds, seconds)
                how = draw.choice(["quiet", "quiet", "quiet", "restless", "busy", "failed"])
                entries[node] = ended(
                    policy,
                    entries[node],
                    probe.depth,
                    now,
                    how,  # type: ignore[arg-type]
                    noise=draw.choice([None, 0.001, 0.03, 0.2]),
                    look_again=draw.random() < look_again,
                )
        made = decide(policy, list(entries.values()), list(charges.values()), running, now)
        for probe in made.probes:
            seconds = probe.longest_seconds * (took or draw.choice([0.1, 0.5, 1.0]))
            entries[probe.node] = begun(policy, entries[probe.node], probe.depth, now)
            charges[f"{probe.node}/{now}"] = Charge(now, probe.longest_seconds)
            running[probe.node] = (now + seconds, probe, seconds)
            started.append((now, probe.node, probe.depth, seconds))
        assert len(running) <= policy.most_at_once
        now += step
    return started, entries


@settings(max_examples=25)
@given(
    budget=st.sampled_from([60.0, 200.0, 1500.0]),
    nodes=st.integers(1, 30),
    seed=st.integers(0, 10**6),
    sleeps=st.booleans(),
)
def test_no_hour_exceeds_the_budget(budget: float, nodes: int, seed: int, sleeps: bool) -> None:
    policy = Policy(
        every_seconds={"light": 5 * MINUTE, "full": HOUR},
        longest_seconds={"light": 20.0, "full": 60.0},
        budget_seconds=budget,
        seed=seed,
    )
    started, _ = run(policy, nodes, 6, seed, sleep=(HOUR, 3 * HOUR) if sleeps else None)
    assert started
    for at, *_ in started:  # the fullest hour begins with a start
        inside = sum(took for then, _, _, took in started if at <= then < at + HOUR)
        assert inside <= budget


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 10))
def test_intervals_stay_within_their_bounds(seed: int, nodes: int) -> None:
    base = {"light": 10 * MINUTE, "full": 4 * HOUR}
    policy = Policy(every_seconds=base, longest_seconds={"light": 20.0, "full": 60.0}, seed=seed)
    draw = random.Random(seed)
    for i in range(nodes):
        entry, now = first(policy, f"n{i}", 0.0), 0.0
        for depth, interval in base.items():
            assert 0 <= entry.due[depth] <= interval  # type: ignore[index]
        for _ in range(30):
            depth = draw.choice(schedule.DEPTHS)
            entry = begun(policy, entry, depth, now)
            how = draw.choice(["quiet", "restless"])
            noise = draw.choice([None, 0.0, 0.01, 0.05, 1.0])
            entry = ended(policy, entry, depth, now, how, noise=noise)  # type: ignore[arg-type]
            gap = entry.due[depth] - now
            assert SHORTEST * (1 - JITTER) * base[depth] <= gap
            assert gap <= LONGEST * (1 + JITTER) * base[depth]
            assert SHORTEST <= entry.pace <= LONGEST
            now += draw.uniform(1, HOUR)


def test_the_pace_by_hand() -> None:
    """It aims at 2 % / noise, by a quarter upwards and by half downwards at most, and without any
    noise at the longest. Something odd: a quarter of the interval at once."""
    policy = Policy()
    entry = begun(policy, first(policy, "n", 0.0), "light", 0.0)
    paces = []
    for noise in (0.01, None, 0.0125, 0.02, 0.04, 9.0, 0.05, 0.0):
        entry = ended(policy, entry, "light", 0.0, "quiet", noise=noise)
        paces.append(entry.pace)
    assert paces == pytest.approx([1.25, 1.5625, 1.6, 1.0, 0.5, 0.25, 0.3125, 0.390625])
    assert ended(policy, entry, "light", 0.0, "restless").pace == SHORTEST
    for _ in range(30):
        entry = ended(policy, entry, "light", 0.0, "quiet")
    assert entry.pace == LONGEST


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    policy = Policy(budget_seconds=900.0)
    assert run(policy, 12, 8, 5)[0] == run(policy, 12, 8, 5)[0]
    assert run(policy, 12, 8, 5)[0] != run(replace(policy, seed=1), 12, 8, 5)[0]


def test_a_fleet_that_joins_at_once_is_not_probed_at_once() -> None:
    """500 nodes with an interval of 10 min: uniform starts put about 50 into each minute; 85 is
    five standard deviations (of 6.7) away."""
    policy = Policy(most_at_once=500)
    due = [first(policy, f"n{i}", 0.0).due["light"] for i in range(500)]
    minutes = [int(d // MINUTE) for d in due]
    assert max(minutes.count(m) for m in range(10)) < 85
    assert min(minutes.count(m) for m in range(10)) > 15


@pytest.mark.parametrize("sleep_hours", [2, 50, 1000])
def test_what_was_missed_in_a_sleep_runs_once_and_spread_out(sleep_hours: int) -> None:
    policy = Policy(most_at_once=500)
    entries = [first(policy, f"n{i}", 0.0) for i in range(500)]
    now = sleep_hours * HOUR
    woken = resumed(policy, entries, now)
    made = decide(policy, woken, [], [], now)
    assert len(made.probes) <= 5  # of 500; those whose share is next to nothing
    lights = [entry.due["light"] for entry in woken]
    assert all(now <= due <= now + 5 * MINUTE for due in lights)
    per_minute = [sum(now + m * 60 <= d < now + (m + 1) * 60 for d in lights) for m in range(5)]
    assert max(per_minute) < 150
    # One each: after it has begun, a node's next probe is an interval away.
    for entry in woken:
        after = begun(policy, entry, "light", entry.due["light"])
        assert after.due["light"] - entry.due["light"] >= (1 - JITTER) * 10 * MINUTE


@given(back=st.floats(2.0, 1e9), pace=st.floats(SHORTEST, LONGEST))
def test_a_clock_that_is_set_back_does_not_silence_a_node(back: float, pace: float) -> None:
    policy = Policy()
    entry = replace(begun(policy, first(policy, "n", 2e9), "full", 2e9), pace=pace)
    now = 2e9 - back
    assert jumped(2e9, now)
    (healed,) = resumed(policy, [entry], now)
    for depth, base in policy.every_seconds.items():
        assert now <= healed.due[depth] <= now + max(1.0, pace) * base * (1 + JITTER)
    # Charges of the future still count: no second budget by turning the clock.
    assert schedule.charged([Charge(2e9, 30.0)], now) == 30.0


def test_a_second_look_goes_first_and_a_full_probe_cannot_be_starved() -> None:
    policy = Policy(
        every_seconds={"light": 60.0, "full": 600.0},
        longest_seconds={"light": 10.0, "full": 100.0},
        budget_seconds=120.0,
        most_at_once=50,
    )
    light = [Entry(f"l{i}", {"light": 500.0 + i, "full": 1e9}) for i in range(20)]
    full = Entry("f", {"light": 1e9, "full": 400.0})
    again = Entry("a", {"light": 1e9, "full": 1e9}, again="light")
    made = decide(policy, [*light, full, again], [Charge(0.0, 20.0)], [], 1000.0)
    # 20 of 120 are spent and the second look takes 10: 90 are left, the full one needs 100. The
    # light ones behind it wait too, until the old charge leaves the hour.
    assert [(p.node, p.depth, p.reason) for p in made.probes] == [("a", "light", "second look")]
    assert made.waiting_for_budget == 21
    assert made.look_again == HOUR
    unspread = replace(policy, spread=False)
    later = decide(unspread, [*light, full], [], [], 3601.0)
    assert [(p.node, p.depth) for p in later.probes] == [
        ("f", "full"),
        ("l0", "light"),
        ("l1", "light"),
    ]
    # Spread over the hour, the full one has begun more than ten minutes' share of 20.
    (only,) = decide(policy, [*light, full], [], [], 3601.0).probes
    assert only.node == "f"


def test_the_hour_s_budget_is_spread_and_leaves_room_for_second_looks() -> None:
    """1,800 s an hour, a sixth of them for second looks, are 250 in ten minutes: five probes that
    may take 60 s, then the seconds that they really took count; the one that fills the share may
    pass it."""
    policy = Policy(every_seconds={"light": HOUR}, budget_seconds=1800.0, most_at_once=100)
    due = [Entry(f"n{i:02d}", {"light": float(i)}) for i in range(100)]
    made = decide(policy, due, [], [], 1000.0)
    assert [p.node for p in made.probes] == ["n00", "n01", "n02", "n03", "n04"]
    assert made.waiting_for_budget == 95
    # 5 x 8 s later 210 are left of the share: three of 60 do not fill it, the fourth passes it.
    took = [Charge(1000.0, 8.0) for _ in range(5)]
    made = decide(policy, due[5:], took, [], 1008.0)
    assert len(made.probes) == 4
    # The share is full until the charges are ten minutes old. A second look does not wait for it.
    full = [Charge(1000.0, 250.0)]
    again = replace(due[99], again="light")
    made = decide(policy, [*due[5:99], again], full, [], 1599.0)
    assert [(p.node, p.reason) for p in made.probes] == [("n99", "second look")]
    assert made.look_again == 1600.0
    assert len(decide(policy, due[5:], full, [], 1600.0).probes) == 5
    # It waits for the hour, though.
    hour = [Charge(100.0, 1750.0)]
    made = decide(policy, [again], hour, [], 1600.0)
    assert not made.probes
    assert made.look_again == 100.0 + HOUR


@settings(max_examples=8)
@given(
    budget=st.sampled_from([60.0, 200.0, 1500.0]),
    nodes=st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
def test_ten_minutes_hold_their_share_and_one_probe_more(
    budget: float, nodes: int, seed: int
) -> None:
    policy = Policy(
        every_seconds={"light": 5 * MINUTE, "full": HOUR},
        longest_seconds={"light": 20.0, "full": 60.0},
        budget_seconds=budget,
        seed=seed,
    )
    started, _ = run(policy, nodes, 6, seed, look_again=0.0)
    assert started
    for at, *_ in started:
        inside = sum(took for then, _, _, took in started if at <= then < at + 10 * MINUTE)
        assert inside <= budget * 5 / 36 + 60.0


def test_spreading_wastes_nothing_of_a_budget_that_is_asked_for() -> None:
    """50 nodes that ask for a probe a minute, with 144 s an hour: 20 s in each ten minutes. Of 10 s
    each that is two, twelve an hour. Of 15 s each the second one passes the share, and the hour
    holds nine of them at most."""
    for longest, an_hour in ((10.0, 12), (15.0, 9)):
        policy = Policy(
            every_seconds={"light": 60.0},
            longest_seconds={"light": longest, "full": longest},
            budget_seconds=144.0,
        )
        started, _ = run(policy, 50, 6, 1, took=1.0, look_again=0.0)
        for hour in range(1, 6):
            begin = 1e9 + hour * HOUR
            inside = [at for at, *_ in started if begin <= at < begin + HOUR]
            assert len(inside) == an_hour


def test_a_node_has_one_probe_at_a_time_and_a_full_one_holds_the_light_one() -> None:
    policy = Policy()
    entry = Entry("n", {"light": 0.0, "full": 5.0})
    assert decide(policy, [entry], [], ["n"], 10.0).probes == ()
    (probe,) = decide(policy, [entry], [], [], 10.0).probes
    assert probe.depth == "full"
    after = begun(policy, entry, "full", 10.0)
    assert min(after.due.values()) > 10.0 + 500


def test_a_busy_device_is_asked_again_later_and_later() -> None:
    policy = Policy()
    entry, waits = first(policy, "n", 0.0), []
    for _ in range(8):
        entry = ended(policy, entry, "light", 0.0, "busy")
        waits.append(entry.due["light"])
    for wait, least in zip(waits, [60, 120, 240, 480, 960, 1920, 2400, 2400], strict=True):
        assert least <= wait <= least * (1 + JITTER)
    assert ended(policy, entry, "light", 0.0, "quiet").retries == 0


def test_quiet_hours_start_nothing_that_would_reach_into_them() -> None:
    quiet = QuietHours.parse("22-06:30", timezone.utc)
    midnight = datetime(2026, 3, 4, tzinfo=timezone.utc).timestamp()
    policy = Policy(quiet=quiet, longest_seconds={"light": 60.0, "full": 300.0})
    entry = Entry("n", {"light": 0.0, "full": 1e12})
    for hour, free in ((3.0, False), (6.49, False), (6.51, True), (21.9, True), (21.99, False)):
        now = midnight + hour * HOUR
        made = decide(policy, [entry], [], [], now)
        assert bool(made.probes) == free, hour
        if not free:
            end = midnight + 6.5 * HOUR + (DAY if hour > 7 else 0)
            assert made.look_again == end
    for text in ("22", "22-22", "25-06", "a-b", "22-06-07", ""):
        with pytest.raises(TimetableError, match="22-06"):
            QuietHours.parse(text)


def test_cron_in_local_time_across_a_change_of_clocks() -> None:
    """03:30 in Berlin is 02:30 UTC in winter and 01:30 UTC in summer; on the day of the change
    (29 March 2026) 02:30 does not exist, and 03:30 is 01:30 UTC."""
    berlin = ZoneInfo("Europe/Berlin")
    cron = Cron("30 3 * * *", berlin)
    at = datetime(2026, 3, 28, 12, tzinfo=timezone.utc).timestamp()
    found = []
    for _ in range(2):
        at = cron.after(at)
        found.append(datetime.fromtimestamp(at, timezone.utc).strftime("%d %H:%M"))
    assert found == ["29 01:30", "30 01:30"]
    before = datetime(2026, 3, 27, 12, tzinfo=timezone.utc).timestamp()
    winter = datetime.fromtimestamp(cron.after(before), timezone.utc)
    assert winter.strftime("%d %H:%M") == "28 02:30"
    policy = Policy(every_seconds={}, cron={"full": cron})
    due = [first(policy, f"n{i}", at).due["full"] for i in range(50)]
    start = cron.after(at)
    assert all(start <= d <= start + 300 for d in due)
    assert len(set(due)) == 50


@pytest.mark.parametrize("text", ["", "* * *", "61 * * * *", "0 0 31 2 *", "@never"])
def test_a_cron_expression_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(TimetableError, match=r"cron expression|never comes"):
        Cron(text)


def test_an_entry_survives_the_store_and_a_new_policy() -> None:
    policy = Policy()
    entry = ended(
        policy, begun(policy, first(policy, "n", 0.0), "full", 5.0), "full", 9.0, "quiet",
        look_again=True,
    )  # fmt: skip
    assert Entry.from_dict(entry.as_dict()) == entry
    lighter = Policy(every_seconds={"light": 30.0})
    moved = schedule.fitted(lighter, entry, 10.0)
    assert set(moved.due) == {"light"}
    assert moved.due["light"] <= 10.0 + 30.0 * 1.25 * (1 + JITTER)
    assert moved.again is None
