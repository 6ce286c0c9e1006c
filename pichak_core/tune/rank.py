"""The LoRA rank: the largest whose adapters, gradients and optimizer state fit the memory left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pichak_core.plan import CONSTANT

#: Ranks that are tried, largest first.
RANK_LADDER = (64, 32, 16, 8, 4)

_MIB = 1024**2


def adapter_bytes_per_rank(
    shapes: Iterable[tuple[int, int]], *, bytes_per_param: int = 4, optimizer_copies: int = 4
) -> int:
    """Bytes that each unit of rank costs over all adapted matrices `shapes`, given as (out, in).

    A rank-r adapter of an out × in matrix has r·(out + in) parameters. Each is held in
    `optimizer_copies` copies of `bytes_per_param` bytes: by default an fp32 master weight, its
    gradient and Adam's two moments. `ValueError` for shapes or counts that are not positive.
    """
    if bytes_per_param < 1 or optimizer_copies < 1:
        raise ValueError("bytes_per_param and optimizer_copies have to be at least 1")
    sides = 0
    for shape in shapes:
        out_features, in_features = shape
        if out_features < 1 or in_features < 1:
            raise ValueError(f"an adapted matrix has a positive shape (out, in), not {shape!r}")
        sides += int(out_features) + int(in_features)
    return sides * bytes_per_param * optimizer_copies


def auto_rank(
    shapes: Iterable[tuple[int, int]],
    budget_bytes: float,
    *,
    ladder: Sequence[int] = RANK_LADDER,
    bytes_per_param: int = 4,
    optimizer_copies: int = 4,
) -> tuple[int, str]:
    """(rank, the sentence): the largest of `ladder` that fits `budget_bytes`.

    `budget_bytes` is the capacity left by the kept batch's peak, and may be negative. When even the
    smallest does not fit, that smallest is returned and the sentence starts with "does not fit" and
    says to expect an OOM: a trainer needs a rank of at least 1, and 0 would silently mean no
    adapter. `ValueError` for no shapes, or an empty or non-positive ladder.
    """
    matrices = list(shapes)
    if not matrices:
        raise ValueError("no adapted matrices were given: there is no rank to choose")
    if not ladder or min(ladder) < 1:
        raise ValueError(f"the ladder of ranks has to hold positive ranks, not {tuple(ladder)!r}")
    each = adapter_bytes_per_rank(
        matrices, bytes_per_param=bytes_per_param, optimizer_copies=optimizer_copies
    )
    ranks = sorted(ladder, reverse=True)
    cost = (
        f"{each / _MIB:.3g} MiB per unit of rank over {len(matrices)} matrices "
        f"({optimizer_copies} copies of {bytes_per_param} bytes)"
    )
    left = f"{budget_bytes / _MIB:,.0f} MiB left by the kept batch's peak"
    for rank in ranks:
        if rank * each <= budget_bytes:
            larger = [r for r in ranks if r > rank]
            why = (
                f"{larger[-1]} would need {larger[-1] * each / _MIB:,.0f} MiB"
                if larger
                else f"the largest of the ladder {_ladder(ranks)}, a {CONSTANT}"
            )
            return rank, f"rank {rank} needs {rank * each / _MIB:,.0f} of {left}: {cost}; {why}"
    smallest = ranks[-1]
    return smallest, (
        f"does not fit, expect an OOM: rank {smallest}, the smallest of the ladder, needs "
        f"{smallest * each / _MIB:,.0f} MiB against {left}: {cost}; adapt fewer matrices, or lower "
        "the micro-batch or the sequence length"
    )


def _ladder(ranks: Sequence[int]) -> str:
    return " ".join(str(rank) for rank in ranks)
