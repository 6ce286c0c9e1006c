"""A plain decoder-only transformer in torch, with the shapes of common small models.

RMSNorm before each block, rotary positions, grouped-query attention, a SwiGLU MLP, no biases: the
architecture of the Llama family (Touvron et al. 2023, https://arxiv.org/abs/2302.13971). The model
is a dictionary of tensors and pure functions over it, so that importing this file needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Base of the rotary frequencies (Su et al. 2021, https://arxiv.org/abs/2104.09864).
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5
INITIAL_DEVIATION = 0.02

EMBEDDING = "embedding"
FINAL_NORM = "final_norm"
OUTPUT = "output"


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. `heads` divides `width`, and `kv_heads` divides `heads`."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool = True

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear inside the blocks, by name, in the order of the forward pass."""
        keys = self.kv_heads * self.head_width
        block = {
            "query": (self.width, self.width),
            "key": (keys, self.width),
            "value": (keys, self.width),
            "attention_out": (self.width, self.width),
            "gate": (self.hidden, self.width),
            "up": (self.hidden, self.width),
            "down": (self.width, self.hidden),
        }
        return {
            f"layer{layer}.{name}": size
            for layer in range(self.layers)
            for name, size in block.items()
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model: its name and its size."""
        sizes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.width)}
        for layer in range(self.layers):
            sizes[f"layer{layer}.attention_norm"] = (self.width,)
            sizes[f"layer{layer}.mlp_norm"] = (self.width,)
        sizes.update(self.linears())
        sizes[FINAL_NORM] = (self.width,)
        if not self.tied:
            sizes[OUTPUT] = (self.vocabulary, self.width)
        return sizes

    def parameter_count(self) -> int:
        """Number of weights; a tied embedding counts once."""
        return sum(math.prod(size) for size in self.tensors().values())


#: By the name after ``builtin:``. The last three have the published sizes of SmolLM2-135M,
#: SmolLM2-360M and TinyLlama-1.1B, whose vocabularies decide most of what a small model's loss
#: takes; the first two have the byte tokenizer's.
SHAPES: dict[str, Shape] = {
    "gpt-1m": Shape(vocabulary=256, width=128, layers=5, heads=4, kv_heads=4, hidden=352),
    "gpt-25m": Shape(vocabulary=256, width=512, layers=8, heads=8, kv_heads=8, hidden=1_408),
    "gpt-135m": Shape(vocabulary=49_152, width=576, layers=30, heads=9, kv_heads=3, hidden=1_536),
    "gpt-360m": Shape(vocabulary=49_152, width=960, layers=32, heads=15, kv_heads=5, hidden=2_560),
    "gpt-1.1b": Shape(
        vocabulary=32_000, width=2_048, layers=22, heads=32, kv_heads=4, hidden=5_632, tied=False
    ),
}


@dataclass
class Transformer:
    """Weights by name, and the low-rank factors that `lora.add_lora` puts beside some of them.

    `adapters[name]` is (A of rank × in, B of out × rank); the linear `name` then computes
    ``W x + B A x``. `checkpointing` recomputes each block in the backward pass.
    """

    shape: Shape
    weights: dict[str, torch.Tensor]
    adapters: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    checkpointing: bool = False

    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that get a gradient, in a fixed order."""
        for name, weight in self.weights.items():
            if weight.requires_grad:
                yield name, weight
        for name, (a, b) in self.adapters.items():
            yield f"{name}.lora_a", a
            yield f"{name}.lora_b", b

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The named linear, with its adapter where it has one."""
        from torch.nn import functional

        y = functional.linear(x, self.weights[name])
        if name in self.adapters:
            a, b = self.adapters[name]
            y = y + functional.linear(functional.linear(x, a), b)
        return y

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: ids (rows, tokens) to (rows, tokens, vocabulary)."""
        from torch.nn import functional
        from torch.utils.checkpoint import checkpoint

        x = functional.embedding(ids, self.weights[EMBEDDING])
        rotation = rotary_angles(ids.shape[1], self.shape.head_width, ids.device)
        for layer in range(self.shape.layers):
            if self.checkpointing:
                # Nothing in a block is random, so there is no generator state to save.
                x = checkpoint(
                    self._block, layer, x, rotation, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = self._block(layer, x, rotation)
        x = functional.rms_norm(x, x.shape[-1:], self.weights[FINAL_NORM], NORM_EPSILON)
        return functional.linear(x, self.weights[EMBEDDING if self.shape.tied else OUTPUT])

    def _block(
        self, layer: int, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        from torch.nn import functional

        name = f"layer{layer}"
        normed = functional.rms_norm(
            x, x.shape[-1:], self.weights[f"{name}.attention_norm"], NORM_EPSILON
        )
        x = x + self._attention(name, normed, rotation)
        normed = functional.rms_norm(
            x, x.shape[-1:], self.weights[f"{name}.mlp_norm"], NORM_EPSILON
        )
        gated = functional.silu(self.linear(f"{name}.gate", normed))
        return x + self.linear(f"{name}.down", gated * self.linear(f"{name}.up", normed))

    def _attention(
        self, name: str, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        from torch.nn import functional

        rows, tokens, width = x.shape

        def heads(part: str) -> torch.Tensor:
            flat = self.linear(f"{name}.{part}", x)
            return flat.view(rows, tokens, -1, self.shape.head_width).transpose(1, 2)

        query, key, value = rotate(heads("query"), rotation), heads("key"), heads("value")
        key = rotate(key, rotation)
        shared_by = self.shape.heads // self.shape.kv_heads
        if shared_by > 1:
            key = key.repeat_interleave(shared_by, dim=1)
            value = value.repeat_interleave(shared_by, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear(
            f"{name}.attention_out", mixed.transpose(1, 2).reshape(rows, tokens, width)
        )


def build_transformer(
    shape: Shape,
    *,
    seed: int,
    device: str,
    dtype: torch.dtype,
    checkpointing: bool = False,
) -> Transformer:
    """A freshly initialised model with every weight trained.

    Weights are drawn on the CPU from a generator of their own, so a seed gives the same model on
    every device and the global generators do not move. Linears and embeddings are normal with
    deviation 0.02, those that write into the residual stream by 1/√(2·layers) less (Radford et
    al. 2019); norms are 1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    residual = INITIAL_DEVIATION / math.sqrt(2 * shape.layers)
    weights: dict[str, torch.Tensor] = {}
    for name, size in shape.tensors().items():
        if len(size) == 1:
            weight = torch.ones(size)
        else:
            deviation = residual if name.endswith((".attention_out", ".down")) else None
            weight = torch.empty(size).normal_(
                0.0, deviation or INITIAL_DEVIATION, generator=generator
            )
        weights[name] = weight.to(device=device, dtype=dtype).requires_grad_()
    return Transformer(shape, weights, checkpointing=checkpointing)


def rotary_angles(
    tokens: int, head_width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position × frequency, each (tokens, head_width), in float32."""
    import torch

    steps = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn each (i, i + half) pair of a head's elements by its position's angle."""
    import torch

    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
