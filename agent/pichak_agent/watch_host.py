"""What the readings say of the machine: stolen CPU time, memory, disk, clock. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from statistics import median

from pichak_agent.readings import Reading
from pichak_agent.watch import Key, Sign
from pichak_agent.watch_past import Window, growth

MIB, GIB = 2**20, 2**30
#: Of the CPUs' time: new, and for what is there already.
STEAL_PERCENT, STILL_STEAL_PERCENT = 5.0, 3.0
#: Of the time, in which every task that could run waited for memory.
STALL_PERCENT, STILL_STALL_PERCENT = 10.0, 4.0
#: Less than this, and 2 % of the machine, left to have.
LOW_MEMORY_BYTES, LOW_MEMORY_SHARE = 512 * MIB, 0.02
FULL_HOURS, SOON_HOURS = 3.0, 0.5
LOW_DISK_BYTES, LOW_DISK_SHARE = GIB, 0.01
_DISK_MINUTES = 20
CLOCK_SECONDS, CLOCK_DRIFT_SECONDS = 1.0, 5.0


def steal(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """The hypervisor gives the CPUs' time to others."""
    there = ("cpu_steal", "") in active
    recent = window.since(window.lasting_seconds)
    points = [
        (r.host.cpu_total_seconds, r.host.cpu_steal_seconds)
        for r in recent
        if r.host.cpu_total_seconds is not None and r.host.cpu_steal_seconds is not None
    ]
    grown = growth(points)  # against the CPUs' time, so a share
    if grown is None or not _lasts(window, recent, there=there):
        return
    percent = 100 * grown.rate
    if percent > STILL_STEAL_PERCENT if there else grown.lasts(STEAL_PERCENT / 100):
        yield Sign(
            "cpu_steal",
            "warn",
            "",
            f"the hypervisor gave {percent:.1f} % of the CPUs' time to others in the last "
            f"{window.lasting_seconds:.0f} s",
            {"steal_percent": round(percent, 2), **_times(recent)},
        )


