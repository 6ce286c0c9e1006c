"""Matrix products: sustained arithmetic in each precision that the device has.

Operands are random (zeros draw less power and clock higher) and rotate through a pool larger than
the last-level cache, so that each product reads memory as training does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._peaks import Kind, Part, matmul_tflop_s
from pichak_core.measure._readings import gap, host_of, is_cuda, tried
from pichak_core.measure._suspect import beyond, reasons
from pichak_core.measure._torch import Precision, settings, waiter
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured, median_and_spread

if TYPE_CHECKING:
    import torch

CPU_FP32 = Metric("cpu.matmul_fp32_gflop_s", "GFLOP/s", "fp32 matrix products on all usable cores")
CPU_BF16 = Metric("cpu.matmul_bf16_gflop_s", "GFLOP/s", "bf16 matrix products on all usable cores")
GPU_BF16 = Metric("gpu.matmul_bf16_tflop_s", "TFLOP/s", "bf16 matrix products")
GPU_FP16 = Metric("gpu.matmul_fp16_tflop_s", "TFLOP/s", "fp16 matrix products")
GPU_TF32 = Metric("gpu.matmul_tf32_tflop_s", "TFLOP/s", "fp32 matrix products through TF32")
GPU_FP32 = Metric("gpu.matmul_fp32_tflop_s", "TFLOP/s", "fp32 matrix products, no TF32")

_CPU_SIZE = 1024
_GPU_SIZE = 8192
_DEFAULT_CACHE_BYTES = 128 * 2**20
#: The shortest stretch that is timed, so that starting and waiting do not count.
_STRETCH_SECONDS = 0.02


@dataclass(frozen=True)
class Case:
    """One product to time: `size` rows and columns, on `device`. `ceiling` is what the device can
    do at most, in the metric's unit; None where nobody knows."""

    metric: Metric
    dtype: str
    precision: Precision
    device: str
    size: int
    ceiling: float | None = None


def flop_count(size: int, products: int = 1) -> int:
    """Each of size² results takes `size` multiplications and as many additions."""
    return 2 * size**3 * products


def pool_bytes(cache_bytes: int, largest_matrix_bytes: int, limit_bytes: int) -> int:
    """How much memory operands rotate through: a quarter more than the caches and two matrices,
    within the limit; three matrices are needed at least."""
    wanted = cache_bytes * 5 // 4 + 2 * largest_matrix_bytes
    return max(3 * largest_matrix_bytes, min(wanted, limit_bytes))


def stretches(
    product: Callable[[], object],
    wait: Callable[[], None],
    budget_seconds: float,
    clock: Callable[[], float],
) -> list[tuple[float, int]]:
    """(seconds, products) of stretches that fill the budget; at least three.

    The first product warms up and sets how many make a stretch.
    """
    product()
    wait()
    begun = clock()
    product()
    wait()
    one = max(clock() - begun, 1e-9)
    count = max(1, math.ceil(_STRETCH_SECONDS / one))
    done: list[tuple[float, int]] = []
    started = clock()
    while len(done) < 3 or clock() - started < budget_seconds:
        begun = clock()
        for _ in range(count):
            product()
        wait()
        done.append((clock() - begun, count))
    return done


