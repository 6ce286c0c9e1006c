"""Whether a GPU is what it calls itself: its name against what its silicon says. Pure.

A name can be flashed into a card's firmware; its compute capability cannot.
"""

from __future__ import annotations

import re

from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.nvml import Gpu

#: Names of GPUs and their compute capability: NVIDIA's list "CUDA GPUs: Compute Capability". Models
#: that were sold with two kinds of silicon (RTX 2050, RTX 3050) are left out.
_CAPABILITIES = (
    (r"P100", "6.0"),
    (r"P4|P40|GTX 10[5-8]0", "6.1"),
    (r"V100S?|TITAN V", "7.0"),
    (r"T4|TITAN RTX|RTX 20[678]0|Quadro RTX [4568]000|GTX 16[3-6]0", "7.5"),
    (r"A100|A800|A30", "8.0"),
    (r"A2|A10G?|A16|A40|RTX 30[6-9]0|RTX A[2456][05]?00", "8.6"),
    (r"L4|L20|L40S?|RTX 40[5-9]0|RTX [456]000 Ada", "8.9"),
    (r"H20|H100|H200|H800|GH200", "9.0"),
    (r"B100|B200|GB200", "10.0"),
    (r"B300|GB300", "10.3"),
    (r"RTX 50[5-9]0|RTX PRO [456]000", "12.0"),
    (r"GB10", "12.1"),
)
_PATTERNS = tuple((re.compile(rf"\b(?:{names})\b"), found) for names, found in _CAPABILITIES)

#: NVML's total and torch's differ by what the driver keeps for itself.
_SIZE_TOLERANCE = 0.1


def expected_capability(name: str) -> str | None:
    """The compute capability of a model by its name; None for a name that is not in the list."""
    return next((found for pattern, found in _PATTERNS if pattern.search(name)), None)


def identity_doubt(gpu: Gpu, by_torch: TorchGpu | None = None) -> str:
    """Why the GPU may not be what it says; "" where nothing contradicts it."""
    name, capability = gpu.text("name") or "", gpu.text("compute_capability")
    expected = expected_capability(name)
    if expected and capability and expected != capability:
        return (
            f"it calls itself {name}, whose compute capability is {expected}, "
            f"and its silicon says {capability}"
        )
    if by_torch is None or "mig_index" in gpu.values:
        return ""
    if name and by_torch.name and _plain(name) != _plain(by_torch.name):
        return f"NVML calls it {name} and CUDA calls it {by_torch.name}"
    total = gpu.number("memory_total_bytes")
    if total and not by_torch.integrated:
        share = by_torch.total_bytes / total
        if abs(share - 1) > _SIZE_TOLERANCE:
            return (
                f"NVML says {total / 2**20:,.0f} MiB of memory and CUDA says "
                f"{by_torch.total_bytes / 2**20:,.0f} MiB"
            )
    return ""


def _plain(name: str) -> str:
    return re.sub(r"^nvidia\s+", "", name.strip().lower())
