"""What each rule sees in a simulated trace, and what it must not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pichak_agent.readings import GpuReading, OwnUse, Reading
from pichak_agent.testing import (
    START_UNIX,
    Fault,
    SimulatedCard,
    SimulatedNode,
    gpu_fault,
    host_fault,
    own_fault,
)
from pichak_agent.watch import Watch, WatchFinding
from pichak_agent.watch_rules import CODES, RULES
from pichak_core.devices import ProcessMemory
from pichak_core.devices.nvml_codes import HW_SLOWDOWN, IDLE, SW_POWER_CAP, SW_THERMAL
from pichak_core.testing import GIB, MIB

BEGINS = 600.0
BUSY = SimulatedNode(jobs=1.0, seed=7)
IDLE_NODE = SimulatedNode(jobs=0.0, seed=3)


@dataclass
class Story:
    """When each code was first suspected, confirmed and resolved, and its last words."""

    first: dict[str, float] = field(default_factory=dict)
    confirmed: dict[str, float] = field(default_factory=dict)
    resolved: dict[str, float] = field(default_factory=dict)
    last: dict[str, WatchFinding] = field(default_factory=dict)


def watched(
    node: SimulatedNode, seconds: float, *faults: Fault, watch: Watch | None = None
) -> Story:
    story, watch = Story(), watch or Watch(RULES)
    for reading in node.trace(seconds, faults):
        if not watch.take(reading):
            continue
        for found in watch.findings():
            code, now = found.sign.code, reading.steady_seconds
            assert code in CODES
            story.first.setdefault(code, now)
            story.last[code] = found
            if found.state != "suspected":
                getattr(story, found.state).setdefault(code, now)
    return story


def job_from_the_start(node: SimulatedNode) -> SimulatedNode:
    """A node whose one long job begins within the first minutes, by its seed."""
    for seed in range(200):
        made = replace(node, seed=seed)
        own = [len(r.own) for r in replace(made, interval_seconds=10).trace(2400)]
        if all(own[20:]) and own[20:]:
            return made
    raise AssertionError("no such seed")


ONE_JOB = job_from_the_start(BUSY)


def test_nothing_is_wrong_with_the_job_that_the_faults_below_are_put_into() -> None:
    assert watched(ONE_JOB, 2400).first == {}


# -- heat, limits, link, memory errors --------------------------------------------------------


def test_heat() -> None:
    hot = gpu_fault(
        BEGINS,
        ends=1200.0,
        throttle_bitmask=SW_POWER_CAP | SW_THERMAL,
        temperature_celsius=91,
        sm_clock_mhz=1100,
    )
    story = watched(ONE_JOB, 1500, hot)
    assert set(story.first) == {"gpu_slowed"}
    assert BEGINS + 20 <= story.first["gpu_slowed"] <= BEGINS + 60
    assert story.confirmed["gpu_slowed"] >= story.first["gpu_slowed"] + 30
    assert 1200 < story.resolved["gpu_slowed"] <= 1200 + 150
    sign = story.last["gpu_slowed"].sign
    assert "software thermal slowdown" in sign.sentence
    assert "power cap" not in sign.sentence
    assert sign.evidence["temperature_celsius"] == 91


@pytest.mark.parametrize(
    ("bits", "seen"),
    [(IDLE, False), (SW_POWER_CAP, False), (IDLE | HW_SLOWDOWN, False), (HW_SLOWDOWN, True)],
)
def test_which_bits_are_a_fault(bits: int, seen: bool) -> None:
    story = watched(ONE_JOB, 1000, gpu_fault(BEGINS, throttle_bitmask=bits))
    assert ("gpu_slowed" in story.first) is seen


def test_heat_by_its_counter_where_no_bit_is_told() -> None:
    grows = gpu_fault(
        BEGINS,
        throttle_bitmask=None,
        throttled_thermal_seconds=lambda at, old: (old or 0.0) + 0.5 * (at - BEGINS),
    )
    story = watched(ONE_JOB, 900, grows)
    assert story.confirmed["gpu_slowed"] < BEGINS + 150
    assert story.last["gpu_slowed"].sign.evidence["share_of_time"] == pytest.approx(0.5, abs=0.02)


def test_a_flicker_at_the_limit_does_not_flap() -> None:
    """Half of the readings, by chance a little more or less than the limit."""
    flicker = gpu_fault(
        BEGINS,
        throttle_bitmask=lambda at, old: HW_SLOWDOWN if int(at * 7919) % 97 < 48 else SW_POWER_CAP,
    )
    watch = Watch(RULES)
    story = watched(ONE_JOB, 2400, flicker, watch=watch)
    if "gpu_slowed" in story.confirmed:
        assert "gpu_slowed" not in story.resolved
        assert story.last["gpu_slowed"].episodes == 1


def test_a_power_limit_that_is_lowered_and_set_back() -> None:
    story = watched(ONE_JOB, 1800, gpu_fault(BEGINS, ends=1200.0, power_limit_watts=500.0))
    assert set(story.first) == {"gpu_power_limit", "gpu_power_limit_changed"}
    assert story.confirmed == story.first  # it was read
    assert set(story.resolved) == set(story.first)
    evidence = story.last["gpu_power_limit_changed"].sign.evidence
    assert (evidence["before_watts"], evidence["limit_watts"]) == (700.0, 500.0)
    assert START_UNIX - 1 <= float(evidence["before_unix"]) < START_UNIX + 60


def test_a_laptop_moves_its_limit_all_the_time() -> None:
    moves = gpu_fault(0, power_limit_watts=lambda at, _: 60.0 + int(at) % 37)
    assert watched(ONE_JOB, 1200, moves).first == {}


def test_a_link_that_is_slow_under_load() -> None:
    story = watched(ONE_JOB, 1200, gpu_fault(BEGINS, pcie_generation=1, pcie_width=16))
    assert set(story.first) == {"gpu_link"}
    evidence = story.last["gpu_link"].sign.evidence
    assert (evidence["pcie_generation"], evidence["pcie_generation_max"]) == (1, 5)


def test_an_idle_link_trains_down() -> None:  # field case 25
    assert watched(IDLE_NODE, 1200, gpu_fault(0, pcie_generation=1, pcie_width=1)).first == {}


@pytest.mark.parametrize("use", [None, 0])
def test_a_use_that_is_not_told_is_no_load(use: int | None) -> None:  # field case 15
    """WSL2 says 0 for ever, or nothing; then only the draw shows load."""
    changes: dict[str, Any] = {"utilisation_percent": use, "pcie_generation": 1}
    story = watched(ONE_JOB, 1200, gpu_fault(0, **changes))
    assert ("gpu_link" in story.first) is (use is None)
    no_draw = gpu_fault(0, **changes, power_watts=None)
    assert watched(ONE_JOB, 1200, no_draw).first == {}


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"ecc_uncorrected": 2}, "gpu_ecc", "fail"),
        ({"remapped_rows_uncorrected": 1}, "gpu_rows_replaced", "warn"),
        ({"remapped_rows_failed": True}, "gpu_repair_failed", "fail"),
        ({"remapped_rows_pending": True}, "gpu_repair_pending", "warn"),
    ],
)
def test_memory_errors(change: dict[str, Any], code: str, severity: str) -> None:
    story = watched(ONE_JOB, 900, gpu_fault(BEGINS, **change))
    assert set(story.first) == {code}
    assert story.confirmed[code] == story.first[code] <= BEGINS + 40
    assert story.last[code].sign.severity == severity


def test_errors_that_are_corrected_in_numbers() -> None:
    grows = gpu_fault(BEGINS, ecc_corrected=lambda at, _: 3 + int((at - BEGINS) / 3))
    assert set(watched(ONE_JOB, 1000, grows).first) == {"gpu_ecc_growing"}


def test_a_reloaded_driver_counts_from_zero() -> None:
    had = gpu_fault(0, ends=BEGINS, remapped_rows_corrected=5)
    assert watched(ONE_JOB, 1200, had).first == {}
    again = gpu_fault(900, remapped_rows_corrected=1)
    assert set(watched(ONE_JOB, 1200, had, again).first) == {"gpu_rows_replaced"}


def test_one_of_four_sisters_is_held_back() -> None:  # field case 100
    node = job_from_the_start(replace(BUSY, cards=(SimulatedCard(),) * 4, interval_seconds=5))
    slow = gpu_fault(BEGINS, index=2, power_watts=320.0, sm_clock_mhz=900)
    story = watched(node, 1200, slow)
    assert set(story.first) == {"gpu_below_sisters"}
    assert "GPU 2" in story.last["gpu_below_sisters"].sign.sentence
    # alone, or of two, nobody is accused; nor is one that does something else
    two = replace(node, cards=(SimulatedCard(),) * 2)
    assert watched(two, 1200, gpu_fault(BEGINS, 1, power_watts=320.0, sm_clock_mhz=900)).first == {}
    other = gpu_fault(
        BEGINS, 2, power_watts=320.0, sm_clock_mhz=900, memory_used_bytes=lambda _, old: old // 3
    )
    assert watched(node, 1200, other).first == {}


# -- GPUs that go, NVML that does not answer --------------------------------------------------


def on_gpus(starts: float, change: Callable[[Sequence[GpuReading]], Sequence[GpuReading]]) -> Fault:
    def changed(at: float, reading: Reading) -> Reading:
        if at < starts or not reading.gpus:
            return reading
        return replace(reading, gpus=tuple(change(reading.gpus)))

    return changed


TWO = SimulatedNode(cards=(SimulatedCard(),) * 2, jobs=0.0, seed=5)


def test_a_card_falls_off_the_bus() -> None:  # field cases 26, 28
    lost = on_gpus(BEGINS, lambda gpus: [gpus[0], GpuReading(1, "", lost="NVML code 15")])
    story = watched(TWO, 900, lost)
    assert set(story.first) == {"gpu_lost"}
    assert story.confirmed["gpu_lost"] >= story.first["gpu_lost"] + 30
    assert "code 15" in story.last["gpu_lost"].sign.sentence


def test_a_card_vanishes_without_a_word() -> None:  # field case 28
    story = watched(TWO, 900, on_gpus(BEGINS, lambda gpus: gpus[:1]))
    assert set(story.first) == {"gpu_missing"}
    assert story.last["gpu_missing"].sign.subject == "GPU-simulated-5-1"


def test_another_card_in_its_place() -> None:
    def swap(gpus: Sequence[GpuReading]) -> Sequence[GpuReading]:
        return [gpus[0], replace(gpus[1], uuid="GPU-other")]

    story = watched(TWO, 900, on_gpus(BEGINS, swap))
    assert set(story.first) == {"gpu_swapped"}
    assert "GPU-other" in story.last["gpu_swapped"].sign.sentence


def test_what_the_node_had_before_the_agent_was_restarted() -> None:
    had = {"GPU-simulated-5-0": "A", "GPU-simulated-5-1": "B", "GPU-gone": "C"}
    story = watched(TWO, 300, watch=Watch(RULES, had))
    assert set(story.first) == {"gpu_missing"}
    assert story.last["gpu_missing"].sign.subject == "GPU-gone"
    assert set(watched(TWO, 300, watch=Watch(RULES, {"GPU-simulated-5-0": "A"})).first) == {
        "gpu_added"
    }


def without_nvml(starts: float, gap: str, reason: str, ends: float = 1e9) -> Fault:
    def changed(at: float, reading: Reading) -> Reading:
        if not starts <= at < ends:
            return reading
        return replace(reading, gpus=(), full=False, nvml_gap=gap, nvml_reason=reason)

    return changed


def test_a_container_loses_its_right_to_the_gpus() -> None:  # field case 5
    story = watched(TWO, 1500, without_nvml(BEGINS, "NVML code 999", "lost", 1200.0))
    assert set(story.first) == {"nvml_lost"}
    assert story.confirmed["nvml_lost"] < BEGINS + 90
    assert story.resolved["nvml_lost"] > 1200
    sign = story.last["nvml_lost"].sign
    assert "recreate this container" in sign.sentence
    assert float(sign.evidence["last_answer_unix"]) < START_UNIX + BEGINS


def test_every_handle_is_lost() -> None:  # field case 5
    lost = on_gpus(BEGINS, lambda gpus: [GpuReading(g.index, lost="code 999") for g in gpus])
    assert set(watched(TWO, 900, lost).first) == {"nvml_lost"}


def test_only_a_process_that_starts_now_is_refused() -> None:  # field case 5
    def refused(at: float, reading: Reading) -> Reading:
        return replace(reading, fresh_gap="NVML code 999" if at >= BEGINS else "")

    story = watched(TWO, 900, refused)
    assert set(story.first) == {"nvml_lost"}
    assert "refuses one that starts now" in story.last["nvml_lost"].sign.sentence


def test_nvml_hangs() -> None:
    story = watched(TWO, 900, without_nvml(BEGINS, "no answer within 10 s", "timed out"))
    assert set(story.first) == {"nvml_hung"}


def test_a_machine_without_nvml_lacks_nothing() -> None:
    gone = without_nvml(0, "no NVIDIA driver library on this machine", "no such device")
    assert watched(IDLE_NODE, 900, gone).first == {}


# -- who has the memory -----------------------------------------------------------------------


def test_a_neighbour_takes_memory_of_an_idle_card() -> None:
    story = watched(IDLE_NODE, 900, gpu_fault(BEGINS, memory_used_bytes=9 * GIB))
    assert set(story.first) == {"gpu_shared_memory"}
    assert story.last["gpu_shared_memory"].sign.severity == "info"
    assert story.last["gpu_shared_memory"].sign.evidence["bytes"] == 9 * GIB


def test_a_neighbour_beside_a_job_that_says_what_it_holds() -> None:
    grows = gpu_fault(BEGINS, memory_used_bytes=lambda _, old: old + 3 * GIB)
    story = watched(ONE_JOB, 900, grows)
    assert set(story.first) == {"gpu_shared_memory"}
    assert story.last["gpu_shared_memory"].sign.severity == "warn"


def test_beside_a_job_that_does_not_say_nobody_is_accused() -> None:
    grows = gpu_fault(BEGINS, memory_used_bytes=lambda _, old: old + 3 * GIB, compute_processes=5)
    assert watched(replace(ONE_JOB, tells=False), 900, grows).first == {}


def test_the_drivers_reserve_is_no_neighbour() -> None:  # field case 12
    """912 MiB used by version 1 of the query are 8 MiB and the reserve."""
    v1 = replace(IDLE_NODE, cards=(SimulatedCard(reserved_bytes=None),))
    assert watched(v1, 900, gpu_fault(0, memory_used_bytes=912 * MIB)).first == {}
    v2 = gpu_fault(0, memory_used_bytes=8 * MIB, memory_reserved_bytes=904 * MIB)
    assert watched(IDLE_NODE, 900, v2).first == {}


def test_memory_that_is_not_told_is_no_neighbour() -> None:  # field case 14
    assert watched(IDLE_NODE, 900, gpu_fault(0, memory_used_bytes=None)).first == {}


def test_a_strange_program() -> None:
    story = watched(IDLE_NODE, 900, gpu_fault(BEGINS, compute_processes=2))
    assert set(story.first) == {"gpu_foreign_process"}
    assert "2 programs" in story.last["gpu_foreign_process"].sign.sentence
    story = watched(ONE_JOB, 900, gpu_fault(BEGINS, compute_processes=2))
    assert story.last["gpu_foreign_process"].sign.severity == "warn"
    assert story.last["gpu_foreign_process"].sign.evidence["processes"] == 1


def test_rows_that_cannot_be_are_nobody() -> None:  # field case 11
    dropped = gpu_fault(0, compute_processes=0, compute_processes_dropped=3)
    assert watched(IDLE_NODE, 900, dropped).first == {}


def test_the_desktop_of_windows_is_nobody() -> None:
    card = SimulatedCard(extra={"driver_model": 0})
    desktop = gpu_fault(0, compute_processes=14)
    assert watched(replace(IDLE_NODE, cards=(card,)), 900, desktop).first == {}


# -- the spill that does not raise ------------------------------------------------------------

WINDOWS = replace(ONE_JOB, windows=True)


def moved(dedicated: int = 0, shared: int = 0, card_shared: int = 0) -> Fault:
    """The job's counters change by so much from `BEGINS` on."""

    def change(since: float, use: OwnUse) -> OwnUse:
        old = use.memory
        assert old is not None
        base = ProcessMemory(old.dedicated, 200 * MIB, old.reserved, 0, 300 * MIB)
        if since < 0:
            return replace(use, memory=base)
        return replace(
            use,
            memory=replace(
                base,
                dedicated=base.dedicated + dedicated,
                shared=base.shared + shared,
                card_shared=(base.card_shared or 0) + card_shared,
            ),
        )

    return lambda at, reading: own_fault(0, lambda _, use: change(at - BEGINS, use))(at, reading)


