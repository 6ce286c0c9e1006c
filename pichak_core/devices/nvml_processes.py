"""Which programs use a GPU, as far as NVML can be believed.

The rows only show that somebody is there. They are never added up into "used by others": process
ids are another namespace's in a container, the lists are empty there while memory is used, WDDM
knows no memory of a process, and one driver series changed the rows' layout without a version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pichak_core.devices.nvml_codes import number, refusals, why
from pichak_core.measurement import Reason, Unmeasured

#: Linux gives out ids below 2^22; Windows uses all 32 bits.
LINUX_PID_LIMIT, WINDOWS_PID_LIMIT = 2**22, 2**32 - 1

_CALLS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
}
#: Newest first. The bare name is last: newer bindings raise an error of their own from it when the
#: driver is older than they are.
_VERSIONS = ("_v3", "_v2", "")


@dataclass(frozen=True)
class GpuProcess:
    """A row that can be: `used_bytes` is None where the driver does not say."""

    kind: str
    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Processes:
    """The believable rows of a GPU, and how many were impossible."""

    rows: tuple[GpuProcess, ...]
    dropped: int


def read_processes(
    nvml: Any, handle: Any, kind: str, *, total_bytes: int | None, pid_limit: int
) -> Processes | Unmeasured:
    """The ``compute`` or ``graphics`` processes of a GPU through the newest call that answers."""
    gap = Unmeasured(f"{kind}_processes", Reason.NOT_SUPPORTED, "NVML has no such call here")
    for version in _VERSIONS:
        function = getattr(nvml, _CALLS[kind] + version, None)
        if function is None:
            continue
        try:
            raw = list(function(handle))
        except refusals(nvml, ValueError, TypeError, AttributeError) as error:
            gap = why(gap.name, error)
            if gap.reason is Reason.LOST:
                return gap
            continue
        return believable(kind, raw, total_bytes, pid_limit)
    return gap


def believable(
    kind: str, raw: list[Any], total_bytes: int | None, pid_limit: int = LINUX_PID_LIMIT
) -> Processes:
    """The rows whose id and memory are possible; "not available" in any form becomes None."""
    rows: list[GpuProcess] = []
    for entry in raw:
        try:
            pid, used = number(entry.pid), number(entry.usedGpuMemory)
        except (ValueError, TypeError, AttributeError):
            continue
        if pid is None or not 0 < pid < pid_limit:
            continue
        if used is not None and (used < 0 or (total_bytes is not None and used > total_bytes)):
            continue
        rows.append(GpuProcess(kind, pid, used))
    return Processes(tuple(rows), len(raw) - len(rows))
