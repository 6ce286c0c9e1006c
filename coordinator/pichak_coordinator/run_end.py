"""How a stored run ended: whole, interrupted, cut off with its coordinator, or not yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pichak_coordinator.cut_runs import (
    COORDINATOR,
    PROFILE,
    count_ended,
    run_to_go_on,
    still_at_it,
    without_result,
)
from pichak_coordinator.database import default_path
from pichak_coordinator.records import Run
from pichak_coordinator.store_read import Reader

State = Literal["ended", "interrupted", "running", "cut off", "no end"]


@dataclass(frozen=True)
class RunEnd:
    """`sentence` is for a person, "" for a run that came to its end."""

    state: State = "ended"
    sentence: str = ""


def end_of(store: Reader, run: Run) -> RunEnd:
    """How `run` ended, what is kept of it, and how to go on with it where that can be done."""
    if run.finished_unix is not None:
        if not _goes_on(store, run):
            return RunEnd()
        return RunEnd("interrupted", f"{run.run} was interrupted: {_kept(store, run)}.")
    alive = still_at_it(run.settings)
    who = run.settings.get(COORDINATOR) or {}
    if alive:
        done, jobs = count_ended(store, run.run)
        return RunEnd(
            "running",
            f"{run.run} is still running (process {who['pid']}): {done} of {jobs} jobs are done.",
        )
    if alive is None:
        where = f" on {who['host']}" if isinstance(who, Mapping) and who.get("host") else ""
        said = f"{run.run} has no end: it was cut off, or still runs{where}"
        return RunEnd("no end", f"{said}: {_kept(store, run)}.")
    said = f"{run.run} was cut off: its coordinator (process {who['pid']}) went away"
    return RunEnd("cut off", f"{said}; {_kept(store, run)}.")


def _kept(store: Reader, run: Run) -> str:
    done, jobs = count_ended(store, run.run)
    text = f"{done} of {jobs} jobs were done, and what they measured is kept"
    if lost := len(without_result(store, run.run)):
        text = (
            f"the results of {done} of {jobs} jobs are here, and those of {lost} more were cut off "
            "with the file that they came in: import the whole file"
        )
    if not jobs:
        text = "nothing was measured yet"
    if not _goes_on(store, run):
        return text
    where = "" if store.path == default_path() else f" --store {store.path}"
    return f"{text}; `pichak fleet profile --resume{where}` goes on with it"


def _goes_on(store: Reader, run: Run) -> bool:
    if run.command != PROFILE:
        return False
    try:
        return run_to_go_on(store, PROFILE, {}).run == run.run
    except ValueError:
        return False