def test_a_job_is_moved_to_system_memory() -> None:  # field cases 33, 34
    down = -int(1.4 * GIB)
    story = watched(WINDOWS, 900, moved(down, -down, -down))
    assert set(story.first) == {"gpu_spill"}
    assert story.confirmed["gpu_spill"] >= BEGINS + 30
    evidence = story.last["gpu_spill"].sign.evidence
    assert evidence["moved_bytes"] == -down
    assert evidence["before_shared_bytes"] == 200 * MIB


def test_pinned_memory_is_no_spill() -> None:
    assert watched(WINDOWS, 900, moved(0, 3 * GIB, 3 * GIB)).first == {}
    assert watched(WINDOWS, 1800).first == {}


def test_another_program_is_pushed_out() -> None:
    story = watched(WINDOWS, 900, moved(0, 0, 2 * GIB))
    assert set(story.first) == {"gpu_pushed_out"}
    assert story.last["gpu_pushed_out"].sign.evidence["others_bytes"] == 2 * GIB


def test_counters_that_are_missing_accuse_nobody() -> None:  # field cases 38, 39, 40
    gone = own_fault(BEGINS, lambda _, use: replace(use, memory=None))
    assert watched(WINDOWS, 1200, gone).first == {}


def test_more_than_the_card_has() -> None:  # field case 36
    more = own_fault(BEGINS, lambda _, use: replace(use, allocated_bytes=90 * GIB))
    story = watched(ONE_JOB, 900, more)
    assert set(story.first) == {"gpu_spill"}
    assert "80.0 GiB" in story.last["gpu_spill"].sign.sentence
    less = own_fault(BEGINS, lambda _, use: replace(use, allocated_bytes=79 * GIB))
    assert watched(ONE_JOB, 900, less).first == {}


