"""The process that reads NVML, and what it writes: one JSON record a line on stdout."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pichak_core.devices.nvml import Gpu, ask_count, load, read_gpu, read_system, why
from pichak_core.measurement import Reason, Unmeasured


def start(nvml: Any) -> Unmeasured | None:
    """Initialise NVML; None when it runs, or the reason it does not."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code == 18:
            versions = mismatch(_slurp("/proc/self/maps"), _slurp("/proc/driver/nvidia/version"))
            return Unmeasured("nvml", Reason.FAILED, versions)
        # After a reload of its host's services a container keeps the library and loses the device.
        gap = why("nvml", error)
        return Unmeasured("nvml", Reason.LOST, gap.detail) if code == 999 else gap
    return None


def mismatch(maps: str, kernel_module: str) -> str:
    """NVML's code 18 as one line naming both versions where they can be read: the library's from
    the process's memory map, the kernel module's from ``/proc/driver/nvidia/version``."""
    library = re.search(r"libnvidia-ml\.so\.([0-9.]+[0-9])", maps)
    module = re.search(r"Kernel Module[^0-9]*([0-9]+(?:\.[0-9]+)+)", kernel_module)
    return (
        f"the NVIDIA library ({library.group(1) if library else 'version unreadable'}) and the "
        f"kernel module ({module.group(1) if module else 'version unreadable'}) differ: reboot, or "
        "reload the module, after a driver update"
    )


def records(nvml: Any, first: int = 0) -> Iterator[dict[str, Any]]:
    """What the child writes: a header, then a record a GPU from `first` on, each as it is read."""
    gap = start(nvml)
    if gap is not None:
        yield {"gap": to_wire(gap)}
        return
    count = ask_count(nvml)
    if isinstance(count, Unmeasured):
        yield {"gap": to_wire(count)}
        return
    yield {"system": read_system(nvml), "count": count}
    for index in range(first, count):
        yield {"gpu": gpu_to_wire(read_gpu(nvml, index))}


def to_wire(gap: Unmeasured) -> list[str]:
    return [gap.name, gap.reason.value, gap.detail]


def from_wire(parts: Sequence[str]) -> Unmeasured:
    return Unmeasured(str(parts[0]), Reason(parts[1]), str(parts[2]))


def gpu_to_wire(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "values": gpu.values,
        "gaps": {name: to_wire(gap) for name, gap in gpu.gaps.items()},
        "lost": to_wire(gpu.lost) if gpu.lost else None,
    }


def gpu_from_wire(record: dict[str, Any]) -> Gpu:
    return Gpu(
        int(record["index"]),
        dict(record["values"]),
        {name: from_wire(gap) for name, gap in record["gaps"].items()},
        from_wire(record["lost"]) if record["lost"] else None,
    )


def main(arguments: Sequence[str]) -> None:
    """The child's entry: ``read FIRST`` once, or ``live INDEX SECONDS`` until nobody listens."""
    try:
        nvml = load()
    except ImportError as error:
        _write({"gap": to_wire(Unmeasured("nvml", Reason.NOT_INSTALLED, str(error)))})
        return
    if arguments[0] == "read":
        for record in records(nvml, int(arguments[1])):
            _write(record)
    elif start(nvml) is None:
        while True:
            _write({"gpu": gpu_to_wire(read_gpu(nvml, int(arguments[1]), live_only=True))})
            time.sleep(float(arguments[2]))


def _write(record: dict[str, Any]) -> None:
    try:
        os.write(sys.stdout.fileno(), json.dumps(record).encode() + b"\n")
    except BrokenPipeError:
        sys.exit(0)


def _slurp(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
