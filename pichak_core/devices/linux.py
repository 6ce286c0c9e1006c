"""What Linux's text files say: memory, cores, CPU times, stalls, load, caches.

Parsers take text and raise `ValueError` when it is not what it should be; what reads takes its
root. Memory is in bytes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pichak_core.devices.cgroups import cpu_quotas, memory_bounds
from pichak_core.devices.host import CpuTimes, Pressure

PROC = Path("/proc")
SYS = Path("/sys")


def usable_memory_bytes(proc: Path = PROC, sys: Path = SYS) -> tuple[int, str]:
    """(bytes this process can have now, the sentence that says which bound won).

    The smallest of limit - (current - inactive file cache) over the control groups above this
    process, and the system's MemAvailable. `OSError` where neither can be read.
    """
    candidates: list[tuple[int, str]] = []
    try:
        available = _mem_available(parse_meminfo((proc / "meminfo").read_text()))
    except OSError:
        available = None
    if available is not None:
        candidates.append((available, f"MemAvailable of {proc / 'meminfo'}"))
    for bound in memory_bounds(proc, sys):
        use = (
            "its use could not be read"
            if bound.current_bytes is None
            else f"{_mib(bound.current_bytes)} in use, {_mib(bound.reclaimable_bytes)} of it "
            "reclaimable cache"
        )
        where = Path(bound.directory) / bound.file
        candidates.append(
            (bound.available_bytes, f"limit {_mib(bound.limit_bytes)} of {where}, {use}")
        )
    if available is None:
        candidates += _from_psutil()
    if not candidates:
        raise OSError(
            f"how much memory is available cannot be read: {proc / 'meminfo'} is unreadable, no "
            "control group gives a limit and psutil does not tell (pip install psutil)"
        )
    least = min(candidates, key=lambda pair: pair[0])
    others = len(candidates) - 1
    tail = f"; the smallest of {others + 1} bounds" if others else ""
    return least[0], least[1] + tail


def usable_cores(
    proc: Path = PROC, sys: Path = SYS, *, affinity: int | None = None
) -> tuple[int, str]:
    """(cores this process can keep busy, the sentence that says which bound won).

    min(affinity, ceil(smallest CPU quota of the control groups above)), at least 1. `affinity`
    replaces the count of CPUs that the scheduler allows this process.
    """
    if affinity is None:
        affinity, where = affinity_count()
    else:
        where = "affinity mask"
    quotas = cpu_quotas(proc, sys)
    if quotas:
        tightest = min(quotas, key=lambda quota: quota.cores)
        whole = max(1, math.ceil(tightest.cores))
        if whole < affinity:
            return whole, (
                f"CPU quota of {tightest.directory}: {tightest.quota_us} us in every "
                f"{tightest.period_us} us = {tightest.cores:.4g} cores, rounded up; "
                f"{where} allows {affinity}"
            )
    return max(1, affinity), f"{where}; {'quota is wider' if quotas else 'no CPU quota'}"


def affinity_count() -> tuple[int, str]:
    """(CPUs this process may run on, where that came from). Not every system has a mask."""
    get = getattr(os, "sched_getaffinity", None)
    if get is not None:
        try:
            return len(get(0)), "affinity mask"
        except OSError:
            pass
    return os.cpu_count() or 1, "number of CPUs (the system gives no affinity mask)"


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; lines that are not "name: number [kB]" are left out."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            found[name.strip()] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return found


def parse_cpu_times(text: str, ticks_per_second: int) -> CpuTimes:
    """The first line of ``/proc/stat``. User time already holds guest time, so the guest columns
    are not added; kernels before 2.6.11 have no steal column, and then it is 0."""
    match = re.match(r"cpu +((?:[0-9]+ ?)+)", text)
    if match is None or len(match.group(1).split()) < 4:
        raise ValueError("the text of /proc/stat has no 'cpu' line with at least four numbers")
    columns = [int(part) / ticks_per_second for part in match.group(1).split()[:8]]
    user, nice, system, idle, iowait, irq, softirq, steal = columns + [0.0] * (8 - len(columns))
    busy = user + nice + system + irq + softirq
    return CpuTimes(busy=busy, steal=steal, total=busy + idle + iowait + steal)


def parse_pressure(text: str) -> Pressure:
    """A file of ``/proc/pressure``; CPU has no "full" line on kernels before 5.13."""
    totals = {
        match.group(1): int(match.group(2))
        for match in re.finditer(r"^(some|full) .*\btotal=([0-9]+)", text, re.MULTILINE)
    }
    if "some" not in totals:
        raise ValueError("the text of a pressure file has no 'some … total=' line")
    return Pressure(totals["some"], totals.get("full"))


def parse_load_average(text: str) -> float:
    """The 1-minute figure of ``/proc/loadavg``."""
    first = text.split()[:1]
    if not first:
        raise ValueError("the text of /proc/loadavg is empty")
    return float(first[0])


def parse_cpu_model(text: str) -> str:
    """The CPU's name in ``/proc/cpuinfo``; ARM kernels give part numbers instead of a name."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    for name in ("model name", "cpu model", "cpu", "Model", "Hardware"):
        if fields.get(name):
            return fields[name]
    if "CPU implementer" in fields and "CPU part" in fields:
        return f"ARM implementer {fields['CPU implementer']} part {fields['CPU part']}"
    raise ValueError("the text of /proc/cpuinfo names no CPU model")


def parse_size(text: str) -> int:
    """A cache size of sysfs (``266240K``) in bytes."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 32768K")
    factor: int = 1024 ** " KMG".index(match.group(2) or " ")
    return int(match.group(1)) * factor


def last_level_cache_bytes(sys: Path = SYS) -> int:
    """The largest caches of all CPUs together; one that CPUs share counts once.

    `OSError` where the kernel shows none.
    """
    caches: dict[tuple[int, str], int] = {}
    for index in sys.glob("devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            caches[level, shared] = parse_size((index / "size").read_text())
        except (OSError, ValueError):
            continue
    if not caches:
        raise FileNotFoundError(f"{sys}/devices/system/cpu shows no cache sizes")
    last = max(level for level, _ in caches)
    return sum(size for (level, _), size in caches.items() if level == last)


def _mem_available(meminfo: Mapping[str, int]) -> int | None:
    """MemAvailable; before Linux 3.14 the nearest thing is free memory and the page cache."""
    if "MemAvailable" in meminfo:
        return meminfo["MemAvailable"]
    if "MemFree" not in meminfo:
        return None
    return meminfo["MemFree"] + meminfo.get("Buffers", 0) + meminfo.get("Cached", 0)


def _from_psutil() -> list[tuple[int, str]]:
    try:
        import psutil

        return [(int(psutil.virtual_memory().available), "available memory as psutil gives it")]
    except (ImportError, OSError, LookupError, ValueError):  # a /proc that holds nonsense
        return []


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
