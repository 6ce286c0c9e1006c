"""What a job can be: one function for each kind, run in the job's own process.

What was true of the machine meanwhile is part of every result: beside each measurement of a
fingerprint and of an all-reduce, with the rungs of a ramp, and as ``conditions`` in the others.

Each takes the job's `params`, `progress` (a line about what is being done) and `partial` (what the
result would be if it ended now), and returns the result as plain values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pichak_agent.messages import KINDS
from pichak_core.measure import (
    Context,
    counted_conditions,
    probes,
    run_probes,
    watched_conditions,
)
from pichak_core.measurement import Fingerprint

Progress = Callable[[str], None]
Partial = Callable[[dict[str, Any]], None]


class RefusedError(ValueError):
    """The job is not one that can be done: what is wrong with it, in a sentence."""


class JobFunction(Protocol):
    """The form of each kind's function."""

    def __call__(
        self, params: Mapping[str, Any], *, progress: Progress, partial: Partial
    ) -> dict[str, Any]: ...


_FINGERPRINT_PARAMS = {"device", "depth", "directory", "paths", "only", "seed", "visible_devices"}


def fingerprint(
    params: Mapping[str, Any], *, progress: Progress, partial: Partial
) -> dict[str, Any]:
    """``{"fingerprint": ...}`` of this machine and of `device` (``cpu``, ``cuda:0``).

    `depth` is ``quick`` or ``full``; `directory` is where a disk measurement may write (the job's
    own folder without it), `paths` are files to read instead; `only` names measurements.
    """
    unknown = sorted(set(params) - _FINGERPRINT_PARAMS)
    if unknown:
        raise RefusedError(f"a fingerprint takes no parameter {unknown[0][:40]!r}")
    depth = params.get("depth", "quick")
    if depth not in ("quick", "full"):
        raise RefusedError(f"depth is {depth!r}, not 'quick' or 'full'")
    known = list(probes())
    only = params.get("only")
    wanted = known if only is None else [str(name) for name in only]
    strange = [name for name in wanted if name not in known]
    if strange:
        raise RefusedError(f"no measurement {strange[0][:40]!r}; there are {', '.join(known)}")
    context = Context(
        device=str(params.get("device", "cpu")),
        depth=depth,
        directory=Path(params.get("directory") or Path.cwd()),
        paths=tuple(Path(path) for path in params.get("paths") or ()),
        seed=int(params.get("seed", 0)),
    )

    def so_far(readings: Fingerprint) -> None:
        partial({"fingerprint": readings.to_dict()})

    found = run_probes(context, only=wanted, on_progress=progress, on_readings=so_far)
    return {"fingerprint": found.to_dict()}


def task(params: Mapping[str, Any], *, progress: Progress, partial: Partial) -> dict[str, Any]:
    """What belongs to the training task and is the same on every node."""
    from pichak_core.tune.jobs import task_job

    _enter(params)
    with watched_conditions(str(params.get("device") or "cpu")) as conditions:
        made = task_job(params, progress=progress, partial=partial)
    return {**made, "conditions": conditions}


def ramp(params: Mapping[str, Any], *, progress: Progress, partial: Partial) -> dict[str, Any]:
    """What this machine can do of the training task: the micro-batch ramp by real steps."""
    from pichak_core.tune.jobs import ramp_job

    _enter(params)
    return ramp_job(params, progress=progress, partial=partial)


def _enter(params: Mapping[str, Any]) -> None:
    """The user's own folder, where a job runs on the user's own machine: their code finds its files
    there. On a node of a fleet it stays in its empty one."""
    folder = params.get("working_folder")
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        raise RefusedError(f"working folder {folder}: {error.strerror}") from error


def net_listen(
    params: Mapping[str, Any], *, progress: Progress, partial: Partial
) -> dict[str, Any]:
    """The listening end of link tests."""
    from pichak_agent.link_jobs import listen_job

    with counted_conditions() as conditions:
        made = listen_job(params, progress=progress, partial=partial)
    return {**made, "conditions": conditions}


def net_reach(params: Mapping[str, Any], *, progress: Progress, partial: Partial) -> dict[str, Any]:
    """Which of its peers this machine can open a connection to."""
    from pichak_agent.link_jobs import reach_job

    with counted_conditions() as conditions:
        made = reach_job(params, progress=progress, partial=partial)
    return {**made, "conditions": conditions}


def net_link(params: Mapping[str, Any], *, progress: Progress, partial: Partial) -> dict[str, Any]:
    """One link, measured in both directions from this end."""
    from pichak_agent.link_jobs import link_job

    with counted_conditions() as conditions:
        made = link_job(params, progress=progress, partial=partial)
    return {**made, "conditions": conditions}


def collective(
    params: Mapping[str, Any], *, progress: Progress, partial: Partial
) -> dict[str, Any]:
    """This machine's part in an all-reduce over several."""
    from pichak_agent.collective_job import collective_job

    return collective_job(params, progress=progress, partial=partial)


_FUNCTIONS = (fingerprint, task, ramp, net_listen, net_reach, net_link, collective)
JOBS: dict[str, JobFunction] = dict(zip(KINDS, _FUNCTIONS, strict=True))
