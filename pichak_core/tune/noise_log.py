"""The gradients of a noise-scale measurement: checked, kept in the cheapest way that is exact
enough, and looked over for what would make the answer wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pichak_core.tune.noise_gradients import Gradient
from pichak_core.tune.noise_sketch import CountSketch
from pichak_core.tune.noise_sums import ExactKeeper, Keeper, StreamKeeper

_NAMED = 4


class GradientLog:
    """Checks each gradient against the first and hands it to the keeper that suits their size.

    `norms_sq` is |g_i|² in order. `rounding` is the relative size below which a difference between
    |g_i|² and |Ĝ|² is rounding and not noise.
    """

    def __init__(self, sum_device: Any, seed: int, exact_elements: int, buckets: int) -> None:
        self.keeper: Keeper = ExactKeeper()
        self.norms_sq: list[float] = []
        self.rounding = 1e-11
        self._stream = StreamKeeper(CountSketch(buckets, seed), sum_device)
        self._exact_elements = exact_elements
        self._kept = 0
        self._wide = False
        self._is_torch: bool | None = None
        self._sizes: list[int | None] = []
        self._largest: list[float] = []
        self._twins: set[tuple[float, float]] = set()
        self._repeated = 0

    def add(self, gradient: Gradient, tokens: float, label: str, names: Sequence[str]) -> None:
        """Keep one gradient; `ValueError` (naming `label`) leaves everything as it was."""
        sizes = self._checked_sizes(gradient, label)
        parts_sq = gradient.norms_sq()
        for i, value in enumerate(parts_sq):
            if not math.isfinite(value):
                raise ValueError(
                    f"{label}: the gradient of {_name(i, names)} is not finite; look for a row "
                    "without a scored token, an overflow in fp16, or a learning rate that diverged"
                )
        self._sizes = sizes
        self._is_torch = gradient.is_torch
        self._largest = [
            max(a, b) for a, b in zip(self._largest or [0.0] * len(sizes), parts_sq, strict=True)
        ]
        norm_sq = math.fsum(parts_sq)
        self._repeated += (norm_sq, tokens) in self._twins and norm_sq > 0.0
        self._twins.add((norm_sq, tokens))
        self.norms_sq.append(norm_sq)
        self._keep(gradient, tokens, norm_sq)

    def notes(self, names: Sequence[str]) -> list[str]:
        """What a person should know of these gradients."""
        notes = []
        silent = [i for i, value in enumerate(self._largest) if value == 0.0]
        if silent:
            listed = ", ".join(_name(i, names) for i in silent[:_NAMED])
            more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
            notes.append(
                f"{len(silent)} of {len(self._largest)} trained tensors have no gradient in any "
                f"micro-batch and add nothing to the noise scale: {listed}{more} (LoRA's A has "
                "none while B is zero)"
            )
        if self._repeated:
            notes.append(
                f"{self._repeated} micro-batches have exactly the gradient norm and token count of "
                "an earlier one: were the same rows used twice? The noise is then underestimated"
            )
        if self.keeper is self._stream:
            notes.append(
                "the noise scale's interval comes from sketches of "
                f"{self._stream.sketch.buckets:,} numbers a gradient; its value comes from the "
                "whole gradients"
            )
        return notes

    def _checked_sizes(self, gradient: Gradient, label: str) -> list[int | None]:
        sizes = gradient.sizes()
        if self._is_torch is None:
            return sizes
        if gradient.is_torch is not self._is_torch or len(sizes) != len(self._sizes):
            raise ValueError(
                f"{label}: {len(sizes)} gradient tensors where there were {len(self._sizes)} "
                "before, or of another kind; hand in one entry (or None) for each trained tensor"
            )
        for i, (new, old) in enumerate(zip(sizes, self._sizes, strict=True)):
            if new is not None and old is not None and new != old:
                raise ValueError(f"{label}: tensor {i} has {new:,} elements where it had {old:,}")
        return [old if new is None else new for new, old in zip(sizes, self._sizes, strict=True)]

    def _keep(self, gradient: Gradient, tokens: float, norm_sq: float) -> None:
        if isinstance(self.keeper, ExactKeeper):
            self._kept += sum(size for size in gradient.sizes() if size)
            if not gradient.is_torch or self._kept <= self._exact_elements:
                self._wide = self._wide or (gradient.is_torch and _has_doubles(gradient))
                self.keeper.add(gradient.own_copy(), tokens, norm_sq)
                return
            self._start_streaming(self.keeper)
        self._stream.add(gradient.parts, tokens, norm_sq)

    def _start_streaming(self, exact: ExactKeeper) -> None:
        for row, tokens, norm_sq in zip(exact.rows, exact.tokens, self.norms_sq, strict=False):
            narrow = [p if p is None or self._wide else p.float() for p in row.parts]
            self._stream.add(narrow, tokens, norm_sq)
        self.keeper = self._stream
        self.rounding = 1e-6


def _has_doubles(gradient: Gradient) -> bool:
    return any(p is not None and p.element_size() == 8 for p in gradient.parts)


def _name(index: int, names: Sequence[str]) -> str:
    return names[index] if index < len(names) else f"tensor {index}"
