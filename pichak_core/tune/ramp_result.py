"""What a ramp found: every size it tried, the size it keeps, and how the edge is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pichak_core.tune.first_guess import FirstGuess

Verdict = Literal[
    "ok",
    "refused",
    "over capacity",
    "over headroom",
    "paging",
    "slow",
    "host memory",
    "kernel",
    "no step",
]

LimitedBy = Literal[
    "memory",
    "headroom",
    "paging",
    "host memory",
    "kernel",
    "no step",
    "prediction",
    "limit",
    "rows",
    "time",
]

_VERDICTS: tuple[str, ...] = Verdict.__args__  # type: ignore[attr-defined]
_LIMITS: tuple[str, ...] = LimitedBy.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rung:
    """One size that was run: `batch` rows, its peak in bytes and its time in seconds (None where
    it did not run to its end), and why it passed or did not."""

    batch: int
    peak_bytes: int | None
    seconds: float | None
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class RampResult:
    """What `ramp_micro_batch` measured.

    `micro_batch` is the fastest size that fits, in rows, and `micro_batch_max` the largest.
    `peak_bytes` is the peak over at least three consecutive steps at `micro_batch`,
    `seconds_per_step` the median of at least three timings there and `seconds_spread` their scaled
    MAD; a step is one call of the step function, which trains `passes` micro-batches.
    `budget_bytes` is `capacity_bytes` less `headroom_bytes`. `limited_by` says what lies behind
    `micro_batch_max`: "memory" (refused), "headroom", "paging" (backed by slower memory without an
    error; `spilled` is then True), "host memory", a "kernel"'s own maximum, "no step" (the step
    did nothing), "prediction" (the next size was not run, since it was predicted not to fit), or
    what the caller gave: "limit", "rows" (in the data), "time".

    `steps_run` counts the calls of the search, `refusals` those among them that raised;
    `repeat_steps` counts the repeats at the kept sizes and every second timing.
    `base_bytes` and `bytes_per_row` are the line through the peaks, where two of them tell it.
    """

    micro_batch: int
    micro_batch_max: int
    peak_bytes: int
    budget_bytes: int
    seconds_per_step: float
    seconds_spread: float | None
    tried: tuple[Rung, ...]
    source: str
    spilled: bool
    limited_by: LimitedBy
    capacity_bytes: int
    capacity_source: str
    headroom_bytes: int
    steps_run: int
    repeat_steps: int
    refusals: int
    passes: int = 1
    base_bytes: float | None = None
    bytes_per_row: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows_per_second(self) -> float:
        """Rows trained a second at `micro_batch`."""
        return self.micro_batch * self.passes / self.seconds_per_step

    def guess_for(self, budget_bytes: int) -> int:
        """A first guess, in rows, for an identical device that may use `budget_bytes`."""
        guess = FirstGuess(
            self.micro_batch_max, self.limited_by, self.base_bytes, self.bytes_per_row
        )
        return guess.rows_for(budget_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        record = asdict(self)
        record["tried"] = [asdict(rung) for rung in self.tried]
        record["notes"] = list(self.notes)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RampResult:
        """The result in `record`; `ValueError` says what is missing, unknown or malformed."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(record) - names)
        if unknown:
            raise ValueError(f"not a ramp's result: unknown field {unknown[0]!r}")
        if record.get("limited_by") not in _LIMITS:
            raise ValueError(f"not a ramp's result: limited_by {record.get('limited_by')!r}")
        try:
            tried = tuple(Rung(**rung) for rung in record["tried"])
            made = cls(**{**record, "tried": tried, "notes": tuple(record.get("notes", ()))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a ramp's result: {error}") from error
        bad = [rung.verdict for rung in tried if rung.verdict not in _VERDICTS]
        if bad:
            raise ValueError(f"not a ramp's result: verdict {bad[0]!r}")
        return made


class DoesNotFit(RuntimeError):  # noqa: N818 - it is a finding about the device, not a fault
    """Not even the smallest size fits.

    `phase` is what the step was doing ("state", "forward", "backward", "optimizer"; None where the
    step does not say), `limited_by` what it ran into, `tried` the sizes that were run.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None,
        limited_by: LimitedBy,
        tried: tuple[Rung, ...],
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.limited_by = limited_by
        self.tried = tried


class NotOutOfMemoryError(RuntimeError):
    """An error that looks like a lack of memory while memory was free; raised from the original,
    with what to look at."""


class NoStepError(RuntimeError):
    """The step function returned without having run a training step."""
