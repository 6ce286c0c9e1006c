"""Rows put together from what the store holds of a node: hello, jobs, outcomes, plans, findings.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pichak_coordinator.identity import node_record
from pichak_coordinator.ingest import Parts
from pichak_coordinator.jobs import FINAL
from pichak_coordinator.records import Finding, JobRecord, NodeRecord, Row
from pichak_coordinator.text import last_lines
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan

#: Kinds of which a device has one job in a run.
ONCE = frozenset({"fingerprint", "task", "ramp"})


def rows_of_node(
    node: str,
    hello: Mapping[str, Any],
    node_error: str,
    jobs: Sequence[JobRecord],
    parts: Mapping[str, Parts],
    plans: Mapping[tuple[str, str], Plan],
    findings: Mapping[tuple[str, str], Sequence[Finding]],
) -> list[Row]:
    """One row a device of the node; a node without any job has one, for its error.

    `parts` holds the outcome that counts of each job. A job of device "" is about the whole node:
    each of the node's rows takes part in it.
    """
    devices = sorted({j.device for j in jobs if j.device} | {d for n, d in plans if n == node})
    rows: list[Row] = []
    for device in devices or ["cpu"]:
        mine = [job for job in jobs if job.device in ("", device)]
        mine.sort(key=lambda job: (job.device, job.job_id))
        fingerprint = Fingerprint()
        plan: Plan | None = None
        ramp: Mapping[str, Any] | None = None
        record = node_record(node, hello, device)
        for part in (parts[job.job_id] for job in mine if job.job_id in parts):
            if part.outcome.simulated:
                record = replace(record, simulated=True)
            for reading in part.fingerprint.values():
                # What one job could not measure does not hide what another one did.
                if isinstance(reading, Measurement) or reading.name not in fingerprint:
                    fingerprint.add(reading)
            if part.ramp is not None:
                ramp = part.ramp
            if part.plan is not None and (plan is None or part.outcome.kind == "ramp"):
                plan = part.plan
        errors = [node_error] if node_error else []
        # A run that was resumed did again what had not come to its end.
        done = {job.kind for job in mine if job.state == "done" and job.kind in ONCE}
        errors += [text for job in mine if job.kind not in done and (text := _job_error(job))]
        here = {job.kind for job in mine if job.state == "done" and job.job_id in parts}
        errors += [
            f"{job.kind}: done, but its result is not here; import the whole file that it came in"
            for job in mine
            if job.state == "done" and job.job_id not in parts and job.kind not in here
        ]
        failed = bool(node_error) or any(
            job.state in FINAL and _job_error(job) for job in mine if job.kind not in done
        )
        some = [*findings.get((node, ""), ()), *findings.get((node, device), ())]
        rows.append(
            Row(
                _named(record, fingerprint),
                fingerprint,
                plans.get((node, device), plan),
                ramp,
                "; ".join(_each_once(errors)),
                tuple(sorted(some, key=lambda f: f.order)),
                _printed([job for job in mine if job.kind not in done], parts),
                unfinished=bool(errors) and not failed,
            )
        )
    return rows


def _each_once(errors: Sequence[str]) -> list[str]:
    """Without what another one says within its own words: a ramp tells why its task failed."""
    said = {text: text.partition(": ")[2] or text for text in errors}
    return [
        one
        for one in said
        if not any(said[one] != said[other] and said[one] in said[other] for other in said)
    ]


def _printed(jobs: Sequence[JobRecord], parts: Mapping[str, Parts]) -> dict[str, tuple[str, ...]]:
    """The last lines of what those of `jobs` printed that ended otherwise than well."""
    made: dict[str, tuple[str, ...]] = {}
    for job in jobs:
        outcome = parts[job.job_id].outcome if job.job_id in parts else None
        if outcome is not None and not outcome.ok and (lines := last_lines(outcome.log_tail)):
            made[job.kind] = lines
    return made


def _named(node: NodeRecord, fingerprint: Fingerprint) -> NodeRecord:
    """What the child that held the device read of it goes before the hello: the hello lists cards
    in NVML's order, not in that of the leases (field case 19)."""
    cpu = node.cpu_model or fingerprint.text("cpu.model") or ""
    if node.device.startswith("cpu"):
        return replace(node, cpu_model=cpu, device_name=cpu)
    gpu = fingerprint.text("gpu.name") or node.gpu_model
    uuid = fingerprint.text("gpu.uuid") or ""
    return replace(node, cpu_model=cpu, gpu_model=gpu, device_name=gpu, gpu_uuid=uuid)


def told_apart(rows: list[Row]) -> list[Row]:
    """Machines that share a host name get an alias: with their address, or else their identity."""
    machines: dict[str, set[str]] = {}
    addresses: dict[str, set[str]] = {}
    for row in rows:
        machines.setdefault(row.node.host, set()).add(_machine(row))
        addresses.setdefault(row.node.host, set()).add(row.node.address)

    def named(row: Row) -> Row:
        host = row.node.host
        if not host or len(machines[host]) == 1:
            return row
        apart = len(addresses[host]) == len(machines[host])
        alias = f"{host} ({row.node.address if apart else _machine(row)})"
        return replace(row, node=replace(row.node, alias=alias))

    return [named(row) for row in rows]


def _machine(row: Row) -> str:
    return "-".join(row.node.node.split("-")[:2])


def _job_error(job: JobRecord) -> str:
    if job.state == "done":
        return ""
    if job.state in FINAL:
        return f"{job.kind}: {job.error or job.state}"
    return f"{job.kind}: {'not begun' if job.state == 'queued' else 'begun, and not ended'}"


def same_device(row: Row, device: str, uuid: str) -> bool:
    """Whether a device of an earlier run is this row's: by UUID where both have one."""
    mine = row.node.gpu_uuid
    return mine == uuid if mine and uuid else row.node.device == device
