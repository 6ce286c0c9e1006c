"""Probes from files into the store, as the runs that they would have been in a fleet.

All files of one call become one run, so that they are compared and judged together; where other
files of the call were imported before, the new ones join their run. A run holds one probe of a
device: an earlier probe of the same device becomes a run before it. What was imported before is
recognised by its probe's name and changes nothing. Machines of one identity and different host
names are copies of one image, and are told apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pichak_agent.messages import Job
from pichak_coordinator.identity import node_identities, node_identity
from pichak_coordinator.judging import judge_run
from pichak_coordinator.probe_file import Probe, ProbeJob
from pichak_coordinator.store import Store

COMMAND = "import"
#: A clock that says less was never set (2020-01-01): what it says is no date.
_EARLIEST_UNIX = 1_577_836_800.0
#: What the row of a probe says whose file has no end.
KILLED = "the probe was killed before it was done: what follows is missing"

#: Identity and host name.
Machine = tuple[str, str]
Status = Literal["new", "extended", "known", "refused"]


@dataclass
class Imported:
    """What became of one probe: new, extended (it had been imported in part), known already, or
    refused with an `error` because it contradicts what is stored."""

    probe: Probe
    status: Status = "known"
    run: str = ""
    node: str = ""
    new_outcomes: int = 0
    error: str = ""


@dataclass
class _Round:
    """Probes that become one run, or join one."""

    run: str = ""
    taken: set[tuple[Machine, str]] = field(default_factory=set)
    members: list[Imported] = field(default_factory=list)


def import_probes(store: Store, probes: Sequence[Probe], run_name: str = "") -> list[Imported]:
    """Store and judge `probes`; what became of each, in their order. All of them or none.

    `run_name` names the run; one that has this name already is joined.
    """
    made = [Imported(probe) for probe in probes]
    with store.atomically():
        fresh: dict[str, Imported] = {}
        for entry in made:
            if _look_up(store, entry) and not entry.run:
                fresh.setdefault(entry.probe.name, entry)
        base = _base_run(store, made, run_name)
        changed: set[str] = set()
        for number, some in enumerate(_rounds(store, list(fresh.values()), base)):
            name = f"{run_name}-before-{number}" if number and run_name else run_name
            changed.add(_put_round(store, some, name))
        for entry in made:
            # What was there before, and a second file of a probe of this call.
            if entry.status == "known" and _look_up(store, entry) and _add_missing(store, entry):
                entry.status = "extended"
                changed.add(entry.run)
        # The oldest first: each run is judged by the ones before it, and a run's id is its date.
        for run in sorted(changed):
            store.renew_findings(run)
            judge_run(store, run)
    return made


def _look_up(store: Store, entry: Imported) -> bool:
    """Set run and node of a probe that is in the store; False, and refused, where it is there with
    other results or as something else."""
    for job in entry.probe.jobs:
        record = store.job(job.job_id)
        if record is None:
            continue
        run = store.run(record.run) if record.run else None
        same = (
            run is not None
            and run.command == COMMAND
            and (record.kind, record.device) == (job.kind, job.device)
            and store.outcome_bytes(job.job_id, job.attempt) == job.data
            and entry.run in ("", run.run)
        )
        if run is None or not same:
            entry.status = "refused"
            entry.error = f"job {job.job_id} is in the store with another result"
            return False
        entry.run, entry.node = run.run, record.node
    return True


def _add_missing(store: Store, entry: Imported) -> bool:
    """What an earlier, partial import of the same probe did not have; whether there was any."""
    changed = False
    for job in entry.probe.jobs:
        if store.job(job.job_id) is None:
            entry.new_outcomes += _put_job(store, entry, job)
            changed = True
    if entry.probe.finished_unix is not None and store.node_error(entry.run, entry.node) == KILLED:
        _put_machine_error(store, entry)
        changed = True
    return changed


def _base_run(store: Store, made: Sequence[Imported], run_name: str) -> str:
    """The run that new probes join, "" for none."""
    if run_name:
        for run in store.runs():
            if run.command == COMMAND and run.settings.get("name") == run_name:
                return run.run
        return ""
    known = {entry.run for entry in made if entry.run}
    return known.pop() if len(known) == 1 else ""


def _rounds(store: Store, fresh: list[Imported], base: str) -> list[_Round]:
    """The newest probe of each device in the first round, the one before it in the second, …"""
    rounds: list[_Round] = []
    if base:
        there = {node: _machine(hello) for node, hello in store.hellos_of(base).items()}
        taken = {(there[j.node], j.device) for j in store.jobs(base) if j.node in there}
        rounds.append(_Round(base, taken))
    for entry in sorted(fresh, key=lambda e: e.probe.started_unix, reverse=True):
        keys = {(_machine(entry.probe.hello), device) for device in entry.probe.devices}
        for some in rounds:
            if not keys & some.taken:
                break
        else:
            some = _Round()
            rounds.append(some)
        some.taken |= keys
        some.members.append(entry)
    return [some for some in rounds if some.members]


def _machine(hello: Mapping[str, Any]) -> Machine:
    return node_identity(hello), str(hello.get("host") or "")


def _names(store: Store, run: str, machines: Mapping[Machine, Mapping[str, Any]]) -> list[str]:
    """A node's name for each machine: the one that it has in the run, or had before under its host
    name, else the first that no other machine of the run has."""
    here = {_machine(hello): node for node, hello in store.hellos_of(run).items()}
    before = {(node.node, node.host) for node in store.nodes()}
    made: list[str] = []
    for machine, fresh in zip(machines, node_identities(list(machines.values())), strict=True):
        identity, host = machine
        used = {*here.values(), *made}
        numbered = (identity if n == 1 else f"{identity}-{n}" for n in itertools.count(1))
        had = sorted(n for n, h in before if h == host and f"{n}-".startswith(f"{identity}-"))
        wanted = [here[machine]] if machine in here else [*had, fresh]
        free = [name for name in wanted if machine in here or name not in used]
        made.append(free[0] if free else next(name for name in numbered if name not in used))
    return made


def _put_round(store: Store, some: _Round, name: str) -> str:
    """Write a round's probes into its run, which is begun where it has none; the run."""
    now = store.now()
    members = sorted(some.members, key=lambda e: e.probe.started_unix)
    started = min(_date(e.probe.started_unix, now) for e in members)
    run = some.run
    if not run:
        settings: dict[str, Any] = {**members[-1].probe.settings, "name": name}
        with store.dated(started):
            run = store.begin_run(COMMAND, settings)
    # Two files of one machine (a GPU each) are one node.
    machines = {_machine(e.probe.hello): e.probe.hello for e in members}
    nodes = dict(zip(machines, _names(store, run, machines), strict=True))
    with store.dated(started):
        store.record_nodes(run, list(machines.values()), list(nodes.values()))
    for entry in members:
        entry.run, entry.node, entry.status = run, nodes[_machine(entry.probe.hello)], "new"
        for job in entry.probe.jobs:
            entry.new_outcomes += _put_job(store, entry, job)
        _put_machine_error(store, entry)
    finished = max(_date(e.probe.finished_unix or e.probe.started_unix, now) for e in members)
    with store.dated(finished):
        store.finish_run(run)
    return run


