"""How much of a GPU's memory there is, who holds it, and who says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.nvml import Gpu
from pichak_core.measurement import Reason, Unmeasured


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory: in all, and what nobody holds now; `source` says who said so."""

    total_bytes: int
    free_bytes: int
    unified: bool
    source: str


def device_memory(
    device: TorchGpu, gpu: Gpu | Unmeasured, system_available_bytes: int | None
) -> DeviceMemory | Unmeasured:
    """NVML's figures, except on integrated parts: there the GPU's memory is the system's, and its
    own "free" counts the page cache as used, so MemAvailable is what it can have. Of a MIG device
    its own figures, never its parent's."""
    if device.integrated:
        if system_available_bytes is None:
            return Unmeasured("gpu.memory", Reason.FAILED, "MemAvailable could not be read")
        return DeviceMemory(
            device.total_bytes,
            system_available_bytes,
            True,
            "the GPU shares the system's memory: total as torch gives it, free is MemAvailable",
        )
    return nvml_memory(gpu)


def nvml_memory(gpu: Gpu | Unmeasured) -> DeviceMemory | Unmeasured:
    """NVML's figures of a GPU with memory of its own (or of a MIG device)."""
    if isinstance(gpu, Unmeasured):
        return gpu
    total, budget = gpu.number("memory_total_bytes"), gpu.budget_bytes()
    if total is None or budget is None:
        gap = gpu.get("memory_total_bytes")
        detail = gap.detail if isinstance(gap, Unmeasured) else "NVML does not say what is used"
        return Unmeasured("gpu.memory", Reason.NOT_SUPPORTED, detail)
    version = gpu.values.get("memory_query_version")
    parts = "total - reserved - used" if version == 2 else "total - used (the reserve is in it)"
    of = " of the MIG device" if "mig_index" in gpu.values else ""
    return DeviceMemory(
        int(total), budget, False, f"NVML memory query version {version}{of}: {parts}"
    )


@dataclass(frozen=True)
class ForeignMemory:
    """What others hold of a GPU. `upper_bound` where the driver's own reserve is part of it."""

    bytes: int
    upper_bound: bool
    source: str


def foreign_memory(gpu: Gpu | Unmeasured, own_bytes: int) -> ForeignMemory | Unmeasured:
    """used - own, with the driver's reserve apart (version 2 of NVML's query).

    Never from process lists: their ids are another namespace's in a container, and a list may be
    empty while memory is used. `own_bytes` is what this process's allocator holds.
    """
    if isinstance(gpu, Unmeasured):
        return gpu
    used = gpu.number("memory_used_bytes")
    if used is None:
        gap = gpu.get("memory_used_bytes")
        detail = gap.detail if isinstance(gap, Unmeasured) else "NVML does not say what is used"
        return Unmeasured("gpu.memory_others", Reason.NOT_SUPPORTED, detail)
    held = f" - {own_bytes / 2**20:,.0f} MiB of this process's allocator" if own_bytes else ""
    rest = max(0, int(used) - own_bytes)
    if gpu.number("memory_reserved_bytes") is not None:
        reserve = (gpu.number("memory_reserved_bytes") or 0) / 2**20
        source = f"NVML's used{held}; the driver's reserve of {reserve:,.0f} MiB is not in it"
        return ForeignMemory(rest, False, source)
    source = f"at most: NVML's used{held}; the driver's reserve is in it and not told apart"
    return ForeignMemory(rest, True, source)
