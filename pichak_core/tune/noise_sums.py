"""What is kept of the micro-batches' gradients: all of them while small, else sums and sketches.

Both keepers answer the same question, the inner products behind the noise scale's estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING, Any, Protocol

from pichak_core.tune.noise_estimators import (
    Covariance,
    Estimates,
    calibrate_dots,
    estimate,
    estimate_from_gram,
    jackknife,
)
from pichak_core.tune.noise_gradients import OwnCopy
from pichak_core.tune.noise_sketch import CountSketch

if TYPE_CHECKING:
    import torch

#: A gradient as a list of vectors, one for each trained tensor; None is a tensor without gradient.
Parts = Sequence[Any]


class Keeper(Protocol):
    """Gradients of micro-batches, added one at a time with their scored tokens and |g_i|²."""

    def estimates(self) -> Estimates: ...

    def covariance(self) -> Covariance: ...


class ExactKeeper:
    """Keeps every gradient in float64 and all their inner products. O(k · dimension) memory."""

    def __init__(self) -> None:
        self.rows: list[OwnCopy] = []
        self.tokens: list[float] = []
        self._gram: list[list[float]] = []

    def add(self, gradient: OwnCopy, tokens: float, norm_sq: float) -> None:
        """Keep one gradient."""
        column = [gradient.dot(row) for row in self.rows]
        for row, value in zip(self._gram, column, strict=True):
            row.append(value)
        self._gram.append([*column, norm_sq])
        self.rows.append(gradient)
        self.tokens.append(tokens)

    def estimates(self) -> Estimates:
        return estimate_from_gram(self.tokens, self._gram)

    def covariance(self) -> Covariance:
        return jackknife(self.tokens, self._gram)


class StreamKeeper:
    """Two running sums, Σ t g and Σ t² g, and a sketch of each gradient. O(dimension) memory.

    |g_i|² and |Ĝ|² are exact. S uses the sketch for (g_i − Ĝ)·Ĝ alone, corrected so that both sums
    agree with it; with equal t nothing of the sketch is left in S. The covariance comes from the
    sketches, as if they were the gradients: an effective dimension of the noise far above the
    number of buckets makes it too wide, never too narrow.

    `sum_device` is where the sums lie; None leaves each beside its gradient.
    """

    def __init__(self, sketch: CountSketch, sum_device: Any = None) -> None:
        self.tokens: list[float] = []
        self._norms_sq: list[float] = []
        self.sketch = sketch
        self._device = sum_device
        self._first: list[torch.Tensor | None] = []
        self._second: list[torch.Tensor | None] = []
        self._sketches: list[torch.Tensor] = []
        self._gram: list[list[float]] = []

    def add(self, parts: Parts, tokens: float, norm_sq: float) -> None:
        """Add one gradient to the sums; the tensors are read, not kept."""
        if not self._first:
            self._first, self._second = [None] * len(parts), [None] * len(parts)
        for i, part in enumerate(parts):
            if part is not None:
                moved = _moved(part, self._device)
                self._first[i] = _added(self._first[i], moved, tokens)
                self._second[i] = _added(self._second[i], moved, tokens * tokens)
        self._keep_sketch(self.sketch.of(parts))
        self.tokens.append(tokens)
        self._norms_sq.append(norm_sq)

    def estimates(self) -> Estimates:
        from pichak_core.tune.reductions import dot, sum_of_squares

        total = sum(self.tokens)
        first = [x for x in self._first if x is not None]
        second = [x for x in self._second if x is not None]
        mean_sq = sum(map(sum_of_squares, first)) / total**2
        crossed = sum(dot(x, y) for x, y in zip(first, second, strict=True)) / total
        squares = sum(t * t for t in self.tokens)
        dots = calibrate_dots(
            self.tokens, self._sketched_dots(total), 0.0, crossed - squares * mean_sq
        )
        return estimate(self.tokens, self._norms_sq, mean_sq, dots)

    def covariance(self) -> Covariance:
        return jackknife(self.tokens, self._gram)

    def _sketched_dots(self, total: float) -> list[float]:
        with_mean = [sum(map(mul, row, self.tokens)) / total for row in self._gram]
        mean_sq = sum(map(mul, with_mean, self.tokens)) / total
        return [p - mean_sq for p in with_mean]

    def _keep_sketch(self, sketch: torch.Tensor) -> None:
        import torch

        wide = sketch.double()
        column = [float(torch.dot(wide, other)) for other in self._sketches]
        for row, value in zip(self._gram, column, strict=True):
            row.append(value)
        self._gram.append([*column, float(torch.dot(wide, wide))])
        self._sketches.append(wide)


def _moved(part: torch.Tensor, device: Any) -> torch.Tensor:
    """`part` on the sums' device in float32 (float64 stays), converted after the transfer."""
    import torch

    moved = part.detach() if device is None else part.detach().to(device)
    return moved if moved.dtype == torch.float64 else moved.float()


def _added(total: torch.Tensor | None, moved: torch.Tensor, weight: float) -> torch.Tensor:
    if total is None:
        return moved * weight
    return total.to(moved.device).add_(moved, alpha=weight)
