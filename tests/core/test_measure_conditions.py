"""Sampling: when to stop, percentiles, and what was true while a measurement ran."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pichak_core.devices.host import CpuTimes
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context
from pichak_core.measure._conditions import Conditions, cpu_use, gpu_conditions
from pichak_core.measure._readings import loaded_gpu
from pichak_core.measure._sampling import collect, half_width, percentile
from pichak_core.measurement import MAD_TO_SIGMA, Reason, Unmeasured


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def giving(self, values: Sequence[float], seconds: float) -> Callable[[], float]:
        """A sample function that takes `seconds` and gives the values in turn."""
        position = -1

        def sample() -> float:
            nonlocal position
            position += 1
            self.now += seconds
            return values[position % len(values)]

        return sample


def test_equal_samples_stop_at_the_minimum() -> None:
    clock = Clock()
    assert len(collect(clock.giving([5.0], 0.1), budget_seconds=100, clock=clock)) == 7


def test_scattered_samples_go_on_to_the_budget() -> None:
    clock = Clock()
    samples = collect(clock.giving([1.0, 2.0, 4.0], 0.1), budget_seconds=5.0, clock=clock)
    assert len(samples) == pytest.approx(50, abs=1)


def test_sampling_stops_where_the_interval_is_narrow() -> None:
    # 9 and 11 in turn: median 9 or 10, MAD 1 or 2; each n up to the stop is wider than 20 %.
    clock = Clock()
    samples = collect(
        clock.giving([9.0, 11.0], 0.01), budget_seconds=100, clock=clock, relative=0.2
    )
    assert half_width(samples) <= 0.2 * 10.5
    assert all(half_width(samples[:n]) > 0.2 * 9 for n in range(7, len(samples)))


def test_a_slow_machine_gives_what_it_has() -> None:
    clock = Clock()
    assert len(collect(clock.giving([5.0], 2.0), budget_seconds=1.0, clock=clock)) == 2
    clock = Clock()
    assert len(collect(clock.giving([5.0], 99.0), budget_seconds=1.0, clock=clock)) == 1


def test_half_width_by_its_formula() -> None:
    # 0..8: median 4, MAD 2
    sigma = MAD_TO_SIGMA * 2
    expected = 1.96 * math.sqrt(math.pi / 2) * sigma / 3
    assert half_width(list(range(9))) == pytest.approx(expected, rel=1e-4)
    assert half_width([1.0, 2.0]) == math.inf


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100), (0.001, 1)]
)
def test_percentiles_by_nearest_rank(share: float, expected: int) -> None:
    samples = list(range(100, 0, -1))
    assert percentile(samples, share) == expected
    assert percentile([3.0], share) == 3.0


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 0.5)


def test_steal_is_the_share_of_the_time_that_was_wanted() -> None:
    # In 2 s the machine ran 3 CPU seconds and was kept from 1; this process used 2.5 of the 3.
    before = CpuTimes(busy=100.0, steal=7.0, total=1000.0)
    after = CpuTimes(busy=103.0, steal=8.0, total=1008.0)
    use = cpu_use(before, after, own=2.5, seconds=2.0)
    assert use is not None
    assert use.steal_percent == 25.0
    assert use.others_cores == pytest.approx(0.25)
    assert use.own_cores == pytest.approx(1.25)


def test_a_window_without_ticks_says_nothing() -> None:
    times = CpuTimes(1.0, 1.0, 9.0)
    assert cpu_use(times, times, own=0.0, seconds=5.0) is None
    assert cpu_use(times, CpuTimes(2.0, 1.0, 10.0), own=0.0, seconds=0.01) is None


def test_a_steal_counter_that_runs_backwards_stays_visible() -> None:
    use = cpu_use(CpuTimes(1.0, 5.0, 9.0), CpuTimes(4.0, 4.0, 12.0), own=3.0, seconds=2.0)
    assert use is not None
    assert use.steal_percent < 0


def test_a_gpus_readings_together() -> None:
    # field case 25: an idle link has trained down; under load it is what it is
    readings = [
        Gpu(0, {"sm_clock_mhz": 300, "pcie_generation": 1, "throttle_bitmask": 1,
                "memory_used_bytes": 2**20, "temperature_celsius": 40, "power_watts": 20.0}),
        Gpu(0, {"sm_clock_mhz": 1900, "pcie_generation": 4, "throttle_bitmask": 4,
                "memory_used_bytes": 5 * 2**20, "temperature_celsius": 66, "power_watts": 70.5}),
        Gpu(0, {"sm_clock_mhz": 1950, "pcie_generation": 4, "throttle_bitmask": 32,
                "memory_used_bytes": 3 * 2**20, "temperature_celsius": 64, "power_watts": 71.5}),
    ]  # fmt: skip
    assert gpu_conditions(readings) == {
        "gpu.sm_clock_mhz": 1900.0,
        "gpu.power_watts": 70.5,
        "gpu.temperature_celsius": 66,
        "gpu.pcie_generation": 4,
        "gpu.throttle_bitmask": 37,
        "gpu.memory_used_mib": 5.0,
    }


def test_throttled_time_is_what_it_grew_by() -> None:
    # field case 100: the power cap's bit is set at full load on every card; the counter that
    # grows, the draw and the clock tell which one is held back
    cap = 4
    held = [
        Gpu(0, {"throttle_bitmask": cap, "throttled_power_seconds": 900.0, "power_watts": 150.0,
                "sm_clock_mhz": 900}),
        Gpu(0, {"throttle_bitmask": cap, "throttled_power_seconds": 900.4, "power_watts": 150.0,
                "sm_clock_mhz": 880}),
    ]  # fmt: skip
    free = [
        Gpu(1, {"throttle_bitmask": cap, "throttled_power_seconds": 31.0, "power_watts": 296.0,
                "sm_clock_mhz": 1700}),
        Gpu(1, {"throttle_bitmask": cap, "throttled_power_seconds": 31.0, "power_watts": 295.0,
                "sm_clock_mhz": 1710}),
    ]  # fmt: skip
    slow, fast = gpu_conditions(held), gpu_conditions(free)
    assert slow["gpu.throttle_bitmask"] == fast["gpu.throttle_bitmask"] == cap
    assert slow["gpu.throttled_power_seconds"] == pytest.approx(0.4)
    assert fast["gpu.throttled_power_seconds"] == 0.0
    assert (slow["gpu.power_watts"], fast["gpu.power_watts"]) == (150.0, 295.5)
    assert slow["gpu.sm_clock_mhz"] == 890.0
    # one reading says nothing of growth, nor does a counter that began again
    assert "gpu.throttled_power_seconds" not in gpu_conditions(held[:1])
    assert "gpu.throttled_power_seconds" not in gpu_conditions(held[::-1])


def test_a_gpu_that_is_lost_meanwhile_is_said() -> None:
    gone = Unmeasured("gpu", Reason.LOST, "fell off the bus")
    assert gpu_conditions([Gpu(0, lost=gone)]) == {"gpu.lost": "fell off the bus"}
    assert gpu_conditions([]) == {}


class FakeHost:
    """Counters that a test moves; `frequency` None is a system that does not say."""

    def __init__(self, frequency: float | None) -> None:
        self.times = CpuTimes(0.0, 0.0, 0.0)
        self.frequency = frequency
        self.asked = threading.Event()

    def cpu_times(self) -> CpuTimes:
        return self.times

    def load_average(self) -> float:
        raise NotImplementedError("no load average here")

    def niceness(self) -> int:
        return 0

    def cpu_frequency_mhz(self) -> float:
        if self.frequency is None:
            raise FileNotFoundError("no cpufreq")
        self.asked.set()
        return self.frequency


def test_conditions_are_sampled_during_the_block_even_when_it_fails() -> None:
    host: Any = FakeHost(2400.0)
    conditions = Conditions(host, interval_seconds=0.005)
    try:
        with pytest.raises(RuntimeError), conditions.during() as window:
            host.asked.clear()
            assert host.asked.wait(20)
            assert host.asked.wait(20)
            host.asked.clear()
            assert host.asked.wait(20)
            raise RuntimeError("the measurement failed")
        assert window.found["cpu.frequency_mhz"] == 2400.0
        assert "cpu.load_average_1m" not in window.found
    finally:
        conditions.close()
    assert conditions._thread is not None
    assert not conditions._thread.is_alive()


def test_what_the_system_does_not_say_is_left_out() -> None:
    silent: Any = SimpleNamespace()
    for name in ("cpu_times", "load_average", "cpu_frequency_mhz", "niceness"):

        def refuse(name: str = name) -> None:
            raise FileNotFoundError(name)

        setattr(silent, name, refuse)
    conditions = Conditions(silent)
    with conditions.during() as window:
        pass
    assert window.found == {}
    assert conditions._thread is None
    conditions.close()


class FakeLive:
    """Readings that arrive when a test says so."""

    def __init__(self) -> None:
        self.arrived: list[Gpu] = []

    def latest(self) -> list[Gpu]:
        taken, self.arrived = self.arrived, []
        return taken

    def close(self) -> None: ...


def test_readings_of_the_gpu_can_be_seen_while_the_block_runs_and_are_not_lost() -> None:
    # field case 25: what the link does under load is read while copies run
    live: Any = FakeLive()
    host: Any = FakeHost(None)
    conditions = Conditions(host, live)
    live.arrived = [Gpu(0, {"pcie_generation": 1})]
    with conditions.during() as window:
        assert conditions.gpu_readings() == []  # what came before is not of this block
        live.arrived = [Gpu(0, {"pcie_generation": 4})]
        context = Context(cache={"conditions": conditions})
        assert [g.values["pcie_generation"] for g in loaded_gpu(context)] == [4]
        live.arrived = [Gpu(0, {"pcie_generation": 3})]
    assert window.found["gpu.pcie_generation"] == 4
    assert len(conditions.gpu_readings()) == 2
    with conditions.during() as window:  # the next block begins with nothing
        assert conditions.gpu_readings() == []
    assert window.found.get("gpu.pcie_generation") is None
    assert loaded_gpu(Context()) == []
    conditions.close()


@pytest.mark.parametrize("more", [0, 7])
def test_what_was_measured_giving_way_to_others_says_so(more: int) -> None:
    """Ray's workers give way to all else: with their number, by a process that really does."""
    if not hasattr(os, "nice"):
        pytest.skip("this system has no niceness")
    script = (
        f"import json, os; os.nice({more})\n"
        "from pichak_core.measure import counted_conditions\n"
        "with counted_conditions() as found: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + more)
    assert json.loads(done.stdout).get("cpu.niceness", 0) == expected
