"""What a GPU can do at most, from its own properties and published constants of its kind. Pure.

None stands for "not known": no result is then called impossible for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: MB/s (10^6 bytes) of one PCIe lane by generation, in each direction, after line coding (8b/10b,
#: from generation 3 on 128b/130b, in generation 6 242 of 256 bytes of a flit) and before headers.
LANE_MB_S = {1: 250.0, 2: 500.0, 3: 984.6, 4: 1969.2, 5: 3938.5, 6: 7562.5}

#: Dense bf16/fp16 operations (two a multiply-add) a cycle and multiprocessor, by compute
#: capability; NVIDIA's architecture white papers. TF32 does half of it.
_TENSOR_OPERATIONS = {
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
}
#: fp32 operations a cycle and multiprocessor outside the tensor cores.
_FP32_OPERATIONS = {
    (7, 0): 128,
    (7, 5): 128,
    (8, 0): 128,
    (8, 6): 256,
    (8, 9): 256,
    (9, 0): 256,
    (10, 0): 256,
    (10, 3): 256,
    (12, 0): 256,
}

Kind = Literal["half", "tf32", "fp32"]


def link_mb_s(generation: int | None, width: int | None) -> float | None:
    """MB/s that a PCIe link carries in each direction; None when it is not known."""
    lane = LANE_MB_S.get(generation or 0)
    return None if lane is None or not width or width < 1 else lane * width


def memory_mb_s(clock_khz: float | None, bus_bits: float | None) -> float | None:
    """MB/s that a GPU's memory moves at most: two transfers a clock over the whole bus.

    The clock is the one that CUDA and NVML give, of which each kind of memory (GDDR5 to GDDR7, HBM)
    makes two transfers: 2,619 MHz x 5,120 bits is the 3.35 TB/s of an H100.
    """
    if not clock_khz or not bus_bits:
        return None
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e6


def matmul_tflop_s(
    capability: tuple[int, int], multiprocessors: int, clock_khz: float | None, kind: Kind
) -> float | None:
    """TFLOP/s of dense matrix products at most; None for an architecture that is not listed."""
    table = _FP32_OPERATIONS if kind == "fp32" else _TENSOR_OPERATIONS
    operations = table.get(capability)
    if operations is None or not clock_khz:
        return None
    each = operations / 2 if kind == "tf32" else operations
    return each * multiprocessors * clock_khz * 1e3 / 1e12


@dataclass(frozen=True)
class Part:
    """What torch's device properties say of a GPU; clocks in kHz, None where torch is too old."""

    capability: tuple[int, int]
    multiprocessors: int
    clock_khz: float | None
    memory_clock_khz: float | None
    bus_bits: float | None
    cache_bytes: int | None
    integrated: bool

    @classmethod
    def of(cls, properties: Any) -> Part:
        """From `torch.cuda.get_device_properties`."""

        def known(name: str) -> int | None:
            value = getattr(properties, name, None)
            return int(value) if isinstance(value, int) and value > 0 else None

        return cls(
            (int(properties.major), int(properties.minor)),
            int(properties.multi_processor_count),
            known("clock_rate"),
            known("memory_clock_rate"),
            known("memory_bus_width"),
            known("L2_cache_size"),
            bool(getattr(properties, "is_integrated", getattr(properties, "integrated", False))),
        )
