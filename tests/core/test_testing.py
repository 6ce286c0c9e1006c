"""The public fakes do what they say."""

from __future__ import annotations

import pytest

from pichak_core.devices import Backend
from pichak_core.testing import (
    GIB,
    MIB,
    FakeClock,
    FakeCuda,
    FakeDevice,
    FakeStep,
    OutOfMemoryError,
    affine_memory,
    step_seconds,
)


def test_the_clock_moves_when_told() -> None:
    clock = FakeClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(2.5)
    assert clock() == 7.5


def test_affine_memory_with_and_without_an_optimizer_phase() -> None:
    assert [affine_memory(100, 10)(rows) for rows in (1, 2, 10)] == [110, 120, 200]
    with_phase = affine_memory(100, 10, optimizer_phase_bytes=150)
    assert [with_phase(rows) for rows in (1, 5, 6)] == [150, 150, 160]


def test_seconds_are_repeatable_and_jitter_only_when_asked() -> None:
    assert step_seconds(1.0, 0.5)(4) == 3.0
    first, second = (step_seconds(1.0, 0.5, jitter=0.1, seed=3) for _ in range(2))
    drawn = [first(4) for _ in range(20)]
    assert drawn == [second(4) for _ in range(20)]
    assert len(set(drawn)) == 20
    assert min(drawn) > 0


def test_a_device_reserves_in_multiples_and_refuses_what_does_not_fit() -> None:
    device: Backend = FakeDevice(
        100 * MIB, affine_memory(10 * MIB, 3 * MIB), rounding_bytes=20 * MIB, held_bytes=5 * MIB
    )
    assert isinstance(device, FakeDevice)
    with device.watch() as peak:
        device.train(7)
    assert (peak.held, peak.allocated, peak.reserved) == (5 * MIB, 31 * MIB, 40 * MIB)
    with device.watch() as peak, pytest.raises(OutOfMemoryError):
        device.train(31)  # 103 MiB
    assert device.ran == [7, 31]
    assert device.capacity().bytes == 100 * MIB
    device.set_cap(30 * MIB)
    assert device.capacity().bytes == 30 * MIB
    with pytest.raises(OutOfMemoryError):
        device.train(7)


def test_a_device_that_pages_is_slow_instead() -> None:
    device = FakeDevice(
        10 * GIB,
        affine_memory(0, GIB),
        seconds_of=lambda _: 2.0,
        pages=True,
        dedicated_bytes=4 * GIB,
        counters=True,
    )
    assert device.may_page
    for rows, seconds, shared in ((4, 2.0, 0), (5, 18.0, GIB)):
        before = device.clock()
        with device.watch():
            device.train(rows)
            reading = device.process_memory()
        assert device.clock() - before == seconds
        assert reading is not None
        assert (reading.shared, reading.dedicated) == (shared, 4 * GIB)
        device.release()


def test_state_leaks_and_context() -> None:
    device = FakeDevice(
        GIB, affine_memory(100, 10), state_bytes=40, leak_bytes=7, context_bytes=1000, held_bytes=50
    )
    peaks = []
    for _ in range(3):
        with device.watch() as peak:
            device.train(5)
        peaks.append((peak.held, peak.allocated, peak.reserved))
    assert peaks == [(50, 110, 1110), (57, 157, 1157), (64, 164, 1164)]


def test_a_step_counts_what_it_trains() -> None:
    device = FakeDevice(GIB, affine_memory(100, 10))
    step = FakeStep(device, errors={3: ValueError}, trains=lambda call: call != 1)
    for rows in (1, 2, 4):
        step(rows)
    assert step.calls == [1, 2, 4]
    assert device.ran == [1, 4]
    assert step.steps_run == 2
    with pytest.raises(ValueError):
        step(3)
    assert step.phase == "forward"
    step.close()
    assert step.closed == 1


def test_the_cuda_namespace_keeps_its_books() -> None:
    cuda = FakeCuda(GIB, others_bytes=100 * MIB)
    cuda.allocate(3 * MIB)
    assert cuda.memory_allocated(0) == 3 * MIB
    assert cuda.memory_reserved(0) == 4 * MIB
    assert cuda.mem_get_info(0) == (GIB - 104 * MIB, GIB)
    cuda.free(3 * MIB)
    assert cuda.memory_reserved(0) == 4 * MIB, "cached"
    assert cuda.max_memory_allocated(0) == 3 * MIB
    cuda.empty_cache()
    cuda.reset_peak_memory_stats(0)
    assert cuda.memory_reserved(0) == cuda.max_memory_reserved(0) == 0
    cuda.set_per_process_memory_fraction(0.25, 0)
    with pytest.raises(OutOfMemoryError):
        cuda.allocate(257 * MIB)
    with pytest.raises(ValueError, match="fraction"):
        cuda.set_per_process_memory_fraction(1.5, 0)
    cuda.broken = True
    with pytest.raises(RuntimeError, match="device-side assert"):
        cuda.mem_get_info(0)
