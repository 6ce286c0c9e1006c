"""Ceilings from published data sheets, and results beyond them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pichak_core.measure._peaks import Part, link_mb_s, matmul_tflop_s, memory_mb_s
from pichak_core.measure._suspect import beyond, reasons


@pytest.mark.parametrize(
    ("generation", "width", "gb_s"),
    [(1, 1, 0.25), (2, 16, 8.0), (3, 16, 15.75), (4, 16, 31.5), (5, 16, 63.0), (6, 16, 121.0)],
)
def test_links_carry_what_their_specification_says(
    generation: int, width: int, gb_s: float
) -> None:
    assert link_mb_s(generation, width) == pytest.approx(gb_s * 1000, rel=2e-3)


@pytest.mark.parametrize(("generation", "width"), [(None, 16), (4, None), (4, 0), (9, 16)])
def test_an_unknown_link_has_no_ceiling(generation: int | None, width: int | None) -> None:
    assert link_mb_s(generation, width) is None


@pytest.mark.parametrize(
    ("mhz", "bits", "gb_s"),
    [
        (9_751, 384, 936),  # RTX 3090
        (10_501, 384, 1_008),  # RTX 4090
        (5_001, 256, 320),  # T4
        (1_215, 5_120, 1_555),  # A100 40 GB
        (2_619, 5_120, 3_352),  # H100 SXM
    ],
)
def test_memory_peaks_are_the_data_sheets(mhz: int, bits: int, gb_s: float) -> None:
    assert memory_mb_s(mhz * 1e3, bits) == pytest.approx(gb_s * 1000, rel=2e-3)
    assert memory_mb_s(None, bits) is None
    assert memory_mb_s(mhz, None) is None


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "mhz", "half", "fp32"),
    [
        ((7, 5), 40, 1_590, 65, 8.1),  # T4
        ((8, 0), 108, 1_410, 312, 19.5),  # A100
        ((9, 0), 132, 1_830, 989, 61.9),  # H100 SXM
        ((8, 9), 142, 2_520, 366, 91.6),  # L40S
    ],
)
def test_arithmetic_peaks_are_the_data_sheets(
    capability: tuple[int, int], multiprocessors: int, mhz: int, half: float, fp32: float
) -> None:
    def peak(kind: str) -> float | None:
        return matmul_tflop_s(capability, multiprocessors, mhz * 1e3, kind)  # type: ignore[arg-type]

    assert peak("half") == pytest.approx(half, rel=0.01)
    assert peak("tf32") == pytest.approx(half / 2, rel=0.01)
    assert peak("fp32") == pytest.approx(fp32, rel=0.01)
    assert matmul_tflop_s((6, 1), 20, 1e6, "half") is None
    assert matmul_tflop_s(capability, multiprocessors, None, "half") is None


def test_a_part_is_read_from_any_age_of_torch() -> None:
    old = SimpleNamespace(major=8, minor=6, multi_processor_count=82, name="x")
    part = Part.of(old)
    assert (part.capability, part.multiprocessors) == ((8, 6), 82)
    assert part.clock_khz is part.memory_clock_khz is part.bus_bits is part.cache_bytes is None
    assert not part.integrated
    new = SimpleNamespace(
        **vars(old), clock_rate=0, memory_clock_rate=9_751_000, memory_bus_width=384,
        L2_cache_size=6 * 2**20, is_integrated=1,
    )  # fmt: skip
    part = Part.of(new)
    assert part.clock_khz is None  # 0 is "not said"
    assert (part.memory_clock_khz, part.bus_bits) == (9_751_000, 384)
    assert part.integrated


def test_what_is_beyond_a_ceiling_says_by_how_much() -> None:
    assert beyond(104.9, 100.0, "MB/s", "it carries") == ""
    assert beyond(1e9, None, "MB/s", "it carries") == ""
    assert beyond(130.0, 100.0, "MB/s", "this link carries at most") == (
        "1.30 times the 100 MB/s that this link carries at most: a cache or a bug answered"
    )
    assert reasons("", "one", "", "two") == "one; two"
