"""Counts the bytes of live CPU tensors, to the byte and the same in every run.

What the operating system says of a process moves with allocators, threads and other processes:
four identical runs under a resource limit ended at four different batch sizes. The storages of
the tensors that are alive do not.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Kind = TypeVar("Kind")


class LiveTensors:
    """Counts live tensor storage on the CPU and raises past `cap_bytes`.

    Inside `counting()` every operation of this thread is seen, those of backward too. A storage
    counts once, however many views share it, from the operation that makes or first touches it
    until nothing refers to it; what was alive at the start (weights, optimizer state, gradients)
    counts from the start. `live_bytes` and `peak_bytes` are storage bytes.

    Not seen: what an operation allocates and frees inside itself (convolution workspaces, the
    packed copies of a matrix product), storage that only C++ holds at the start, threads other
    than this one, and code that bypasses torch's dispatcher.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    @contextlib.contextmanager
    def counting(self, *, collect: bool = True) -> Iterator[LiveTensors]:
        """Count over a block. `torch.OutOfMemoryError` comes after the operation that passed the
        cap; that operation's result goes with the exception. Without `collect`, garbage that the
        collector has not found yet counts as alive."""
        for tensor in live_tensors(collect=collect):
            self._see(tensor)
        self.peak_bytes = self.live_bytes
        try:
            with _seeing(self._after_operation):
                yield self
        finally:
            self._storages.clear()

    def _after_operation(self, operation: Any, tensors: Iterator[torch.Tensor]) -> None:
        for tensor in tensors:
            self._see(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.cap_bytes is not None and self.live_bytes > self.cap_bytes:
            raise out_of_memory_error()(
                f"CPU out of memory: live tensors reached {self.live_bytes:,} bytes in {operation},"
                f" over the cap of {self.cap_bytes:,} bytes"
            )

    def _see(self, tensor: torch.Tensor) -> None:
        for storage in _storages_of(tensor):
            key, size = id(storage), storage.nbytes()
            known = self._storages.get(key)
            if known is not None and known[1] == size:
                continue
            # A storage may change its size (resize_), so a known one is counted anew.
            self.live_bytes += size - (known[1] if known else 0)
            reference = known[0] if known else weakref.ref(storage, self._forgetting(key))
            self._storages[key] = (reference, size)

    def _forgetting(self, key: int) -> Callable[[object], None]:
        counter = weakref.ref(self)

        def forget(_: object) -> None:
            alive = counter()
            if alive is not None and key in alive._storages:
                alive.live_bytes -= alive._storages.pop(key)[1]

        return forget


def live_tensors(*, collect: bool = True) -> Iterator[torch.Tensor]:
    """Every tensor that Python can reach now, and the gradients of those that keep one; after a
    collection, unless `collect` is False."""
    import torch

    if collect:
        gc.collect()
    for tensor in objects_of(torch.Tensor):
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def objects_of(kind: type[Kind]) -> list[Kind]:
    """Every object of `kind`, or of a class derived from it, that the collector knows."""
    everything = gc.get_objects()
    # By class, not isinstance(): lazy proxies answer that by loading what they stand for.
    kinds = {found for found in set(map(type, everything)) if issubclass(found, kind)}
    return [thing for thing in everything if type(thing) in kinds]


def live_bytes() -> int:
    """Bytes of CPU tensor storage alive now."""
    storages = {
        id(storage): storage for tensor in live_tensors() for storage in _storages_of(tensor)
    }
    return sum(storage.nbytes() for storage in storages.values())


def out_of_memory_error() -> type[RuntimeError]:
    """`torch.OutOfMemoryError`, under the name that this torch gives it (2.4 has the old one)."""
    import torch

    found: type[RuntimeError] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    return found


def _seeing(
    after: Callable[[Any, Iterator[torch.Tensor]], None],
) -> contextlib.AbstractContextManager[Any]:
    """Calls ``after(operation, the tensors it took and gave)`` behind each operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            after(func, _tensors_in((args, kwargs, result)))
            return result

    return Seeing()  # type: ignore[no-untyped-call]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The CPU storages behind a tensor: one, the parts of a sparse one, those inside a wrapper.

    An opaque layout (oneDNN's) has none that can be seen.
    """
    import torch

    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _storages_of(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu":
            yield storage
    elif tensor.layout == torch.sparse_coo:
        yield from _storages_of(tensor._indices())
        yield from _storages_of(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from _storages_of(tensor.crow_indices())
        yield from _storages_of(tensor.col_indices())
        yield from _storages_of(tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from _storages_of(tensor.ccol_indices())
        yield from _storages_of(tensor.row_indices())
        yield from _storages_of(tensor.values())
