"""Runs a training step at one size, watched and timed, and cleans up after a refusal."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from pichak_core.devices import Backend, Peak, ProcessMemory
from pichak_core.tune.oom import Judgement, error_chain, judge_error
from pichak_core.tune.ramp_result import NotOutOfMemoryError


@dataclass(frozen=True)
class Attempt:
    """What came of running `rows` one or more times in a row.

    `seconds` has an entry for each step that ended. `refusal` is set when a step raised a lack of
    memory or a kernel's limit, and `phase` then says what the step was doing, where it tells.
    `executed` is how many optimizer steps ran, None where the step does not count them.
    `before` and `after` are the system's counters of this process, None where there are none.
    """

    rows: int
    peak: Peak
    seconds: tuple[float, ...] = ()
    refusal: Judgement | None = None
    phase: str | None = None
    executed: int | None = None
    before: ProcessMemory | None = None
    after: ProcessMemory | None = None
    host_free_bytes: int | None = None


@dataclass
class StepRunner:
    """Calls `step_fn(rows)` on `backend`. `calls` counts the calls.

    `step_fn` may have the attributes `steps_run` (optimizer steps so far) and `phase`, as
    `TrainingStep` has them.
    """

    step_fn: Callable[[int], object]
    backend: Backend
    clock: Callable[[], float]
    capacity_bytes: int
    calls: int = 0
    _after_refusal: bool = field(default=False, repr=False)

    def attempt(
        self, rows: int, *, repeats: int = 1, watched: bool = True, smaller_ran: bool = True
    ) -> Attempt:
        """Run `rows` from a clean state, `repeats` times without cleaning in between.

        Nothing of a refused step survives: its exception and frames are dropped before the
        collector and the allocator's cache. An error that is neither a lack of memory nor, with
        `smaller_ran`, a kernel's limit is raised: as it is, or as `NotOutOfMemoryError` where it
        looks like one. Such a look-alike right after a refusal may be the refusal's own,
        reported late, so the size is run once more first.
        """
        self._clean()
        try:
            attempt = self._run(rows, repeats, watched, smaller_ran)
        except NotOutOfMemoryError:
            if not self._after_refusal:
                raise
            attempt = None
        self._after_refusal = False
        if attempt is None:
            self._clean()
            attempt = self._run(rows, repeats, watched, smaller_ran)
        if attempt.refusal is not None:
            self._after_refusal = True
            self._clean()
        return attempt

    def _run(self, rows: int, repeats: int, watched: bool, smaller_ran: bool) -> Attempt:
        peak, seconds = Peak(), []
        before, executed = self.backend.process_memory(), self._executed()
        refusal: Judgement | None = None
        try:
            with self._watch(watched) as peak:
                for _ in range(repeats):
                    self.calls += 1
                    started = self.clock()
                    self.step_fn(rows)
                    self.backend.synchronize()
                    seconds.append(self.clock() - started)
        except Exception as error:  # noqa: BLE001 - a step is anyone's code; judged, mostly re-raised
            refusal = self._judge(error, peak, smaller_ran)
            drop_frames(error)
        now = self._executed()
        return Attempt(
            rows,
            peak,
            tuple(seconds),
            refusal,
            phase=getattr(self.step_fn, "phase", None) if refusal else None,
            executed=None if now is None or executed is None else now - executed,
            before=before,
            after=self.backend.process_memory(),
            host_free_bytes=self.backend.host_free_bytes(),
        )

    def _judge(self, error: Exception, peak: Peak, smaller_ran: bool) -> Judgement:
        known = [self.backend.free_bytes()]
        if peak.reserved:
            known.append(self.capacity_bytes - peak.reserved)
        judgement = judge_error(
            error, free_bytes=min((f for f in known if f is not None), default=None)
        )
        if judgement.kind == "look-alike":
            raise NotOutOfMemoryError(f"{judgement.text}: {judgement.hint}") from error
        if judgement.kind == "other" or (judgement.kind == "kernel" and not smaller_ran):
            raise error
        return judgement

    def _watch(self, watched: bool) -> AbstractContextManager[Peak]:
        return self.backend.watch() if watched else contextlib.nullcontext(Peak())

    def _executed(self) -> int | None:
        steps: Any = getattr(self.step_fn, "steps_run", None)
        return steps if isinstance(steps, int) else None

    def _clean(self) -> None:
        # A device reports an error of the failed step late, at the next synchronisation.
        if self._after_refusal:
            with contextlib.suppress(RuntimeError):
                self.backend.synchronize()
        self.backend.release()


def drop_frames(error: BaseException) -> None:
    """Let go of everything that the frames of `error`, and of what it was raised from, hold."""
    for link in error_chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
