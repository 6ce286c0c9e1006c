"""The workload around a causal language model: what ``builtin:`` and ``hf:`` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pichak_core.workload import Settings, WorkloadError
from pichak_core.workload.batches import Batch, MicroBatches, longest_rows

if TYPE_CHECKING:
    import torch

#: Learning rate of the optimizer handed out. No probe's result depends on it.
PROBE_LEARNING_RATE = 1e-4


class LanguageModel(Protocol):
    """A model on its device. `longest` is the most positions it takes, None where any will do."""

    vocabulary: int
    pad_id: int
    longest: int | None

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the batch's scored tokens, as training has it."""
        ...

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that get a gradient, in a fixed order."""
        ...

    def linear_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of each linear that a LoRA adapts."""
        ...


class ModelWorkload:
    """A `Workload` over one language model and one data file.

    The model is built at the first use of what needs it and again after `close()`, from the same
    seed. `seq_len` is None until the corpus was profiled; `loss_of` and `grad_fn` need it.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        build: Callable[[Settings], LanguageModel],
        load_tokenizer: Callable[[], Callable[[str], Any]],
    ) -> None:
        self.name = name
        self.data = settings.data
        self.seq_len = settings.seq_len
        self.missing: dict[str, str] = {}
        if settings.data is None:
            self.missing["data"] = "no training file was given, so there is no corpus to profile"
            self.missing["grad_fn"] = "no training file was given, so there are no real gradients"
        self._settings = settings
        self._build = build
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Callable[[str], Any] | None = None
        self._model: LanguageModel | None = None
        self._micro_batches: MicroBatches | None = None

    @property
    def tokenizer(self) -> Callable[[str], Any]:
        """The model's tokenizer, loaded once; it needs no model."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """A new AdamW over the trained tensors at each access, without state."""
        import torch

        return torch.optim.AdamW(
            [tensor for _, tensor in self._ready().trained()], lr=PROBE_LEARNING_RATE
        )

    def loss_of(self, b: int) -> torch.Tensor:
        """Forward pass of `b` rows of `seq_len` random tokens, all scored: the scalar mean loss.

        The rows are the same at every call with the same `b`.
        """
        model = self._ready()
        batch = longest_rows(
            b,
            self._row_length(model),
            model.vocabulary,
            seed=self._settings.seed,
            device=self._settings.device,
        )
        return self._forward(model, batch)

    def grad_fn(self, i: int) -> tuple[Sequence[torch.Tensor], int]:
        """Gradients of micro-batch `i`'s mean loss, unclipped, and its scored tokens.

        One tensor for each of `named_weights()`, in their order and shape. They belong to the
        caller: no later call changes them, and the weights keep no gradient. Dropout, where the
        model has any, is seeded anew for each `i`. `StopIteration` when the data is used up.
        """
        model = self._ready()
        batch = self._batches(model).get(i)
        self._check_ids(model, batch)
        tensors = [tensor for _, tensor in model.trained()]
        for tensor in tensors:
            tensor.grad = None
        with own_randomness(self._settings.device, self._settings.seed + 1 + i):
            self._forward(model, batch.to(self._settings.device)).backward()  # type: ignore[no-untyped-call]
        return [_take_gradient(tensor) for tensor in tensors], batch.scored_tokens

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """The trained tensors: the model's own, or LoRA's factors."""
        return self._ready().trained()

    def adapter_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of each linear that a LoRA adapts, whatever the method."""
        return self._ready().linear_shapes()

    def close(self) -> None:
        """Free the model."""
        self._model = None
        self._micro_batches = None
        if self._settings.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    def _ready(self) -> LanguageModel:
        if self._model is None:
            training_dtype(self._settings)  # what cannot be had is said before anything is built
            with own_randomness(self._settings.device, self._settings.seed):
                self._model = self._build(self._settings)
        return self._model

    def _forward(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        with mixed_precision(self._settings):
            return model.loss(batch)

    def _row_length(self, model: LanguageModel) -> int:
        if self.seq_len is None:
            raise WorkloadError(
                f"{self.name}: the row length is not known yet; profile the corpus first, or give "
                "seq_len"
            )
        if model.longest is not None and self.seq_len > model.longest:
            raise WorkloadError(
                f"{self.name}: rows of {self.seq_len:,} tokens do not fit the model's "
                f"{model.longest:,} positions; give seq_len={model.longest} or less"
            )
        return self.seq_len

    def _batches(self, model: LanguageModel) -> MicroBatches:
        if self._micro_batches is None:
            data, seq_len = self.data, self._row_length(model)
            if data is None:
                raise WorkloadError(f"{self.name}: gradients need rows, and no data file was given")
            from pichak_core.tune.examples import ExampleStream

            self._micro_batches = MicroBatches(
                lambda: ExampleStream(data, self.tokenizer, seq_len, self._settings.seed),
                seq_len,
                model.pad_id,
            )
        return self._micro_batches

    def _check_ids(self, model: LanguageModel, batch: Batch) -> None:
        # On a GPU an id outside the embedding is a device-side assert that ends the process.
        largest = int(batch.input_ids.max())
        if largest >= model.vocabulary:
            raise WorkloadError(
                f"{self.name}: the tokenizer gives id {largest:,}, and the model's embedding has "
                f"{model.vocabulary:,} rows; the tokenizer belongs to another model"
            )


def training_dtype(settings: Settings) -> torch.dtype:
    """The type that matrix products run in: bfloat16 or float32.

    ``auto`` is bfloat16 where the GPU has it in hardware (CUDA compute capability 8.0) and
    float32 elsewhere. `WorkloadError` for another name, or for a device that torch does not see.
    """
    import torch

    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise WorkloadError(
            f"device {settings.device}: torch {torch.__version__} sees no CUDA device here; "
            "install a CUDA build of torch, or use device cpu"
        )
    named = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if settings.dtype in named:
        return named[settings.dtype]
    if settings.dtype != "auto":
        raise WorkloadError(f"dtype {settings.dtype!r} is not one of auto, bf16, fp32")
    if not settings.device.startswith("cuda"):
        return torch.float32
    has_bfloat16 = torch.cuda.get_device_capability(settings.device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def storage_dtype(settings: Settings) -> torch.dtype:
    """The type that the model's own weights are kept in.

    Trained weights are float32, as AdamW needs them; a base frozen under LoRA is kept in the type
    it computes in.
    """
    import torch

    return training_dtype(settings) if settings.method == "lora" else torch.float32


def mixed_precision(settings: Settings) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 where `training_dtype` says so, nothing otherwise."""
    import torch

    if training_dtype(settings) is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(settings.device.partition(":")[0], dtype=torch.bfloat16)


@contextlib.contextmanager
def own_randomness(device: str, seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block, and put them back behind it."""
    import torch

    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also seed the GPUs that are not ours to put back.
        torch.default_generator.manual_seed(seed)
        for ours in devices:
            with torch.cuda.device(ours):
                torch.cuda.manual_seed(seed)
        yield


def _take_gradient(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    gradient = tensor.grad
    tensor.grad = None
    return torch.zeros_like(tensor) if gradient is None else gradient