def _put_job(store: Store, entry: Imported, job: ProbeJob) -> int:
    """One job with its outcome, dated by when it ended on its node; how many outcomes were new."""
    probe, now = entry.probe, store.now()
    outcome = job.parts.outcome if job.parts else None
    ended = outcome.started_unix + outcome.seconds if outcome and outcome.started_unix else 0.0
    with store.dated(_date(ended or probe.started_unix, now)):
        sent = Job(job.job_id, job.attempt, job.kind, {"device": job.device}, 1.0)
        store.record_job(entry.run, sent, node=entry.node, device=job.device)
        new = store.record_outcome(job.data) if job.data is not None else False
        store.set_job_state(job.job_id, job.state, error=job.error)
    return int(new)


def _put_machine_error(store: Store, entry: Imported) -> None:
    error = KILLED if entry.probe.finished_unix is None else ""
    with store.dated(_date(entry.probe.started_unix, store.now())):
        store.record_node(entry.run, entry.probe.hello, node=entry.node, error=error)


def _date(unix: float, now: float) -> float:
    """When something happened by a clock that may be wrong: never before 2020, never after now."""
    return min(unix, now) if unix >= _EARLIEST_UNIX else now


def summary(entry: Imported) -> Mapping[str, Any]:
    """JSON-ready."""
    return {
        "probe": entry.probe.name,
        "host": str(entry.probe.hello.get("host") or ""),
        "node": entry.node,
        "run": entry.run,
        "status": entry.status,
        "new_outcomes": entry.new_outcomes,
        "simulated": entry.probe.simulated,
        "interrupted": entry.probe.interrupted,
        "error": entry.error or None,
    }
