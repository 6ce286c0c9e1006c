"""Matrix products: operations by formula, time by a known clock, results against fp64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pichak_core.measure import Context, Metric, matmul, probes, run_one  # noqa: E402
from pichak_core.measure._torch import settings  # noqa: E402
from pichak_core.measure.matmul import (  # noqa: E402
    CPU_BF16,
    CPU_FP32,
    GPU_TF32,
    Case,
    disagreement,
    flop_count,
    measure,
    pool_bytes,
    stretches,
    sustained,
)
from pichak_core.measurement import Measurement, Reason, Unmeasured  # noqa: E402

MIB = 2**20


def storage(matrices: int, size: int, bytes_each: int) -> torch.Tensor:
    return torch.empty(matrices * size * size * bytes_each, dtype=torch.uint8)


def test_operations_by_counting_them() -> None:
    n = 5
    counted = sum(2 for _ in itertools.product(range(n), range(n), range(n)))
    assert flop_count(n) == counted
    assert flop_count(n, products=3) == 3 * counted
    assert flop_count(8192) == 1_099_511_627_776


def test_the_pool_outgrows_the_caches_within_the_limit() -> None:
    assert pool_bytes(260 * MIB, 4 * MIB, 3000 * MIB) == 325 * MIB + 8 * MIB
    assert pool_bytes(260 * MIB, 4 * MIB, 100 * MIB) == 100 * MIB
    assert pool_bytes(260 * MIB, 4 * MIB, 1 * MIB) == 12 * MIB  # three matrices are needed


def test_stretches_fill_the_budget_and_are_long_enough_to_time() -> None:
    now = 0.0

    def product() -> None:
        nonlocal now
        now += 0.004

    done = stretches(product, lambda: None, 1.0, lambda: now)
    # 4 ms a product: 5 make 20 ms, and 50 such stretches a second
    assert [count for _, count in done] == [5] * 50
    assert [seconds for seconds, _ in done] == pytest.approx([0.02] * 50)


def test_a_slow_product_is_still_run_three_times() -> None:
    now = 0.0

    def product() -> None:
        nonlocal now
        now += 9.0

    assert stretches(product, lambda: None, 1.0, lambda: now) == [(9.0, 1)] * 3


def test_the_sustained_part_is_what_comes_after_the_burst() -> None:
    # 5 fast stretches, then clocks settle lower
    rates = [260.0] * 5 + [128.0] * 5
    assert sustained(rates) == [128.0] * 5
    assert sustained([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


def test_the_rate_is_the_formula_over_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        return now

    real = torch.mm

    def mm(*arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal now
        now += 0.001
        return real(*arguments, **named)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(matmul.time, "perf_counter", clock)
    case = Case(CPU_FP32, "float32", "highest", "cpu", 64)
    made = measure(case, storage(4, 64, 4), budget_seconds=0.2, threads=1)
    assert float(made.value) == pytest.approx(2 * 64**3 / 0.001 / 1e9)
    assert made.detail["max"] == pytest.approx(made.value)
    assert made.suspect == ""
    tera = Case(Metric("x_tflop_s", "TFLOP/s", ""), "float32", "highest", "cpu", 64)
    made = measure(tera, storage(4, 64, 4), budget_seconds=0.2, threads=1)
    assert float(made.value) == pytest.approx(2 * 64**3 / 0.001 / 1e12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_products_agree_and_wrong_ones_do_not(dtype: str) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(128, 128, generator=generator).to(kind) for _ in range(2))
    case = Case(CPU_BF16, dtype, "highest", "cpu", 128)
    out = torch.mm(a, b)
    assert disagreement(a, b, out, case) == ""
    wrong = out.clone()
    wrong[0, 17] += 8
    assert disagreement(a, b, wrong, case)
    assert disagreement(a, b, torch.full_like(out, float("nan")), case)
    assert disagreement(b, a, out, case)


def test_tf32_is_allowed_its_own_rounding() -> None:
    # TF32 keeps 10 bits of each operand's fraction.
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) + 0x1000).bitwise_and(-0x2000).view(torch.float32)

    out = rounded(a) @ rounded(b)
    assert disagreement(a, b, out, Case(GPU_TF32, "float32", "high", "cpu", 256)) == ""
    assert disagreement(a, b, out, Case(GPU_TF32, "float32", "highest", "cpu", 256))


def test_operands_are_random_and_each_matrix_is_another() -> None:
    pool = matmul._fill(storage(6, 64, 2), 64, torch.bfloat16)
    assert pool.shape == (6, 64, 64)
    assert len({tuple(matrix.flatten().tolist()) for matrix in pool}) == 6
    assert abs(float(pool.float().mean())) < 0.05
    assert float(pool.float().std()) == pytest.approx(1.0, abs=0.05)


def test_the_callers_torch_is_as_it_was() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    state = torch.random.get_rng_state()
    case = Case(CPU_FP32, "float32", "high", "cpu", 64)
    measure(case, storage(4, 64, 4), budget_seconds=0.01, threads=threads + 1)
    with pytest.raises(RuntimeError), settings(threads=1, precision="medium"):  # type: ignore[arg-type]
        raise RuntimeError("in the middle")
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(torch.random.get_rng_state(), state)


def test_on_the_cpu(tmp_path: Path) -> None:
    cache = tmp_path / "sys/devices/system/cpu/cpu0/cache/index3"
    cache.mkdir(parents=True)
    for name, text in (("level", "3"), ("size", "4096K"), ("shared_cpu_list", "0-1")):
        (cache / name).write_text(text)
    probe = replace(probes()["matmul"], budget_seconds={"quick": 0.3, "full": 0.3})
    made = {r.name: r for r in run_one(probe, Context(device="cpu", sys=tmp_path / "sys"))}
    for name in ("cpu.matmul_fp32_gflop_s", "cpu.matmul_bf16_gflop_s"):
        rate = made[name]
        assert isinstance(rate, Measurement)
        assert 0 < float(rate.value) <= rate.detail["max"]
        assert rate.suspect == ""
        assert rate.samples >= 3
    gap = made["gpu.matmul_bf16_tflop_s"]
    assert isinstance(gap, Unmeasured)
    assert gap.reason is Reason.NO_DEVICE


def test_a_gpu_gets_the_precisions_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # Turing: no bf16 or TF32 in hardware; its fp16 product fails, which costs that one alone.
    seen: list[tuple[str, str, int]] = []
    ceilings: list[float | None] = []

    def fake(case: Case, kept: torch.Tensor, budget_seconds: float) -> Measurement:
        seen.append((case.dtype, case.precision, case.size))
        ceilings.append(case.ceiling)
        if case.dtype == "float16":
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return Measurement(case.metric.name, 8.0, "TFLOP/s", "a fake")

    real = torch.empty
    for name, answer in {
        "get_device_capability": (7, 5),
        "mem_get_info": (2 * 2**30, 15 * 2**30),
        "get_device_properties": SimpleNamespace(
            major=7,
            minor=5,
            multi_processor_count=40,
            clock_rate=1_590_000,
            L2_cache_size=4 * MIB,
        ),
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: real(1, dtype=dtype))
    monkeypatch.setattr(matmul, "measure", fake)
    made = {r.name: r for r in matmul.run(Context(device="cuda:0"))}
    for name in ("gpu.matmul_bf16_tflop_s", "gpu.matmul_tf32_tflop_s"):
        gap = made[name]
        assert isinstance(gap, Unmeasured)
        assert "7.5" in gap.detail
    failed = made["gpu.matmul_fp16_tflop_s"]
    assert isinstance(failed, Unmeasured)
    assert "CUBLAS" in failed.detail
    assert isinstance(made["gpu.matmul_fp32_tflop_s"], Measurement)
    assert isinstance(made["cpu.matmul_fp32_gflop_s"], Unmeasured)
    # 2 GiB are free: four fp32 matrices in a quarter of them are 4096 wide at most
    assert seen == [("float16", "highest", 4096), ("float32", "highest", 4096)]
    assert ceilings == pytest.approx([65.1, 8.14], rel=1e-3)  # a T4's data sheet


def test_more_than_the_units_can_do_is_suspect() -> None:
    case = Case(CPU_FP32, "float32", "highest", "cpu", 64, ceiling=1e-3)
    made = measure(case, storage(4, 64, 4), budget_seconds=0.01, threads=1)
    assert "0.001 GFLOP/s that the device's units do at its clock" in made.suspect
    case = replace(case, ceiling=1e9)
    assert measure(case, storage(4, 64, 4), budget_seconds=0.01, threads=1).suspect == ""
