"""An agent whose jobs take `SECONDS` and no CPU: what is left of a profile's time is the
coordinator's and Ray's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pichak_agent import ray_actor
from pichak_agent.daemon import Agent
from pichak_agent.messages import SCHEMA, Job
from pichak_agent.simulation import simulated_runner
from pichak_agent.versions import own_versions
from pichak_core.simulated_host import SimulatedHost

SECONDS = 5.0
METRICS = {"cpu.usable_cores": 8, "host.memory_copy_mb_s": 9000.0, "cpu.model": "simulated"}


class SleepingAgent(ray_actor.AgentActor):
    """The real actor around an agent whose runner sleeps."""

    def __init__(self, instance: str) -> None:
        host = SimulatedHost(host=instance, metrics=METRICS)
        answer = simulated_runner(host)

        def run_job(job: Job, *, on_progress: Callable[[str], None], **_: Any) -> bytes:
            time.sleep(SECONDS)
            return answer(job, on_progress)

        def describe() -> dict[str, Any]:
            about = {"schema": SCHEMA, "versions": dict(own_versions()), "pid": os.getpid()}
            return {**about, "gpus_gap": "", **host.hello()}

        # A home of its own, as on a machine of its own: agents of one machine measure in turn.
        root = Path(os.environ["PICHAK_HOME"]) / instance
        root.mkdir(exist_ok=True)
        self._agent = Agent(instance, root=root, run_job=run_job, describe=describe)
