"""A simulated host's answers to jobs, as outcomes that say that they are simulated, the agent that
gives them on a node of a cluster, and the service of such a node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pichak_agent.daemon import Agent
from pichak_agent.home import default_root
from pichak_agent.messages import SCHEMA, Job, Outcome, encode
from pichak_agent.service import RayStart, Service
from pichak_agent.service_files import safe_name
from pichak_agent.telemetry import Telemetry
from pichak_agent.versions import own_versions
from pichak_core.measure import probes
from pichak_core.measurement import Fingerprint
from pichak_core.plan import Plan
from pichak_core.simulated_host import SimulatedHost

#: Set by a service for everything that Ray starts on a simulated node: JSON with `file`, `name` and
#: `started_unix`.
VARIABLE = "PICHAK_SIMULATE"


def simulated_runner(
    host: SimulatedHost, clock: Callable[[], float] = time.time
) -> Callable[[Job, Callable[[str], None]], bytes]:
    """What runs jobs on `host` and gives each one's outcome's bytes."""

    def run(job: Job, say: Callable[[str], None]) -> bytes:
        now, began = clock(), time.monotonic()
        say("simulated")
        status, error, result = "ok", "", dict[str, Any]()
        try:
            result = _result(host, job, now)
        except ValueError as why:
            status, error = "refused", str(why)
        outcome = Outcome(
            *(job.job_id, job.attempt, job.kind, status, result, error),
            node=host.host,
            started_unix=now,
            seconds=time.monotonic() - began,
            versions=own_versions(),
            simulated=True,
        )
        return encode(outcome)

    return run


def simulated_agent(host: SimulatedHost, instance: str) -> Agent:
    """An agent whose jobs `host` answers; it starts no process."""
    answer = simulated_runner(host)

    def run_job(job: Job, *, on_progress: Callable[[str], None], **_: Any) -> bytes:
        return answer(job, on_progress)

    def describe() -> dict[str, Any]:
        about = {"schema": SCHEMA, "versions": dict(own_versions()), "pid": os.getpid()}
        return {**about, "gpus_gap": "", **host.hello()}

    return Agent(instance, run_job=run_job, describe=describe)


def agent_of_node(instance: str, variables: Mapping[str, str] = os.environ) -> Agent:
    """The node's agent: a simulated one where a service says so in `variables`. `ValueError` or
    `OSError` when its file is no longer what it was."""
    said = variables.get(VARIABLE)
    if not said:
        return Agent(instance, telemetry=Telemetry)
    told = json.loads(said)
    host = load_host(Path(told["file"]), str(told["name"]), float(told["started_unix"]))
    return simulated_agent(host, instance)


def load_host(file: Path, name: str, started_unix: float) -> SimulatedHost:
    """The host in `file`, called `name` unless that is empty; its relative times count from
    `started_unix`."""
    host = SimulatedHost.load(file, started_unix)
    return replace(host, host=name) if name else host


def variable(file: Path, name: str, started_unix: float) -> str:
    """What `VARIABLE` is set to."""
    return json.dumps({"file": str(file.absolute()), "name": name, "started_unix": started_unix})


def simulated_service(how: RayStart, file: Path, say: Callable[[str], None]) -> Service:
    """The service of the host in `file`, called as `how` says or else as the file does.

    It has a home of its own, so that several run beside each other and beside a real one. `OSError`
    when the file cannot be read, `ValueError` when it holds no host.
    """
    began = time.time()
    host = load_host(file, how.name, began)
    name = safe_name(host.host)
    marks = {"pichak.io/name": name, "pichak.io/simulated": "true"}
    made = replace(
        how,
        name=name,
        labels={**how.labels, **marks},
        num_cpus=1 if how.num_cpus is None else how.num_cpus,
        num_gpus=host.gpus,
    )
    return Service(
        made,
        name,
        say,
        simulated=str(file.absolute()),
        home=default_root() / "simulated" / name,
        # The machine's own GPUs are not those of the host.
        variables={
            VARIABLE: variable(file, name, began),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(host.gpus))),
        },
    )


def _result(host: SimulatedHost, job: Job, now: float) -> dict[str, Any]:
    device = _device(job.params)
    if job.kind == "fingerprint":
        found = host.fingerprint(device, now)
        return {"fingerprint": _only(found, job.params.get("only")).to_dict()}
    if job.kind == "task":
        return {"task": host.task(device).to_dict()}
    if job.kind != "ramp":
        raise ValueError(f"{host.host} is simulated: it has no network that could be measured")
    given = job.params.get("task")
    task = Plan.from_dict(dict(given)) if given else host.task(device)
    headroom, limit = job.params.get("headroom", 0.12), job.params.get("limit")
    return host.ramp(task, device, now, headroom=headroom, limit=limit)


def _device(params: Mapping[str, Any]) -> str:
    """The host's own device: a job with a leased GPU calls it cuda:0, as a child would see it."""
    device, visible = str(params.get("device", "cpu")), params.get("visible_devices")
    if not visible or not device.startswith("cuda"):
        return device
    return f"cuda:{str(visible).split(',')[int(device.partition(':')[2] or 0)]}"


def _only(found: Fingerprint, names: Any) -> Fingerprint:
    if names is None:
        return found
    wanted = {m.name for name, probe in probes().items() if name in names for m in probe.metrics}
    made = Fingerprint()
    for name, reading in found.items():
        if name in wanted:
            made.add(reading)
    return made
