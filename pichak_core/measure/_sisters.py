"""The other GPUs of the machine, where a measurement needs them: only those that are idle."""

from __future__ import annotations

from pichak_core.devices.gpu_join import join, torch_gpu
from pichak_core.measure import Context
from pichak_core.measure._readings import nvml_report
from pichak_core.measurement import Reason, Unmeasured

#: A sister card with more memory in use than this is somebody's.
_IDLE_BYTES = 2**30


def others_idle(context: Context, own: int, count: int) -> list[str] | Unmeasured:
    """The other GPUs that torch sees, all idle by NVML's word, or why they may not be used."""
    if count < 2:
        detail = "torch sees one GPU here, so there is nothing to copy beside it"
        return Unmeasured("gpu", Reason.NO_DEVICE, detail)
    report = nvml_report(context)
    names = []
    for index in range(count):
        if index == own:
            continue
        gpu = report.gap or join(torch_gpu(index), report.gpus)
        used = None if isinstance(gpu, Unmeasured) else gpu.number("memory_used_bytes")
        if used is None:
            detail = f"NVML cannot tell whether cuda:{index} is idle"
            return Unmeasured("gpu", Reason.NOT_SUPPORTED, detail)
        if used > _IDLE_BYTES:
            detail = f"cuda:{index} has {used / 2**20:,.0f} MiB in use: it may be somebody's"
            return Unmeasured("gpu", Reason.BUSY, detail)
        names.append(f"cuda:{index}")
    return names
