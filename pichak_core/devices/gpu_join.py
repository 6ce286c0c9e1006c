"""Which of NVML's GPUs is torch's ``cuda:N``. The two number them differently: NVML by PCI address,
CUDA by speed and through a mask; only the UUID or the PCI address joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pichak_core.devices.cuda_visible import MASK, Physical, visible_devices
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


def torch_gpus() -> list[TorchGpu]:
    """Every CUDA device that torch shows. `ImportError` without torch, `RuntimeError` without
    CUDA."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    count = torch.cuda.device_count()
    return [from_properties(i, torch.cuda.get_device_properties(i)) for i in range(count)]


def join(device: TorchGpu, gpus: Sequence[Gpu], mask: str | None = None) -> Gpu | Unmeasured:
    """NVML's view of torch's device, by UUID or else by PCI address; never by index or name.

    On a GPU in MIG mode it is the slice: the one with torch's UUID, else the one that `mask` (the
    value of CUDA_VISIBLE_DEVICES) names, else the only one.
    """
    for gpu in gpus:
        for each in gpu.slices:
            if _same_uuid(device.uuid, each.text("uuid")):
                return each
    found = next((gpu for gpu in gpus if _same_uuid(device.uuid, gpu.text("uuid"))), None)
    if found is None:
        found = next((g for g in gpus if _same_pci(device.pci_bus_id, g.text("pci_bus_id"))), None)
    if found is not None:
        return found if found.flag("mig_mode") is not True else _slice_of(device, found, gpus, mask)
    listed = ", ".join(gpu.text("uuid") or f"index {gpu.index} (lost)" for gpu in gpus) or "none"
    return Unmeasured(
        "gpu",
        Reason.NO_DEVICE,
        f"NVML lists no GPU with cuda:{device.index}'s UUID {device.uuid or '(unknown)'} or PCI "
        f"address {device.pci_bus_id or '(unknown)'}; it lists {listed}",
    )


def _slice_of(
    device: TorchGpu, gpu: Gpu, gpus: Sequence[Gpu], mask: str | None
) -> Gpu | Unmeasured:
    visible = visible_devices(mask, [physical(each) for each in gpus]).uuids
    if mask is not None and len(visible) == 1:
        for each in gpu.slices:
            if _same_uuid(visible[0], each.text("uuid")):
                return each
    if len(gpu.slices) == 1:
        return gpu.slices[0]
    return Unmeasured(
        "gpu",
        Reason.NO_DEVICE,
        f"cuda:{device.index} is on {gpu.text('uuid')}, which is in MIG mode with "
        f"{len(gpu.slices)} MIG devices, and nothing tells which one it is: name it by its MIG-"
        f" UUID in {MASK}",
    )


def physical(gpu: Gpu) -> Physical:
    """A GPU as CUDA_VISIBLE_DEVICES sees it."""
    known = [each for each in gpu.slices if each.text("uuid")]
    instances = tuple(
        (int(each.number("mig_gpu_instance") or 0), int(each.number("mig_compute_instance") or 0))
        for each in known
        if each.number("mig_gpu_instance") is not None
    )
    return Physical(
        gpu.text("uuid") or "",
        tuple(str(each.text("uuid")) for each in known),
        gpu.flag("mig_mode") is True,
        instances if len(instances) == len(known) else (),
    )


def _same_uuid(one: str, other: str | None) -> bool:
    return bool(one) and other is not None and _plain_uuid(one) == _plain_uuid(other)


def _same_pci(one: str, other: str | None) -> bool:
    return bool(one) and other is not None and _plain_pci(one) == _plain_pci(other)


def _plain_uuid(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _plain_pci(address: str) -> str:
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}"