def test_a_pace_that_collapses_without_any_counter() -> None:  # field cases 33, 35
    crawl = own_fault(
        BEGINS, lambda _, use: replace(use, seconds_per_step=9 * (use.seconds_per_step or 0))
    )
    story = watched(ONE_JOB, 900, crawl)
    assert set(story.first) == {"throughput_collapse"}
    evidence = story.last["throughput_collapse"].sign.evidence
    ratio = float(evidence["seconds_per_step"]) / float(evidence["before_seconds_per_step"])
    assert ratio == pytest.approx(9, rel=0.1)
    slower = own_fault(
        BEGINS, lambda _, use: replace(use, seconds_per_step=1.3 * (use.seconds_per_step or 0))
    )
    assert watched(ONE_JOB, 900, slower).first == {}


# -- the host ---------------------------------------------------------------------------------


def test_a_hypervisor_that_steals() -> None:
    stolen = host_fault(
        BEGINS, ends=1200.0, cpu_steal_seconds=lambda since, old: old + 0.12 * 32 * since
    )
    kept = host_fault(1200.0, cpu_steal_seconds=lambda _, old: old + 0.12 * 32 * 600)
    story = watched(IDLE_NODE, 1500, stolen, kept)
    assert set(story.first) == {"cpu_steal"}
    assert story.confirmed["cpu_steal"] < BEGINS + 150
    assert story.resolved["cpu_steal"] < 1500
    assert float(story.last["cpu_steal"].sign.evidence["steal_percent"]) > 3


