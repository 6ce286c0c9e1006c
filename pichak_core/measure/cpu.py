"""The CPU: what this process may use of it, what others take, and how fast it is.

The rate is deflate (zlib level 1) of one fixed megabyte of text: integer work with branches that
stays in a core's own caches, the kind that tokenising and loading data does. zlib releases the
interpreter's lock, so threads show all cores without starting processes.
"""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable

from pichak_core.devices.host import Host
from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._conditions import CpuUse, CpuWindow
from pichak_core.measure._readings import attempt, gap, host_of, tried
from pichak_core.measure._sampling import collect
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured, median_and_spread

MODEL = Metric("cpu.model", "", "the CPU's name")
LOGICAL = Metric("cpu.logical_cores", "", "CPUs that the machine shows")
USABLE = Metric("cpu.usable_cores", "", "CPUs that this process can keep busy")
QUOTA = Metric("cpu.quota_cores", "cores", "CPU time a second that the control groups allow")
STEAL = Metric("cpu.steal_percent", "%", "CPU time that the hypervisor gave to others")
PRESSURE = Metric("cpu.pressure_some_percent", "%", "time in which some task waited for a CPU")
OTHERS = Metric("cpu.load_others_cores", "cores", "CPU time a second that others used")
SINGLE = Metric("cpu.single_thread_deflate_mb_s", "MB/s", "deflate on one thread")
ALL = Metric("cpu.all_core_deflate_mb_s", "MB/s", "deflate on every usable core at once")

BLOCK_BYTES = 1_000_000
_WINDOWS = 10


