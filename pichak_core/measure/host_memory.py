"""The machine's memory: how much, how much of it can be had, how fast it copies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from pichak_core.devices.host import Host
from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._readings import attempt, gap, host_of, nvml_gpu, tried
from pichak_core.measure._sampling import collect
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured, median_and_spread

MIB = 2**20

TOTAL = Metric("host.memory_total_mib", "MiB", "memory of the machine")
USABLE = Metric("host.memory_usable_mib", "MiB", "memory that this process can have now")
COPY = Metric("host.memory_copy_mb_s", "MB/s", "memory copied by all usable cores together")
SHARED = Metric("host.shm_mib", "MiB", "size of /dev/shm")
NUMA = Metric("gpu.numa_node", "", "the NUMA node that the GPU hangs on")

_DEFAULT_BUFFER = 256 * MIB
_SMALLEST_BUFFER, _LARGEST_BUFFER = 32 * MIB, 1024 * MIB
#: No machine's memory moves 20 TB/s; a copy reads and writes, so half of that.
_IMPOSSIBLE_MB_S = 10e6


def buffer_bytes(cache_bytes: int | None, usable_bytes: int) -> int:
    """The size of each of the two buffers: together twice the caches, at most a quarter of what
    this process can have. A multiple of 1 MiB."""
    wanted = max(_SMALLEST_BUFFER, cache_bytes or _DEFAULT_BUFFER)
    return max(MIB, min(wanted, _LARGEST_BUFFER, usable_bytes // 8) // MIB * MIB)


def _buffers(size: int) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
    """Two buffers of `size` bytes, both written once: memory that was never written is one shared
    page of zeros, and reading that is reading a cache."""
    source, target = (ctypes.c_char * size)(), (ctypes.c_char * size)()
    tile = os.urandom(MIB)
    for start in range(0, size, MIB):
        ctypes.memmove(ctypes.addressof(source) + start, tile, min(MIB, size - start))
    return source, target


class CopyError(RuntimeError):
    """The bytes that arrived are not the bytes that were sent."""


def copy_rates(
    size: int, threads: int, budget_seconds: float, clock: Callable[[], float]
) -> list[float]:
    """MB/s of copying `size` bytes with `threads` threads, new content each round, checked.

    Every byte counts once, though it is read and written. `CopyError` when one arrives wrong.
    """
    # One cache line of a slice changes each round and is looked for at the other end.
    part = size // threads // 64 * 64
    starts = [part * i for i in range(threads)]
    lengths = [*[part] * (threads - 1), size - part * (threads - 1)]
    buffers = _buffers(size)
    source, target = (ctypes.addressof(buffer) for buffer in buffers)
    with ThreadPoolExecutor(threads) as pool:
        round_number = 0

        def sample() -> float:
            nonlocal round_number
            round_number += 1
            stamp = round_number.to_bytes(8, "little")
            for start, length in zip(starts, lengths, strict=True):
                ctypes.memmove(source + start + length - 8, stamp, 8)
            begun = clock()
            jobs = [
                pool.submit(ctypes.memmove, target + start, source + start, length)
                for start, length in zip(starts, lengths, strict=True)
            ]
            for job in jobs:
                job.result()
            seconds = clock() - begun
            for start, length in zip(starts, lengths, strict=True):
                if ctypes.string_at(target + start + length - 8, 8) != stamp:
                    raise CopyError(f"byte {start + length - 8} of a copy holds an old value")
            return size / seconds / 1e6

        sample()
        return collect(sample, budget_seconds=budget_seconds, clock=clock)


def doubt(median_mb_s: float, size: int, cache_bytes: int | None) -> str:
    """Why a rate cannot be the memory's; empty when it can."""
    if median_mb_s > _IMPOSSIBLE_MB_S:
        return "faster than any memory"
    if cache_bytes is not None and 2 * size < cache_bytes:
        return (
            f"the {2 * size // MIB} MiB that could be had fit in {cache_bytes // MIB} MiB of cache"
        )
    return ""


def _copy(context: Context, host: Host, usable_bytes: int) -> Measurement:
    found = tried(host.last_level_cache_bytes)
    cache = found if isinstance(found, int) else None
    size = buffer_bytes(cache, usable_bytes)
    threads, _ = host.usable_cores()
    rates = copy_rates(size, threads, 0.6 * context.budget_seconds, context.clock)
    middle, spread = median_and_spread(rates)
    known = f"{cache // MIB} MiB" if cache else "of unknown size"
    return Measurement(
        COPY.name,
        middle,
        COPY.unit,
        f"{size // MIB} MiB copied by {threads} threads, {len(rates)} times, content checked (last "
        f"level caches: {known}); a byte counts once",
        samples=len(rates),
        spread=spread,
        suspect=doubt(middle, size, cache),
        detail={"buffer_mib": size // MIB, "threads": threads, "samples": rates},
    )


def _numa(context: Context, host: Host) -> Reading:
    gpu = nvml_gpu(context)
    if isinstance(gpu, Unmeasured):
        return Unmeasured(NUMA.name, gpu.reason, gpu.detail)
    address = gpu.text("pci_bus_id")
    if address is None:
        return Unmeasured(NUMA.name, Reason.NOT_SUPPORTED, "NVML gives no PCI address")
    node = tried(lambda: host.gpu_numa_node(address))
    if not isinstance(node, int):
        return gap(NUMA, node)
    if node < 0:
        return Unmeasured(NUMA.name, Reason.NOT_SUPPORTED, "the system does not say (numa_node -1)")
    return Measurement(NUMA.name, node, "", f"sysfs, PCI device {address}")


def run(context: Context) -> Iterable[Reading]:
    host = host_of(context)
    yield attempt(
        TOTAL, lambda: host.memory_total_bytes() / MIB, "what the system counts as its own"
    )
    usable = tried(host.usable_memory_bytes)
    if isinstance(usable, tuple):
        yield Measurement(USABLE.name, usable[0] / MIB, USABLE.unit, usable[1])
    else:
        yield gap(USABLE, usable)
    shared = tried(host.shared_memory)
    if isinstance(shared, Exception):
        yield gap(SHARED, shared)
    else:
        free = f"{shared.free_bytes // MIB} MiB of it free"
        source = f"statvfs of {shared.path}, {free}"
        yield Measurement(SHARED.name, shared.total_bytes / MIB, SHARED.unit, source)
    yield _numa(context, host)
    yield _copy(context, host, usable[0] if isinstance(usable, tuple) else 8 * _SMALLEST_BUFFER)


register(
    Probe(
        "host_memory",
        (TOTAL, USABLE, COPY, SHARED, NUMA),
        run,
        {"quick": 1.5, "full": 5.0},
    )
)
