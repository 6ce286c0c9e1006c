"""Plain LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685) on a `Transformer`'s linears."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pichak_core.workload.transformer import Transformer


def add_lora(model: Transformer, rank: int, *, seed: int) -> None:
    """Freeze the model's weights and put trained factors beside every linear of its blocks.

    A (rank × in) is uniform within ±1/√in and B (out × rank) is zero, so the model's output does
    not change; the scale alpha/rank is 1. The factors are float32 whatever the base is stored in,
    as trainers keep them. `ValueError` for a rank below 1 or a model that has adapters.
    """
    import torch

    if rank < 1:
        raise ValueError(f"a LoRA rank is at least 1, not {rank}")
    if model.adapters:
        raise ValueError("the model already has LoRA factors")
    generator = torch.Generator().manual_seed(seed)
    for weight in model.weights.values():
        weight.requires_grad_(False)
    for name, (out_features, in_features) in model.shape.linears().items():
        device = model.weights[name].device
        bound = 1 / math.sqrt(in_features)
        a = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(out_features, rank, device=device)
        model.adapters[name] = (a.to(device).requires_grad_(), b.requires_grad_())
