"""How a job ended, decided from what was seen of it: one `Outcome`, whatever happened. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_agent.messages import (
    Job,
    MessageError,
    Outcome,
    clip_text,
    decode,
    encode,
)

#: Characters of a child's output that an outcome keeps.
LOG_TAIL = 16 * 1024
#: Characters of a sentence that says what went wrong.
ERROR_TEXT = 4 * 1024


@dataclass
class Seen:
    """What the runner saw of one child until nothing of it was left.

    `verdict` and `why` are the runner's own reason to end it ("timeout", "cancelled", "killed" for
    its memory, "error" for its pipe); "" when it ended by itself. `exit_code` and `signal_number`
    are the child's; both None when the process that watches it was lost. `outcome` is what the
    child sent as its end, `partial` its last partial result. `oom_kills` names each counter of the
    out-of-memory killer that rose meanwhile; `group_oom_kills` counts those in the job's own
    control group, which is full at its memory cap; `in_group` says that it has one, and `no_group`
    why a job with a cap has none. `unseen`
    says why its processes could not be watched.
    """

    verdict: str = ""
    why: str = ""
    cannot_start: str = ""
    exit_code: int | None = None
    signal_number: int | None = None
    outcome: bytes | None = None
    unfinished_frame: bool = False
    partial: Mapping[str, Any] = field(default_factory=dict)
    oom_kills: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    group_oom_kills: int = 0
    in_group: bool = False
    no_group: str = ""
    unseen: str = ""
    left_running: int = 0
    log: bytes = b""
    started_unix: float = 0.0
    seconds: float = 0.0


def conclude(job: Job, seen: Seen, *, node: str, versions: Mapping[str, str]) -> bytes:
    """The one outcome's bytes."""
    outcome = _judge(job, seen)
    log = seen.log.decode("utf-8", "replace")
    if seen.left_running:
        log += f"\n[{seen.left_running} of its processes could not be killed and may still run]"
    if seen.group_oom_kills and job.memory_cap_bytes:
        # How many is not said: version 2 counts the first of a group twice.
        log += "\n[the kernel killed processes of it at its memory cap]"
    if seen.unseen:
        log += f"\n[its processes could not be watched: {seen.unseen}; one may be left]"
    if seen.no_group:
        log += f"\n[its memory cap was held by looking, not by the kernel: {seen.no_group}]"
    outcome = replace(
        outcome,
        error=clip_text(outcome.error, ERROR_TEXT),
        log_tail=clip_text(log, LOG_TAIL, keep="end"),
        node=node,
        started_unix=seen.started_unix,
        seconds=seen.seconds,
        versions={**versions, **outcome.versions},
    )
    try:
        return encode(outcome)
    except MessageError as error:
        reason = f"its result cannot be kept: {error}"
        return encode(replace(outcome, status="error", error=reason, result={}, traceback=""))


def _judge(job: Job, seen: Seen) -> Outcome:
    sent, unreadable = _sent(job, seen)
    if sent is not None and (sent.ok or not seen.verdict):
        return sent
    result = dict(sent.result if sent is not None else {}) or dict(seen.partial)
    traceback = sent.traceback if sent is not None else ""

    def ended(status: str, error: str) -> Outcome:
        return Outcome(
            job.job_id, job.attempt, job.kind, status, result, error=error, traceback=traceback
        )

    if seen.cannot_start:
        return ended("error", f"the job's process cannot start: {seen.cannot_start}")
    if seen.verdict:
        return ended(seen.verdict, seen.why)
    if unreadable:
        return ended("error", f"the job's outcome cannot be read: {unreadable}")
    if seen.signal_number is not None:
        return ended("killed", _by_signal(seen, job.memory_cap_bytes))
    if seen.exit_code is None:
        lost = "the process that watches over the job was lost, and the job with it"
        return ended("killed", lost)
    how = f"the job's process ended with exit code {seen.exit_code} and without a result"
    if seen.unfinished_frame:
        how += ", in the middle of sending one"
    last = seen.log.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return ended("error", f"{how}; it printed last: {clip_text(last, 300)}" if last else how)


def _sent(job: Job, seen: Seen) -> tuple[Outcome | None, str]:
    """The child's own outcome, or why it is not one of this job."""
    if seen.outcome is None:
        return None, ""
    try:
        outcome = decode(seen.outcome, Outcome)
    except MessageError as error:
        return None, str(error)
    named = (outcome.job_id, outcome.attempt, outcome.kind)
    if named != (job.job_id, job.attempt, job.kind):
        return None, f"it is for {named[0]}, attempt {named[1]}, {named[2][:40]!r}"
    return outcome, ""


def at_the_limit(cap_bytes: int) -> str:
    """The sentence for a job whose control group was full."""
    return (
        "memory cap exceeded: the kernel killed processes of it at its control group's limit of "
        f"{cap_bytes / 1024**3:.2f} GiB"
    )


def _by_signal(seen: Seen, cap_bytes: int) -> str:
    number = seen.signal_number or 0
    if number == signal.SIGKILL and seen.group_oom_kills and cap_bytes:
        return at_the_limit(cap_bytes)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    text = f"the job's process was killed by {name}"
    if number != signal.SIGKILL:
        return text
    if seen.group_oom_kills:
        text += ", by the kernel's out-of-memory killer (its own control group counts it)"
    elif seen.in_group:
        text += "; its own control group counts no process killed for want of memory"
    elif seen.oom_kills:
        # The narrowest comes last.
        file, (before, after) = list(seen.oom_kills.items())[-1]
        text += (
            f"; oom_kill in {file} rose from {before} to {after} meanwhile, so it may have been "
            "the kernel's out-of-memory killer, or that struck another process: the kernel's log "
            "says"
        )
    return text
