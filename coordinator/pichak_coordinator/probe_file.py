"""The result file of ``pichak agent probe``: one machine's jobs, with the outcomes' own bytes.

What comes from another machine is checked field by field; a file that holds anything else than what
a probe writes is refused whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pichak_agent.messages import KINDS, SCHEMA, MessageError, Outcome, check_name
from pichak_coordinator.assemble import rows_of_node
from pichak_coordinator.framed_file import FramedFileError, FrameWriter, read_frames
from pichak_coordinator.identity import node_identity
from pichak_coordinator.ingest import Parts, read_outcome
from pichak_coordinator.records import JobRecord, Row

#: More jobs than a machine's devices have.
MAX_JOBS = 1000
#: Bytes of all outcomes of one file, which are held in memory.
MAX_TOTAL_BYTES = 512 * 1024**2
_MAX_PROBE = 80
_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,4}")
_HELLO_TEXTS = ("machine_id", "host", "address", "cpu_model")
_MAX_HELLO_TEXT = 1024
_MAX_GPUS = 1024
_UNSENT = ("failed", "cancelled")


@dataclass(frozen=True)
class ProbeJob:
    """One job of a probe: `data` are its outcome's bytes and `parts` what they hold, or both are
    None and `state` ("failed", "cancelled") with `error` says why it never ran."""

    job_id: str
    kind: str
    device: str
    state: str
    error: str = ""
    data: bytes | None = None
    parts: Parts | None = None

    @classmethod
    def ended(cls, device: str, data: bytes) -> ProbeJob:
        """The job of an outcome; `MessageError` when it is not a sound one."""
        parts = read_outcome(data)
        outcome = parts.outcome
        state, error = _state_of(outcome)
        return cls(outcome.job_id, outcome.kind, device, state, error, data, parts)

    @property
    def attempt(self) -> int:
        return self.parts.outcome.attempt if self.parts else 1


@dataclass(frozen=True)
class Probe:
    """One run of ``pichak agent probe``. `name` is unique; each job's id begins with it.

    `hello` is what the machine says of itself, `finished_unix` None where the probe was killed
    before its file was whole.
    """

    name: str
    started_unix: float
    hello: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    jobs: tuple[ProbeJob, ...] = ()
    finished_unix: float | None = None
    interrupted: bool = False

    @property
    def simulated(self) -> bool:
        """Whether any of it was."""
        return any(job.parts.outcome.simulated for job in self.jobs if job.parts)

    @property
    def devices(self) -> tuple[str, ...]:
        """What was measured, each once."""
        return tuple(dict.fromkeys(job.device for job in self.jobs))

    def header(self) -> dict[str, Any]:
        """The file's first object."""
        return {
            "file": "probe",
            "schema": SCHEMA,
            "probe": self.name,
            "started_unix": self.started_unix,
            "settings": dict(self.settings),
            "hello": dict(self.hello),
        }

    def rows(self) -> list[Row]:
        """One row a device, as a store would give them."""
        node = node_identity(self.hello)
        records = [
            JobRecord(j.job_id, self.name, node, j.device, j.kind, j.state, 1, j.error)
            for j in self.jobs
        ]
        parts = {j.job_id: j.parts for j in self.jobs if j.parts}
        return rows_of_node(node, self.hello, "", records, parts, {}, self._findings(node))

    def _findings(self, node: str) -> dict[tuple[str, str], list[Any]]:
        found: dict[tuple[str, str], list[Any]] = {}
        for job in self.jobs:
            if job.parts:
                found.setdefault((node, job.device), []).extend(job.parts.findings)
        return found


def write_job(writer: FrameWriter, job: ProbeJob) -> None:
    """Add a job, on the disk when this returns."""
    unsent = "" if job.data is not None else job.state
    writer.object(
        {
            "job": job.job_id,
            "kind": job.kind,
            "device": job.device,
            "unsent": unsent,
            "error": job.error if unsent else "",
        }
    )
    if job.data is not None:
        writer.outcome(job.data)
    writer.sync()


def write_end(writer: FrameWriter, finished_unix: float, interrupted: bool) -> None:
    """Say how the probe ended, and finish the file."""
    writer.object({"finished_unix": finished_unix, "interrupted": interrupted})
    writer.finish()


def read_probe(path: Path, *, partial: bool = False) -> Probe:
    """The probe in a file; `FramedFileError` says what is wrong with it.

    With `partial` a file that ends in the middle gives the jobs that are whole in it.
    """
    try:
        return _read(path, read_frames(path, partial=partial), partial)
    except (MessageError, ValueError) as error:
        if isinstance(error, FramedFileError):
            raise
        raise FramedFileError(f"{path}: {error}") from error


