"""Tells a ramp rung by rung, so that a person can check it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pichak_core.devices import Backend
from pichak_core.plan import format_number
from pichak_core.tune.ramp_result import LimitedBy, Rung

#: What to cut next, by the phase in which one row ran out of memory.
_NEXT_TO_CUT = {
    "state": (
        "the weights with the optimizer's state fill the device: train adapters (LoRA), or use an "
        "optimizer with less state"
    ),
    "optimizer": (
        "the optimizer's step needs it, whatever the batch: train adapters (LoRA), or use an "
        "optimizer with less state or without fused temporaries"
    ),
    "forward": (
        "activations are linear in the sequence length: shorten the rows, or turn on gradient "
        "checkpointing"
    ),
    "backward": (
        "gradients and activations are alive together: turn on gradient checkpointing, shorten the "
        "rows, or train adapters (LoRA)"
    ),
}
_NEXT_ANYWAY = (
    "shorten the rows, turn on gradient checkpointing, or train adapters (LoRA) instead of all "
    "weights"
)
_BEYOND: dict[LimitedBy, str] = {
    "limit": "the limit that was given ends the ramp there",
    "rows": "the rows in the data end the ramp there",
}


def gib(count: float) -> str:
    """Bytes as GiB, below 1 GiB as MiB, below 1 MiB as KiB, and below 1 KiB as they are."""
    if abs(count) < 2**10:
        return f"{count:,.0f} B"
    if abs(count) < 2**20:
        return f"{count / 2**10:,.1f} KiB"
    if abs(count) < 2**30:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 2**30:.2f} GiB"


def rows_text(count: int) -> str:
    """``1 row``, ``23 rows``."""
    return counted(count, "row")


def counted(count: int, noun: str) -> str:
    """``1 update``, ``2,300 updates``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def tell(
    backend: Backend,
    tried: Sequence[Rung],
    *,
    kept: int,
    largest: int,
    limited_by: LimitedBy,
    predicted_bytes: float | None,
    peak_bytes: int,
    timings: Mapping[int, Sequence[float]],
    capacity: str,
    headroom_bytes: int,
    passes: int,
    tokens_per_row: int | None,
    step_seconds_limit: float | None = None,
) -> str:
    """The `source` of a ramp's result. `passes` micro-batches are trained by each step."""
    rungs = "; ".join(f"{rows_text(rung.batch)} {rung.verdict} ({rung.why})" for rung in tried)
    seconds = timings[kept]
    unit, scale = ("rows/s", 1) if tokens_per_row is None else ("tokens/s", tokens_per_row)
    paces = {
        size: f"{format_number(size * passes * scale / statistics.median(timed))} {unit}"
        for size, timed in timings.items()
    }
    each = f" of {passes} micro-batches" if passes > 1 else ""
    return (
        f"real training steps on {backend.device} ({backend.describe()}): {rungs}. "
        f"{_edge(tried, largest, limited_by, predicted_bytes, step_seconds_limit)} "
        f"{_choice(kept, largest, paces)} "
        f"Over {len(seconds)} consecutive steps{each}, {rows_text(kept)} peaked at "
        f"{gib(peak_bytes)} and took {statistics.median(seconds):.3g} s a step (median). "
        f"Peak: {backend.peak_source()}. {_clock(backend)}"
        f"Capacity {capacity}; {_headroom(headroom_bytes)}."
    )


def why_nothing_fits(smallest: Rung, phase: str | None, *, capacity: str, budget_bytes: int) -> str:
    """What a person is told when not even the smallest size fits."""
    head = f"{rows_text(smallest.batch)} does not fit in {capacity}"
    if smallest.verdict == "over headroom":
        return (
            f"{head} with the headroom: {smallest.why}, and {gib(budget_bytes)} may be used; "
            f"lower headroom, or {_NEXT_ANYWAY}"
        )
    if smallest.verdict == "host memory":
        return f"{head}: {smallest.why}; give the process more host memory or load fewer rows ahead"
    died = f" (it died in {phase})" if phase else ""
    cut = _NEXT_TO_CUT.get(phase or "", _NEXT_ANYWAY)
    return f"{head}: {smallest.verdict}, {smallest.why}{died}; {cut}"


def _edge(
    tried: Sequence[Rung],
    largest: int,
    limited_by: LimitedBy,
    predicted_bytes: float | None,
    step_seconds_limit: float | None,
) -> str:
    head = f"The largest that fits is {largest:,}:"
    if limited_by in _BEYOND:
        return f"{head} {_BEYOND[limited_by]}."
    if limited_by == "time":
        return (
            f"{head} larger ones were left out, as their step was expected to take longer than the "
            f"{step_seconds_limit or 0:g} s allowed."
        )
    if limited_by == "prediction":
        peak = "" if predicted_bytes is None else f" at {gib(predicted_bytes)}"
        return (
            f"{head} {largest + 1:,} was predicted to pass what may be used{peak} and was not run, "
            "since running out of this memory takes the host down."
        )
    beyond = [rung for rung in tried if rung.batch == largest + 1 and rung.verdict != "ok"]
    return f"{head} {largest + 1:,} was {beyond[-1].verdict}." if beyond else f"{head[:-1]}."


def _choice(kept: int, largest: int, paces: Mapping[int, str]) -> str:
    if kept == largest:
        others = len(paces) > 1
        more = ", and no smaller size was faster beyond the timings' noise" if others else ""
        return f"Kept it at {paces[kept]}{more}."
    return f"Kept {rows_text(kept)}, which train faster: {paces[kept]} against {paces[largest]}."


def _headroom(headroom_bytes: int) -> str:
    if not headroom_bytes:
        return "no headroom is left for what one step does not show"
    return (
        f"{gib(headroom_bytes)} of it (a constant share) are left for what one step does not show"
    )


def _clock(backend: Backend) -> str:
    if backend.watch_slows:
        return "Steps were timed again without the counting, which slows them. "
    if backend.may_page and backend.process_memory() is None:
        why = backend.spill_unknown or "no system counters tell of paging here"
        return f"{why[0].upper()}{why[1:]}: capacity and time were the signs. "
    return ""
