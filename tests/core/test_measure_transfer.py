"""Transfers: run for real over host memory, by a known clock, and against devices that lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from pichak_core.devices.gpus import Report  # noqa: E402
from pichak_core.devices.nvml import Gpu  # noqa: E402
from pichak_core.measure import Context, _sisters, probes, run_one, transfer  # noqa: E402
from pichak_core.measure import transfer_bandwidth as public  # noqa: E402
from pichak_core.measure._copies import (  # noqa: E402
    PATHS,
    Buffers,
    Copies,
    time_both_ways,
    time_path,
    time_together,
)
from pichak_core.measure._mover import CudaMover, HostMover, fill, next_round  # noqa: E402
from pichak_core.measure._sisters import others_idle  # noqa: E402
from pichak_core.measure._transfer_metrics import METRICS, Measured, doubt, readings  # noqa: E402
from pichak_core.measure._transfer_verdict import Link  # noqa: E402
from pichak_core.measure.transfer import large_bytes, measure  # noqa: E402
from pichak_core.measurement import Measurement, Reason, Unmeasured  # noqa: E402

MIB = 2**20


class Clocked(HostMover):
    """Host memory whose copies take a known time: `rates` in MB/s by direction.

    "card" buffers are told from "host" ones by their address. Copies on two lanes overlap, those
    on one lane follow each other, as on a device.
    """

    def __init__(self, to_card: float, to_host: float, *, within: float = 1e5) -> None:
        self.now = 0.0
        self.lane_free = [0.0, 0.0]
        self.to_card, self.to_host, self.within = to_card, to_host, within
        self._cards: set[int] = set()
        super().__init__(self.clock)

    def clock(self) -> float:
        return self.now

    def card(self, words: int) -> Any:
        made = super().card(words)
        self._cards.add(made.data_ptr())
        return made

    def copy(self, target: Any, source: Any, *, lane: int = 0) -> None:
        ends = source.data_ptr() in self._cards, target.data_ptr() in self._cards
        rate = {(False, True): self.to_card, (True, False): self.to_host}.get(ends, self.within)
        begun = max(self.now, self.lane_free[lane])
        self.lane_free[lane] = begun + target.numel() * 4 / rate / 1e6
        self.move(target, source)

    def move(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def mark(self, lane: int = 0) -> Any:
        return max(self.now, self.lane_free[lane])

    def wait(self) -> None:
        self.now = max(self.now, *self.lane_free)


class Zeroing(Clocked):
    """Its copies arrive as zeros."""

    def move(self, target: Any, source: Any) -> None:
        target.zero_()


class Caching(Clocked):
    """Answers from what it saw first: later copies leave the target as it is."""

    def __init__(self, *rates: float) -> None:
        super().__init__(*rates)
        self.seen: set[int] = set()

    def move(self, target: Any, source: Any) -> None:
        if target.data_ptr() not in self.seen:
            self.seen.add(target.data_ptr())
            target.copy_(source)


def test_the_content_is_the_formulas_and_changes_everywhere() -> None:
    buffer = torch.zeros(70_000, dtype=torch.int32)
    fill(buffer, 5)
    expected = (numpy.arange(70_000, dtype=numpy.uint64) * 2_654_435_761 + 5) % 2**32
    assert (buffer.numpy().view(numpy.uint32) == expected).all()
    before = buffer.clone()
    next_round([buffer])
    assert int((buffer == before).sum()) == 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [("h2d_pinned", 12_800.0), ("d2h_pageable", 3_200.0), ("d2d", 100_000.0)],
)
def test_a_rate_is_the_bytes_over_the_time(path: str, expected: float) -> None:
    mover = Clocked(12_800.0, 3_200.0)
    made = time_path(
        mover, Buffers.of(mover, MIB), path, budget_seconds=0, samples=9, clock=mover.clock
    )
    assert made.mb_s == pytest.approx(expected)
    assert made.event_mb_s == pytest.approx(expected)
    assert (len(made.wall_seconds), made.wrong, made.rounds) == (9, 0, 11)
    assert made.clocks_differ == made.wrong_content == ""
    assert made.spread == pytest.approx(0.0, abs=1e-6)


def test_at_least_seven_samples_or_three_times_the_budget() -> None:
    mover = Clocked(1000.0, 1000.0)
    buffers = Buffers.of(mover, MIB)  # 1.05 ms a copy
    made = time_path(mover, buffers, "h2d_pinned", budget_seconds=0.005, clock=mover.clock)
    assert len(made.wall_seconds) == 7
    made = time_path(mover, buffers, "h2d_pinned", budget_seconds=0.001, clock=mover.clock)
    assert len(made.wall_seconds) == 3


@pytest.mark.parametrize("device", [Zeroing, Caching])
@pytest.mark.parametrize("path", PATHS)
def test_content_that_does_not_arrive_makes_the_rate_suspect(
    device: type[Clocked], path: str
) -> None:
    mover = device(1e9, 1e9)
    made = time_path(
        mover, Buffers.of(mover, 4096), path, budget_seconds=0, samples=7, clock=mover.clock
    )
    assert made.wrong >= 8
    assert "arrived wrong" in doubt(made, Link())


def test_both_clocks_are_kept_and_a_disagreement_is_told() -> None:
    fast = Copies("h2d_pinned", 128_000_000, (0.02,) * 7, (0.01,) * 7)
    assert fast.mb_s == pytest.approx(6400)  # the wall clock counts
    assert fast.event_mb_s == pytest.approx(12800)
    assert fast.clocks_differ == (
        "to the GPU, pinned: 12,800 MB/s by the GPU's clock and 6,400 MB/s by the wall clock"
    )
    # 5 MB in 200 us, and 60 us of asking and waiting: that is what a call costs
    small = Copies("h2d_pinned", 5_000_000, (260e-6,) * 7, (200e-6,) * 7)
    assert small.clocks_differ == ""
    assert Copies("h2d_pinned", 8, (1.0,)).clocks_differ == ""


def test_both_directions_at_once_are_shown_apart() -> None:
    # field case 97: the wall clock sees the slower direction only, the device's sees each
    mover = Clocked(25_000.0, 11_000.0)
    up, down = time_both_ways(mover, Buffers.of(mover, MIB), clock=mover.clock)
    assert (up.path, down.path) == ("h2d_both", "d2h_both")
    assert up.mb_s == pytest.approx(25_000)
    assert down.mb_s == pytest.approx(11_000)
    assert up.wrong == down.wrong == 0
    bad = Zeroing(25_000.0, 11_000.0)
    assert time_both_ways(bad, Buffers.of(bad, 4096), clock=bad.clock)[0].wrong == 8


class Bus:
    """Devices on one bus: copies that are under way together share its rate."""

    def __init__(self, rate: float, own_rate: float) -> None:
        self.rate, self.own_rate, self.now = rate, own_rate, 0.0
        self.waiting: dict[Shared, int] = {}

    def clock(self) -> float:
        return self.now

    def drain(self) -> None:
        """Equal loads: all end together."""
        if self.waiting:
            each = min(self.own_rate, self.rate / len(self.waiting))
            self.now += max(self.waiting.values()) / each / 1e6
            self.waiting.clear()


class Shared(HostMover):
    """A device on a `Bus`."""

    def __init__(self, bus: Bus, device: str) -> None:
        super().__init__(bus.clock)
        self.bus, self.device = bus, device

    def copy(self, target: Any, source: Any, *, lane: int = 0) -> None:
        self.bus.waiting[self] = self.bus.waiting.get(self, 0) + target.numel() * 4
        target.copy_(source)

    def seconds(self, first: Any, second: Any) -> float | None:
        return None  # no clock of its own

    def wait(self) -> None:
        self.bus.drain()


@pytest.mark.parametrize(("bus_rate", "ratio"), [(12_000.0, 1 / 3), (36_000.0, 1.0)])
def test_together_over_alone_shows_a_shared_bus(bus_rate: float, ratio: float) -> None:
    bus = Bus(bus_rate, 12_000.0)
    movers = [Shared(bus, f"cuda:{n}") for n in range(3)]
    found = time_together(
        movers, [Buffers.of(m, 4096) for m in movers], "d2h", rounds=3, clock=bus.clock
    )
    assert found.alone_mb_s == pytest.approx((12_000.0,) * 3)
    assert found.ratios == pytest.approx((ratio,) * 3)


def test_the_large_size_follows_the_memory() -> None:
    assert large_bytes(512 * MIB, 80 * 2**30, 64 * 2**30) == 512 * MIB
    assert large_bytes(512 * MIB, 2 * 2**30, 64 * 2**30) == 256 * MIB
    assert large_bytes(512 * MIB, 80 * 2**30, 2400 * MIB) == 100 * MIB
    assert large_bytes(512 * MIB, 1, 1) == MIB


def test_the_whole_measurement_over_host_memory() -> None:
    loaded = [Gpu(0, {"pcie_generation": 1}), Gpu(0, {"pcie_generation": 4, "pcie_width": 16})]
    given = iter([loaded[:1], loaded])
    found = measure(HostMover(), MIB, 0.05, loaded=lambda: next(given))
    assert found.loaded == loaded[1:]  # what came before the large copies is left out
    assert set(found.small) == set(PATHS)
    assert all(c.wrong == 0 and c.mb_s > 0 for c in (*found.small.values(), *found.large.values()))
    gap = Unmeasured("gpu", Reason.NO_DEVICE, "torch sees one GPU here")
    made = {r.name: r for r in readings(found, Link(4, 16, 4, 16), gap)}
    assert set(made) == {metric.name for metric in METRICS}
    small = made["gpu.h2d_pinned_5mb_mb_s"]
    assert isinstance(small, Measurement)
    assert small.detail["size_bytes"] == 5_000_000
    assert small.samples == len(small.detail["wall_seconds"]) == len(small.detail["event_seconds"])
    together = made["gpu.copies_together_ratio"]
    assert isinstance(together, Unmeasured)
    assert together.reason is Reason.NO_DEVICE


def test_a_copy_faster_than_its_link_is_suspect_and_does_not_rank() -> None:
    fast = {p: Copies(p, 10**8, (1e-3,) * 7) for p in (*PATHS, "h2d_both", "d2h_both")}
    made = {
        r.name: r
        for r in readings(
            Measured(fast, fast, []), Link(4, 16, 4, 16), Unmeasured("gpu", Reason.NO_DEVICE)
        )
    }
    # 100 GB/s over the 31.5 of PCIe 4.0 x16
    for name in ("gpu.h2d_pinned_mb_s", "gpu.d2h_pageable_mb_s", "gpu.h2d_both_mb_s"):
        reading = made[name]
        assert isinstance(reading, Measurement)
        assert "3.17 times the 31,507 MB/s that a PCIe 4.0 x16 link" in reading.suspect
    assert made["gpu.d2d_5mb_mb_s"].suspect == ""  # type: ignore[union-attr]
    assert made["gpu.transfer_verdict"].suspect  # type: ignore[union-attr]
    assert isinstance(made["gpu.link_share_percent"], Unmeasured)


def test_the_public_call_describes_itself() -> None:
    made = public("cpu", 0.1, 3, mover=HostMover())
    text = made.describe()
    assert text.startswith("copies of 0.1 MB, cpu: PCIe, of unknown generation and width\n")
    assert text.count("MB/s") >= 5
    assert all(len(made.copies[path].wall_seconds) == 3 for path in PATHS)
    assert made.mb_s("d2d") == made.copies["d2d"].mb_s
    assert made.suspect("d2d") == ""
    zeros = public("cpu", 0.1, 3, mover=Zeroing(1e4, 1e4))
    assert zeros.describe().count("SUSPECT: 5 of 5 copies arrived wrong") == 5
    assert zeros.notes == []


@pytest.mark.parametrize(
    ("device", "mb", "n", "message"),
    [
        ("cpu", 5.0, 20, "give 'cuda:N'"),
        ("cuda:0", 0.0, 20, "at least one copy"),
        ("cuda:0", float("nan"), 20, "at least one copy"),
        ("cuda:0", 5.0, 0, "at least one copy"),
    ],
)
def test_impossible_arguments_are_refused(device: str, mb: float, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        public(device, mb, n)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no CUDA device"):
            public("cuda:0")


def test_it_does_not_apply_to_the_cpu() -> None:
    for name in ("transfer", "device_memory", "peer_copy"):
        for reading in run_one(probes()[name], Context(device="cpu")):
            assert isinstance(reading, Unmeasured)
            assert reading.reason is Reason.NO_DEVICE


@pytest.mark.parametrize(
    ("used", "reason"),
    [(900 * MIB, None), (9 * 2**30, Reason.BUSY), (None, Reason.NOT_SUPPORTED)],
)
def test_a_sister_that_somebody_uses_is_not_touched(
    used: int | None, reason: Reason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"uuid": "GPU-b"} | ({} if used is None else {"memory_used_bytes": used})
    report = Report(
        gpus=[Gpu(0, {"uuid": "GPU-a", "memory_used_bytes": 30 * 2**30}), Gpu(1, values)]
    )
    context = Context(device="cuda:1", cache={"nvml": report})
    # torch counts the other way round: its cuda:0 is NVML's number 1
    monkeypatch.setattr(
        _sisters, "torch_gpu", lambda _: SimpleNamespace(index=0, uuid="GPU-b", pci_bus_id="")
    )
    found = others_idle(context, own=1, count=2)
    if reason is None:
        assert found == ["cuda:0"]
    else:
        assert isinstance(found, Unmeasured)
        assert found.reason is reason
    alone = others_idle(context, own=0, count=1)
    assert isinstance(alone, Unmeasured)
    assert alone.reason is Reason.NO_DEVICE


def test_the_registered_run_with_a_gpu_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"mem_get_info": (16 * MIB, 16 * MIB), "device_count": 1, "is_available": False}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(transfer, "CudaMover", lambda _: HostMover())
    made = {r.name: r for r in transfer.run(Context(device="cuda:0", budget_seconds=0.05))}
    assert set(made) == {metric.name for metric in METRICS}
    large = made["gpu.h2d_pinned_mb_s"]
    assert isinstance(large, Measurement)
    assert large.detail["size_bytes"] == 2 * MIB  # an eighth of what is free on the card
    assert isinstance(made["gpu.link_share_percent"], Unmeasured)


class FakeStream:
    def __init__(self, device: str) -> None:
        self.device = device


class FakeEvent:
    """Records on a stream; 12.5 ms lie between any two."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream

    def elapsed_time(self, other: Any) -> float:
        assert other.stream is self.stream
        return 12.5  # milliseconds, as CUDA gives them


def test_the_cuda_mover_keeps_its_lanes_apart_and_its_units_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[Any] = []

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    waited: list[str] = []
    fakes = {"Stream": FakeStream, "Event": FakeEvent, "stream": on, "synchronize": waited.append,
             "empty_cache": lambda: waited.append("emptied")}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    mover = CudaMover("cuda:1")
    target, source = torch.zeros(4), torch.ones(4)
    first = mover.mark(1)
    mover.copy(target, source, lane=1)
    second = mover.mark(1)
    assert torch.equal(target, source)
    assert entered == [first.stream]
    assert mover.mark(0).stream is not first.stream
    assert mover.seconds(first, second) == 0.0125
    mover.wait()
    mover.release()
    assert waited == ["cuda:1", "emptied"]
