"""The learning rate, from the size of the weights that it moves.

An Adam step moves each element by about lr, so lr·√numel(W) = ‖W‖_F is the rate at which one step
rewrites W. The trained tensor with the smallest ‖W‖_F/√numel is rewritten first and decides:

    lr = rewrite / divisor · min(1, √(B / B_noise))

The factor is Adam's square-root rule for batches below the noise scale (Malladi et al. 2022,
arXiv:2205.10287). The anchor is never raised: a bigger batch lowers the noise, not how far a step
moves a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pichak_core.plan import CONSTANT, format_number
from pichak_core.tune.noise_gradients import is_tensor

#: Measured once, elsewhere, for adapter factors: 1/2 destroyed the model, 1/32 was the first that
#: learned.
DEFAULT_DIVISOR = 32
#: Measured once, elsewhere, for a 135M model's own weights: 1/320 was best, 1/32 learned 3.7 times
#: less.
FULL_FINETUNE_DIVISOR = 320

_NAMED = 3
_PAIR = 2

Named = tuple[str, Any]


@dataclass(frozen=True)
class LRResult:
    """A learning rate and what it came from.

    `rewrite_scale` is the smallest ‖W‖_F/√numel, that of the tensor `binding`, among `matrices`
    tensors with a size. `batch_factor` is min(1, √(B/B_noise)), 1 where either is unknown.
    `divisor` and `divisor_source` are for the plan's list of constants. `notes` name what was
    skipped.
    """

    learning_rate: float
    rewrite_scale: float
    binding: str
    matrices: int
    batch_factor: float
    source: str
    divisor: float = DEFAULT_DIVISOR
    divisor_source: str = CONSTANT
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewriteScale:
    """The smallest ‖W‖_F/√numel, the tensor that has it, and how many tensors have a size."""

    scale: float
    binding: str
    matrices: int
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The sentence behind `scale`."""
        seen = f"{self.matrices:,} trained tensors"
        return f"the smallest ‖W‖_F/√numel of {seen}, that of {self.binding}"


@dataclass(frozen=True)
class _Size:
    name: str
    norm: float
    numel: int
    dimensions: int | None

    @property
    def rms(self) -> float:
        return self.norm / math.sqrt(self.numel)


def derive_lr(
    named_weights: Iterable[Named] | Mapping[str, Any],
    *,
    divisor: float | None = None,
    batch_tokens: float | None = None,
    noise_tokens: float | None = None,
    full_finetune: bool = False,
) -> LRResult:
    """The learning rate for the trained tensors `named_weights` (pairs, or a dict; consumed once).

    `batch_tokens` are the scored tokens of the optimizer step that will really run, `noise_tokens`
    the noise scale. `divisor` overrides the constant that `full_finetune` selects. Where some
    tensors require gradients, the others are taken for frozen and left out. `ValueError` when no
    tensor has a finite, non-zero norm, or one has no readable values; `TypeError` for tensors
    without their names.
    """
    if divisor is not None and not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor has to be a positive number, not {divisor}")
    rewrite = measure_rewrite(named_weights)
    standard = FULL_FINETUNE_DIVISOR if full_finetune else DEFAULT_DIVISOR
    used = standard if divisor is None else float(divisor)
    trained = "the model's own weights" if full_finetune else "adapter factors"
    divisor_source = f"{CONSTANT}, for {trained}" if divisor is None else f"{CONSTANT}: given"
    factor, why = batch_factor(batch_tokens, noise_tokens)
    source = (
        f"rewrite/{used:g} × {format_number(factor)}: rewrite = {format_number(rewrite.scale)}, "
        f"{rewrite.source}; divisor {used:g} ({divisor_source}); {why}"
    )
    return LRResult(
        rewrite.scale / used * factor,
        rewrite.scale,
        rewrite.binding,
        rewrite.matrices,
        factor,
        source,
        used,
        divisor_source,
        rewrite.notes,
    )


def rewrite_scale(
    named_weights: Iterable[Named] | Mapping[str, Any],
) -> tuple[float, str, int]:
    """(smallest ‖W‖_F/√numel, name of the tensor that has it, number of tensors with a size).

    A weight is a torch tensor (any floating dtype; its norm is taken in double precision) or an
    object with `norm()` and `numel()`. All-zero tensors have no size and do not count.
    `ValueError` and `TypeError` as for `derive_lr`.
    """
    rewrite = measure_rewrite(named_weights)
    return rewrite.scale, rewrite.binding, rewrite.matrices