def test_no_steal_is_told_where_there_is_none_to_read() -> None:
    assert watched(IDLE_NODE, 600, host_fault(0, cpu_steal_seconds=None)).first == {}


def test_memory_that_everything_waits_for() -> None:
    waits = host_fault(
        BEGINS, memory_full_pressure_us=lambda since, old: old + int(0.3 * since * 1e6)
    )
    story = watched(IDLE_NODE, 900, waits)
    assert set(story.first) == {"memory_pressure"}
    assert float(story.last["memory_pressure"].sign.evidence["stalled_percent"]) > 25


def test_memory_that_is_gone() -> None:
    low = host_fault(BEGINS, memory_available_bytes=200 * MIB)
    assert set(watched(IDLE_NODE, 900, low).first) == {"memory_pressure"}


def test_somebody_was_killed_for_memory() -> None:
    killed = host_fault(BEGINS, oom_kills=3)
    story = watched(IDLE_NODE, 1200, killed)
    assert set(story.first) == {"oom_kill"}
    assert story.last["oom_kill"].sign.evidence["before"] == 2
    assert "oom_kill" in story.resolved


SLOW = replace(IDLE_NODE, interval_seconds=10)


def test_a_disk_that_fills() -> None:
    """600 GiB at 100 MiB/s are full after 6,144 s."""
    fills = host_fault(0, disk_free_bytes=lambda since, _: int(600 * GIB - since * 100 * MIB))
    story = watched(SLOW, 3600, fills)
    assert set(story.first) == {"disk_filling"}
    assert story.first["disk_filling"] < 1500
    evidence = story.last["disk_filling"].sign.evidence
    assert evidence["bytes_per_second"] == pytest.approx(100 * MIB, rel=1e-3)
    assert evidence["hours_to_full"] == pytest.approx((6144 - 3600) / 3600, abs=0.02)


