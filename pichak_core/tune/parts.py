"""The parts of a plan, in the order in which they are measured. Each adds its numbers, its notes
and its constants to the plan that it is given; `derive` and a fleet's jobs are made of them.

A part reads from the plan what earlier parts put there, so that numbers that were measured on
another machine serve as well as one's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pichak_core.plan import CONSTANT, Plan, Value, format_number
from pichak_core.tune.accumulation import (
    DEFAULT_TARGET_TOKENS,
    MIN_UPDATES,
    plan_accumulation,
)
from pichak_core.tune.corpus import BUCKETS, CorpusProfile, profile_corpus
from pichak_core.tune.gradient_size import gradient_bytes
from pichak_core.tune.learning_rate import (
    DEFAULT_DIVISOR,
    FULL_FINETUNE_DIVISOR,
    batch_factor,
    measure_rewrite,
)
from pichak_core.tune.noise import DEFAULT_K, NoiseScale, measure_noise_scale
from pichak_core.tune.ramp import ramp_micro_batch
from pichak_core.tune.ramp_result import DoesNotFit, LimitedBy, RampResult
from pichak_core.tune.ramp_story import rows_text
from pichak_core.tune.rank import auto_rank

Say = Callable[[str], None]

#: What lies behind the largest size that ran, by `RampResult.limited_by`.
_BEHIND_IT: dict[LimitedBy, str] = {
    "memory": "the next size was refused",
    "headroom": "the next size passed the headroom",
    "paging": "the next size was served from system memory instead of the device's",
    "host memory": "the next size ran out of the host's memory",
    "kernel": "the next size failed in a kernel, with memory to spare",
    "no step": "the next size ran no training step",
    "prediction": "the next size was predicted to take the host down and was not run",
    "limit": "the limit that was given ends the ramp there",
    "rows": "the data has no more rows",
    "time": "larger ones were left out, as their step was expected to take longer than allowed",
}

_KIND_IS = {
    "value": "noise_scale_tokens is an estimate",
    "coarse": "noise_scale_tokens is an estimate from too few tokens to rest on",
    "lower_bound": "the noise scale is at least noise_scale_tokens",
    "upper_bound": "the noise scale is at most noise_scale_tokens",
}
#: What a noise scale that is no value means for the factor made of it.
_BOUND_SAYS = {
    "upper_bound": "the noise scale is at most that, so the factor may be larger, up to 1",
    "lower_bound": "the noise scale is at least that, so the factor may be smaller",
    "coarse": "the noise scale is a coarse one",
}

#: How the note begins that stands where a micro-batch is missing.
NO_BATCH = "no micro-batch"


def corpus(
    plan: Plan,
    data: str | Path,
    tokenizer: Any,
    *,
    sample: int | None = 512,
    quantile: float = 0.95,
    seed: int = 0,
    buckets: Sequence[int] | None = None,
    say: Say | None = None,
) -> CorpusProfile:
    """`seq_len`, `loss_policy`, `supervised_per_row`, `rows_total`; raises `CorpusError`."""
    profile = profile_corpus(
        data,
        tokenizer if tokenizer is not None else "bytes",
        sample=sample,
        quantile=quantile,
        seed=seed,
        buckets=tuple(buckets) if buckets else BUCKETS,
        on_progress=None if say is None else lambda what, n, of: say(f"{what}: {n:,} of {of:,}"),
    )
    plan.set("seq_len", Value(profile.seq_len, profile.seq_source, profile.seconds, "tokens"))
    rows = f"{profile.rows_seen:,} of {profile.rows_total:,} rows tokenised"
    plan.set(
        "loss_policy",
        profile.loss_policy,
        f"{rows}, read as {profile.detected_format}",
    )
    plan.set(
        "supervised_per_row",
        Value(
            float(profile.supervised_per_row),
            f"mean over {rows}: what the loss scores of a row cut to {profile.seq_len:,} tokens",
            unit="scored tokens",
        ),
    )
    plan.set("rows_total", profile.rows_total, "counted over the whole file", unit="rows")
    if profile.scored_tokens_lost:
        share = profile.scored_tokens_lost / max(1, profile.scored_tokens)
        plan.note(
            f"{profile.rows_losing_scored:,} of {profile.rows_seen:,} rows lose scored tokens at "
            f"{profile.seq_len:,} tokens, {100 * share:.3g} % of all scored tokens"
        )
    for line in profile.defect_lines():
        plan.note(f"corpus: {line}")
    return profile


def noise(
    plan: Plan,
    grad_fn: Callable[[int], tuple[Any, float]],
    *,
    k: int = DEFAULT_K,
    budget_seconds: float | None = 300.0,
    names: Sequence[str] | None = None,
    say: Say | None = None,
) -> NoiseScale | None:
    """`noise_scale_tokens` with its interval; a note instead when it cannot be had."""
    try:
        found = measure_noise_scale(
            grad_fn, k=k, budget_seconds=budget_seconds, names=names, on_progress=say
        )
    except ValueError as error:
        plan.note(f"no noise scale: {error}")
        return None
    plan.set("noise_scale_tokens", found.as_value())
    reach = f"T = {format_number(found.tokens)} scored tokens were seen"
    plan.set("noise_scale_kind", found.kind, f"{_KIND_IS[found.kind]}; {reach}")
    for note in found.notes:
        plan.note(note)
    return found


def weights(plan: Plan, named_weights: Iterable[tuple[str, Any]]) -> None:
    """`rewrite_scale`, the size at which an Adam step rewrites the first weight, or a note; and
    `gradient_bytes`, what data-parallel training would send."""
    started = time.monotonic()
    named = list(named_weights)
    try:
        found = measure_rewrite(named)
    except ValueError as error:
        plan.note(f"no learning rate: {error}")
        return
    plan.set("rewrite_scale", Value(found.scale, found.source, time.monotonic() - started))
    size = gradient_bytes(named)
    if size is not None:
        plan.set("gradient_bytes", size)
    for note in found.notes:
        plan.note(note)


def ramp(
    plan: Plan, step_fn: Callable[[int], Any], *, tokens_per_row: int | None = None, **options: Any
) -> RampResult | None:
    """`micro_batch`, `micro_batch_max`, `seconds_per_step` and the token rates.

    `options` go to `ramp_micro_batch`; `tokens_per_row` defaults to the plan's `seq_len`. When not
    even one row fits, the plan gets a note that says where it died, and None is returned.
    """
    started = time.monotonic()
    headroom = options.get("headroom")
    length = tokens_per_row or plan.as_dict().get("seq_len")
    try:
        found = ramp_micro_batch(
            step_fn, **{"device": plan.device, "tokens_per_row": length, **options}
        )
    except DoesNotFit as error:
        plan.note(f"{NO_BATCH}: {error}")
        return None
    spent = time.monotonic() - started
    if getattr(step_fn, "loss_is_finite", None) is False:
        plan.note(
            "the loss of the first step was NaN or infinite: memory and times are those of real "
            "steps, but this model would not train"
        )
    passes = int(getattr(step_fn, "passes", 1))
    plan.set("micro_batch", Value(found.micro_batch, found.source, spent, "rows"))
    plan.set(
        "micro_batch_max",
        Value(found.micro_batch_max, _max_source(found), unit="rows"),
    )
    if headroom is not None:
        plan.set("headroom", float(headroom), CONSTANT)
    if options.get("step_seconds_limit") is not None:
        plan.set("step_seconds_limit", float(options["step_seconds_limit"]), CONSTANT, unit="s")
    kept = rows_text(found.micro_batch)
    per_pass = found.seconds_per_step / passes
    timed = f"median of the repeated steps at {kept}, {found.seconds_per_step:.3g} s" + (
        f" for {passes} passes and one optimizer step" if passes > 1 else ""
    )
    plan.set("seconds_per_step", Value(per_pass, f"one micro-batch: {timed}", unit="s"))
    if length is not None and per_pass > 0:
        rate = found.micro_batch * float(length) / per_pass
        plan.set(
            "tokens_per_second",
            Value(rate, f"{kept} of {length:,} tokens; {timed}", unit="tokens/s"),
        )
    scored = plan.as_dict().get("supervised_per_row")
    if scored and per_pass > 0:
        rate = found.micro_batch * float(scored) / per_pass
        plan.set(
            "scored_tokens_per_second",
            Value(
                rate,
                f"{kept} of {format_number(scored)} scored tokens, each padded to the longest "
                f"length; {timed}",
                unit="scored tokens/s",
            ),
        )
    for note in found.notes:
        plan.note(note)
    return found


def batch(
    plan: Plan, target_tokens: int | None = None, *, fallback: int = DEFAULT_TARGET_TOKENS
) -> None:
    """`target_tokens`, `grad_accum`, `effective_batch_rows` and `effective_batch_tokens`.

    The target is `target_tokens` where the caller insists, else the plan's noise scale, else the
    `fallback`, a constant. Needs `micro_batch`; without scored tokens per row every token of the
    sequence is taken to be scored, and a note says so.
    """
    if "micro_batch" not in plan:
        return
    values = plan.as_dict()
    per_row = values.get("supervised_per_row")
    if per_row is None and "seq_len" in plan:
        per_row = values["seq_len"]
        plan.note("scored tokens per row are unknown: every token of a row was taken as scored")
    if per_row is None:
        plan.note("no accumulation: it needs the scored tokens of a row (`data`)")
        return
    if not float(per_row) > 0:
        plan.note("no accumulation: the loss scores no token of a row at this length")
        return
    noise_value = plan.values.get("noise_scale_tokens") if target_tokens is None else None
    found = plan_accumulation(
        micro_batch=int(values["micro_batch"]),
        supervised_per_row=float(per_row),
        noise_tokens=float(noise_value) if noise_value is not None else None,
        noise_kind=str(values.get("noise_scale_kind", "value")),
        target_tokens=target_tokens or fallback,
        rows_total=int(values["rows_total"]) if "rows_total" in plan else None,
    )
    for name, value in found.values().items():
        plan.set(name, value)
    if found.cut_for_updates:
        plan.set("min_updates", MIN_UPDATES, CONSTANT)
        plan.note(f"target_tokens: {found.target_source}")
    for note in found.notes:
        plan.note(note)


def learning_rate(plan: Plan, *, full_finetune: bool) -> None:
    """`learning_rate` from `rewrite_scale`, the effective batch and the noise scale."""
    if "rewrite_scale" not in plan:
        return
    values = plan.as_dict()
    divisor = FULL_FINETUNE_DIVISOR if full_finetune else DEFAULT_DIVISOR
    factor, why = batch_factor(
        _optional(values.get("effective_batch_tokens")), _optional(values.get("noise_scale_tokens"))
    )
    bound = _BOUND_SAYS.get(str(values.get("noise_scale_kind", "")))
    if bound and "noise_scale_tokens" in values and "effective_batch_tokens" in values:
        why += f" ({bound})"
    scale = float(values["rewrite_scale"])
    rate = scale / divisor * factor
    source = (
        f"rewrite/{divisor} × {format_number(factor)}: rewrite = {format_number(scale)}, "
        f"{plan.why('rewrite_scale')}; {why}"
    )
    plan.set("learning_rate", rate, source)
    plan.set("learning_rate_divisor", divisor, CONSTANT)


def rank(
    plan: Plan,
    shapes: Sequence[tuple[int, int]],
    *,
    ramp_result: RampResult | None = None,
    ran_with_rank: int | None = None,
) -> None:
    """`lora_rank`: the largest that fits beside the kept batch, at least the one that ran."""
    if ramp_result is None:
        plan.note("no LoRA rank: it needs the memory that the kept batch leaves (`step_fn`)")
        return
    spare = ramp_result.budget_bytes - ramp_result.peak_bytes
    found, source = auto_rank(list(shapes), spare)
    fits = not source.startswith("does not fit")
    if ran_with_rank is not None and (not fits or found < ran_with_rank):
        found, fits = ran_with_rank, True
        source = f"the ramp trained with rank {ran_with_rank}, so it fits; beyond it: {source}"
    if not fits:
        plan.note(f"lora_rank: {source}")
    plan.set("lora_rank", found, source)


def _max_source(found: RampResult) -> str:
    return f"the largest size that ran; {_BEHIND_IT[found.limited_by]}"


def _optional(value: Any) -> float | None:
    return None if value is None or not math.isfinite(float(value)) else float(value)
