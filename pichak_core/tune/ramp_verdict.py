"""Does a size fit? The reasons why not, the most certain first."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from pichak_core.tune.ramp_result import NoStepError, Verdict
from pichak_core.tune.ramp_story import gib
from pichak_core.tune.ramp_trial import Attempt, StepRunner
from pichak_core.tune.spill import SPILL_FACTOR, spill_between, spilled_bytes

#: Constant. With less host memory than this left behind a step, the size does not fit.
HOST_GUARD_BYTES = 512 * 2**20


@dataclass
class Judge:
    """Judges attempts against `capacity_bytes` and `budget_bytes` (the capacity less the
    headroom). `rates` are the seconds a row of the sizes that fit so far."""

    runner: StepRunner
    capacity_bytes: int
    budget_bytes: int
    rates: dict[int, float] = field(default_factory=dict)

    def verdict(self, attempt: Attempt) -> tuple[Verdict, str, Attempt]:
        """(verdict, reason, the attempt with the seconds of a second timing, if one was needed).

        `NoStepError` when the step did nothing and no smaller size has worked, so that it is the
        step function that is at fault.
        """
        self.rates.pop(attempt.rows, None)
        smaller = [size for size in self.rates if size < attempt.rows]
        why_not = self._refused(attempt)
        if why_not is None and (idle := self._did_nothing(attempt)):
            if not smaller:
                raise NoStepError(
                    f"the step function did not train at {attempt.rows} row(s): {idle}; each call "
                    "must run one whole training step"
                )
            why_not = ("no step", idle)
        why_not = why_not or self._too_large(attempt)
        if why_not is None and smaller and self._slow(attempt, self._best(attempt.rows)):
            verdict, why, attempt = self._time_again(attempt)
        elif why_not is None:
            verdict, why = "ok", _measured(attempt)
        else:
            verdict, why = why_not
        if verdict == "ok":
            self.rates[attempt.rows] = _rate(attempt)
        return verdict, why, attempt

    def _time_again(self, attempt: Attempt) -> tuple[Verdict, str, Attempt]:
        """Slow once is a suspicion: time this size and the one it was compared with again, and
        compare the fastest of these with the slowest of those."""
        again = self.runner.attempt(attempt.rows, repeats=2)
        refused = self._refused(again)
        if refused is not None:
            return *refused, again
        compared = self._best(attempt.rows)
        reference = self.runner.attempt(compared, repeats=2)
        if reference.refusal is None:
            slowest = max(reference.seconds) / compared
            self.rates[compared] = max(self.rates[compared], slowest)
        fastest = min(_rate(attempt), min(again.seconds) / attempt.rows)
        times = fastest / self.rates[compared]
        if times <= SPILL_FACTOR:
            return "ok", f"{_measured(again)}, timed again", again
        why = f"{_measured(again)}: {times:.1f}x the seconds a row of {compared}, timed again"
        return "slow", why, again

    def _did_nothing(self, attempt: Attempt) -> str:
        steps = len(attempt.seconds)
        if attempt.executed is not None and attempt.executed < steps:
            return f"{attempt.executed} of {steps} training steps were run"
        if attempt.peak.allocated <= attempt.peak.held:
            return f"nothing was allocated on {self.runner.backend.device}"
        return ""

    def _refused(self, attempt: Attempt) -> tuple[Verdict, str] | None:
        refusal = attempt.refusal
        if refusal is None:
            return None
        why = refusal.text + (f", in {attempt.phase}" if attempt.phase else "")
        if refusal.kind == "kernel":
            return "kernel", why
        if refusal.kind == "host memory" and self.runner.backend.kind != "cpu":
            return "host memory", why
        return "refused", why

    def _too_large(self, attempt: Attempt) -> tuple[Verdict, str] | None:
        peak, said = attempt.peak.reserved, _measured(attempt)
        if peak > self.capacity_bytes:
            return (
                "over capacity",
                f"{said}: the {gib(self.capacity_bytes)} there are do not hold it",
            )
        moved = spilled_bytes(attempt.before, attempt.after)
        if moved:
            return "paging", f"{said}: the driver moved {gib(moved)} to system memory"
        host = attempt.host_free_bytes
        if host is not None and host < HOST_GUARD_BYTES:
            return "host memory", f"{said}: it left {gib(host)} of host memory"
        if peak > self.budget_bytes:
            return "over headroom", f"{said}: it leaves {gib(self.capacity_bytes - peak)}"
        return None

    def _slow(self, attempt: Attempt, compared: int) -> bool:
        """Whether its seconds a row are those of paging. Counters that saw no spill decide."""
        if not self.runner.backend.may_page:
            return False
        if spilled_bytes(attempt.before, attempt.after) == 0:
            return False
        return _rate(attempt) > SPILL_FACTOR * self.rates[compared]

    def _best(self, rows: int) -> int:
        """The size below `rows` that is fastest a row."""
        return min((size for size in self.rates if size < rows), key=lambda size: self.rates[size])


def _rate(attempt: Attempt) -> float:
    return statistics.median(attempt.seconds) / attempt.rows


def _measured(attempt: Attempt) -> str:
    seconds = statistics.median(attempt.seconds)
    text = f"peak {gib(attempt.peak.reserved)} in {seconds:.3g} s"
    others = spill_between(attempt.before, attempt.after).others_bytes
    if others:
        text += f", {gib(others)} of other programs pushed to system memory"
    return text
