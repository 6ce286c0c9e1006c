"""Looks at a GPU before it is measured: who is on it, and do its cores work.

NVML is read in a child with a watchdog, several times; `gpu_use.py` judges. Nothing here creates a
CUDA context.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pichak_core.devices.cuda_visible import MASK, resolve
from pichak_core.devices.gpu_join import join, physical, torch_gpu
from pichak_core.devices.gpu_use import GpuUse, judge_use, unknown
from pichak_core.devices.gpus import Report, run_child
from pichak_core.devices.host import this_host
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.processes import descendants, name_and_owner
from pichak_core.measurement import Reason, Unmeasured

LOOKS = 5
PAUSE_SECONDS = 0.4
#: Starting NVML takes seconds on a card without persistence.
_TIMEOUT_SECONDS = 20.0
_AGAIN_SECONDS = 10.0
#: The process-id namespace that a machine starts with: what NVML numbers processes by.
_FIRST_NAMESPACE = "pid:[4026531836]"
_DEVICE_FILES = ("/dev/nvidia", "/dev/dxg")


class GpuBusyError(RuntimeError):
    """Somebody works on the GPU; `use` says who, the text says it in a sentence."""

    def __init__(self, use: GpuUse) -> None:
        super().__init__(f"{use.sentence}; it was left alone")
        self.use = use


def look_at(
    device: str,
    *,
    own_variable: str = "",
    environment: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
) -> GpuUse:
    """Several looks at ``cuda:N`` in about two seconds, and what they say.

    This process, what it started, and processes that were started with the variable `own_variable`
    do not count as others.
    """
    lines, ending, _ = run_child(["use", str(LOOKS), str(PAUSE_SECONDS)], _TIMEOUT_SECONDS)
    report = Report()
    for line in lines:
        report.take(line)
    gap = report.gap or (ending if not report.gpus else None)
    if gap is not None or not report.gpus:
        return unknown(device, gap.describe() if gap else "NVML lists no GPU")
    first = list({gpu.index: gpu for gpu in reversed(report.gpus)}.values())
    chosen = _which(device, sorted(first, key=lambda gpu: gpu.index), environment.get(MASK))
    if isinstance(chosen, Unmeasured):
        return unknown(device, chosen.describe())
    wsl2 = False
    with contextlib.suppress(OSError, NotImplementedError, ValueError):
        wsl2 = this_host(proc=proc).kind().kind == "wsl2"
    return judge_use(
        device,
        [gpu for gpu in report.gpus if gpu.index == chosen.index],
        is_ours=_is_ours(own_variable, proc),
        who=lambda pid: _who(pid, proc),
        zero_means_nothing=wsl2,
        apart_seconds=PAUSE_SECONDS,
    )


def wait_until_free(
    look: Callable[[], GpuUse],
    *,
    wait_seconds: float = 0.0,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GpuUse:
    """The first look that is not busy; `GpuBusyError` when none came within `wait_seconds`.

    After a busy one two quiet looks in a row are asked for: a training run pauses too, to evaluate
    or to save.
    """
    until = clock() + wait_seconds
    busy: GpuUse | None = None
    quiet = 0
    while True:
        use = look()
        if use.state == "busy":
            busy, quiet = use, 0
        else:
            quiet += 1
        if busy is None or quiet == 2:
            return use
        left = until - clock()
        if left <= 0:
            raise GpuBusyError(busy)
        say(f"waiting {left:.0f} s more: {busy.sentence}")
        sleep(min(_AGAIN_SECONDS, left))


def _which(device: str, gpus: list[Gpu], mask: str | None) -> Gpu | Unmeasured:
    """NVML's GPU behind ``cuda:N``: by the only one there is, by the mask's UUID, or by torch's."""
    ordinal = int(device.partition(":")[2] or 0)
    if len(gpus) == 1:
        return gpus[0]
    entries = [entry.strip() for entry in (mask or "").split(",")]
    if ordinal < len(entries) and entries[ordinal].upper().startswith("GPU-"):
        uuid = resolve(entries[ordinal], [physical(gpu) for gpu in gpus])
        for gpu in gpus:
            if uuid is not None and gpu.text("uuid") == uuid:
                return gpu
    try:
        return join(torch_gpu(ordinal), gpus, mask)
    except (ImportError, RuntimeError) as error:
        named = ", ".join(gpu.text("name") or "?" for gpu in gpus)
        return Unmeasured(
            "gpu", Reason.FAILED, f"which of {len(gpus)} GPUs ({named}) it is: {error}"
        )


def _is_ours(variable: str, proc: Path) -> Callable[[int], bool]:
    family = {os.getpid()}
    with contextlib.suppress(OSError):
        family |= set(descendants(os.getpid()))

    def ours(pid: int) -> bool:
        if not _same_numbers(pid, proc):
            return False
        if pid in family:
            return True
        with contextlib.suppress(OSError):
            return bool(variable) and any(
                entry.startswith(variable.encode() + b"=")
                for entry in (proc / str(pid) / "environ").read_bytes().split(b"\0")
            )
        return False

    return ours


def _who(pid: int, proc: Path) -> tuple[str, str]:
    return name_and_owner(pid) if _same_numbers(pid, proc) else ("", "")


def _same_numbers(pid: int, proc: Path) -> bool:
    """Whether `pid`, as NVML gives it, is that process here. In a container it may be the host's
    number, and a stranger here: then only one that holds a GPU's device file open is believed
    (field case 29)."""
    if not (proc / "self").exists():
        return True  # not Linux: there is one numbering
    with contextlib.suppress(OSError):
        if str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_NAMESPACE:
            return True
    with contextlib.suppress(OSError):
        return any(
            str(link.readlink()).startswith(_DEVICE_FILES)
            for link in (proc / str(pid) / "fd").iterdir()
        )
    return False
