"""Whose memory it is: figures worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpu_memory import (
    DeviceMemory,
    ForeignMemory,
    device_memory,
    foreign_memory,
)
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_codes import SENTINELS, number
from pichak_core.devices.nvml_processes import WINDOWS_PID_LIMIT, believable
from pichak_core.measure._gpu_facts import FREE, OTHERS, TOTAL, memory_readings
from pichak_core.measurement import Measurement, Reason, Unmeasured

MIB, GIB = 2**20, 2**30
SENTINEL = 2**64 - 1


def gpu(total: int, used: int, reserved: int | None = None, **more: int) -> Gpu:
    values = {"memory_total_bytes": total, "memory_used_bytes": used}
    if reserved is not None:
        values["memory_reserved_bytes"] = reserved
    return Gpu(0, {**values, "memory_query_version": 1 if reserved is None else 2, **more})


def test_an_idle_card_is_not_occupied_by_a_neighbour() -> None:
    # field case 12: 904 MiB of reserve, 8 MiB in use; version 1 tells 912
    card = foreign_memory(gpu(80 * GIB, 8 * MIB, 904 * MIB), 0)
    assert isinstance(card, ForeignMemory)
    assert (card.bytes, card.upper_bound) == (8 * MIB, False)
    old = foreign_memory(gpu(80 * GIB, 912 * MIB), 0)
    assert isinstance(old, ForeignMemory)
    assert (old.bytes, old.upper_bound) == (912 * MIB, True)
    assert old.source.startswith("at most")


def test_foreign_is_used_less_own_whatever_the_process_lists_say() -> None:
    # field case 29: 9 GiB in use and an empty list; or a process id of another namespace
    for processes in (0, 1):
        card = gpu(24 * GIB, 9 * GIB, GIB // 2, compute_processes=processes)
        held = foreign_memory(card, 2 * GIB)
        assert isinstance(held, ForeignMemory)
        assert held.bytes == 7 * GIB
    more = foreign_memory(gpu(24 * GIB, GIB, 0), 3 * GIB)  # read before this process grew
    assert isinstance(more, ForeignMemory)
    assert more.bytes == 0


@pytest.mark.parametrize(
    ("pid", "used", "kept"),
    [
        (4711, 2 * GIB, True),
        (4711, None, True),  # field case 14: WDDM says nothing of a process's memory
        (4711, SENTINEL, True),  # field case 14: the same, raw
        (2**32 - 1, 2 * GIB, False),  # field case 11
        (2**40, 2 * GIB, False),  # field case 11
        (0, 2 * GIB, False),
        (-5, 2 * GIB, False),
        (4711, 25 * GIB, False),  # more than the card has
        (4711, -1, False),
        (None, GIB, False),
        ("x", GIB, False),
    ],
)
def test_process_rows_are_believed_when_they_are_possible(
    pid: object, used: object, kept: bool
) -> None:
    found = believable("compute", [SimpleNamespace(pid=pid, usedGpuMemory=used)], 24 * GIB)
    assert (len(found.rows), found.dropped) == ((1, 0) if kept else (0, 1))
    if kept:
        assert found.rows[0].used_bytes == (None if used in (None, SENTINEL) else used)


def test_process_ids_of_windows_use_more_bits() -> None:
    row = SimpleNamespace(pid=5_000_000, usedGpuMemory=None)
    assert believable("graphics", [row], GIB).dropped == 1
    assert believable("graphics", [row], GIB, WINDOWS_PID_LIMIT).dropped == 0


def test_no_sentinel_reaches_arithmetic() -> None:
    # field case 14: 17179869184 GiB is 2^64 - 1 bytes; 16 GiB in bytes is that number too
    assert [number(raw) for raw in (None, *SENTINELS)] == [None, None, None]
    assert number(17179869184) == 16 * GIB
    assert isinstance(foreign_memory(Gpu(0, {"memory_total_bytes": GIB}), 0), Unmeasured)


GB10 = TorchGpu(0, "NVIDIA GB10", "u", "", 121 * GIB, True)


def test_unified_memory_is_what_the_system_has_available() -> None:
    # field case 2: CUDA's free is 41 GiB because 73 GiB of page cache count as used
    misleading = gpu(121 * GIB, 80 * GIB, 0)
    memory = device_memory(GB10, misleading, 116 * GIB)
    assert isinstance(memory, DeviceMemory)
    assert (memory.free_bytes, memory.unified) == (116 * GIB, True)
    readings = {r.name: r for r in memory_readings(misleading, GB10, 116 * GIB, 0)}
    free, others = readings[FREE.name], readings[OTHERS.name]
    assert isinstance(free, Measurement)
    assert free.value == 116 * 1024
    assert "MemAvailable" in free.source
    assert isinstance(others, Unmeasured)  # never "80 GiB are held by others"
    assert others.reason is Reason.NOT_SUPPORTED


def test_unified_memory_that_the_system_does_not_tell_is_a_gap() -> None:
    # field case 3: what is not known must not become a budget to allocate
    assert isinstance(device_memory(GB10, gpu(121 * GIB, 0, 0), None), Unmeasured)


def test_a_gpu_that_says_nothing_is_three_gaps_with_the_reason() -> None:
    why = Unmeasured("memory", Reason.NOT_SUPPORTED, "NVML code 3")
    silent = Gpu(0, {}, {"memory_total_bytes": why, "memory_used_bytes": why})
    readings = list(memory_readings(silent, None, 10 * GIB, 0))
    assert [r.name for r in readings] == [TOTAL.name, FREE.name, OTHERS.name]
    assert {r.detail for r in readings if isinstance(r, Unmeasured)} == {"NVML code 3"}
