"""Runs whose coordinator went away: their open jobs, what became of them, and which can go on.

One writer has the store at a time, so a job that is open when a command begins has nobody who waits
for it any more. Its agent may have ended it meanwhile, may still be at it, or may be gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pichak_coordinator.assemble import ONCE
from pichak_coordinator.jobs import FINAL
from pichak_coordinator.records import JobRecord, Run
from pichak_coordinator.store import Store
from pichak_coordinator.store_read import Reader
from pichak_core.devices.processes import started_at

#: The command whose runs can be gone on with.
PROFILE = "fleet profile"
#: Under this name a run's settings say which process is at it.
COORDINATOR = "coordinator"
_NOBODY = "its coordinator went away before it ended, and no result of it came back"


@dataclass(frozen=True)
class OpenJob:
    """A job that had not ended when its coordinator went away."""

    job_id: str
    run: str
    node: str


def this_process() -> dict[str, Any]:
    """This process as a run's settings name it."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": started_at(os.getpid()),
    }


def begun_here(settings: Mapping[str, Any]) -> bool:
    """Whether a run with these settings was begun on this machine, by what it says."""
    said = settings.get(COORDINATOR)
    return isinstance(said, Mapping) and said.get("host") == socket.gethostname()


def still_at_it(settings: Mapping[str, Any]) -> bool | None:
    """Whether the process that began a run lives; None where that cannot be seen from here."""
    said = settings.get(COORDINATOR)
    if not isinstance(said, Mapping) or not begun_here(settings):
        return None
    pid, started = said.get("pid"), said.get("started")
    if type(pid) is not int or not isinstance(started, str):
        return None
    return started_at(pid) == started


def open_jobs(store: Store) -> list[OpenJob]:
    """Every job without a final state, the oldest first."""
    found = store.each(
        "SELECT job_id, run, node FROM jobs WHERE run IS NOT NULL "
        "AND state NOT IN ('done', 'failed', 'cancelled') ORDER BY changed_unix, job_id"
    )
    return [OpenJob(*record) for record in found]


def settle(store: Store, jobs: Iterable[OpenJob]) -> int:
    """Give each of them its final state, by the outcome that came meanwhile or for want of one; how
    many there were. One that has its final state keeps it."""
    settled = 0
    for job in jobs:
        found = store.each(
            "SELECT status FROM outcomes WHERE job_id = ? ORDER BY status = 'ok' DESC, "
            "attempt DESC LIMIT 1",
            job.job_id,
        )
        status = next((str(record[0]) for record in found), "")
        if status == "ok":
            settled += store.set_job_state(job.job_id, "done")
        elif status == "cancelled":
            error = "its coordinator went away, so it was ended"
            settled += store.set_job_state(job.job_id, "cancelled", error=error)
        else:
            error = f"{status}, while its coordinator was away" if status else _NOBODY
            settled += store.set_job_state(job.job_id, "failed", error=error)
    return settled


def run_to_go_on(store: Reader, command: str, settings: Mapping[str, Any]) -> Run:
    """The last run of `command`, if it was cut off or interrupted and none of `settings` differs
    from what it was asked; what it does not say of itself differs from nothing.

    `ValueError` says in a sentence why there is none.
    """
    last = next((run for run in store.runs() if run.command == command), None)
    if last is None:
        raise ValueError(f"no {command} is in {store.path}, so none can go on")
    if last.finished_unix is None and still_at_it(last.settings):
        raise ValueError(f"the last {command}, {last.run}, is still running")
    if last.finished_unix is not None and not _left_undone(store, last.run):
        raise ValueError(
            f"the last {command}, {last.run}, came to its end: there is nothing to resume"
        )
    if last.settings.get("simulated"):
        raise ValueError(f"the last {command}, {last.run}, is simulated: nothing can go on with it")
    differing = sorted(
        name for name in settings if name in last.settings and last.settings[name] != settings[name]
    )
    if differing:
        told = ", ".join(
            f"{name} {last.settings[name]!r} where now {settings[name]!r} is asked"
            for name in differing
        )
        raise ValueError(f"{last.run} cannot go on with other settings: it had {told}")
    return last


def _left_undone(store: Reader, run: str) -> bool:
    """Whether a job of it was called off, or never ended, or its result is not here, whose like was
    not done later, the task on any node."""
    called_off, done = set(), set()
    lost = without_result(store, run)
    for job in store.jobs(run):
        what = _what(job)
        if job.state == "cancelled" or job.state not in FINAL or job.job_id in lost:
            called_off.add(what)
        elif job.state == "done":
            done.add(what)
    return not called_off <= done


def without_result(store: Reader, run: str) -> set[str]:
    """Jobs of a run that were done and whose result is not in the store: of a file that ended too
    early the jobs came, and the results behind them did not."""
    found = store.each(
        "SELECT job_id FROM jobs WHERE run = ? AND state = 'done' AND NOT EXISTS (SELECT 1 FROM "
        "outcomes o WHERE o.job_id = jobs.job_id AND (status = 'ok' OR attempt >= attempts))",
        run,
    )
    return {str(record[0]) for record in found}


def count_ended(store: Reader, run: str) -> tuple[int, int]:
    """(jobs that were done and whose result is here, all jobs) of a run; one that was begun again,
    after a resume or on another node, is one job."""
    lost = without_result(store, run)
    wanted: dict[object, bool] = {}
    for job in store.jobs(run):
        what = _what(job) if job.kind in ONCE else job.job_id
        done = job.state == "done" and job.job_id not in lost
        wanted[what] = wanted.get(what, False) or done
    return sum(wanted.values()), len(wanted)


def _what(job: JobRecord) -> tuple[str, str, str]:
    """What a job is to bring: the task is one, on whichever node."""
    return ("", "", job.kind) if job.kind == "task" else (job.node, job.device, job.kind)
