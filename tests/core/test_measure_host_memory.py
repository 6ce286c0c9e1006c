"""Memory: sizes from known trees, and a copy whose every byte is checked."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest

from pichak_core.devices.host import SharedMemory
from pichak_core.devices.linux_host import LinuxHost
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context, host_memory, probes, run_one
from pichak_core.measure.host_memory import (
    MIB,
    CopyError,
    _buffers,
    buffer_bytes,
    copy_rates,
    doubt,
)
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("cache", "usable", "expected"),
    [
        (260 * MIB, 24 * GIB, 260 * MIB),  # the two together are twice the cache
        (None, 24 * GIB, 256 * MIB),
        (8 * MIB, 24 * GIB, 32 * MIB),
        (260 * MIB, 800 * MIB, 100 * MIB),  # a quarter of a small container, and no more
        (2 * GIB, 1024 * GIB, 1024 * MIB),
        (260 * MIB, 0, MIB),
    ],
)
def test_buffers_outgrow_the_caches_but_not_the_container(
    cache: int | None, usable: int, expected: int
) -> None:
    assert buffer_bytes(cache, usable) == expected


def test_impossible_rates_are_suspect() -> None:
    assert doubt(20_000.0, 256 * MIB, 260 * MIB) == ""
    assert "memory" in doubt(11e6, 256 * MIB, 260 * MIB)
    assert "cache" in doubt(20_000.0, 100 * MIB, 260 * MIB)
    assert doubt(20_000.0, 100 * MIB, None) == ""


def test_the_source_is_really_written() -> None:
    # Pages that were never written are one shared page of zeros: reading them reads a cache.
    source, target = _buffers(3 * MIB + 4096)
    page = 4096
    pages = [source.raw[i : i + page] for i in range(0, len(source), page)]
    assert all(any(content) for content in pages)
    assert len(target) == len(source)


class Ticks:
    """A clock on which everything takes the same time."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize("threads", [1, 3])
def test_the_rate_is_bytes_over_time(threads: int) -> None:
    # Each copy lies between two readings of a clock that ticks once a millisecond.
    rates = copy_rates(5 * MIB + 8, threads, budget_seconds=0.05, clock=Ticks(0.001))
    assert rates == pytest.approx([(5 * MIB + 8) / 0.001 / 1e6] * len(rates))
    assert len(rates) >= 7


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_is_copied(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    kept: list[tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]] = []

    def keep(size: int) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
        kept.append(_buffers(size))
        return kept[0]

    monkeypatch.setattr("pichak_core.measure.host_memory._buffers", keep)
    copy_rates(MIB + 24, threads, budget_seconds=0.0, clock=time.monotonic)
    source, target = kept[0]
    assert target.raw == source.raw


def test_a_copy_that_loses_bytes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.memmove

    def forgetful(target: object, source: object, count: int) -> object:
        return real(target, source, count if count == 8 else count // 2)

    monkeypatch.setattr("pichak_core.measure.host_memory.ctypes.memmove", forgetful)
    with pytest.raises(CopyError, match="old value"):
        copy_rates(4 * MIB, 1, budget_seconds=0.0, clock=time.monotonic)


def machine(tmp_path: Path, meminfo: str) -> Context:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(meminfo)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return Context(proc=tmp_path / "proc", sys=tmp_path / "sys", root=tmp_path)


def test_sizes_are_read_from_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 90: docker's 64 MiB
    monkeypatch.setattr(
        LinuxHost, "shared_memory", lambda _: SharedMemory("/dev/shm", 67108864, 1048576)
    )
    context = machine(tmp_path, "MemTotal: 1048576 kB\nMemAvailable: 262144 kB\n")
    made = Fingerprint()
    for reading in run_one(probes()["host_memory"], context):
        made.add(reading)
    assert made.number("host.memory_total_mib") == 1024
    assert made.number("host.memory_usable_mib") == 256
    assert made.number("host.shm_mib") == 64
    copied = made["host.memory_copy_mb_s"]
    assert isinstance(copied, Measurement)
    assert copied.detail["buffer_mib"] == 32  # an eighth of what is available
    assert float(copied.value) > 0
    assert copied.samples >= 7


def test_the_measured_shared_memory_is_the_systems(tmp_path: Path) -> None:
    import os

    (tmp_path / "dev/shm").mkdir(parents=True)
    size = LinuxHost(tmp_path, tmp_path, tmp_path).shared_memory()
    told = os.statvfs(tmp_path)
    assert size.total_bytes == told.f_blocks * told.f_frsize


@pytest.mark.parametrize(
    ("address", "content", "value", "words"),
    [
        ("00000000:41:00.0", "1\n", 1, "sysfs, PCI device 00000000:41:00.0"),
        ("00000000:41:00.0", "0\n", 0, "sysfs"),  # node 0 is a node
        ("00000000:41:00.0", "-1\n", None, "the system does not say"),
        ("00000000:41:00.0", None, None, "numa_node"),  # a container without that part of sysfs
        (None, "1\n", None, "NVML gives no PCI address"),
    ],
)
def test_the_numa_node_of_a_gpu_is_what_sysfs_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    content: str | None,
    value: int | None,
    words: str,
) -> None:
    values: dict[str, object] = {} if address is None else {"pci_bus_id": address}
    gpu = Gpu(0, values)  # type: ignore[arg-type]
    monkeypatch.setattr(host_memory, "nvml_gpu", lambda _: gpu)
    device = tmp_path / "sys/bus/pci/devices/0000:41:00.0"
    device.mkdir(parents=True)
    if content is not None:
        (device / "numa_node").write_text(content)
    context = machine(tmp_path, "MemTotal: 1048576 kB\nMemAvailable: 262144 kB\n")
    made = host_memory._numa(context, LinuxHost(context.proc, context.sys, context.root))
    if value is None:
        assert isinstance(made, Unmeasured)
        assert words in made.detail
    else:
        assert isinstance(made, Measurement)
        assert made.value == value
        assert words in made.source


def test_without_a_gpu_there_is_no_node(tmp_path: Path) -> None:
    context = machine(tmp_path, "MemTotal: 1048576 kB\n")
    made = host_memory._numa(context, LinuxHost(context.proc, context.sys, context.root))
    assert isinstance(made, Unmeasured)
    assert made.reason is Reason.NO_DEVICE