def text_block(size: int = BLOCK_BYTES) -> bytes:
    """Text of `size` bytes that is the same on every machine: words of a fixed lexicon with the
    frequencies of language (the n-th word 1/n as often as the first)."""
    draw = random.Random(2018)  # noqa: S311 - reproducible text, not a secret
    letters = "etaoinshrdlucmfw"
    lexicon = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(4096)]
    weights = [1.0 / rank for rank in range(1, len(lexicon) + 1)]
    words = draw.choices(lexicon, weights, k=size // 3)
    return " ".join(words).encode()[:size]


def rates_by_window(
    blocks: list[tuple[float, float]], started: float, ended: float, size: int
) -> list[float]:
    """MB/s in each of ten equal windows of a run, from the (start, end) of every block: one that
    spans windows counts in each for the share of its time that it spent there."""
    width = (ended - started) / _WINDOWS
    done = [0.0] * _WINDOWS
    for begun, finished in blocks:
        first = max(0, int((begun - started) / width))
        for place in range(first, _WINDOWS):
            left = started + place * width
            if finished <= left:
                break
            inside = min(finished, left + width) - max(begun, left)
            done[place] += max(0.0, inside) / (finished - begun)
    return [count * size / width / 1e6 for count in done]


def _single(block: bytes, budget_seconds: float, clock: Callable[[], float]) -> list[float]:
    def sample() -> float:
        begun = clock()
        zlib.compress(block, 1)
        return len(block) / (clock() - begun) / 1e6

    sample()
    return collect(sample, budget_seconds=budget_seconds, clock=clock)


def _all_cores(block: bytes, threads: int, budget_seconds: float) -> tuple[list[float], int]:
    """(MB/s of all threads together in each window, different results of the same work)."""
    finished: list[list[tuple[float, float]]] = [[] for _ in range(threads)]
    results: set[int] = set()
    stop = threading.Event()

    def work(mine: list[tuple[float, float]]) -> None:
        while not stop.is_set():
            begun = time.monotonic()
            packed = zlib.compress(block, 1)
            mine.append((begun, time.monotonic()))
            results.add(zlib.crc32(packed))

    workers = [threading.Thread(target=work, args=(mine,), daemon=True) for mine in finished]
    for worker in workers:
        worker.start()
    # The first tenth is the ramp: threads start one after another.
    time.sleep(0.1 * budget_seconds)
    started = time.monotonic()
    time.sleep(0.9 * budget_seconds)
    ended = time.monotonic()
    stop.set()
    for worker in workers:
        worker.join()
    blocks = [block_time for mine in finished for block_time in mine]
    return rates_by_window(blocks, started, ended, len(block)), len(results)


def _rates(context: Context, host: Host, cores: int) -> Iterable[Reading]:
    block = text_block()
    library = {"zlib": zlib.ZLIB_RUNTIME_VERSION, "block_bytes": len(block)}
    single = _single(block, 0.3 * context.budget_seconds, context.clock)
    middle, spread = median_and_spread(single)
    yield Measurement(
        SINGLE.name,
        middle,
        SINGLE.unit,
        f"zlib level 1 on 1 MB of fixed text, one thread, {len(single)} times; comparable between "
        "machines with the same zlib",
        samples=len(single),
        spread=spread,
        detail={**library, "samples": single},
    )
    window = tried(lambda: CpuWindow(host))
    every, results = _all_cores(block, cores, 0.55 * context.budget_seconds)
    use = window.end() if isinstance(window, CpuWindow) else None
    middle, spread = median_and_spread(every)
    busy = {"cores_kept_busy": round(use.own_cores, 2)} if use else {}
    yield Measurement(
        ALL.name,
        middle,
        ALL.unit,
        f"zlib level 1 on 1 MB of fixed text, {cores} threads at once, the median of {_WINDOWS} "
        "windows",
        samples=len(every),
        spread=spread,
        suspect="" if results == 1 else "the same bytes were compressed to different results",
        detail={**library, "samples": every, "threads": cores, **busy},
    )


class _Counters:
    """What the system counts over the whole measurement: steal, others' load, stalls."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._window = tried(lambda: CpuWindow(host))
        self._stalled_us = tried(lambda: host.pressure("cpu").some_us)
        self._since = time.monotonic()

    def readings(self) -> Iterable[Reading]:
        stalled_us = tried(lambda: self._host.pressure("cpu").some_us)
        seconds = time.monotonic() - self._since
        if isinstance(stalled_us, int) and isinstance(self._stalled_us, int):
            yield pressure_reading(stalled_us - self._stalled_us, seconds)
        else:
            yield gap(
                PRESSURE, next(e for e in (self._stalled_us, stalled_us) if not isinstance(e, int))
            )
        window = self._window
        use = tried(window.end) if isinstance(window, CpuWindow) else window
        if isinstance(use, CpuUse):
            yield from use_readings(use)
        else:
            why = use or OSError("the CPU counters did not move")
            yield from (gap(STEAL, why), gap(OTHERS, why))


def pressure_reading(stalled_us: int, seconds: float) -> Measurement:
    """The share of `seconds` in which at least one task on the machine waited for a CPU."""
    return Measurement(
        PRESSURE.name,
        100.0 * stalled_us / 1e6 / seconds,
        PRESSURE.unit,
        f"/proc/pressure/cpu: 'some' grew by {stalled_us / 1e6:.2f} s in {seconds:.1f} s of this "
        "measurement's own load",
        suspect="longer than the time that passed" if stalled_us / 1e6 > 1.05 * seconds else "",
    )


def use_readings(use: CpuUse) -> Iterable[Measurement]:
    """Steal and the load of others."""
    over = f"CPU counters of the system over {use.seconds:.1f} s of this measurement's own load"
    yield Measurement(
        STEAL.name,
        use.steal_percent,
        STEAL.unit,
        f"{over}: steal / (busy + steal)",
        suspect="the system's steal counter ran backwards" if use.steal_percent < 0 else "",
    )
    yield Measurement(
        OTHERS.name,
        use.others_cores,
        OTHERS.unit,
        f"{over}: all busy time minus this process's own",
    )


def run(context: Context) -> Iterable[Reading]:
    host = host_of(context)
    yield attempt(MODEL, host.cpu_model, "what the CPU calls itself")
    count = os.cpu_count()
    if count:
        yield Measurement(LOGICAL.name, count, LOGICAL.unit, "CPUs that the system has online")
    cores, bound = host.usable_cores()
    yield Measurement(USABLE.name, cores, USABLE.unit, bound)
    quota = host.quota_cores()
    if quota is None:
        yield Unmeasured(QUOTA.name, Reason.NOT_SUPPORTED, "no CPU quota above this process")
    else:
        yield Measurement(QUOTA.name, quota[0], QUOTA.unit, f"the smallest quota: {quota[1]}")
    counters = _Counters(host)
    yield from _rates(context, host, cores)
    yield from counters.readings()


register(
    Probe(
        "cpu",
        (MODEL, LOGICAL, USABLE, QUOTA, STEAL, PRESSURE, OTHERS, SINGLE, ALL),
        run,
        {"quick": 2.0, "full": 8.0},
    )
)
