"""The micro-batch of a training step, from a ramp that really trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from pichak_core.devices import Backend, Capacity
from pichak_core.devices.caps import cap_of
from pichak_core.devices.torch_backend import backend_for
from pichak_core.measurement import median_and_spread
from pichak_core.tune.first_guess import FirstGuess
from pichak_core.tune.ramp_loop import Ramp
from pichak_core.tune.ramp_result import LimitedBy, RampResult
from pichak_core.tune.ramp_search import LONGEST_LEAP, EdgeSearch
from pichak_core.tune.ramp_story import gib, tell
from pichak_core.tune.ramp_trial import StepRunner
from pichak_core.tune.ramp_verdict import Judge

#: Constant. The share of the capacity that the kept size's peak leaves for what one step does not
#: show: fragmentation over a long run, evaluation, checkpoints.
DEFAULT_HEADROOM = 0.12


def ramp_micro_batch(
    step_fn: Callable[[int], object],
    *,
    device: str = "cuda:0",
    start: int = 1,
    limit: int = 512,
    headroom: float = DEFAULT_HEADROOM,
    rows: int | None = None,
    tokens_per_row: int | None = None,
    first_guess: int | FirstGuess | None = None,
    step_seconds_limit: float | None = None,
    keep: Literal["fastest", "largest"] = "fastest",
    backend: Backend | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[str], None] | None = None,
) -> RampResult:
    """The micro-batch that trains fastest on `device`, and the largest that fits.

    ``step_fn(b)`` runs one real training step of b rows at the run's longest sequence; build it
    with `TrainingStep`. Sizes from `start` are run, up to `limit` and to the `rows` of the data;
    only sizes that ran are kept. `headroom` is the share of the capacity that the peak must leave.
    `first_guess` is a size to begin with, or what a ramp on an identical device foretells; it is
    not used where the end of the memory would have to be felt for step by step.
    Sizes whose step is expected, from that of smaller ones, to take longer than
    `step_seconds_limit` are not run; a size that then takes longer is noted. `tokens_per_row` turns
    rows/s into tokens/s in the source. ``keep="largest"`` leaves out the timing of smaller sizes.
    `backend` replaces the device's own, `clock` gives seconds. `on_progress` is called with a line
    for each size. ``step_fn.close()``, where there is one, is called at the end, whatever happens.

    In a fleet each ramp has a process of its own: a device error can leave the context unusable.

    Raises `DoesNotFit` when not even the smallest size fits, with the phase it died in;
    `NoStepError` when the step function ran no step; `NotOutOfMemoryError` for an error that only
    looks like a lack of memory; any other error of the step as it is.
    """
    if not callable(step_fn):
        raise TypeError(
            f"step_fn is {step_fn!r}; give a function of b that trains one step of b rows"
        )
    ceiling, ceiling_is = _ceiling(limit, rows)
    if start < 1:
        raise ValueError(f"start is {start}; the smallest size is 1 row")
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom is {headroom}; it is a share of the capacity, 0 to below 1")
    if step_seconds_limit is not None and step_seconds_limit <= 0:
        raise ValueError(f"step_seconds_limit is {step_seconds_limit}; it must be positive")
    try:
        backend = backend or backend_for(device)
        capacity = backend.capacity()
        budget = int(capacity.bytes * (1 - headroom))
        runner = StepRunner(step_fn, backend, clock, capacity.bytes)
        leap = _longest_leap(backend)
        search = EdgeSearch(
            start=min(start, ceiling),
            ceiling=ceiling,
            budget_bytes=budget,
            first_guess=_rows_to_begin(first_guess, budget) if leap == LONGEST_LEAP else None,
            # Half of the headroom may be spent on finding the exact edge, never all of it.
            safe_bytes=(budget + capacity.bytes) // 2 if backend.unified else None,
            longest_leap=leap,
        )
        ramp = Ramp(
            runner,
            search,
            Judge(runner, capacity.bytes, budget),
            ceiling_is,
            step_seconds_limit,
            on_progress or (lambda _: None),
        )
        largest = ramp.find_edge()
        kept = ramp.fastest(largest) if keep == "fastest" else largest
    finally:
        close = getattr(step_fn, "close", None)
        if callable(close):
            close()
    passes = getattr(step_fn, "passes", 1)
    return _result(ramp, kept, largest, capacity, passes, tokens_per_row)


def _ceiling(limit: int, rows: int | None) -> tuple[int, LimitedBy]:
    for name, value in (("limit", limit), ("rows", rows)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; a ramp needs at least 1")
    if rows is not None and rows < limit:
        return rows, "rows"
    return limit, "limit"


def _rows_to_begin(guess: int | FirstGuess | None, budget_bytes: int) -> int | None:
    return guess.rows_for(budget_bytes) if isinstance(guess, FirstGuess) else guess


def _longest_leap(backend: Backend) -> int:
    """Paging that only time can show is looked for between neighbouring sizes: over a long leap
    the fixed costs of a step, which more rows share, would hide it."""
    seen = backend.process_memory() is not None or cap_of(backend.device) is not None
    return LONGEST_LEAP if seen or not backend.may_page else 3


def _result(
    ramp: Ramp,
    kept: int,
    largest: int,
    capacity: Capacity,
    passes: int,
    tokens_per_row: int | None,
) -> RampResult:
    tried, steady, search = tuple(ramp.tried), ramp.steady[kept], ramp.search
    seconds, spread = median_and_spread(steady.seconds)
    limited_by = ramp.limited_by()
    timings = {timed.rows: timed.seconds for timed in (*ramp.timed, *ramp.steady.values())}
    headroom_bytes = capacity.bytes - search.budget_bytes
    slope, peak = search.slope_bytes(), search.predicted_peak(largest)
    return RampResult(
        micro_batch=kept,
        micro_batch_max=largest,
        peak_bytes=steady.peak_bytes,
        budget_bytes=search.budget_bytes,
        seconds_per_step=seconds,
        seconds_spread=spread,
        passes=passes,
        tried=tried,
        source=tell(
            ramp.runner.backend,
            tried,
            kept=kept,
            largest=largest,
            limited_by=limited_by,
            predicted_bytes=search.predicted_peak(largest + 1),
            peak_bytes=steady.peak_bytes,
            timings=timings,
            capacity=f"{gib(capacity.bytes)}: {capacity.source}",
            headroom_bytes=headroom_bytes,
            passes=passes,
            tokens_per_row=tokens_per_row,
            step_seconds_limit=ramp.step_seconds_limit,
        ),
        spilled=any(rung.verdict in ("over capacity", "paging", "slow") for rung in tried),
        limited_by=limited_by,
        capacity_bytes=capacity.bytes,
        capacity_source=capacity.source,
        headroom_bytes=headroom_bytes,
        steps_run=ramp.steps_run,
        repeat_steps=ramp.runner.calls - ramp.steps_run,
        refusals=ramp.refusals,
        base_bytes=None if slope is None or peak is None else peak - slope * largest,
        bytes_per_row=slope,
        notes=ramp.notes(),
    )
