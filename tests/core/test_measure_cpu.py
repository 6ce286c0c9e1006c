"""What the CPU measurement says, against closed forms and against the system's own counters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from pichak_core.devices.host import this_host
from pichak_core.measure import Context, probes, run_one
from pichak_core.measure._conditions import CpuUse
from pichak_core.measure.cpu import (
    _all_cores,
    pressure_reading,
    rates_by_window,
    text_block,
    use_readings,
)
from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured

MB = 1_000_000


def test_the_text_is_the_same_everywhere() -> None:
    block = text_block()
    assert len(block) == MB
    # As Python 3.10, 3.11, 3.12 and 3.13 make it: with another text, rates would not compare.
    assert zlib.crc32(block) == 621055553
    ratio = len(zlib.compress(block, 1)) / len(block)
    assert 0.2 < ratio < 0.7  # neither noise nor a run of zeros


def test_rates_by_window_conserve_the_work() -> None:
    # Two threads, blocks of 0.25 s back to back over 10 s: 8 blocks a second of 1 MB each.
    blocks = [(i * 0.25, (i + 1) * 0.25) for i in range(40)] * 2
    assert rates_by_window(blocks, 0.0, 10.0, MB) == pytest.approx([8.0] * 10)


def test_a_block_that_spans_windows_counts_in_each_by_its_share() -> None:
    # One block from 0.5 to 2.5 in windows of one second: a quarter, a half, a quarter.
    rates = rates_by_window([(0.5, 2.5)], 0.0, 10.0, 4 * MB)
    assert rates == pytest.approx([1.0, 2.0, 1.0, *[0.0] * 7])
    # what began before the run counts from its start only, what ends after it to its end
    assert rates_by_window([(-1.0, 1.0)], 0.0, 10.0, 4 * MB)[0] == pytest.approx(2.0)
    assert rates_by_window([(9.0, 13.0)], 0.0, 10.0, 4 * MB)[9] == pytest.approx(1.0)
    assert sum(rates_by_window([(20.0, 21.0), (-5.0, -4.0)], 0.0, 10.0, MB)) == 0


def test_every_thread_does_the_same_work() -> None:
    rates, results = _all_cores(text_block(50_000), threads=3, budget_seconds=0.2)
    assert results == 1
    assert len(rates) == 10
    assert all(rate >= 0 for rate in rates)
    assert sum(rates) > 0


def test_steal_and_load_of_others() -> None:
    steal, others = use_readings(CpuUse(2.0, 25.0, 0.5, 1.0))
    assert (steal.value, steal.unit, steal.suspect) == (25.0, "%", "")
    assert others.value == 0.5


def test_a_negative_steal_is_suspect_and_ranks_nobody() -> None:
    steal, _ = use_readings(CpuUse(2.0, -3.0, 0.5, 1.0))
    assert "backwards" in steal.suspect
    made = Fingerprint()
    made.add(steal)
    assert made.number("cpu.steal_percent") is None


def test_pressure_is_a_share_of_the_time() -> None:
    assert pressure_reading(500_000, 2.0).value == 25.0
    assert not pressure_reading(2_000_000, 2.0).suspect
    assert pressure_reading(9_000_000, 2.0).suspect


@pytest.mark.skipif(not Path("/proc/pressure/cpu").exists(), reason="this kernel counts no stalls")
def test_real_stalls_are_counted_where_more_wants_to_run_than_can() -> None:
    host = this_host()
    try:
        before = host.pressure("cpu").some_us
    except OSError as error:
        pytest.skip(f"stalls are not counted here: {error}")
    spin = "import time; end = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"
    spinners = [
        subprocess.Popen([sys.executable, "-S", "-c", spin])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    for spinner in spinners:
        spinner.wait()
    assert host.pressure("cpu").some_us > before


def test_a_cpu_probe_on_this_machine() -> None:
    started = time.monotonic()
    made = {r.name: r for r in run_one(probes()["cpu"], Context())}
    spent = time.monotonic() - started
    cores = made["cpu.usable_cores"]
    assert isinstance(cores, Measurement)
    assert 1 <= int(cores.value) <= (os.cpu_count() or 1)
    for name in ("cpu.single_thread_deflate_mb_s", "cpu.all_core_deflate_mb_s"):
        rate = made[name]
        assert isinstance(rate, Measurement)
        assert float(rate.value) > 0
        assert rate.samples >= 7
        assert rate.spread is not None
        assert rate.detail["zlib"] == zlib.ZLIB_RUNTIME_VERSION
        assert "cpu.steal_percent" in rate.conditions
    # the measurement's parts cannot cost more than it did
    assert sum(r.seconds for r in made.values() if isinstance(r, Measurement)) <= 1.01 * spent


def shortly(context: Context) -> list[Reading]:
    """The CPU measurement with a budget that shows that it runs, not how fast the machine is."""
    return run_one(replace(probes()["cpu"], budget_seconds={"quick": 0.3, "full": 0.3}), context)


def test_a_closed_proc_leaves_named_gaps(tmp_path: Path) -> None:
    context = Context(proc=tmp_path / "proc", sys=tmp_path / "sys", root=tmp_path)
    made = {r.name: r for r in shortly(context)}
    for name in ("cpu.model", "cpu.steal_percent", "cpu.load_others_cores"):
        gap = made[name]
        assert isinstance(gap, Unmeasured), name
        assert gap.reason is Reason.NOT_SUPPORTED
        assert str(tmp_path) in gap.detail
    assert isinstance(made["cpu.pressure_some_percent"], Unmeasured)
    assert isinstance(made["cpu.all_core_deflate_mb_s"], Measurement)


def test_a_quota_is_told_in_cores(tmp_path: Path) -> None:
    # field case 95
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    membership = tmp_path / "proc/self/cgroup"
    membership.parent.mkdir(parents=True)
    membership.write_text("0::/job\n")
    context = Context(proc=tmp_path / "proc", sys=tmp_path / "sys", root=tmp_path)
    made = Fingerprint()
    for reading in shortly(context):
        made.add(reading)
    assert made.number("cpu.quota_cores") == 1.5
