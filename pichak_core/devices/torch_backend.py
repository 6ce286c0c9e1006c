"""The device a step trains on, behind one small interface: `backend_for("cuda:0" | "cpu")`."""

from __future__ import annotations

from typing import Any

from pichak_core.devices import Backend, gpu_memory_reader


def backend_for(device: str, *, cap_bytes: int | None = None) -> Backend:
    """The backend of a torch device name; "cuda" is the current CUDA device.

    `cap_bytes` caps what this process may have of it, like `Backend.set_cap`; None keeps the cap
    that this process has set before, if any. `ValueError` for a device that is neither ``cpu`` nor
    ``cuda``, `RuntimeError` where torch sees no such device, `ImportError` without torch.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: memory can be measured on 'cpu' and 'cuda:N'")
    torch = _torch()
    backend: Backend
    if kind == "cpu":
        from pichak_core.devices.cpu_backend import CpuBackend

        backend = CpuBackend()
    else:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"device {device!r}: torch {torch.__version__} sees no CUDA device; "
                "install a CUDA build of torch and check the driver, or use device='cpu'"
            )
        from pichak_core.devices.cuda_backend import CudaBackend, device_index

        backend = CudaBackend(
            device,
            torch.cuda,
            counters=gpu_memory_reader(lambda: _pci_bus_id(device_index(device, torch.cuda))),
        )
    if cap_bytes is not None:
        backend.set_cap(cap_bytes)
    return backend


def _pci_bus_id(index: int) -> str:
    """The PCI address of torch's device, from torch or else through its UUID from NVML; "" where
    neither knows."""
    from pichak_core.devices.gpu_join import join, torch_gpu

    device = torch_gpu(index)
    if device.pci_bus_id:
        return device.pci_bus_id
    from pichak_core.devices.gpus import read_gpus
    from pichak_core.measurement import Unmeasured

    gpu = join(device, read_gpus().gpus)
    return "" if isinstance(gpu, Unmeasured) else gpu.text("pci_bus_id") or ""


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "measuring a training step needs torch: pip install 'pichak-fleet[torch]'"
        ) from error
    return torch
