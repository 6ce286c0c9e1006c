"""Which of NVML's GPUs is torch's ``cuda:N``. The two number them differently: NVML by PCI address,
CUDA by speed and through a mask; only the UUID or the PCI address joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pichak_core.devices.nvml import Gpu
from pichak_core.measurement import Reason, Unmeasured


@dataclass(frozen=True)
class TorchGpu:
    """A CUDA device as torch shows it. `uuid` and `pci_bus_id` are "" where torch is too old to
    tell; `integrated` parts share the system's memory."""

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    total_bytes: int
    integrated: bool


def torch_gpu(index: int) -> TorchGpu:
    """The CUDA device `index`. `ImportError` without torch, `RuntimeError` when CUDA has no such
    device."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    if not 0 <= index < torch.cuda.device_count():
        raise RuntimeError(f"torch sees {torch.cuda.device_count()} CUDA devices, not cuda:{index}")
    return from_properties(index, torch.cuda.get_device_properties(index))


def from_properties(index: int, properties: Any) -> TorchGpu:
    """From torch's device properties, whose identity fields depend on torch's version."""
    domain, bus, slot = (
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    )
    known = isinstance(domain, int) and isinstance(bus, int) and isinstance(slot, int)
    pci = f"{domain:08x}:{bus:02x}:{slot:02x}.0" if known else ""
    return TorchGpu(
        index,
        str(properties.name),
        str(getattr(properties, "uuid", "")),
        pci,
        int(properties.total_memory),
        bool(getattr(properties, "is_integrated", getattr(properties, "integrated", False))),
    )


def join(device: TorchGpu, gpus: Sequence[Gpu]) -> Gpu | Unmeasured:
    """NVML's view of torch's device, by UUID or else by PCI address; never by index or name."""
    for wanted, field, normal in (
        (device.uuid, "uuid", _plain_uuid),
        (device.pci_bus_id, "pci_bus_id", _plain_pci),
    ):
        if not wanted:
            continue
        for gpu in gpus:
            found = gpu.text(field)
            if found and normal(found) == normal(wanted):
                return gpu
    listed = ", ".join(gpu.text("uuid") or f"index {gpu.index} (lost)" for gpu in gpus) or "none"
    return Unmeasured(
        "gpu",
        Reason.NO_DEVICE,
        f"NVML lists no GPU with cuda:{device.index}'s UUID {device.uuid or '(unknown)'} or PCI "
        f"address {device.pci_bus_id or '(unknown)'}; it lists {listed}",
    )


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
    own "free" counts the page cache as used, so MemAvailable is what it can have."""
    if device.integrated:
        if system_available_bytes is None:
            return Unmeasured("gpu.memory", Reason.FAILED, "MemAvailable could not be read")
        return DeviceMemory(
            device.total_bytes,
            system_available_bytes,
            True,
            "the GPU shares the system's memory: total as torch gives it, free is MemAvailable",
        )
    if isinstance(gpu, Unmeasured):
        return gpu
    total, budget = gpu.number("memory_total_bytes"), gpu.budget_bytes()
    if total is None or budget is None:
        gap = gpu.get("memory_total_bytes")
        detail = gap.detail if isinstance(gap, Unmeasured) else "NVML does not say what is used"
        return Unmeasured("gpu.memory", Reason.NOT_SUPPORTED, detail)
    version = gpu.values.get("memory_query_version")
    return DeviceMemory(
        int(total), budget, False, f"NVML memory query version {version}: total - reserved - used"
    )


def _plain_uuid(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _plain_pci(address: str) -> str:
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}"