def memory(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """Tasks stall for memory, or almost none is left; and who was killed for it."""
    there = ("memory_pressure", "") in active
    recent = window.since(window.lasting_seconds)
    stalled = growth(
        [
            (r.steady_seconds, us / 1e4)
            for r in recent
            if (us := r.host.memory_full_pressure_us) is not None
        ]
    )
    span = recent[-1].steady_seconds - recent[0].steady_seconds
    left = [b for r in recent if (b := r.host.memory_available_bytes) is not None]
    total = window.now.host.memory_total_bytes
    low = max(left) if len(left) >= 3 and total and _lasts(window, recent, there=there) else None
    evidence: dict[str, float] = dict(_times(recent))
    if stalled and (stalled.rate > STILL_STALL_PERCENT if there else stalled.lasts(STALL_PERCENT)):
        evidence["stalled_percent"] = round(stalled.rate, 2)
        text = f"every task waited for memory in {stalled.rate:.0f} % of the last {span:.0f} s"
        yield Sign("memory_pressure", "warn", "", text, evidence)
    elif low is not None and low < min(LOW_MEMORY_BYTES, LOW_MEMORY_SHARE * (total or 0)) * (
        1.5 if there else 1
    ):
        evidence |= {"available_bytes": low, "total_bytes": total or 0}
        text = f"no more than {low / MIB:,.0f} MiB of memory could be had in the last {span:.0f} s"
        yield Sign("memory_pressure", "warn", "", text, evidence)
    kills = [(r.at_unix, k) for r in window.readings if (k := r.host.oom_kills) is not None]
    if kills and kills[-1][1] > kills[0][1]:
        count = kills[-1][1] - kills[0][1]
        yield Sign(
            "oom_kill",
            "warn",
            "",
            f"the out-of-memory killer ended {count} process{'es' if count != 1 else ''} of this "
            "machine in the last three minutes",
            {
                "before": kills[0][1],
                "after": kills[-1][1],
                "from_unix": kills[0][0],
                "to_unix": kills[-1][0],
            },
            sure=True,
        )


def disk(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """The file system where results are kept is nearly full, or will be soon at its pace.

    The pace is the median of the minutes' changes, and of twenty minutes' changes: a checkpoint
    that is written once moves neither.
    """
    free, total = window.now.host.disk_free_bytes, window.now.host.disk_total_bytes
    if free is None or not total:
        return
    there = ("disk_filling", "") in active
    if free < min(LOW_DISK_BYTES, LOW_DISK_SHARE * total) * (1.2 if there else 1):
        yield Sign(
            "disk_filling",
            "fail",
            "",
            f"the disk where results are kept has {free / MIB:,.0f} MiB left",
            {"free_bytes": free, "total_bytes": total, "at_unix": window.now.at_unix},
        )
        return
    points = [
        (r.steady_seconds, float(b), r.at_unix)
        for r in window.minutes
        if (b := r.host.disk_free_bytes) is not None
    ]
    rates = [
        rate
        for step in (1, _DISK_MINUTES)
        if (rate := _fill_rate(points, step)) is not None and rate > 0
    ]
    if not rates:
        return
    hours = free / max(rates) / 3600
    if hours < FULL_HOURS * (1.5 if there else 1):
        yield Sign(
            "disk_filling",
            "fail" if hours < SOON_HOURS else "warn",
            "",
            f"the disk where results are kept will be full in about {hours:.1f} h at its present "
            f"pace of {max(rates) * 3600 / GIB:,.1f} GiB an hour",
            {
                "free_bytes": free,
                "before_bytes": points[0][1],
                "before_unix": points[0][2],
                "bytes_per_second": round(max(rates), 1),
                "hours_to_full": round(hours, 2),
            },
        )


def clock(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """The wall clock was moved against one that nobody sets."""
    offsets = [(r.at_unix, o) for r in window.readings if (o := r.host.steady_unix) is not None]
    jumps = [
        (after - before, at)
        for (_, before), (at, after) in pairwise(offsets)
        if abs(after - before) > CLOCK_SECONDS
    ]
    if jumps:
        moved, at = max(jumps, key=lambda jump: abs(jump[0]))
        yield Sign(
            "clock_jumped",
            "warn",
            "",
            f"the wall clock was moved by {moved:+.1f} s; times before and after it do not compare",
            {"moved_seconds": round(moved, 3), "at_unix": at},
            sure=True,
        )
        return
    slow = [o for r in window.minutes if (o := r.host.steady_unix) is not None]
    if len(slow) > 1 and _drifted(slow) > CLOCK_DRIFT_SECONDS:
        yield Sign(
            "clock_jumped",
            "warn",
            "",
            f"the wall clock is being moved: by {slow[-1] - slow[0]:+.1f} s within "
            f"{len(slow)} minutes",
            {"moved_seconds": round(slow[-1] - slow[0], 3), "at_unix": window.now.at_unix},
        )


def _drifted(offsets: Sequence[float]) -> float:
    """Seconds by which the clock crept; its jumps are not in it."""
    steps = [b - a for a, b in pairwise(offsets)]
    return abs(sum(step for step in steps if abs(step) <= CLOCK_SECONDS))


def _fill_rate(points: Sequence[tuple[float, float, float]], step: int) -> float | None:
    """Bytes a second, the median over the changes of `step` minutes; None for too short a past."""
    if len(points) <= max(_DISK_MINUTES, 4 * step):
        return None
    chosen = points[::-step][:_DISK_MINUTES][::-1]
    rates = [(before[1] - after[1]) / (after[0] - before[0]) for before, after in pairwise(chosen)]
    return median(rates)


def _lasts(window: Window, recent: Sequence[Reading], *, there: bool) -> bool:
    span = recent[-1].steady_seconds - recent[0].steady_seconds if recent else 0.0
    return span > 0 and (there or span >= 0.5 * window.lasting_seconds)


def _times(recent: Sequence[Reading]) -> dict[str, float]:
    return {"from_unix": recent[0].at_unix, "to_unix": recent[-1].at_unix}
