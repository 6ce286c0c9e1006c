"""``hf:PATH_OR_ID``: a causal language model of `transformers`, whole or under PEFT's LoRA.

From a local folder, or from the user's own hub cache; the network is never asked.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pichak_core.workload import Settings, WorkloadError
from pichak_core.workload.batches import Batch
from pichak_core.workload.model_workload import ModelWorkload, storage_dtype

if TYPE_CHECKING:
    import torch

Loaded = TypeVar("Loaded")

#: What transformers raises for files that are absent, malformed, or need a further package.
_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError)


class HuggingFaceModel:
    """A `LanguageModel` over `transformers`' `AutoModelForCausalLM`, in training mode.

    The loss is the model's own, so its memory is what a trainer's step takes.
    """

    def __init__(self, name: str, folder: str, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        model = _load(
            name,
            "weights",
            lambda: AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, **_dtype_argument(storage_dtype(settings))
            ),
        )
        config = model.config.get_text_config()
        config.use_cache = False
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        padding = getattr(config, "pad_token_id", None)
        self.pad_id = padding if isinstance(padding, int) and 0 <= padding < self.vocabulary else 0
        self.longest: int | None = getattr(config, "max_position_embeddings", None)
        self._shapes = _linear_shapes(model)
        if settings.gradient_checkpointing:
            _checkpoint(name, model)
        if settings.method == "lora":
            model = _with_lora(model, settings.lora_rank)
        self._model = model.to(settings.device).train()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy in nats over the batch's scored tokens."""
        loss: torch.Tensor = self._model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        ).loss
        return loss

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that require a gradient; tied ones once."""
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def linear_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of what PEFT's ``all-linear`` adapts: every linear but the output layer."""
        return list(self._shapes)


def open_huggingface(name: str, settings: Settings) -> ModelWorkload:
    """The workload ``hf:NAME``, NAME a folder or a hub id.

    `WorkloadError` when a package is not installed, the folder does not exist, or the id is not in
    the hub cache of the user on this machine.
    """
    needed = ["torch", "transformers", *(["peft"] if settings.method == "lora" else [])]
    absent = [package for package in needed if importlib.util.find_spec(package) is None]
    if absent:
        raise WorkloadError(
            f"hf:{name} needs {' and '.join(absent)}, not installed here: "
            "pip install 'pichak-fleet[torch,hf]'"
        )
    folder = _folder_of(name)
    from transformers import AutoConfig

    _load(name, "config.json", lambda: AutoConfig.from_pretrained(folder, local_files_only=True))
    return ModelWorkload(
        f"hf:{name}",
        settings,
        build=lambda given: HuggingFaceModel(name, folder, given),
        load_tokenizer=lambda: _tokenizer(name, folder),
    )


def _folder_of(name: str) -> str:
    """The local folder that `name` is, or that the hub cache holds for it."""
    from pichak_core.tune.hub_cache import cached_folder

    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if name.startswith(("/", "./", "../", "~")):
        raise WorkloadError(f"hf:{name}: there is no folder {folder} on this machine")
    try:
        cached = cached_folder(name, "config.json")
    except ValueError as error:
        raise WorkloadError(
            f"hf:{name}: neither a folder on this machine nor a hub id ({error})"
        ) from error
    if cached is None:
        hub = importlib.import_module("huggingface_hub")
        raise WorkloadError(
            f"hf:{name} is not in the hub cache {hub.constants.HF_HUB_CACHE} on this machine; "
            f"fetch it once with `hf download {name}`, or give the path of a local folder"
        )
    return cached


def _tokenizer(name: str, folder: str) -> Callable[[str], Any]:
    from pichak_core.tune.row_stream import CorpusError
    from pichak_core.tune.tokenizers import load_tokenizer

    try:
        tokenizer: Callable[[str], Any] = load_tokenizer(folder)
    except CorpusError as error:
        raise WorkloadError(f"hf:{name}: {error}") from error
    return tokenizer


def _load(name: str, what: str, load: Callable[[], Loaded]) -> Loaded:
    try:
        return load()
    except _LOADING_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise WorkloadError(f"hf:{name}: its {what} cannot be loaded: {reason}") from error


def _dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """`from_pretrained`'s keyword for the storage type, which transformers 4.56 renamed.

    Casting afterwards would also round the rotary frequencies, which stay in float32.
    """
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if version >= (4, 56) else "torch_dtype": dtype}


def _checkpoint(name: str, model: Any) -> None:
    # transformers 5 renamed it. Over a frozen base, reentrant checkpoints give no gradient.
    enable = getattr(model, "activation_checkpointing_enable", None)
    try:
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    except ValueError as error:
        raise WorkloadError(f"hf:{name} has no gradient checkpointing: {error}") from error


def _with_lora(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _linear_shapes(model: Any) -> list[tuple[int, int]]:
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    shapes = []
    for module in model.modules():
        if module is output:
            continue
        if isinstance(module, torch.nn.Linear):
            shapes.append((module.out_features, module.in_features))
        elif isinstance(module, Conv1D):
            # GPT-2's own linear keeps its weight as (in, out).
            shapes.append((int(module.weight.shape[1]), int(module.weight.shape[0])))
    return shapes
