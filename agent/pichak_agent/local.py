"""One job on this machine, without Ray and without an agent that stays.

For commands that measure the machine they run on: the user's code runs in a child process as it
does on a node of a fleet, and waits for what others measure here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pichak_agent import runner
from pichak_agent.home import measuring_lock, usable_root
from pichak_agent.identity import describe_node
from pichak_agent.locks import FileLock, wait_for
from pichak_agent.messages import Job, Outcome, decode, encode
from pichak_agent.own_jobs import OwnJobs

__all__ = ["describe_node", "run_here", "run_here_bytes"]

#: Seconds to wait for an agent that measures this machine.
LOCK_WAIT_SECONDS = 3600.0
_POLL_SECONDS = 0.1


def run_here(job: Job, *, on_progress: Callable[[str], None]) -> Outcome:
    """The outcome of `job`, run in a child process of its own; Ctrl-C as in `run_here_bytes`."""
    return decode(run_here_bytes(job, on_progress=on_progress), Outcome)


def run_here_bytes(job: Job, *, on_progress: Callable[[str], None]) -> bytes:
    """The outcome's bytes as they were made once, for a file that carries them elsewhere.

    Ctrl-C ends the child and gives the outcome with what it had measured; a second Ctrl-C raises
    `KeyboardInterrupt` without it. `on_progress` is called from another thread.
    """
    cancel = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="pichak-job") as pool:
        running = pool.submit(_run, job, on_progress, cancel)
        try:
            while not running.done():
                # A wait without a limit would keep Ctrl-C out on some systems.
                threading.Event().wait(_POLL_SECONDS)
        except KeyboardInterrupt:
            cancel.set()
        return running.result()


def _run(job: Job, on_progress: Callable[[str], None], cancel: threading.Event) -> bytes:
    lock = _lock_of(job)
    note = f"job {job.job_id}, pid {os.getpid()}"
    refusal = wait_for(
        lock, job.lock, note, limit_seconds=LOCK_WAIT_SECONDS, cancel=cancel, say=on_progress
    )
    if refusal:
        status = "cancelled" if cancel.is_set() else "busy"
        return encode(Outcome(job.job_id, job.attempt, job.kind, status, error=refusal))
    try:
        with OwnJobs(usable_root()).running(job) as given:
            return runner.run(given, on_progress=on_progress, cancel=cancel)
    finally:
        lock.release()


def _lock_of(job: Job) -> FileLock:
    """The lock where this machine's agents have theirs."""
    return measuring_lock(usable_root(), job.lock)
