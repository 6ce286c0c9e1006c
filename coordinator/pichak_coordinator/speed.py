"""How fast a row trains, read from its plan: what judges, tables and picks all go by."""

from __future__ import annotations

from dataclasses import dataclass

from pichak_coordinator.records import Row
from pichak_core.plan import Plan

#: The noise taken for a speed whose own spread is not known: a constant, no measurement.
UNKNOWN_NOISE = 0.025


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one device. `noise` is the relative standard error of the step time, or
    None where no spread was measured. `scored` says which tokens are counted: those that the loss
    scores, or all that are processed (padding included)."""

    tokens_per_second: float
    scored: bool
    noise: float | None = None

    @property
    def unit(self) -> str:
        return "scored tokens/s" if self.scored else "tokens/s"


def plan_number(plan: Plan | None, name: str) -> float | None:
    """A number of the plan that somebody measured, None for anything else."""
    value = None if plan is None else plan.values.get(name)
    if value is None or isinstance(value.value, (bool, str)) or not value.measured:
        return None
    return float(value.value)


def scored_speed(row: Row) -> Speed | None:
    """The measured speed in scored tokens, None where the plan does not tell them apart."""
    rate = plan_number(row.plan, "scored_tokens_per_second")
    if rate is None and _counts_scored(row.plan):
        rate = plan_number(row.plan, "tokens_per_second")
    return Speed(rate, True, _noise(row)) if rate is not None and rate > 0 else None


def processed_speed(row: Row) -> Speed | None:
    """The measured speed in all tokens that pass through the model."""
    rate = plan_number(row.plan, "tokens_per_second")
    if rate is None or _counts_scored(row.plan):
        return None
    return Speed(rate, False, _noise(row)) if rate > 0 else None


def rows_per_second(row: Row) -> float | None:
    """Training rows a second: micro-batch over step time."""
    batch = plan_number(row.plan, "micro_batch")
    seconds = plan_number(row.plan, "seconds_per_step")
    return batch / seconds if batch and seconds else None


def _counts_scored(plan: Plan | None) -> bool:
    """Whether this plan's ``tokens_per_second`` are scored tokens: its unit says so."""
    return plan is not None and any(
        name == "tokens_per_second" and "scored" in value.unit
        for name, value in plan.values.items()
    )


def _noise(row: Row) -> float | None:
    """1.2533 · spread / √samples is the standard error of a median; the kept size is timed at least
    three times (`RampResult`)."""
    ramp = row.ramp or {}
    seconds, spread = ramp.get("seconds_per_step"), ramp.get("seconds_spread")
    if not isinstance(seconds, (int, float)) or not isinstance(spread, (int, float)):
        return None
    if isinstance(seconds, bool) or isinstance(spread, bool) or seconds <= 0 or spread < 0:
        return None
    return float(1.2533 * spread / seconds / 3**0.5)
