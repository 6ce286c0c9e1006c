"""A simulated host's answers to jobs, as outcomes that say that they are simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pichak_agent.messages import Job, Outcome, encode
from pichak_core.plan import Plan
from pichak_core.simulated_host import SimulatedHost


def simulated_runner(
    host: SimulatedHost, clock: Callable[[], float] = time.time
) -> Callable[[Job, Callable[[str], None]], bytes]:
    """What runs jobs on `host` and gives each one's outcome's bytes."""

    def run(job: Job, say: Callable[[str], None]) -> bytes:
        now = clock()
        say("simulated")
        result = _result(host, job, now)
        outcome = Outcome(
            *(job.job_id, job.attempt, job.kind, "ok", result),
            node=host.host,
            started_unix=now,
            simulated=True,
        )
        return encode(outcome)

    return run


def _result(host: SimulatedHost, job: Job, now: float) -> Mapping[str, Any]:
    device = str(job.params["device"])
    if job.kind == "fingerprint":
        return {"fingerprint": host.fingerprint(device, now).to_dict()}
    if job.kind == "task":
        return {"task": host.task(device).to_dict()}
    given = job.params.get("task")
    task = Plan.from_dict(dict(given)) if given else host.task(device)
    headroom, limit = job.params.get("headroom", 0.12), job.params.get("limit")
    return host.ramp(task, device, now, headroom=headroom, limit=limit)