def sustained(rates: Sequence[float]) -> list[float]:
    """The second half of a run: what is left once clocks and temperature have settled."""
    return list(rates[len(rates) // 2 :]) if len(rates) >= 6 else list(rates)


def measure(
    case: Case, storage: torch.Tensor, budget_seconds: float, threads: int | None = None
) -> Measurement:
    """Time one case over the bytes of `storage`, which are overwritten; `threads` is for the CPU.
    Raises what torch raises."""
    import torch

    dtype: torch.dtype = getattr(torch, case.dtype)
    with torch.no_grad(), settings(threads=threads, precision=case.precision):
        pool = _fill(storage, case.size, dtype)
        count = len(pool)
        out = torch.empty_like(pool[0])
        turn = 0

        def product() -> None:
            nonlocal turn
            torch.mm(pool[turn % count], pool[(turn + 1) % count], out=out)
            turn += 1

        wait = waiter(case.device)
        timed = stretches(product, wait, budget_seconds, time.perf_counter)
        last = (pool[(turn - 1) % count], pool[turn % count])
        wrong = disagreement(last[0], last[1], out, case)
    giga = case.metric.unit == "GFLOP/s"
    unit = 1e9 if giga else 1e12
    rates = [flop_count(case.size, n) / seconds / unit for seconds, n in timed]
    kept = sustained(rates)
    middle, spread = median_and_spread(kept)
    where = f"{threads} threads" if threads else case.device
    return Measurement(
        case.metric.name,
        middle,
        case.metric.unit,
        f"{sum(n for _, n in timed)} products of random {case.size} x {case.size} matrices from a "
        f"pool of {count} ({pool.nbytes // 2**20} MiB) on {where}, 2 n^3 operations each; "
        "median of the second half of the run",
        samples=len(kept),
        spread=spread,
        suspect=reasons(
            wrong,
            beyond(middle, case.ceiling, case.metric.unit, "the device's units do at its clock"),
        ),
        detail={"max": max(rates), "early": rates[0], "late": rates[-1], "samples": rates},
    )


def disagreement(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, case: Case) -> str:
    """Whether the product's first row is what fp64 says it is; empty when it is.

    The error of a dot product is bounded by its length's roundings of sum |a||b|; each precision
    rounds inputs or results by its own epsilon.
    """
    import torch

    row, columns = a[0].double(), b.double() if case.size <= 2048 else b[:, :64].double()
    true = row @ columns
    scale = row.abs() @ columns.abs()
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-10}.get(case.dtype, 2.0**-23)
    if case.precision == "high":
        epsilon = 2.0**-10
    got = out[0, : true.numel()].double()
    tolerance = (2 * epsilon + math.sqrt(case.size) * 2.0**-23) * scale
    if bool(torch.isfinite(got).all()) and bool(((got - true).abs() <= tolerance).all()):
        return ""
    return "the product is not what its operands give"


def _fill(storage: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """`storage` (bytes) as count x size x size random numbers of `dtype`: windows, some cache
    lines apart, of one random run."""
    import torch

    step, device = 1088, storage.device
    count = storage.numel() // (size * size * dtype.itemsize)
    pool = storage[: count * size * size * dtype.itemsize].view(dtype).view(count, size, size)
    generator = torch.Generator(device=device).manual_seed(0)
    run = torch.randn(size * size + step * count, generator=generator, device=device).to(dtype)
    for place in range(count):
        pool[place].view(-1).copy_(run[step * place : step * place + size * size])
    return pool


def _cpu(context: Context) -> Iterable[Reading]:
    import torch

    host = host_of(context)
    caches = tried(host.last_level_cache_bytes)
    usable = tried(host.usable_memory_bytes)
    threads, _ = host.usable_cores()
    size = pool_bytes(
        caches if isinstance(caches, int) else _DEFAULT_CACHE_BYTES,
        _CPU_SIZE**2 * 4,
        (usable[0] if isinstance(usable, tuple) else 2**30) // 8,
    )
    storage = torch.empty(size, dtype=torch.uint8)
    for metric, dtype in ((CPU_FP32, "float32"), (CPU_BF16, "bfloat16")):
        case = Case(metric, dtype, "highest", "cpu", _CPU_SIZE)
        yield measure(case, storage, 0.3 * context.budget_seconds, threads)


def _gpu(context: Context) -> Iterable[Reading]:
    import torch

    major, minor = torch.cuda.get_device_capability(context.device)
    free, _ = torch.cuda.mem_get_info(context.device)
    properties = torch.cuda.get_device_properties(context.device)
    part = Part.of(properties)
    cache = part.cache_bytes or _DEFAULT_CACHE_BYTES
    ampere = bool(torch.version.hip) or major >= 8
    size = _GPU_SIZE
    while size > 1024 and 4 * size**2 * 4 > free // 4:
        size //= 2
    shape = pool_bytes(cache, size**2 * 4, free // 4)
    storage = torch.empty(shape, dtype=torch.uint8, device=context.device)
    cases: tuple[tuple[Metric, str, Precision, bool], ...] = (
        (GPU_BF16, "bfloat16", "highest", ampere),
        (GPU_FP16, "float16", "highest", True),
        (GPU_TF32, "float32", "high", ampere and not torch.version.hip),
        (GPU_FP32, "float32", "highest", True),
    )
    for metric, dtype, precision, has in cases:
        if not has:
            detail = f"compute capability {major}.{minor} does not have it in hardware"
            yield Unmeasured(metric.name, Reason.NOT_SUPPORTED, detail)
            continue
        try:
            case = Case(metric, dtype, precision, context.device, size, _ceiling(part, metric))
            yield measure(case, storage, 0.2 * context.budget_seconds)
        except RuntimeError as error:
            yield gap(metric, error)
    del storage
    torch.cuda.empty_cache()


def _ceiling(part: Part, metric: Metric) -> float | None:
    import torch

    if torch.version.hip:  # its capability numbers are other architectures'
        return None
    kind: Kind = {GPU_TF32: "tf32", GPU_FP32: "fp32"}.get(metric, "half")  # type: ignore[assignment]
    return matmul_tflop_s(part.capability, part.multiprocessors, part.clock_khz, kind)


def run(context: Context) -> Iterable[Reading]:
    other, absent = ("CPU", CPU) if is_cuda(context) else ("GPU", GPU)
    for metric in absent:
        detail = f"this is the fingerprint of {context.device}, not of a {other}"
        yield Unmeasured(metric.name, Reason.NO_DEVICE, detail)
    yield from _gpu(context) if is_cuda(context) else _cpu(context)


CPU = (CPU_FP32, CPU_BF16)
GPU = (GPU_BF16, GPU_FP16, GPU_TF32, GPU_FP32)

register(Probe("matmul", (*CPU, *GPU), run, {"quick": 2.5, "full": 30.0}, needs=("torch",)))
