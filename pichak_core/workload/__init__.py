"""What a probe trains: a model, an optimizer, rows, and gradients, behind one interface.

Three kinds: ``builtin:NAME`` (nothing to download), ``hf:PATH_OR_ID``, and the user's own
``FILE.py:factory`` or ``package.module:factory``. User code is loaded only in a child process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Method = Literal["full", "lora"]


@dataclass(frozen=True)
class Settings:
    """What a factory is given.

    `seq_len` is in tokens; None until the corpus was profiled (a factory then may still build its
    tokenizer). `lora_rank` is used by ``method="lora"`` alone. `data` is a path or None. `dtype`
    is ``auto`` (bfloat16 where the GPU computes in it, else float32), ``bf16`` or ``fp32``: what
    matrix products run in; trained weights are float32 in each.
    """

    model: str = "builtin:gpt-1m"
    data: str | None = None
    device: str = "cpu"
    method: Method = "full"
    seq_len: int | None = None
    lora_rank: int = 8
    seed: int = 0
    dtype: str = "auto"
    gradient_checkpointing: bool = False


class Workload(Protocol):
    """One training task on one device. Models are built at the first use of what needs them.

    `loss_of(b)` is the forward pass of b rows of the run's longest length and returns the scalar
    loss. `optimizer` is fresh (no state). `grad_fn(i)` runs one forward+backward on the i-th fresh
    micro-batch of real rows and returns (gradients, scored tokens); `StopIteration` says that the
    data is used up. `named_weights()` gives the *trained* tensors. `adapter_shapes()` gives
    (out, in) of each matrix that a LoRA would adapt. `tokenizer` is called as
    ``tok(text) -> {"input_ids": [...]}``. `close()` frees the model.

    `missing` holds the parts that this workload cannot give, by name (``data``, ``tokenizer``,
    ``grad_fn``, ``named_weights``, ``adapter_shapes``), each with a note that says why. Attributes
    among them are None, and methods raise `WorkloadError`.
    """

    name: str
    data: str | None
    seq_len: int | None

    @property
    def missing(self) -> Mapping[str, str]: ...

    @property
    def tokenizer(self) -> Callable[[str], Any] | None: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def loss_of(self, b: int) -> torch.Tensor: ...

    def grad_fn(self, i: int) -> tuple[Sequence[torch.Tensor], int]: ...

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    def adapter_shapes(self) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


class WorkloadError(ValueError):
    """A workload that cannot be had: what, where, and what to do."""


def open_workload(settings: Settings) -> Workload:
    """Build the workload that `settings.model` names; `WorkloadError` says what is wrong."""
    kind, _, name = settings.model.partition(":")
    if kind == "builtin" and name:
        from pichak_core.workload.builtin import open_builtin

        return open_builtin(name, settings)
    if kind == "hf" and name:
        from pichak_core.workload.huggingface import open_huggingface

        return open_huggingface(name, settings)
    # The last colon: a Windows path has one behind its drive letter.
    target, _, factory = settings.model.rpartition(":")
    if not target or not factory.isidentifier():
        raise WorkloadError(
            f"model {settings.model!r} is not of the form builtin:NAME, hf:PATH_OR_ID, "
            "FILE.py:factory or package.module:factory; try builtin:gpt-1m"
        )
    from pichak_core.workload.python_file import open_python

    return open_python(target, factory, settings)
