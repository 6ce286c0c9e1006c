"""Sums over large tensors in double precision, chunk by chunk, without a copy of the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CPU_CHUNK = 1 << 17  # 1 MiB of doubles: stays in the cache
_DEVICE_CHUNK = 1 << 23


def sum_of_squares(x: torch.Tensor) -> float:
    """Σ x² in float64, whatever the floating dtype and device of `x`."""
    return dot(x, x)


def dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """Σ x·y in float64; `x` and `y` have as many elements and lie on the same device."""
    import torch

    flat_x = x.detach().reshape(-1)
    flat_y = flat_x if y is x else y.detach().reshape(-1)
    parts = [
        torch.dot(a, a if flat_y is flat_x else b)
        for a, b in zip(doubles(flat_x), doubles(flat_y), strict=True)
    ]
    return float(torch.stack(parts).sum()) if parts else 0.0


def doubles(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The chunks of a flat tensor as float64; on the CPU where the device has no doubles."""
    import torch

    chunk = _CPU_CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK
    for start in range(0, flat.numel(), chunk):
        piece = flat[start : start + chunk]
        if piece.device.type == "mps":
            piece = piece.cpu()
        yield piece.to(torch.float64)
