"""The devices: what a process can have of them, and what a step's peak was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from pichak_core.devices import GpuMemoryUse, ProcessMemory
from pichak_core.devices.caps import cap_of, remember_cap
from pichak_core.devices.cpu_backend import CpuBackend
from pichak_core.devices.cuda_backend import UNIFIED_RESERVE_BYTES, CudaBackend
from pichak_core.devices.live_tensors import LiveTensors, live_bytes
from pichak_core.devices.torch_backend import backend_for
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.testing import GIB, MIB, FakeCuda, OutOfMemoryError
from pichak_core.tune.ramp import ramp_micro_batch
from pichak_core.tune.ramp_result import DoesNotFit

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def no_caps() -> Iterator[None]:
    yield
    for device in ("cpu", "cuda:0", "cuda:3"):
        remember_cap(device, None)


def host(free: int = 64 * GIB) -> tuple[int, str]:
    return free, "a made-up host"


def cuda_backend(cuda: FakeCuda, **options: Any) -> CudaBackend:
    return CudaBackend("cuda:0", cuda, available=options.pop("available", host), **options)


# --- Live tensors, by hand ---------------------------------------------------------------------


def counted(work: Any) -> tuple[int, int]:
    """(peak, what is left) of a piece of work, over what was live before."""
    counter = LiveTensors()
    with counter.counting():
        before = counter.live_bytes
        kept = work()
        return counter.peak_bytes - before, counter.live_bytes - before + 0 * id(kept)


def test_views_share_their_storage() -> None:
    def work() -> Any:
        x = torch.zeros(1000)
        return x[10:20], x.view(10, 100), x.t(), x.detach(), x.expand(5, 1000)

    assert counted(work) == (4000, 4000)


def test_what_nothing_refers_to_is_gone_at_once() -> None:
    def work() -> None:
        for _ in range(5):
            x = torch.zeros(1000)
            del x

    assert counted(work) == (4000, 0)


def test_an_operation_in_place_adds_nothing() -> None:
    def work() -> Any:
        x = torch.zeros(1000)
        x.add_(1).mul_(2)
        torch._foreach_add_([x, x], 1.0)
        return x

    assert counted(work) == (4000, 4000)


def test_lists_of_results_and_results_that_are_no_tensors_are_seen() -> None:
    def work() -> Any:
        x = torch.zeros(1000)
        parts = torch._foreach_mul([x, x[:500]], 2.0)
        values, indices = torch.topk(x, 10)
        assert torch.equal(x, x)
        return x, parts, values, indices

    peak, left = counted(work)
    assert left == 4000 + 4000 + 2000 + 40 + 80
    assert peak >= left


def test_a_storage_that_changes_its_size_counts_anew() -> None:
    def work() -> Any:
        x = torch.empty(0)
        x.resize_(1000)
        y = torch.zeros(500)
        y.untyped_storage().resize_(0)
        return x, y, torch.zeros(1), y.shape, y.detach()

    assert counted(work)[1] == 4000 + 4


def test_what_was_made_elsewhere_counts_when_it_is_touched() -> None:
    numpy = pytest.importorskip("numpy")

    def work() -> Any:
        array = torch.from_numpy(numpy.zeros(1000))
        array.add_(1)
        return array

    assert counted(work)[1] == 8000


def test_sparse_gradients_count_their_parts() -> None:
    table = torch.nn.Embedding(1000, 8, sparse=True)
    rows = torch.tensor([1, 2, 3])

    def work() -> Any:
        table(rows).sum().backward()
        return table.weight.grad

    # Three rows of eight floats, and their three indices.
    assert counted(work)[1] == 3 * 8 * 4 + 3 * 8


def test_what_was_alive_before_counts_from_the_start() -> None:
    base = live_bytes()
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    weights = (100 * 100 + 100) * 4
    # Weights, gradients, two moments, and a step count of 4 bytes for each of two tensors.
    assert live_bytes() - base == 4 * weights + 8
    counter = LiveTensors()
    with counter.counting():
        assert counter.live_bytes == live_bytes()
    del model, optimizer
    gc.collect()
    assert live_bytes() == base


def test_forward_and_backward_of_a_linear_layer_by_hand() -> None:
    n, b = 64, 10
    layer = torch.nn.Linear(n, n, bias=False)
    x = torch.randn(b, n)

    def work() -> None:
        layer(x).sum().backward()

    # The output (b·n floats) goes when its sum is taken; then the sum and its gradient (4 bytes
    # each) with the weight's gradient (n·n) at the end.
    peak, left = counted(work)
    assert left == 4 * n * n
    assert peak == max(4 * b * n + 4, 4 * n * n + 4 + 4)


def test_past_the_cap_an_operation_raises_also_in_backward() -> None:
    x = torch.zeros(1000, requires_grad=True)
    base = live_bytes()
    counter = LiveTensors(base + 10_000)
    with pytest.raises(torch.OutOfMemoryError, match="over the cap"), counter.counting():
        torch.zeros(4000)
    counter = LiveTensors(base + 9000)
    with counter.counting():
        y = (x * 2).sum()  # 4004 bytes
        with pytest.raises(torch.OutOfMemoryError):
            (y + (x * x).sum()).backward()


# --- The CPU -----------------------------------------------------------------------------------


def test_the_cpus_capacity_is_what_is_available_and_what_is_held() -> None:
    backend = CpuBackend(lambda: host(3 * GIB))
    held = live_bytes()
    kept = torch.zeros(MIB, dtype=torch.uint8)
    capacity = backend.capacity()
    assert capacity.bytes == 3 * GIB + held + MIB
    assert "a made-up host" in capacity.source
    assert backend.unified, "the whole host is at stake"
    del kept


def test_a_cap_below_that_is_the_device() -> None:
    backend = CpuBackend(lambda: host(3 * GIB))
    backend.set_cap(GIB)
    assert backend.capacity().bytes == GIB
    assert "the cap" in backend.capacity().source
    assert not backend.unified
    backend.set_cap(100 * GIB)
    assert backend.capacity().bytes < 4 * GIB, "a cap gives no memory"
    assert backend.unified
    backend.set_cap(None)
    assert cap_of("cpu") is None


def test_unreadable_memory_is_an_error_unless_there_is_a_cap() -> None:
    def unreadable() -> tuple[int, str]:
        raise OSError("no /proc")

    backend = CpuBackend(unreadable)
    with pytest.raises(OSError, match="no /proc"):
        backend.capacity()
    assert backend.free_bytes() is None
    backend.set_cap(GIB)
    assert backend.capacity().bytes == GIB


def test_the_cpu_counts_a_block_and_stops_it_at_the_capacity() -> None:
    backend = CpuBackend(lambda: host(10 * MIB))
    held = live_bytes()
    with backend.watch() as peak:
        torch.zeros(MIB)
    assert peak.held == held
    assert peak.allocated == peak.reserved == held + 4 * MIB
    backend.capacity()
    with pytest.raises(torch.OutOfMemoryError), backend.watch() as peak:
        torch.zeros(3 * MIB)
    assert peak.reserved == held + 12 * MIB


def test_devices_by_name() -> None:
    backend = backend_for("cpu", cap_bytes=GIB)
    assert (backend.device, backend.kind) == ("cpu", "cpu")
    assert backend.describe()
    assert cap_of("cpu") == GIB
    assert backend_for("cpu").capacity().bytes == GIB, "a cap is remembered"
    with pytest.raises(ValueError, match="'tpu:0'"):
        backend_for("tpu:0")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA device"):
            backend_for("cuda:0")
    with pytest.raises(ValueError, match="leaves nothing"):
        backend_for("cpu", cap_bytes=0)


# --- CUDA --------------------------------------------------------------------------------------


def test_the_cards_capacity_is_free_and_held_not_its_total() -> None:
    cuda = FakeCuda(6 * GIB, others_bytes=int(2.9 * GIB))
    cuda.allocate(GIB)
    backend = cuda_backend(cuda)
    assert backend.capacity().bytes == 6 * GIB - int(2.9 * GIB)
    assert "6.00 GiB on the card" in backend.capacity().source
    assert backend.describe() == "Fake GPU, 6,144 MiB"
    assert not backend.unified


def test_a_peak_is_what_was_reserved() -> None:
    cuda = FakeCuda(6 * GIB, rounding_bytes=20 * MIB)
    backend = cuda_backend(cuda)
    cuda.allocate(100 * MIB)
    with backend.watch() as peak:
        cuda.allocate(55 * MIB)
        cuda.free(55 * MIB)
    assert peak.held == 100 * MIB
    assert peak.allocated == 155 * MIB
    assert peak.reserved == 160 * MIB
    backend.release()
    with backend.watch() as peak:
        cuda.allocate(MIB)
    assert peak.reserved == 120 * MIB


# field case 59
def test_a_cap_counts_the_memory_outside_the_allocator() -> None:
    cuda = FakeCuda(12 * GIB, others_bytes=GIB)
    backend = cuda_backend(cuda)
    backend.set_cap(5 * GIB)

    def step(rows: int) -> None:
        taken = int(4.2 * GIB) + rows * GIB // 2  # 4.7 GiB with one row: below the cap alone
        cuda.allocate(taken)
        cuda.free(taken)
        if cuda.others_bytes == GIB:
            cuda.grow_outside(int(0.9 * GIB))  # context and workspaces, at the first step

    with pytest.raises(DoesNotFit) as caught:
        ramp_micro_batch(step, backend=backend, headroom=0.0)
    (rung,) = caught.value.tried
    assert rung.verdict == "over capacity"
    assert rung.peak_bytes == pytest.approx(5.6 * GIB, abs=4 * MIB)


def test_a_cap_limits_the_allocator_and_none_lifts_it() -> None:
    cuda = FakeCuda(8 * GIB)
    backend = cuda_backend(cuda)
    backend.set_cap(2 * GIB)
    assert cuda.fraction == 0.25
    with pytest.raises(OutOfMemoryError):
        cuda.allocate(3 * GIB)
    backend.set_cap(None)
    assert cuda.fraction == 1.0
    backend.set_cap(100 * GIB)
    assert cuda.fraction == 1.0
    assert backend.capacity().bytes == 8 * GIB


# field case 2
def test_on_a_unified_part_the_page_cache_is_not_used_memory() -> None:
    # The driver says 41 of 121 GiB are free, since it counts 73 GiB of page cache as used.
    cuda = FakeCuda(121 * GIB, others_bytes=80 * GIB, is_integrated=True)
    backend = cuda_backend(cuda, available=lambda: (116 * GIB, "MemAvailable"))
    assert backend.unified
    capacity = backend.capacity()
    assert capacity.bytes == 116 * GIB - max(UNIFIED_RESERVE_BYTES, int(0.05 * 116 * GIB))
    assert "MemAvailable" in capacity.source
    assert backend.free_bytes() == 116 * GIB
    # Our own disk probe fills the cache: nothing changes.
    cuda.grow_outside(30 * GIB)
    assert backend.capacity().bytes == capacity.bytes
    with backend.watch() as peak:
        cuda.allocate(GIB)
    assert peak.reserved == GIB


# field case 3
def test_on_a_unified_part_the_allocator_stops_before_the_system_does() -> None:
    cuda = FakeCuda(121 * GIB, is_integrated=True)
    backend = cuda_backend(cuda, available=lambda: (50 * GIB, "MemAvailable"))
    limit = backend.capacity().bytes
    with backend.watch():
        assert cuda.fraction * cuda.total_bytes == pytest.approx(limit)
        with pytest.raises(OutOfMemoryError):
            cuda.allocate(limit + GIB)
    assert cuda.fraction == 1.0


# field case 3
def test_a_ramp_on_a_unified_part_never_asks_for_all_of_it() -> None:
    cuda = FakeCuda(121 * GIB, is_integrated=True)
    backend = cuda_backend(cuda, available=lambda: (100 * GIB, "MemAvailable"))
    largest = 0

    def step(rows: int) -> None:
        nonlocal largest
        taken = 10 * GIB + rows * 3 * GIB
        largest = max(largest, taken)
        cuda.allocate(taken)
        cuda.free(taken)

    result = ramp_micro_batch(step, backend=backend)
    assert result.refusals == 0
    assert largest < result.capacity_bytes == 95 * GIB
    assert result.micro_batch_max == (int(0.88 * 95 * GIB) - 10 * GIB) // (3 * GIB)


def test_a_broken_context_gives_no_numbers_instead_of_wrong_ones() -> None:
    cuda = FakeCuda(6 * GIB)
    backend = cuda_backend(cuda)
    with backend.watch() as peak:
        cuda.allocate(GIB)
        cuda.broken = True
    assert backend.free_bytes() is None
    assert peak.reserved == GIB


def test_host_memory_and_counters_are_passed_on() -> None:
    cuda = FakeCuda(6 * GIB)
    assert cuda_backend(cuda).host_free_bytes() == 64 * GIB
    assert cuda_backend(cuda).process_memory() is None
    cuda.allocate(GIB)
    seen = GpuMemoryUse(GIB + 7, 8, 2 * GIB, 9)
    reading = cuda_backend(cuda, counters=lambda: seen).process_memory()
    assert reading == ProcessMemory(GIB + 7, 8, GIB, 2 * GIB, 9)


def test_counters_that_cannot_be_this_process_are_unknown_and_not_zero() -> None:
    # field case 39
    cuda = FakeCuda(6 * GIB)
    cuda.allocate(GIB)
    gap = Unmeasured("gpu.process_memory", Reason.NOT_SUPPORTED, "spill unknown: no such process")
    backend = cuda_backend(cuda, counters=lambda: gap)
    assert backend.process_memory() is None
    assert backend.spill_unknown == "spill unknown: no such process"
    backend = cuda_backend(cuda, counters=lambda: GpuMemoryUse(0, 0))
    assert backend.process_memory() is None
    assert "whose allocator holds 1.00 GiB" in backend.spill_unknown


@pytest.mark.parametrize("name", ["cuda:x", "cuda:", "cpu", "cuda:-1"])
def test_names_that_are_no_cuda_device(name: str) -> None:
    with pytest.raises(ValueError, match="is not 'cuda' or 'cuda:N'"):
        CudaBackend(name, FakeCuda(GIB), available=host)


def test_a_card_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"torch sees 1 CUDA device\(s\)"):
        CudaBackend("cuda:3", FakeCuda(GIB), available=host)
