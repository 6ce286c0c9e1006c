"""How fast a GPU's own memory copies. On the CPU that is `host_memory`'s copy rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._copies import Buffers, Copies, time_path
from pichak_core.measure._mover import WORD, CudaMover, Mover
from pichak_core.measure._peaks import Part, memory_mb_s
from pichak_core.measure._readings import nvml_gpu
from pichak_core.measure._suspect import beyond, reasons
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured
from pichak_core.plan import format_number

MIB = 2**20

COPY = Metric("gpu.memory_copy_mb_s", "MB/s", "copied within the GPU's memory; a byte counts once")
SHARE = Metric("gpu.memory_peak_share_percent", "%", "read and written over the memory's peak")
METRICS = (COPY, SHARE)

_LARGEST = 1024 * MIB
_DEFAULT_CACHE_BYTES = 128 * MIB


def copy_bytes(cache_bytes: int | None, free_bytes: int) -> int:
    """The size of each of two buffers: eight times the cache, so that what is left in it from the
    round before does not count; at most 1 GiB and an eighth of what is free."""
    wanted = 8 * (cache_bytes or _DEFAULT_CACHE_BYTES)
    return max(MIB, min(wanted, _LARGEST, free_bytes // 8) // MIB * MIB)


def _card_only(mover: Mover, size_bytes: int) -> Buffers:
    """Two buffers on the card and next to nothing on the host."""
    words = size_bytes // WORD
    nothing = mover.host(1, pinned=False)
    return Buffers(words, [nothing, nothing], nothing, [mover.card(words) for _ in range(2)])


def time_copies(
    mover: Mover,
    size_bytes: int,
    budget_seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Copies:
    """Copies of `size_bytes` within the device; raises what the device raises."""
    buffers = _card_only(mover, size_bytes)
    try:
        return time_path(mover, buffers, "d2d", budget_seconds=budget_seconds, clock=clock)
    finally:
        del buffers
        mover.release()


def doubt(made: Copies, peak_mb_s: float | None, cache_bytes: int | None) -> str:
    """Why a rate cannot be the memory's; "" when it can. A copy reads a byte and writes one."""
    small = ""
    if cache_bytes and 2 * made.size_bytes < cache_bytes:
        small = (
            f"the {2 * made.size_bytes // MIB} MiB that could be had fit in "
            f"{cache_bytes // MIB} MiB of cache"
        )
    half = None if peak_mb_s is None else peak_mb_s / 2
    what = "a copy can reach at the memory's clock and bus width"
    return reasons(made.wrong_content, small, beyond(made.mb_s, half, "MB/s", what))


def readings(made: Copies, part: Part, clock_khz: float | None) -> Iterable[Reading]:
    """Both metrics; `clock_khz` is the memory's. Pure."""
    peak = memory_mb_s(clock_khz, part.bus_bits)
    suspect = doubt(made, peak, part.cache_bytes)
    yield Measurement(
        COPY.name,
        made.mb_s,
        COPY.unit,
        f"copies of {made.size_bytes // MIB} MiB within the GPU's memory, wall clock, new content "
        "each round and checked; median",
        samples=len(made.wall_seconds),
        spread=made.spread,
        suspect=suspect,
        detail={**made.as_dict(), "peak_mb_s": peak, "clocks": made.clocks_differ},
    )
    if peak is None:
        detail = "neither torch nor NVML gives the memory's clock and bus width"
        yield Unmeasured(SHARE.name, Reason.NOT_SUPPORTED, detail)
        return
    yield Measurement(
        SHARE.name,
        200 * made.mb_s / peak,
        SHARE.unit,
        f"read and written bytes over {format_number(peak)} MB/s: two transfers a clock of "
        f"{(clock_khz or 0) / 1e3:,.0f} MHz over {part.bus_bits or 0:,.0f} bits",
        samples=len(made.wall_seconds),
        suspect=suspect,
    )


def run(context: Context) -> Iterable[Reading]:
    import torch

    part = Part.of(torch.cuda.get_device_properties(context.device))
    free, _ = torch.cuda.mem_get_info(context.device)
    size = copy_bytes(part.cache_bytes, int(free))
    made = time_copies(CudaMover(context.device), size, 0.6 * context.budget_seconds)
    gpu = nvml_gpu(context)
    mhz = None if isinstance(gpu, Unmeasured) else gpu.number("memory_clock_max_mhz")
    # Integrated parts have the system's memory, whose clock neither names as it is here.
    clock = None if part.integrated else (mhz * 1e3 if mhz else part.memory_clock_khz)
    yield from readings(made, part, clock)


register(
    Probe(
        "device_memory",
        METRICS,
        run,
        {"quick": 1.0, "full": 5.0},
        needs=("torch",),
        devices=("cuda",),
    )
)