@pytest.mark.parametrize(
    "free",
    [
        lambda since, _: int(600 * GIB - since * MIB),  # a week
        lambda since, _: int((600 - 300 * (since > 1800)) * GIB),  # one large file
        lambda since, _: int((600 - 40 * (int(since / 600) % 3)) * GIB),  # files come and go
    ],
)
def test_a_disk_that_is_used(free: Callable[[float, int], int]) -> None:
    assert watched(SLOW, 7200, host_fault(0, disk_free_bytes=free)).first == {}


def test_files_that_come_rarely_and_stay_fill_it_too() -> None:
    """30 GiB every ten minutes: most minutes show nothing."""
    free = host_fault(0, disk_free_bytes=lambda since, _: int((600 - 30 * int(since / 600)) * GIB))
    assert set(watched(SLOW, 7200, free).first) == {"disk_filling"}


def test_a_full_disk() -> None:
    story = watched(SLOW, 900, host_fault(0, disk_free_bytes=300 * MIB))
    assert story.last["disk_filling"].sign.severity == "fail"


def test_a_clock_that_is_set() -> None:
    def forward(at: float, reading: Reading) -> Reading:
        if at < BEGINS:
            return reading
        moved = replace(reading.host, steady_unix=(reading.host.steady_unix or 0) + 3600)
        return replace(reading, at_unix=reading.at_unix + 3600, host=moved)

    story = watched(IDLE_NODE, 1200, forward)
    assert set(story.first) == {"clock_jumped"}
    assert story.last["clock_jumped"].sign.evidence["moved_seconds"] == pytest.approx(3600, abs=0.1)
    assert story.resolved["clock_jumped"] < BEGINS + 300


