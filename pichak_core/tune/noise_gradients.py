"""Gradients as they are handed in, turned into flat vectors that can be summed and multiplied."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import mul
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gradient:
    """One micro-batch's gradient: a flat vector for each trained tensor, None where there is none.

    Vectors are all torch tensors (views where possible: they may change under the caller's hands)
    or all `array('d')`. `names` are the keys of a mapping, or ().
    """

    parts: list[Any]
    names: tuple[str, ...]
    is_torch: bool

    def sizes(self) -> list[int | None]:
        """Elements of each part, None where there is no gradient."""
        return [None if p is None else size_of(p) for p in self.parts]

    def norms_sq(self) -> list[float]:
        """|part|² in double precision, 0 where there is no gradient."""
        return [0.0 if p is None else dot_parts(p, p) for p in self.parts]

    def own_copy(self) -> OwnCopy:
        """The gradient in float64 on the CPU, independent of the caller's memory."""
        present = [p for p in self.parts if p is not None]
        if not self.is_torch:
            return OwnCopy(self.parts, array("d", chain.from_iterable(present)))
        import torch

        flat = torch.cat([p.to(device="cpu", dtype=torch.float64) for p in present])
        pieces = iter(torch.split(flat, [p.numel() for p in present]))
        return OwnCopy([None if p is None else next(pieces) for p in self.parts], flat)


@dataclass(frozen=True)
class OwnCopy:
    """A gradient that is kept: its parts, and all that are not None in one vector."""

    parts: list[Any]
    flat: Any

    def dot(self, other: OwnCopy) -> float:
        """Inner product, None counting as zeros."""
        pairs = list(zip(self.parts, other.parts, strict=True))
        if all((x is None) == (y is None) for x, y in pairs):
            return dot_parts(self.flat, other.flat)
        return sum(dot_parts(x, y) for x, y in pairs if x is not None and y is not None)


def parts_of(grad: Any) -> Gradient:
    """The vectors of a gradient: a tensor, a sequence or mapping of them, or plain numbers.

    Accepted for each trained tensor: a torch tensor (any floating dtype, device or layout), an
    array with `tolist()`, nested sequences of numbers, or None. `ValueError` for anything else and
    for a gradient without a single vector.
    """
    names: tuple[str, ...] = ()
    if isinstance(grad, Mapping):
        names = tuple(str(name) for name in grad)
        items: list[Any] = list(grad.values())
    elif is_tensor(grad) or hasattr(grad, "tolist"):
        items = [grad]
    elif isinstance(grad, Iterable) and not isinstance(grad, (str, bytes)):
        items = list(grad)
        if items and all(isinstance(item, Real) for item in items):
            items = [items]
    else:
        raise ValueError(f"a gradient is a tensor or a list of tensors, not {type(grad).__name__}")
    given = [item for item in items if item is not None]
    if not given:
        raise ValueError(
            "the gradient is empty: no trained tensor has one; was backward() called, and do the "
            "tensors require gradients?"
        )
    if all(is_tensor(item) for item in given):
        return Gradient([None if p is None else _flat(p) for p in items], names, is_torch=True)
    if any(is_tensor(item) for item in given):
        raise ValueError(
            "a gradient is either torch tensors or plain numbers, not both in one list"
        )
    return Gradient([None if p is None else _floats(p) for p in items], names, is_torch=False)


def is_tensor(x: Any) -> TypeGuard[torch.Tensor]:
    """Whether `x` is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def size_of(part: Any) -> int:
    """Elements of one vector."""
    return int(part.numel()) if is_tensor(part) else len(part)


def dot_parts(x: Any, y: Any) -> float:
    """Inner product of two vectors of the same kind, in double precision."""
    if is_tensor(x):
        from pichak_core.tune.reductions import dot

        return dot(x, y)
    return float(sum(map(mul, x, y)))


def _flat(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise ValueError(f"a gradient of dtype {x.dtype} cannot be measured: it is not real")
    if x.is_meta:
        raise ValueError("a gradient on the meta device has no values")
    import torch

    dense = x.detach()
    return (dense if dense.layout == torch.strided else dense.to_dense()).reshape(-1)


def _floats(x: Any) -> array[float]:
    flat: array[float] = array("d")
    stack = [x.tolist() if hasattr(x, "tolist") else x]
    while stack:
        item = stack.pop()
        if isinstance(item, Real):
            flat.append(float(item))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        else:
            raise ValueError(f"a gradient holds {type(item).__name__} where a number was expected")
    return flat
