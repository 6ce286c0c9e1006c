"""The cap that makes an over-allocation raise, and what the system's counters tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pichak_core.devices import ProcessMemory
from pichak_core.devices.caps import cap_of, remember_cap
from pichak_core.devices.cpu_backend import CpuBackend
from pichak_core.devices.cuda_backend import CudaBackend
from pichak_core.testing import GIB, MIB, FakeCuda, OutOfMemoryError
from pichak_core.tune.spill import (
    SPILL_GUARD_BYTES,
    forbid_spill,
    spill_between,
    spilled_bytes,
)

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def no_caps() -> Iterator[None]:
    yield
    for device in ("cpu", "cuda:0", "cuda:1"):
        remember_cap(device, None)


def host(free: int = 64 * GIB) -> tuple[int, str]:
    return free, "a made-up host"


def test_the_cap_is_free_plus_held_less_the_guard() -> None:
    cuda = FakeCuda(6 * GIB, others_bytes=int(2.9 * GIB))
    cuda.allocate(500 * MIB)
    backend = CudaBackend("cuda:0", cuda, available=host)
    cap, source = forbid_spill(backend=backend)
    assert cap == 6 * GIB - int(2.9 * GIB) - SPILL_GUARD_BYTES
    assert cuda.fraction == pytest.approx(cap / (6 * GIB))
    assert cap_of("cuda:0") == cap
    assert "512 MiB (a constant)" in source
    assert "cuda:0" in source
    # What would have been paged is now refused at its line.
    with pytest.raises(OutOfMemoryError):
        cuda.allocate(cap)
    assert backend.capacity().bytes == cap
    assert SPILL_GUARD_BYTES == 512 * MIB


def test_a_second_call_measures_anew_instead_of_shrinking() -> None:
    cuda = FakeCuda(6 * GIB)
    backend = CudaBackend("cuda:0", cuda, available=host)
    first, _ = forbid_spill(backend=backend)
    again, _ = forbid_spill(backend=backend)
    assert again == first
    cuda.grow_outside(GIB)
    assert forbid_spill(backend=backend)[0] == first - GIB


def test_another_guard() -> None:
    backend = CudaBackend("cuda:0", FakeCuda(6 * GIB), available=host)
    assert forbid_spill(guard_bytes=GIB, backend=backend)[0] == 5 * GIB
    with pytest.raises(ValueError, match="guard_bytes is -1"):
        forbid_spill(guard_bytes=-1, backend=backend)


def test_nothing_left_to_cap_at_is_an_error_and_keeps_the_earlier_cap() -> None:
    cuda = FakeCuda(6 * GIB)
    backend = CudaBackend("cuda:0", cuda, available=host)
    backend.set_cap(GIB)
    cuda.grow_outside(int(5.8 * GIB))
    with pytest.raises(RuntimeError, match="nothing is left to cap cuda:0 at"):
        forbid_spill(backend=backend)
    assert cap_of("cuda:0") == GIB
    assert cuda.fraction == pytest.approx(1 / 6)


def test_cuda_is_the_current_device_and_caps_are_kept_apart() -> None:
    cuda = FakeCuda(6 * GIB, count=2, current=1)
    backend = CudaBackend("cuda", cuda, available=host)
    assert backend.device == "cuda:1"
    forbid_spill(backend=backend)
    assert cap_of("cuda:1") is not None
    assert cap_of("cuda:0") is None
    other = CudaBackend("cuda:0", cuda, available=host)
    assert other.capacity().bytes == 6 * GIB


def test_on_the_cpu_live_tensors_are_capped() -> None:
    import torch

    backend = CpuBackend(lambda: host(GIB))
    held = backend.capacity().bytes - GIB
    cap, _ = forbid_spill(guard_bytes=1000 * MIB, backend=backend)
    assert cap == held + 24 * MIB
    assert cap_of("cpu") == cap
    with backend.watch():
        torch.empty(24 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(24 * MIB + 1, dtype=torch.uint8)


def test_the_cpu_by_its_name() -> None:
    cap, source = forbid_spill("cpu")
    assert cap_of("cpu") == cap > 0
    assert "on cpu" in source


def memory(dedicated: float, shared: float, reserved: float) -> ProcessMemory:
    return ProcessMemory(int(dedicated * GIB), int(shared * GIB), int(reserved * GIB))


# field case 34
def test_a_spill_moves_dedicated_memory_to_shared() -> None:
    # 9.0 GiB reserved on an 8 GiB card: 7.6 GiB dedicated, 1.5 GiB shared where 0.1 GiB was.
    before, after = memory(0.3, 0.1, 0.0), memory(7.9, 1.5, 9.0)
    assert spilled_bytes(before, after) == int(1.5 * GIB) - int(0.1 * GIB)


def test_pinned_memory_raises_shared_alone_and_is_no_spill() -> None:
    assert spilled_bytes(memory(0.3, 0.1, 0.0), memory(5.3, 2.1, 5.0)) == 0


def test_freed_dedicated_memory_alone_is_no_spill() -> None:
    assert spilled_bytes(memory(5.3, 0.1, 5.0), memory(0.3, 0.1, 0.0)) == 0


def test_a_few_megabytes_are_bookkeeping() -> None:
    assert spilled_bytes(memory(1.0, 0.10, 0.0), memory(1.0, 0.13, 0.03)) == 0


def test_missing_counters_are_unknown_and_not_zero() -> None:
    reading = memory(1, 1, 1)
    assert spilled_bytes(None, reading) is None
    assert spilled_bytes(reading, None) is None
    assert spill_between(None, reading).kind == spill_between(reading, None).kind == "unknown"


def with_card(dedicated: float, shared: float, reserved: float, card: float) -> ProcessMemory:
    return ProcessMemory(
        int(dedicated * GIB), int(shared * GIB), int(reserved * GIB), None, int(card * GIB)
    )


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        # 1 GiB of the 6 that the allocator took is in system memory, also of the card's count
        (with_card(0.3, 0.1, 0.0, 0.5), with_card(5.3, 1.1, 6.0, 1.5), "spill"),
        (with_card(0.3, 0.1, 0.0, 0.5), with_card(6.3, 1.1, 6.0, 1.5), "pinned"),
        (with_card(0.3, 0.1, 0.0, 0.5), with_card(6.3, 0.1, 6.0, 1.5), "others pushed out"),
        (with_card(0.3, 0.1, 0.0, 0.5), with_card(6.3, 0.1, 6.0, 0.5), "none"),
        # another program gave its own shared memory back meanwhile
        (with_card(0.3, 0.1, 0.0, 2.5), with_card(6.3, 0.1, 6.0, 0.5), "none"),
        # both at once: the own spill is what matters, and the other one is told beside it
        (with_card(0.3, 0.1, 0.0, 0.5), with_card(5.3, 1.1, 6.0, 2.5), "spill"),
    ],
)
def test_who_was_moved(before: ProcessMemory, after: ProcessMemory, kind: str) -> None:
    seen = spill_between(before, after)
    assert seen.kind == kind
    grown = (after.card_shared or 0) - (before.card_shared or 0)
    others = max(0, grown - (after.shared - before.shared))
    assert seen.others_bytes == pytest.approx(others, abs=1)
    assert bool(seen.moved_bytes) == (kind == "spill")


def test_what_was_moved_before_the_first_reading_is_still_moved() -> None:
    # 2 GiB of weights were demoted while they were loaded; the step adds nothing
    before, after = memory(4.2, 2.1, 6.0), memory(4.2, 2.1, 6.0)
    assert spilled_bytes(before, after) == pytest.approx(1.8 * GIB, rel=1e-6)
    # pinned memory beside a card that holds all of it is none
    assert spilled_bytes(memory(6.2, 2.1, 6.0), memory(6.2, 2.1, 6.0)) == 0


def test_a_card_that_does_not_tell_leaves_others_unknown() -> None:
    assert spill_between(memory(1, 0, 1), memory(1, 0, 1)).others_bytes is None
