"""One plan from what the caller can give: every argument unlocks its part (SPEC 4.8)."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pichak_core.plan import Plan
from pichak_core.tune import parts
from pichak_core.tune.accumulation import DEFAULT_TARGET_TOKENS
from pichak_core.tune.learning_rate import named_pairs
from pichak_core.tune.noise import DEFAULT_K
from pichak_core.tune.ramp import DEFAULT_HEADROOM

if TYPE_CHECKING:
    from pichak_core.devices import Backend
    from pichak_core.tune.ramp_result import RampResult

#: What each argument would have given, for the note that a plan without it carries.
_UNLOCKS = {
    "data": "seq_len, loss_policy and scored tokens per row need `data` (and `tokenizer`)",
    "step_fn": "micro_batch and the step time need `step_fn`",
    "grad_fn": "the noise scale needs `grad_fn`",
    "named_weights": "the learning rate needs `named_weights`",
}


def derive(
    *,
    data: str | Path | None = None,
    tokenizer: Any = None,
    step_fn: Callable[[int], Any] | None = None,
    named_weights: Iterable[tuple[str, Any]] | Mapping[str, Any] | None = None,
    adapter_shapes: Sequence[tuple[int, int]] | None = None,
    device: str = "cuda:0",
    model: str = "",
    target_tokens: int = DEFAULT_TARGET_TOKENS,
    seq_quantile: float = 0.95,
    headroom: float = DEFAULT_HEADROOM,
    grad_fn: Callable[[int], tuple[Any, int]] | None = None,
    noise_k: int = DEFAULT_K,
    full_finetune: bool = False,
    sample: int | None = 512,
    limit: int = 512,
    step_seconds: float | None = None,
    backend: Backend | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """Measure what the arguments allow and return the plan; what they do not allow is noted.

    `data` is a file of training rows and `tokenizer` what turns text into tokens; `step_fn(b)` is
    one real training step of b rows at the run's longest length (`TrainingStep` builds one);
    `grad_fn(i)` one forward+backward on fresh real rows, returning (gradients, scored tokens);
    `named_weights` the *trained* tensors, as (name, tensor) pairs or a dict by name;
    `adapter_shapes` the (out, in) of each adapted matrix.
    `device` is ``cuda:N`` or ``cpu``. `target_tokens` is used where no noise scale was measured.
    The ramp tries sizes up to `limit` rows (and those of `data`) and, with `step_seconds`, leaves
    out those whose step may take longer: on a CPU nothing else may end it for minutes.

    Ctrl-C returns the plan with what has been measured until then. Raises `FileNotFoundError`
    where `data` does not exist, `CorpusError` for one that cannot be read, `ValueError` or
    `TypeError` for arguments that make no sense (before anything is measured), and whatever
    `step_fn` or `grad_fn` raise that is not an out-of-memory.
    """
    _check(target_tokens, seq_quantile, headroom)
    if data is not None and not Path(data).exists():
        raise FileNotFoundError(
            errno.ENOENT, "no such file of training rows; check the path, or leave `data` out", data
        )
    if named_weights is not None:
        named_weights = named_pairs(named_weights)
    say = on_progress or _silent
    plan = Plan(model=model, data=str(data or ""), device=device)
    given = {
        "data": data,
        "step_fn": step_fn,
        "grad_fn": grad_fn,
        "named_weights": named_weights,
    }
    for name, value in given.items():
        if value is None:
            plan.note(_UNLOCKS[name])
    ramp: RampResult | None = None
    try:
        if data is not None:
            parts.corpus(plan, data, tokenizer, sample=sample, quantile=seq_quantile, say=say)
        if step_fn is not None:
            ramp = parts.ramp(
                plan,
                step_fn,
                backend=backend,
                headroom=headroom,
                limit=limit,
                rows=int(plan.rows_total) if "rows_total" in plan else None,
                step_seconds_limit=step_seconds,
                on_progress=say,
            )
        if grad_fn is not None:
            parts.noise(plan, grad_fn, k=noise_k, say=say)
        if named_weights is not None:
            parts.weights(plan, named_weights)
        parts.batch(plan, fallback=target_tokens)
        parts.learning_rate(plan, full_finetune=full_finetune)
        if adapter_shapes is not None:
            parts.rank(plan, adapter_shapes, ramp_result=ramp)
    except KeyboardInterrupt:
        plan.note("interrupted: what follows in the order of derivation was not measured")
    return plan


def _check(target_tokens: int, seq_quantile: float, headroom: float) -> None:
    """Refuse what makes no sense, whether its part was asked for or not."""
    if not (math.isfinite(target_tokens) and target_tokens > 0):
        raise ValueError(f"target_tokens is {target_tokens}; an optimizer step takes 1 or more")
    if not 0 < seq_quantile <= 1:
        raise ValueError(f"seq_quantile is {seq_quantile}; it is a share, above 0 and at most 1")
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom is {headroom}; it is a share of the capacity, 0 to below 1")


def _silent(_text: str) -> None:
    return None
