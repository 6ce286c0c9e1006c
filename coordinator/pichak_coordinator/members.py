"""What one device does in a synchronous step: its rows, in micro-batches as it was measured. Pure.

Every member trains the same number of rows (what a distributed sampler gives each rank): r = ⌈R/n⌉
of the step's R. They are cut into whole micro-batches of the size that the device's ramp kept, each
as long as measured there. What is left over lies on the straight line between the two sizes of the
ramp around it, as a step's time is a fixed part plus a part per row; below the smallest size it is
charged as that one, which is an upper bound. A size that was slower than a larger one is not used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pichak_coordinator.records import Row
from pichak_coordinator.speed import plan_number, processed_speed, scored_speed
from pichak_core.plan import CONSTANT, Value, format_number


@dataclass(frozen=True)
class Member:
    """A device that could take part: `micro_batch` rows in `seconds_per_step` seconds; `smaller`
    are the ramp's smaller sizes, (rows, seconds of one micro-batch). `tokens_per_row` counts scored
    tokens where `scored`, else all of them."""

    row: Row
    micro_batch: int
    seconds_per_step: float
    tokens_per_row: float
    scored: bool
    smaller: tuple[tuple[int, float], ...] = ()

    @property
    def label(self) -> str:
        return self.row.node.label

    @property
    def tokens_per_second(self) -> float:
        """Alone."""
        return self.micro_batch * self.tokens_per_row / self.seconds_per_step

    @property
    def faults(self) -> list[str]:
        return sorted({f.code for f in self.row.findings if f.fault})

    def _around(self, rows: int) -> tuple[tuple[int, float] | None, tuple[int, float]]:
        """The (size, seconds) of the ramp below some rows, fewer than a whole micro-batch, and the
        one that is no smaller."""
        below, above = None, (self.micro_batch, self.seconds_per_step)
        for rung in sorted(self.smaller, reverse=True):
            if rung[1] >= above[1]:
                continue
            if rung[0] < rows:
                below = rung
                break
            above = rung
        return below, above

    def _rest(self, rows: int) -> float:
        """Seconds of fewer rows than a whole micro-batch."""
        below, (size, seconds) = self._around(rows)
        if below is None or size == rows:
            return seconds
        share = (rows - below[0]) / (size - below[0])
        return below[1] + share * (seconds - below[1])

    def step_seconds(self, rows: int) -> float:
        """Seconds of this device's own part of a step, for `rows` rows."""
        whole, rest = divmod(rows, self.micro_batch)
        return whole * self.seconds_per_step + (self._rest(rest) if rest else 0.0)

    def describe(self, rows: int) -> str:
        """The arithmetic of `step_seconds`."""
        whole, rest = divmod(rows, self.micro_batch)
        parts = []
        if whole:
            times = f"{whole} × {format_number(self.seconds_per_step)} s"
            parts.append(f"{times} for micro-batches of {self.micro_batch}")
        if rest:
            last = f"{format_number(self._rest(rest))} s for the last {rest}, " if whole else ""
            parts.append(f"{last}{self._describe_rest(rest)}")
        return f"{rows} {'row' if rows == 1 else 'rows'}: {' + '.join(parts)}"

    def _describe_rest(self, rows: int) -> str:
        below, (size, seconds) = self._around(rows)
        time = format_number(seconds)
        if size == rows:
            return f"as long as {size} took in the ramp ({time} s)"
        if below is None:
            least = "the ramp's smallest that is used" if self.smaller else "the only size known"
            return f"as long as {size} took ({time} s), {least}: an upper bound"
        first = f"{below[0]} ({format_number(below[1])} s)"
        return f"on the line between {first} and {size} ({time} s) of the ramp"


def members_of(rows: Sequence[Row]) -> tuple[list[Member], list[Row]]:
    """(the devices whose step was measured, the rows without). Where any speed is in scored tokens,
    a row without is not among the first: the two cannot be compared."""
    scored = any(scored_speed(row) for row in rows)
    members: list[Member] = []
    rest: list[Row] = []
    for row in rows:
        speed = scored_speed(row) if scored else processed_speed(row)
        batch = plan_number(row.plan, "micro_batch")
        seconds = plan_number(row.plan, "seconds_per_step")
        if speed is None or not batch or not seconds or batch < 1 or seconds <= 0:
            rest.append(row)
            continue
        per_row = speed.tokens_per_second * seconds / batch
        smaller = _smaller(row.ramp, int(batch))
        members.append(Member(row, int(batch), seconds, per_row, scored, smaller))
    return members, rest


def rows_of_step(members: Sequence[Member], given: int | None = None) -> Value | None:
    """R, the rows of one optimizer step over all members: `given`, else the plans' target in tokens
    (the median, should they differ); None where no plan has one."""
    if given is not None:
        return Value(given, f"{CONSTANT}: given (--batch-rows)", unit="rows")
    targets = [
        (float(m.row.plan["target_tokens"]), m)
        for m in members
        if m.row.plan is not None and "target_tokens" in m.row.plan
    ]
    targets = [(target, m) for target, m in targets if target > 0]
    if not targets:
        return None
    target = statistics.median(target for target, _ in targets)
    per_row = statistics.median(m.tokens_per_row for m in members)
    plan = targets[0][1].row.plan
    why = plan.why("target_tokens") if plan is not None else ""
    tokens = "scored tokens" if members[0].scored else "tokens"
    text = (
        f"the plans' target of {format_number(target)} {tokens} a step ÷ {format_number(per_row)} "
        f"a row; the target: {why}"
    )
    source = f"{CONSTANT}: {text}" if why.startswith(CONSTANT) else text
    return Value(max(1, math.ceil(target / per_row * (1 - 1e-12))), source, unit="rows")


def gradient_of(members: Sequence[Member], given: int | None = None) -> Value | None:
    """Bytes of the gradient: `given`, else what the plans counted; None where they did not."""
    if given is not None:
        return Value(given, f"{CONSTANT}: given (--gradient-mib)", unit="bytes")
    for member in members:
        plan = member.row.plan
        if plan is not None and "gradient_bytes" in plan and int(plan["gradient_bytes"]) > 0:
            return plan["gradient_bytes"]
    return None


def _smaller(ramp: Mapping[str, Any] | None, below: int) -> tuple[tuple[int, float], ...]:
    """The ramp's good sizes below the one it kept, with the seconds of one micro-batch each."""
    tried, passes = (ramp or {}).get("tried"), (ramp or {}).get("passes", 1)
    if not isinstance(tried, Sequence) or not isinstance(passes, int) or passes < 1:
        return ()
    made: dict[int, float] = {}
    for rung in tried:
        if not isinstance(rung, Mapping) or rung.get("verdict") != "ok":
            continue
        size, seconds = rung.get("batch"), rung.get("seconds")
        if isinstance(size, int) and isinstance(seconds, (int, float)) and 0 < size < below:
            made[size] = float(seconds) / passes
    return tuple(sorted((size, seconds) for size, seconds in made.items() if seconds > 0))
