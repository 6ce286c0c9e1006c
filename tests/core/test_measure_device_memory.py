"""A GPU's own memory: rates by a known clock, and rates that no memory has."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from pichak_core.measure import Context, device_memory  # noqa: E402
from pichak_core.measure._copies import Copies  # noqa: E402
from pichak_core.measure._mover import HostMover  # noqa: E402
from pichak_core.measure._peaks import Part  # noqa: E402
from pichak_core.measure.device_memory import (  # noqa: E402
    copy_bytes,
    doubt,
    readings,
    time_copies,
)
from pichak_core.measurement import Fingerprint, Measurement, Unmeasured  # noqa: E402

MIB = 2**20
#: An H100 SXM: 3.35 TB/s, so a copy reaches 1.68 TB/s at most.
H100 = Part((9, 0), 132, 1_980_000, 2_619_000, 5_120, 50 * MIB, False)


def copies(gb_s: float, size: int = 400 * MIB, wrong: int = 0) -> Copies:
    return Copies("d2d", size, (size / gb_s / 1e9,) * 9, (), wrong, 11)


def test_buffers_outgrow_the_cache_within_the_memory() -> None:
    assert copy_bytes(50 * MIB, 80 * 2**30) == 400 * MIB
    assert copy_bytes(None, 80 * 2**30) == 1024 * MIB
    assert copy_bytes(128 * MIB, 80 * 2**30) == 1024 * MIB
    assert copy_bytes(50 * MIB, 800 * MIB) == 100 * MIB
    assert copy_bytes(50 * MIB, 10) == MIB


def test_the_copy_really_runs() -> None:
    made = time_copies(HostMover(), MIB, 0.01)
    assert made.wrong == 0
    assert made.size_bytes == MIB
    assert made.mb_s > 10


def test_read_and_written_bytes_are_held_against_the_peak() -> None:
    copy, share = readings(copies(1508), H100, 2_619_000)
    assert isinstance(copy, Measurement)
    assert isinstance(share, Measurement)
    assert float(copy.value) == pytest.approx(1_508_000)
    assert float(share.value) == pytest.approx(100 * 2 * 1508 / 3352, rel=1e-3)
    assert copy.suspect == share.suspect == ""


def test_faster_than_the_part_is_suspect_and_never_ranks() -> None:
    made = Fingerprint()
    for reading in readings(copies(2500), H100, 2_619_000):
        made.add(reading)
    copy = made["gpu.memory_copy_mb_s"]
    assert isinstance(copy, Measurement)
    assert "1.49 times the 1,676,160 MB/s that a copy can reach" in copy.suspect
    assert made.number("gpu.memory_copy_mb_s") is None


def test_what_fits_in_the_cache_or_arrives_wrong_is_suspect() -> None:
    assert "fit in 50 MiB of cache" in doubt(copies(1500, 20 * MIB), None, 50 * MIB)
    assert "3 of 11 copies arrived wrong" in doubt(copies(1500, wrong=3), None, 50 * MIB)
    assert doubt(copies(1500), None, None) == ""


def test_without_a_clock_or_a_bus_width_there_is_no_share() -> None:
    for part, clock in ((H100, None), (replace(H100, bus_bits=None), 2_619_000)):
        copy, share = readings(copies(9e9), part, clock)
        assert isinstance(copy, Measurement)
        assert copy.suspect == ""
        assert isinstance(share, Unmeasured)


def test_the_registered_run_with_a_gpu_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("mem_get_info", (16 * MIB, 16 * MIB)), ("is_available", False)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    monkeypatch.setattr(
        device_memory, "Part", type("Fake", (), {"of": staticmethod(lambda _: H100)})
    )
    monkeypatch.setattr(device_memory, "CudaMover", lambda _: HostMover())
    copy, share = device_memory.run(Context(device="cuda:0", budget_seconds=0.02))
    assert isinstance(copy, Measurement)
    assert copy.detail["size_bytes"] == 2 * MIB
    assert isinstance(share, Measurement)