def measure_rewrite(named_weights: Iterable[Named] | Mapping[str, Any]) -> RewriteScale:
    """`rewrite_scale` with the notes on what did not count and on a binding vector."""
    sizes, notes = _sizes(named_weights)
    binding = min(sizes, key=lambda size: size.rms)
    matrices = [size for size in sizes if size.dimensions is not None and size.dimensions >= 2]
    if binding.dimensions == 1 and matrices:
        second = min(matrices, key=lambda size: size.rms)
        notes.append(
            f"the learning rate is bound by {binding.name}, a vector; the matrices alone would "
            f"allow {second.rms / binding.rms:.3g} times as much ({second.name})"
        )
    return RewriteScale(binding.rms, binding.name, len(sizes), tuple(notes))


def batch_factor(batch_tokens: float | None, noise_tokens: float | None) -> tuple[float, str]:
    """(min(1, √(batch_tokens / noise_tokens)), the sentence); 1 where either is None.

    `ValueError` for a number that is not positive and finite.
    """
    for name, value in (("batch_tokens", batch_tokens), ("noise_tokens", noise_tokens)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} has to be a positive number, not {value}")
    if batch_tokens is None or noise_tokens is None:
        missing = "batch" if batch_tokens is None else "noise scale"
        return 1.0, f"no batch factor, for the {missing} is not known"
    batch, noise = format_number(batch_tokens), format_number(noise_tokens)
    if batch_tokens >= noise_tokens:
        return (
            1.0,
            f"{batch} scored tokens a step reach the noise scale of {noise}: no batch factor",
        )
    factor = math.sqrt(batch_tokens / noise_tokens)
    return factor, (
        f"√({batch} scored tokens a step / noise scale {noise}) = {format_number(factor)}"
    )


def named_pairs(named_weights: Iterable[Named] | Mapping[str, Any]) -> list[Named]:
    """(name, tensor) pairs, of a dict too; `TypeError` for anything else, such as bare tensors."""
    if isinstance(named_weights, Mapping):
        named_weights = named_weights.items()
    given: object = named_weights
    if is_tensor(given) or not isinstance(given, Iterable):
        raise _no_pairs(given)
    pairs: list[Named] = []
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != _PAIR or is_tensor(pair[0]):
            raise _no_pairs(pair)
        pairs.append((str(pair[0]), pair[1]))
    return pairs


def _no_pairs(found: object) -> TypeError:
    return TypeError(
        f"named_weights holds {type(found).__name__} where a (name, tensor) pair should be: hand "
        "in model.named_parameters(), or a dict of tensors by name"
    )


def _sizes(named_weights: Iterable[Named] | Mapping[str, Any]) -> tuple[list[_Size], list[str]]:
    """The tensors with a size, and notes on those without."""
    named = named_pairs(named_weights)
    trained = [(name, w) for name, w in named if getattr(w, "requires_grad", False)]
    notes: list[str] = []
    if trained and len(trained) < len(named):
        notes.append(
            f"{len(named) - len(trained)} tensors do not require gradients and were left out of "
            "the learning rate as frozen"
        )
        named = trained
    sizes: list[_Size] = []
    zero: list[str] = []
    broken: list[str] = []
    for name, weight in named:
        size = _size(name, weight)
        if not math.isfinite(size.norm):
            broken.append(name)
        elif size.norm == 0.0:
            zero.append(name)
        else:
            sizes.append(size)
    if zero:
        notes.append(
            f"{len(zero)} trained tensors are empty or all zero, as LoRA's B is at its start, and "
            f"have no size to rewrite: {_listed(zero)}"
        )
    if broken:
        notes.append(f"{len(broken)} trained tensors hold NaN or infinity: {_listed(broken)}")
    if not sizes:
        raise ValueError(
            f"no learning rate: none of the {len(named)} trained tensors has a finite, non-zero "
            f"norm ({len(zero)} all zero, {len(broken)} not finite); hand in the weights that will "
            "be trained, as they are loaded"
        )
    return sizes, notes


def _size(name: str, weight: Any) -> _Size:
    if not is_tensor(weight):
        try:
            norm, numel = float(weight.norm()), int(weight.numel())
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{name}: {type(weight).__name__} is not a tensor (it needs norm() and numel())"
            ) from error
        return _Size(name, norm if numel else 0.0, max(1, numel), getattr(weight, "ndim", None))
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load the weights first")
    if weight.is_quantized or not weight.is_floating_point():
        raise ValueError(
            f"{name} is quantised or not real ({weight.dtype}): it has no readable size; hand in "
            "the tensors that are trained (the adapter's factors)"
        )
    from pichak_core.tune.reductions import sum_of_squares

    norm = math.sqrt(sum_of_squares(weight))
    return _Size(name, norm, max(1, weight.numel()), weight.ndim)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
