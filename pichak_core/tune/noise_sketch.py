"""A count-sketch of a gradient: a short vector that keeps inner products.

Each coordinate is added, with a random sign, to one of `buckets` buckets (Charikar, Chen and
Farach-Colton 2002). E[sketch(x)·sketch(y)] = x·y with a variance of at most
(|x|²|y|² + (x·y)²) / buckets, and sketches of sums are sums of sketches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: 128 KiB a micro-batch in float64; inner products are off by about 0.8 % of |x||y|.
DEFAULT_BUCKETS = 1 << 14
MIN_BUCKETS = 1024

_SIGNS_PER_BUCKET = 4
_RowHash = tuple[int, int, int]  # offset, start, sign


class CountSketch:
    """Sketches lists of tensors; the same position in the list gets the same hash every time.

    A tensor is cut into rows of `buckets` coordinates. Coordinate j of row r goes to bucket
    (j + offset_r) mod buckets with the sign row_sign_r · signs[start_r + j]. Offset, start and row
    sign are random for each row and `signs` is one long random vector, so that each coordinate gets
    a random bucket and sign at the price of two additions of contiguous memory a row. `seed` fixes
    all of them; no global random state is used. `ValueError` for fewer than 1,024 buckets.
    """

    def __init__(self, buckets: int = DEFAULT_BUCKETS, seed: int = 0) -> None:
        if buckets < MIN_BUCKETS:
            raise ValueError(f"a sketch needs at least {MIN_BUCKETS:,} buckets, not {buckets:,}")
        self.buckets = buckets
        self._seed = seed
        self._signs: dict[torch.device, torch.Tensor] = {}
        self._rows: dict[int, list[_RowHash]] = {}

    def of(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The sketch of one gradient: float32, `buckets` long, on the CPU. None counts as zeros."""
        import torch

        sketch = torch.zeros(self.buckets)
        for device in {p.device for p in parts if p is not None}:
            signs = self._signs_on(device)
            total = torch.zeros(self.buckets, device=device)
            for index, part in enumerate(parts):
                if part is not None and part.device == device:
                    self._add(total, index, part.detach().reshape(-1), signs)
            sketch += total.cpu()
        return sketch

    def _add(
        self, total: torch.Tensor, index: int, flat: torch.Tensor, signs: torch.Tensor
    ) -> None:
        size, buckets = flat.numel(), self.buckets
        for row, (offset, start, sign) in enumerate(self._hashes(index, -(-size // buckets))):
            piece = flat[row * buckets : (row + 1) * buckets].float()
            piece = piece * signs[start : start + piece.numel()]
            head = min(piece.numel(), buckets - offset)
            total[offset : offset + head].add_(piece[:head], alpha=sign)
            if head < piece.numel():
                total[: piece.numel() - head].add_(piece[head:], alpha=sign)

    def _hashes(self, index: int, rows: int) -> list[_RowHash]:
        known = self._rows.get(index)
        if known is None or len(known) != rows:
            rng = random.Random(f"{self._seed}:{index}")  # noqa: S311 - no secret in it
            last_start = (_SIGNS_PER_BUCKET - 1) * self.buckets
            known = [
                (rng.randrange(self.buckets), rng.randint(0, last_start), rng.choice((-1, 1)))
                for _ in range(rows)
            ]
            self._rows[index] = known
        return known

    def _signs_on(self, device: torch.device) -> torch.Tensor:
        import torch

        if device not in self._signs:
            generator = torch.Generator().manual_seed(self._seed)
            bits = torch.randint(0, 2, (_SIGNS_PER_BUCKET * self.buckets,), generator=generator)
            self._signs[device] = (2.0 * bits - 1.0).float().to(device)
        return self._signs[device]
