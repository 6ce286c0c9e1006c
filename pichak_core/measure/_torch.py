"""Torch held still for a measurement, and put back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Precision = Literal["highest", "high"]


@contextmanager
def settings(*, threads: int | None = None, precision: Precision = "highest") -> Iterator[None]:
    """Thread count and fp32 matmul precision for a block; whatever happens, the caller's own come
    back. ``highest`` is real fp32, ``high`` lets CUDA use TF32."""
    import torch

    before = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def waiter(device: str) -> Callable[[], None]:
    """What waits until `device` has done all that was asked of it (nothing, on the CPU)."""
    import torch

    if device.startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def flusher(device: str) -> Callable[[], None]:
    """What hands over to `device` all that was asked of it so far, without waiting: WDDM keeps
    launches in a buffer of its own until it is full or somebody asks after them."""
    import torch

    if device.startswith("cuda"):
        stream: Any = torch.cuda.current_stream(device)

        def flush() -> None:
            stream.query()

        return flush
    return lambda: None
