"""How many bytes the gradient of a model has: what data-parallel training sends in every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pichak_core.plan import Value

_FP32_BYTES = 4


def gradient_bytes(named_weights: Iterable[tuple[str, Any]]) -> Value | None:
    """Bytes of the gradients of the trained tensors, which have their weights' types; None where
    nothing is trained.

    Where some tensors require gradients, the others are taken for frozen and left out. A weight
    is a torch tensor, or an object with `numel()`, counted as fp32.
    """
    weights = [weight for _, weight in named_weights]
    trained = [w for w in weights if getattr(w, "requires_grad", False)] or weights
    sizes = [(int(w.numel()), _element_bytes(w)) for w in trained]
    elements = sum(count for count, _ in sizes)
    if not elements:
        return None
    widths = " or ".join(str(width) for width in sorted({width for _, width in sizes}))
    return Value(
        sum(count * width for count, width in sizes),
        f"{elements:,} trained numbers in {len(sizes):,} tensors, counted, of {widths} bytes each, "
        "as their gradients are",
        unit="bytes",
    )


def _element_bytes(weight: Any) -> int:
    size = getattr(weight, "element_size", None)
    return int(size()) if callable(size) else _FP32_BYTES