def test_a_clock_that_creeps() -> None:
    creeps = host_fault(0, steady_unix=lambda since, old: old + since * 0.002)
    assert set(watched(SLOW, 3600, creeps).first) == {"clock_jumped"}


# -- healthy hours ----------------------------------------------------------------------------


CARDS = {
    "H100": SimulatedCard(),
    "no version 2 of the memory query": SimulatedCard("Tesla T4", 16 * GIB, None, 70.0, 12.0),
    "WSL2": SimulatedCard("RTX 4070", 12 * GIB, None, 200.0, 10.0, says_use=False),
    "vGPU": SimulatedCard("GRID A100", 20 * GIB, says_use=False, says_link=False),
    "laptop": SimulatedCard("RTX 3050 Laptop", 4 * GIB, None, 40.0, 5.0, 2100, 210, 4, 8),
    "WDDM": SimulatedCard("RTX 4090", 24 * GIB, extra={"driver_model": 0}),
}


@pytest.mark.parametrize(("kind", "jobs"), [("H100", 0.0), *((kind, 0.6) for kind in CARDS)])
def test_a_healthy_hour(kind: str, jobs: float) -> None:
    node = SimulatedNode((CARDS[kind],), jobs, windows=kind == "WDDM", seed=11)
    assert watched(node, 3600).first == {}


def healthy(seed: int) -> SimulatedNode:
    """Some node: its cards, its jobs, and how often it is read."""
    cards = list(CARDS.values())
    return SimulatedNode(
        (cards[seed % len(cards)],) * (1, 2, 4)[seed // 7 % 3],
        jobs=(seed * 37 % 100) / 100,
        interval_seconds=(1, 1, 2, 5, 15, 30)[seed // 3 % 6],
        tells=seed % 4 > 0,
        seed=seed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_twenty_healthy_hours_of_ten_nodes(first: int) -> None:
    """A hundred hours in all."""
    seen = {seed: watched(healthy(seed), 7200).first for seed in range(first, first + 10)}
    assert {seed: codes for seed, codes in seen.items() if codes} == {}
