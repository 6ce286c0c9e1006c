"""What happens to a job next: events in, the next state and instructions out. Pure.

    queued → dispatched → running → done | failed | cancelled
                 ↑            ↓
                 └─ retrying ─┘

The caller stores every outcome that arrives, whatever this machine thinks of it, and then feeds
the event; it carries out the instructions. A job reaches exactly one final state, says so with
exactly one `Finished`, and gives no instruction afterwards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

State = Literal["queued", "dispatched", "running", "retrying", "done", "failed", "cancelled"]

#: States that a job never leaves.
FINAL: frozenset[str] = frozenset({"done", "failed", "cancelled"})
#: States with an attempt on a node.
IN_FLIGHT: frozenset[str] = frozenset({"dispatched", "running"})

#: How an attempt may end and be worth another: the node or its agent went away (field case 89: it
#: may have been alive all along), the child was killed from outside, or the device was busy. An
#: error of the work itself, a refusal and a passed deadline would only repeat.
RETRIED = frozenset({"lost", "killed", "busy"})


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon to try again.

    Attempt n + 1 starts min(cap, base · 2^(n−1)) seconds after attempt n ended, times 1 to 1.25:
    the extra comes from the job's id, so that a fleet does not retry in step.
    """

    max_attempts: int = 3
    base_seconds: float = 1.0
    cap_seconds: float = 60.0
    retried: frozenset[str] = RETRIED

    def delay_seconds(self, job_id: str, attempt: int) -> float:
        """The pause after `attempt` (1, 2, …) ended."""
        pause = min(self.cap_seconds, self.base_seconds * 2.0 ** min(attempt - 1, 60))
        digest = hashlib.sha256(f"{job_id}/{attempt}".encode()).digest()
        return pause * (1 + digest[0] / 255 / 4)


@dataclass(frozen=True)
class JobState:
    """Where a job is. `attempt` is the latest one that was sent, 0 before the first."""

    job_id: str
    state: State = "queued"
    attempt: int = 0
    error: str = ""
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def final(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True)
class Ready:
    """There is room on the node, and it is up: the job may be sent (again)."""


@dataclass(frozen=True)
class Started:
    """The agent says that the child of `attempt` runs."""

    attempt: int


@dataclass(frozen=True)
class Ended:
    """`attempt` ended with an outcome's status, or "lost" when there will be none."""

    attempt: int
    status: str
    error: str = ""


@dataclass(frozen=True)
class Overdue:
    """`attempt` should have answered by now, deadline and grace included."""

    attempt: int


@dataclass(frozen=True)
class Cancel:
    """The user, or the end of the run, no longer wants the job."""

    reason: str = "cancelled"


Event = Ready | Started | Ended | Overdue | Cancel


@dataclass(frozen=True)
class Send:
    """Send the job to its node as `attempt`."""

    attempt: int


@dataclass(frozen=True)
class WakeAfter:
    """Feed `Ready` after this pause, when there is room."""

    seconds: float


@dataclass(frozen=True)
class Abort:
    """Have the node end `attempt`; its answer is no longer waited for."""

    attempt: int


@dataclass(frozen=True)
class Finished:
    """The one final state, to be written down and shown."""

    state: State
    error: str = ""


Instruction = Send | WakeAfter | Abort | Finished


def restored(job_id: str, state: str, attempt: int, error: str = "") -> JobState:
    """A job as the store has it, after a restart; `ValueError` for a state that does not exist."""
    for known in get_args(State):
        if known == state:
            return JobState(job_id, known, attempt, error)
    raise ValueError(f"job {job_id}: no state {state!r}")


def advance(job: JobState, event: Event) -> tuple[JobState, list[Instruction]]:
    """The state after `event`, and what to do.

    An event of an attempt that is not in flight changes nothing, with one exception: an "ok"
    outcome of an earlier attempt finishes a job that has not finished, since it is the same work.
    """
    if job.final:
        return job, []
    if isinstance(event, Ready):
        return _send(job)
    if isinstance(event, Started):
        if job.state == "dispatched" and event.attempt == job.attempt:
            return replace(job, state="running"), []
        return job, []
    if isinstance(event, Cancel):
        return _finish(job, "cancelled", event.reason)
    if isinstance(event, Overdue):
        return _overdue(job, event)
    return _ended(job, event)


def _send(job: JobState) -> tuple[JobState, list[Instruction]]:
    if job.state in IN_FLIGHT:
        return job, []
    attempt = job.attempt + 1
    return replace(job, state="dispatched", attempt=attempt), [Send(attempt)]


def _overdue(job: JobState, event: Overdue) -> tuple[JobState, list[Instruction]]:
    if job.state not in IN_FLIGHT or event.attempt != job.attempt:
        return job, []
    job, instructions = _ended(job, Ended(event.attempt, "lost", "no answer within its deadline"))
    return job, [Abort(event.attempt), *instructions]


def _ended(job: JobState, event: Ended) -> tuple[JobState, list[Instruction]]:
    current = job.state in IN_FLIGHT and event.attempt == job.attempt
    if event.status == "ok" and 1 <= event.attempt <= job.attempt:
        # The attempt that just ended needs no abort; a later one that repeats its work does.
        return _finish(replace(job, state="retrying") if current else job, "done", "")
    if not current:
        return job, []
    error = event.error or event.status
    ended = replace(job, state="retrying", error=error)
    if event.status == "cancelled":
        return _finish(ended, "cancelled", error)
    if event.status in job.policy.retried and job.attempt < job.policy.max_attempts:
        return ended, [WakeAfter(job.policy.delay_seconds(job.job_id, job.attempt))]
    tried = f" (tried {job.attempt} times)" if job.attempt > 1 else ""
    return _finish(ended, "failed", f"{error}{tried}")


def _finish(job: JobState, state: State, error: str) -> tuple[JobState, list[Instruction]]:
    """What is still in flight is ended first; it has become useless."""
    aborted: list[Instruction] = [Abort(job.attempt)] if job.state in IN_FLIGHT else []
    return replace(job, state=state, error=error), [*aborted, Finished(state, error)]
