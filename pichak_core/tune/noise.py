"""The gradient noise scale of a task, measured from the gradients of its own micro-batches.

`measure_noise_scale` runs them, `NoiseAccumulator` takes gradients that a training loop computes
anyway. Formulas: `noise_estimators`. What must be handed in are raw gradients: before clipping, not
multiplied by a loss scale, each of rows that no other micro-batch used, with dropout seeds that
differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pichak_core.plan import format_number
from pichak_core.tune.noise_estimators import (
    Estimates,
    effective_count,
    ratio_interval,
    student_t_quantile,
)
from pichak_core.tune.noise_gradients import parts_of
from pichak_core.tune.noise_log import GradientLog
from pichak_core.tune.noise_result import (
    MIN_RATIO,
    NoiseScale,
    classify,
    noise_scale_from_norms,
    sentence,
)
from pichak_core.tune.noise_sketch import DEFAULT_BUCKETS

__all__ = [
    "DEFAULT_K",
    "NoiseAccumulator",
    "NoiseScale",
    "measure_noise_scale",
    "noise_scale_from_norms",
]

#: Micro-batches that are taken before the first look at the result.
DEFAULT_K = 16

#: Gradients are kept whole up to this many numbers over all micro-batches (64 MiB of float64).
EXACT_ELEMENTS = 1 << 23

#: How large the interval's upper end may be, as a multiple of its lower end, to be narrow at
#: T ≥ 2 × B_noise, and to do at T ≥ `target_ratio` × B_noise.
NARROW, GOOD_ENOUGH = 2.0, 4.0

_FEW = 6.0


class NoiseAccumulator:
    """Takes the gradients of micro-batches one at a time and estimates B_noise from them.

    Small gradients are kept whole (up to `exact_elements` numbers together), larger ones as two
    running sums and a sketch each: twice the gradient in float32, on `sum_device` (None: where the
    gradient is). Plain lists of numbers work without torch and are always kept whole. `confidence`
    is the interval's, `seed` fixes the sketch, `names` are the trained tensors' for the notes.
    The caller's tensors are read, never changed or kept.
    """

    def __init__(
        self,
        sum_device: Any = None,
        *,
        confidence: float = 0.9,
        seed: int = 0,
        names: Sequence[str] | None = None,
        exact_elements: int = EXACT_ELEMENTS,
        buckets: int = DEFAULT_BUCKETS,
    ) -> None:
        if not 0.0 < confidence < 1.0:
            raise ValueError(f"confidence is a share between 0 and 1, not {confidence}")
        self.tokens: list[float] = []
        self.skipped = 0
        self._confidence = confidence
        self._names = tuple(names) if names is not None else ()
        self._gradients = GradientLog(sum_device, seed, exact_elements, buckets)

    @property
    def k(self) -> int:
        """Micro-batches that count: those with scored tokens."""
        return len(self.tokens)

    def add(self, grad: Any, tokens: float) -> None:
        """Add the mean gradient of one micro-batch over its `tokens` scored tokens.

        `grad` is a tensor, or a list (or mapping by name) of one entry for each trained tensor in
        the same order every time; None stands for a tensor without a gradient and counts as zeros.
        A micro-batch of 0 scored tokens has no gradient: it is skipped and counted.
        `ValueError` for a gradient that is not finite, of other shapes than before, or negative or
        non-finite `tokens`; nothing was added then.
        """
        index = self.k + self.skipped
        count = float(tokens)
        if not math.isfinite(count) or count < 0:
            raise ValueError(f"micro-batch {index}: {tokens} scored tokens; a count ≥ 0 is needed")
        if count == 0:
            self.skipped += 1
            return
        gradient = parts_of(grad)
        self._names = self._names or gradient.names
        self._gradients.add(gradient, count, f"micro-batch {index}", self._names)
        self.tokens.append(count)

    def result(self) -> NoiseScale:
        """The estimate from what was added so far; more may be added afterwards.

        `ValueError` with fewer than 2 micro-batches that score tokens, or when every gradient is
        exactly zero.
        """
        k = self.k
        if k < 2:
            skipped = f" ({self.skipped} scored no token)" if self.skipped else ""
            raise ValueError(f"a noise scale needs at least 2 micro-batches, not {k}{skipped}")
        log = self._gradients
        if not any(log.norms_sq):
            raise ValueError(
                "every gradient is exactly zero: no trained tensor is connected to the loss"
            )
        est = log.keeper.estimates()
        micro = est.tokens / k
        s = est.s_rob if est.s_rob > log.rounding * micro * est.mean_sq else 0.0
        number, kind = classify(s, est.g2, tokens=est.tokens, micro_tokens=micro)
        if kind == "value" and k < 3:
            kind = "coarse"
        low, high, freedom = self._interval(replace(est, s_rob=s))
        if kind == "lower_bound":
            low = min(low, est.tokens)
        made = NoiseScale(
            b_noise_tokens=number,
            g2=est.g2,
            trace_sigma=s,
            micro_tokens=micro,
            k=k,
            kind=kind,
            source="unset",
            low=low,
            high=high,
            design_effect=s / est.s_tok if s > 0.0 and est.s_tok > 0.0 else None,
            tokens=est.tokens,
            s_token=max(0.0, est.s_tok),
            confidence=self._confidence,
            notes=tuple(self._notes()),
        )
        return replace(made, source=sentence(made, freedom))

    def _interval(self, est: Estimates) -> tuple[float, float, float | None]:
        """(low, high, degrees of freedom); two micro-batches say nothing of the spread."""
        if est.s_rob <= 0.0:
            return 0.0, est.tokens / self.k, None
        if self.k < 3:
            return 0.0, math.inf, None
        # rounded down so that the quantile, slow to compute, is found in its cache
        freedom = max(1.0, math.floor(10.0 * (effective_count(self.tokens) - 1.0)) / 10.0)
        quantile = student_t_quantile(self._confidence, freedom)
        low, high = ratio_interval(est, self._gradients.keeper.covariance(), quantile)
        return low, high, freedom

    def _notes(self) -> list[str]:
        notes = []
        if self.skipped:
            notes.append(f"{self.skipped} micro-batches scored no token and were skipped")
        worth = effective_count(self.tokens)
        if worth < min(_FEW, self.k - 0.5):
            notes.append(
                f"few micro-batches hold most of the scored tokens: the {self.k} are worth "
                f"{worth:.1f} equal ones, and the noise scale's interval is wide for it"
            )
        return notes + self._gradients.notes(self._names)


def measure_noise_scale(
    grad_fn: Callable[[int], tuple[Any, float]],
    *,
    k: int = DEFAULT_K,
    sum_device: Any = None,
    max_micro_batches: int | None = None,
    budget_seconds: float | None = 300.0,
    target_ratio: float = 4.0,
    confidence: float = 0.9,
    seed: int = 0,
    names: Sequence[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NoiseScale:
    """Run micro-batches until B_noise is known well enough, and say how well it is known.

    `grad_fn(i)` runs one forward and backward pass on the i-th micro-batch, of rows that no other
    one used, and returns (its mean gradient, its number of scored tokens); see
    `NoiseAccumulator.add`. It raises `StopIteration` when there are no more rows. After `k`
    micro-batches with scored tokens, collecting ends as soon as T ≥ 2 × B_noise and the ends of
    the interval are within a factor of 2, or T ≥ `target_ratio` × B_noise and they are within a
    factor of 4; and in any case after `max_micro_batches` calls (None: 16 · k), or with the first
    one to end after `budget_seconds` (None: no limit) once two count. The result's notes say
    which. `on_progress` gets a line for each micro-batch.

    Raises `ValueError` as `NoiseAccumulator` does, and what `grad_fn` raises.
    """
    limit = 16 * k if max_micro_batches is None else max_micro_batches
    if k < 2 or limit < 2:
        raise ValueError(f"at least 2 micro-batches are needed, not {min(k, limit)}")
    kept = NoiseAccumulator(sum_device, confidence=confidence, seed=seed, names=names)
    started = clock()
    look_at, why = k, f"the limit of {limit} micro-batches was reached"
    for i in range(limit):
        try:
            grad, tokens = grad_fn(i)
        except StopIteration:
            why = f"the rows ended after {i} micro-batches"
            break
        kept.add(grad, tokens)
        del grad  # on a card it would stand beside the next one
        if on_progress:
            on_progress(
                f"noise scale: micro-batch {i + 1}, {format_number(sum(kept.tokens))} tokens"
            )
        if kept.k >= look_at:
            look_at = kept.k + max(1, kept.k // 4)  # few looks: each tempts to stop on luck
            why_enough = _enough(kept.result(), target_ratio)
            if why_enough:
                why = why_enough
                break
        if budget_seconds is not None and kept.k >= 2 and clock() - started >= budget_seconds:
            why = f"the budget of {budget_seconds:g} s ended"
            break
    made = kept.result()
    ended = f"collecting gradients ended at {made.k} micro-batches: {why}"
    return replace(made, seconds=clock() - started, notes=(*made.notes, ended))


def _enough(made: NoiseScale, target_ratio: float) -> str:
    """Why no more micro-batches are needed, "" while they are."""
    if made.kind == "upper_bound":
        return "the micro-batches do not differ"
    if not made.resolved or made.low is None or made.high is None:
        return ""
    for ratio, width in ((MIN_RATIO, NARROW), (target_ratio, GOOD_ENOUGH)):
        if made.tokens >= ratio * made.b_noise_tokens and made.high <= width * made.low:
            return (
                f"T is more than {ratio:g} × B_noise and the interval's ends are within a factor "
                f"of {width:g}"
            )
    return ""