def _read(path: Path, frames: Iterator[dict[str, Any] | bytes], partial: bool) -> Probe:
    head = next(frames, None)
    if not isinstance(head, dict) or head.get("file") != "probe":
        raise FramedFileError(f"{path}: not a file of `pichak agent probe`")
    if head.get("schema") != SCHEMA:
        raise FramedFileError(
            f"{path}: written in schema {str(head.get('schema'))[:20]} where this side reads "
            f"{SCHEMA}: install the same pichak-fleet version on both machines"
        )
    _only(head, file=str, schema=int, probe=str, started_unix=float, settings=dict, hello=dict)
    name = head["probe"]
    check_name("probe", name)
    if len(name) > _MAX_PROBE:
        raise ValueError(f"probe: a name of {len(name)} characters")
    _check_hello(head["hello"])
    jobs: dict[str, ProbeJob] = {}
    total = 0
    for record in frames:
        if isinstance(record, bytes):
            raise ValueError("an outcome without its job")
        if "finished_unix" in record:
            _only(record, finished_unix=float, interrupted=bool)
            if next(frames, None) is not None:
                raise ValueError("something behind the end of the probe")
            finished, interrupted = record["finished_unix"], record["interrupted"]
            break
        job = _job(record, frames, name, partial)
        if job is None:
            finished, interrupted = None, False
            break
        total += len(job.data or b"")
        if job.job_id in jobs:
            raise ValueError(f"job {job.job_id} is in it twice")
        if len(jobs) >= MAX_JOBS or total > MAX_TOTAL_BYTES:
            raise ValueError(f"more than {MAX_JOBS} jobs, or {MAX_TOTAL_BYTES:,} bytes of outcomes")
        jobs[job.job_id] = job
    else:
        if not partial:
            raise ValueError("no word on how the probe ended")
        finished, interrupted = None, False
    if not jobs:
        raise ValueError("no job is whole in it")
    return Probe(
        *(name, head["started_unix"], head["hello"], head["settings"], tuple(jobs.values())),
        *(finished, interrupted),
    )


def _job(
    record: dict[str, Any], frames: Iterator[dict[str, Any] | bytes], probe: str, partial: bool
) -> ProbeJob | None:
    """The job of a record and the outcome behind it; None when that is not there any more."""
    _only(record, job=str, kind=str, device=str, unsent=str, error=str)
    job_id, kind, device = record["job"], record["kind"], record["device"]
    check_name("job", job_id)
    if not job_id.startswith(f"{probe}-"):
        raise ValueError(f"job {job_id} is none of probe {probe}")
    if kind not in KINDS or not _DEVICE.fullmatch(device):
        raise ValueError(f"job {job_id}: no kind {kind[:40]!r} on a device {device[:40]!r}")
    if record["unsent"]:
        if record["unsent"] not in _UNSENT or not record["error"]:
            raise ValueError(f"job {job_id}: it has neither an outcome nor a reason")
        return ProbeJob(job_id, kind, device, record["unsent"], record["error"])
    data = next(frames, None)
    if data is None and partial:
        return None
    if not isinstance(data, bytes):
        raise ValueError(f"job {job_id}: its outcome is missing")
    job = ProbeJob.ended(device, data)
    if (job.job_id, job.kind) != (job_id, kind):
        raise ValueError(f"job {job_id}: the outcome behind it is of {job.job_id}, {job.kind}")
    return job


def _state_of(outcome: Outcome) -> tuple[str, str]:
    if outcome.ok:
        return "done", ""
    error = f"{outcome.status}: {outcome.error}"
    return ("cancelled" if outcome.status == "cancelled" else "failed"), error


def _only(record: Mapping[str, Any], **wanted: type) -> None:
    """`ValueError` unless `record` has exactly these fields of these types."""
    strange = sorted(set(record) ^ set(wanted))
    if strange:
        raise ValueError(f"a field {strange[0][:40]!r} too much, or missing")
    for name, kind in wanted.items():
        value = record[name]
        if type(value) is not kind:
            raise ValueError(f"{name}: {type(value).__name__} where {kind.__name__} was expected")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: {value!r} is not a time")


def _check_hello(hello: Mapping[str, Any]) -> None:
    for name in _HELLO_TEXTS:
        value = hello.get(name)
        if value is not None and (not isinstance(value, str) or len(value) > _MAX_HELLO_TEXT):
            raise ValueError(f"hello: {name} is not a text of at most {_MAX_HELLO_TEXT} characters")
    for name in ("gpus", "gpu_uuids"):
        value = hello.get(name, [])
        if not isinstance(value, list) or len(value) > _MAX_GPUS:
            raise ValueError(f"hello: {name} is not a list of at most {_MAX_GPUS}")
    node_identity(hello)
