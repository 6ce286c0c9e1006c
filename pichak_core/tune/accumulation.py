"""How many micro-batches make one optimizer step: a target in scored tokens, in whole ones.

The number is rounded up, so that the batch never silently shrinks below its target (a micro-batch
that was halved to fit doubles the accumulation); the effective batch is computed back from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pichak_core.plan import CONSTANT, Value, format_number
from pichak_core.tune.ramp_story import counted, rows_text

#: Scored tokens per step where no noise scale was measured.
DEFAULT_TARGET_TOKENS = 65_536
#: Optimizer steps that one pass over the corpus has to give at least.
MIN_UPDATES = 300


@dataclass(frozen=True)
class Accumulation:
    """The batch of one optimizer step, as it will really run.

    `target_tokens` (scored tokens, after the cut for `MIN_UPDATES`) with the sentence
    `target_source`; `grad_accum` micro-batches with the sentence `source`; together `rows` rows and
    `tokens` scored tokens on average. `updates` is the number of full steps in one pass over the
    corpus, None where its size is unknown. `cut_for_updates`: whether `MIN_UPDATES` decided.
    """

    grad_accum: int
    rows: int
    tokens: float
    target_tokens: float
    updates: int | None
    cut_for_updates: bool
    source: str
    target_source: str
    notes: tuple[str, ...] = ()

    def values(self) -> dict[str, Value]:
        """What a plan holds of it, by the plan's names."""
        ran = "the batch that one optimizer step will really run: grad_accum × micro_batch"
        return {
            "target_tokens": Value(self.target_tokens, self.target_source, unit="scored tokens"),
            "grad_accum": Value(self.grad_accum, self.source, unit="micro-batches"),
            "effective_batch_rows": Value(self.rows, ran, unit="rows"),
            "effective_batch_tokens": Value(
                self.tokens, f"{ran} × supervised_per_row", unit="scored tokens"
            ),
        }


def grad_accum_for(target_tokens: float, micro_batch: int, seq_len: float) -> tuple[int, str]:
    """(micro-batches per optimizer step, the sentence): ⌈target / (micro_batch · seq_len)⌉.

    `seq_len` is the *scored* tokens of a row (all of them where the loss scores every token).
    `ValueError` for anything that is not a positive, finite number.
    """
    for name, value in (
        ("target_tokens", target_tokens),
        ("micro_batch", micro_batch),
        ("scored tokens per row", seq_len),
    ):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} has to be a positive number, not {value}")
    per_micro = micro_batch * seq_len
    # a hair of slack: 3 × 0.1 tokens are not more than a target of 0.3
    n = max(1, math.ceil(target_tokens / per_micro * (1.0 - 1e-12)))
    return n, (
        f"{n:,} × {rows_text(micro_batch)} × {format_number(seq_len)} scored tokens a row = "
        f"{format_number(n * per_micro)} scored tokens per optimizer step, in whole micro-batches, "
        f"for a target of {format_number(target_tokens)}"
    )


def plan_accumulation(
    *,
    micro_batch: int,
    supervised_per_row: float,
    noise_tokens: float | None = None,
    noise_kind: str = "value",
    target_tokens: float = DEFAULT_TARGET_TOKENS,
    rows_total: int | None = None,
    min_updates: int = MIN_UPDATES,
) -> Accumulation:
    """The accumulation of a plan.

    The target is the noise scale (`noise_tokens` and the kind of `NoiseScale`), or the constant
    `target_tokens` where none was measured. It is cut so that one pass over `rows_total` rows gives
    `min_updates` full optimizer steps; a single micro-batch is the least, and where even that gives
    fewer, a note says so. `ValueError` for arguments that are not positive.
    """
    if rows_total is not None and rows_total <= 0:
        raise ValueError(f"rows_total has to be positive, not {rows_total}")
    if min_updates < 1:
        raise ValueError(f"min_updates has to be at least 1, not {min_updates}")
    target, target_source = _target(noise_tokens, noise_kind, target_tokens)
    n, source = grad_accum_for(target, micro_batch, supervised_per_row)
    notes: list[str] = []
    cut = False
    if rows_total is not None and (rows_total // (n * micro_batch)) < min_updates:
        most = max(1, rows_total // (micro_batch * min_updates))
        if most < n:
            cut, n = True, most
            wanted = target
            target = min(target, most * micro_batch * supervised_per_row)
            target_source += (
                f"; cut from {format_number(wanted)}, as one pass over {rows_total:,} rows should "
                f"give at least {min_updates} updates (a {CONSTANT})"
            )
            _, source = grad_accum_for(target, micro_batch, supervised_per_row)
    rows = n * micro_batch
    updates = None if rows_total is None else rows_total // rows
    if updates is not None and updates < min_updates:
        notes.append(
            f"one pass over {rows_text(rows_total or 0)} gives only "
            f"{counted(updates, 'full optimizer step')} of {rows_text(rows)}, fewer than "
            f"{min_updates} even without accumulation: train for more passes, or use a smaller "
            "micro-batch"
        )
    tokens = rows * supervised_per_row
    if n == 1 and tokens > 2 * target:
        notes.append(
            f"one micro-batch scores {format_number(tokens)} tokens, {tokens / target:.1f} times "
            f"the target of {format_number(target)}: a smaller micro-batch would give more "
            "updates from the same tokens"
        )
    if updates is not None:
        whole = f"one pass over {rows_text(rows_total or 0)}"
        source += f"; {whole} is {counted(updates, 'update')} of {rows_text(rows)}"
    return Accumulation(n, rows, tokens, target, updates, cut, source, target_source, tuple(notes))


def _target(noise: float | None, kind: str, fallback: float) -> tuple[float, str]:
    if noise is None:
        return float(fallback), CONSTANT
    what = {
        "coarse": "the noise scale, measured coarsely",
        "lower_bound": "a lower bound of the noise scale",
        "upper_bound": "an upper bound of the noise scale",
    }.get(kind, "the measured noise scale")
    return float(noise), f"{what}, {format_number(float(noise))} scored tokens"
