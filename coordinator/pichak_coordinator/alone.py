"""A whole probe of this machine, without Ray and without a network: into one file.

The same jobs as in a fleet, one after another, each in a process of its own: every device is
fingerprinted, the task's numbers are measured once, every device is ramped with them. What failed
is in the file with its reason; at any moment the file holds what was measured until then.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pichak_agent.local import describe_node, run_here_bytes
from pichak_agent.messages import Job, MessageError
from pichak_coordinator.framed_file import FrameWriter
from pichak_coordinator.interrupts import held_back
from pichak_coordinator.probe_file import Probe, ProbeJob, write_end, write_job
from pichak_coordinator.request import ProfileRequest
from pichak_core.plan import Plan

#: (device, phase, what it does now)
Show = Callable[[str, str, str], None]
Runner = Callable[[Job, Callable[[str], None]], bytes]
_INTERRUPTED = "interrupted before it began"


def _run_here(job: Job, say: Callable[[str], None]) -> bytes:
    return run_here_bytes(job, on_progress=say)


@dataclass
class Alone:
    """One probe. `files` replaces paths of the request in the jobs' parameters; `run` runs a job
    and gives its outcome's bytes."""

    request: ProfileRequest
    devices: Sequence[str]
    files: Mapping[str, Any]
    say: Callable[[str], None]
    show: Show
    run: Runner = _run_here
    describe: Callable[[], dict[str, Any]] = describe_node
    clock: Callable[[], float] = time.time
    _jobs: list[ProbeJob] = field(default_factory=list)
    _task: Plan | None = None
    _task_error: str = ""
    _interrupted: bool = False

    def probe(self, out: Path, *, replace_file: bool = False) -> Probe:
        """Measure, write `out`, and return what is in it. Ctrl-C ends it with what was measured.

        `FramedFileError` when the file cannot be written: before anything was measured, if that can
        be known then.
        """
        started = self.clock()
        made = FrameWriter(out, replace=replace_file)
        try:
            self.say("asking the machine what it is")
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started))
            probe = Probe(
                f"probe-{stamp}-{secrets.token_hex(4)}",
                float(started),
                self.describe(),
                self.request.settings(),
            )
            made.object(probe.header())
            made.sync()
        except BaseException:
            made.discard()
            raise
        try:
            try:
                self._all_jobs(probe, made)
            except KeyboardInterrupt:
                # Between two jobs; what is left is noted as not run.
                self._interrupted = True
                self._all_jobs(probe, made)
            finished = float(self.clock())
            with contextlib.suppress(KeyboardInterrupt), held_back():
                write_end(made, finished, self._interrupted)
        finally:
            made.close()
        return replace(
            probe,
            jobs=tuple(self._jobs),
            finished_unix=finished,
            interrupted=self._interrupted,
        )

    def _all_jobs(self, probe: Probe, made: FrameWriter) -> None:
        host = str(probe.hello.get("host") or "this machine")
        request = self.request
        for number, device in enumerate(self.devices):
            name = f"{probe.name}-fingerprint-{number}"
            self._one(made, device, request.fingerprint_job(name, 1, device))
        name = f"{probe.name}-task-0"
        done = self._one(
            made, self.devices[0], request.task_job(name, 1, self.devices[0], self.files)
        )
        record = done.parts.outcome.result.get("task") if done.parts else None
        if isinstance(record, dict):
            self._task = Plan.from_dict(record).measured_on(host)
        for number, device in enumerate(self.devices):
            job = request.ramp_job(f"{probe.name}-ramp-{number}", 1, device, self.files, self._task)
            why = "" if self._task else f"the task's numbers could not be measured ({done.error})"
            self._one(made, device, job, why)

    def _one(self, made: FrameWriter, device: str, job: Job, why_not: str = "") -> ProbeJob:
        """Run a job, or note why it is not run; it is in the file when this returns. A job that is
        in the file is not run again."""
        for known in self._jobs:
            if known.job_id == job.job_id:
                return known
        data: bytes | None = None
        if not self._interrupted and not why_not:
            self.show(device, job.kind, "")
            try:
                data = self.run(job, lambda text: self.show(device, job.kind, text))
            except KeyboardInterrupt:
                self._interrupted = True
        ended = self._ended(job, device, data, why_not)
        self._interrupted |= ended.state == "cancelled"
        with held_back():
            write_job(made, ended)
            self._jobs.append(ended)
        self.say(f"{device}: {job.kind} {ended.error or 'done'}")
        return ended

    def _ended(self, job: Job, device: str, data: bytes | None, why_not: str) -> ProbeJob:
        if data is not None:
            try:
                return ProbeJob.ended(device, data)
            except MessageError as error:
                why_not = f"its result was refused: {error}"
        elif self._interrupted:
            return ProbeJob(job.job_id, job.kind, device, "cancelled", _INTERRUPTED)
        return ProbeJob(job.job_id, job.kind, device, "failed", why_not)
