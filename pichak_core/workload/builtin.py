"""``builtin:NAME``: a transformer of a common small shape. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pichak_core.workload import Settings, WorkloadError
from pichak_core.workload.batches import Batch, mean_token_loss
from pichak_core.workload.lora import add_lora
from pichak_core.workload.model_workload import ModelWorkload, storage_dtype
from pichak_core.workload.transformer import SHAPES, Shape, build_transformer

if TYPE_CHECKING:
    import torch


class BuiltinModel:
    """A `LanguageModel` over a `Transformer`; rotary positions take rows of any length."""

    pad_id: int = 0
    longest: int | None = None

    def __init__(self, shape: Shape, settings: Settings) -> None:
        self.vocabulary = shape.vocabulary
        self.transformer = build_transformer(
            shape,
            seed=settings.seed,
            device=settings.device,
            dtype=storage_dtype(settings),
            checkpointing=settings.gradient_checkpointing,
        )
        if settings.method == "lora":
            add_lora(self.transformer, settings.lora_rank, seed=settings.seed + 1)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy in nats over the batch's scored tokens."""
        return mean_token_loss(self.transformer.logits(batch.input_ids), batch.labels)

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The model's weights, or LoRA's factors."""
        return list(self.transformer.trained())

    def linear_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of the linears in the blocks: not the embedding, not the output."""
        return list(self.transformer.shape.linears().values())


def open_builtin(name: str, settings: Settings) -> ModelWorkload:
    """The workload ``builtin:NAME``; `WorkloadError` for an unknown name or without torch."""
    shape = SHAPES.get(name)
    if shape is None:
        raise WorkloadError(
            f"there is no built-in model {name!r}; there are: {', '.join(sorted(SHAPES))}"
        )
    if importlib.util.find_spec("torch") is None:
        raise WorkloadError(
            f"builtin:{name} trains with torch, which is not installed: "
            "pip install 'pichak-fleet[torch]'"
        )
    return ModelWorkload(
        f"builtin:{name}",
        settings,
        build=lambda given: BuiltinModel(shape, given),
        load_tokenizer=_byte_tokenizer,
    )


def _byte_tokenizer() -> Callable[[str], Any]:
    from pichak_core.tune.tokenizers import load_tokenizer

    tokenizer: Callable[[str], Any] = load_tokenizer("bytes")
    return tokenizer
