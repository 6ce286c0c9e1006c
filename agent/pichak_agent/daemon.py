"""The agent of one node: takes jobs, runs each in a child, and keeps every outcome until it is
acknowledged. Threads may call it at the same time; how calls arrive is `ray_actor.py`'s business.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pichak_agent import runner
from pichak_agent.ending import ERROR_TEXT
from pichak_agent.files import FileError, FileStore
from pichak_agent.home import Home, open_home, open_some_home
from pichak_agent.identity import describe_node
from pichak_agent.locks import FileLock, wait_for
from pichak_agent.messages import Job, Outcome, clip_text, decode, encode
from pichak_agent.own_jobs import OwnJobs
from pichak_agent.places import Places
from pichak_agent.problems_file import ProblemsFile
from pichak_agent.spool import Key, SpoolError
from pichak_agent.telemetry import Telemetry
from pichak_agent.versions import own_versions
from pichak_core.devices.heap import give_back_freed
from pichak_core.devices.job_group import remove_stale_groups

_LOG = logging.getLogger(__name__)

#: How long a job may wait for what it measures, before its own deadline begins to count.
LOCK_WAIT_SECONDS = 900.0
#: Bytes of outcomes that `pending` hands out at once.
PENDING_BYTES = 64 * 1024**2
_CLOSE_SECONDS = 8.0
_MAX_EARLY_CANCELS = 256
_MAX_PROBLEMS = 50
#: Of the worst that a greeting tells.
_MAX_FINDINGS = 50


@dataclass
class _Running:
    """One attempt under way; `outcome` is there once `done` is set."""

    cancel: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    progress: str = ""
    outcome: bytes = b""


class Agent:
    """Runs jobs on this node. `instance` names its folder below `root` (`home.py`).

    `lock_wait_seconds` bounds the wait for what a job measures. `run_job` has `runner.run`'s form,
    `describe` that of `describe_node`. `telemetry` makes, from the home's root, what samples this
    node until `close`; without it nobody does.
    """

    def __init__(
        self,
        instance: str = "agent",
        *,
        root: Path | None = None,
        lock_wait_seconds: float = LOCK_WAIT_SECONDS,
        run_job: Callable[..., bytes] = runner.run,
        describe: Callable[[], dict[str, Any]] = describe_node,
        telemetry: Callable[[Path], Telemetry] | None = None,
    ) -> None:
        self._problems: deque[str] = deque(maxlen=_MAX_PROBLEMS)
        if root is None:
            self._home, why = open_some_home(instance)
            if why:
                self._note(why)
        else:
            self._home = open_home(root, instance)
        self._places = Places(self._home, self._note)
        self._told = ProblemsFile(self._places)
        self._files = FileStore(self._home.files)
        self._lock_wait = lock_wait_seconds
        self._run_job = run_job
        self._describe = describe
        self._lock = threading.Lock()
        self._running: dict[Key, _Running] = {}
        self._unspooled: dict[Key, bytes] = {}
        self._cancelled_early: dict[str, None] = {}
        self._closing = False
        self._own_jobs = OwnJobs(self._home.root)
        self._telemetry = telemetry(self._home.root) if telemetry else None
        if self._telemetry is not None:
            self._telemetry.start()
        self.problems()

    def hello(self) -> dict[str, Any]:
        """Who answers: `describe_node`'s values, `instance`, `problems`, a sentence each, and
        `findings`: what is wrong by the node's readings now (`WatchFinding.as_dict`)."""
        return {
            **self._describe(),
            "instance": self._home.instance,
            "problems": self.problems(),
            "findings": self._findings(),
        }

    def problems(self) -> list[str]:
        """What a person should know of this agent, a sentence each; the node's other processes hear
        of it too (`told_problems`)."""
        told = [*self._problems, *self._places.messages()]
        self._told.tell(told)
        return told

    def run(self, job_bytes: bytes) -> bytes:
        """The outcome of the job, as encoded bytes that are in the spool by then.

        The same job and attempt is never run twice: an outcome in the spool is handed out again,
        and a second call meanwhile waits for the first. `MessageError` when these bytes are no job.
        """
        job = decode(job_bytes, Job)
        key = Key(job.job_id, job.attempt)
        with self._lock:
            if self._closing:
                return _ended(job, "cancelled", "its agent is being stopped")
            held = self._places.get(key) or self._unspooled.get(key)
            if held is not None:
                return held
            other = self._running.get(key)
            if other is None:
                mine = self._running[key] = _Running()
                if job.job_id in self._cancelled_early:
                    mine.cancel.set()
                self._cancelled_early.pop(job.job_id, None)
        if other is not None:
            other.done.wait()
            return other.outcome
        try:
            mine.outcome = self._attempt(job, mine)
            self._keep(key, mine.outcome)
        finally:
            with self._lock:
                del self._running[key]
            mine.done.set()
            self.problems()
        return mine.outcome

    def progress(self, job_id: str) -> str:
        """What the job last said; "" when it does not run here."""
        with self._lock:
            said = [r.progress for key, r in self._running.items() if key.job_id == job_id]
        return said[-1] if said else ""

    def cancel(self, job_id: str) -> bool:
        """End the job, or what is called so next if the call to run it is still on its way; whether
        it was running."""
        with self._lock:
            found = [r for key, r in self._running.items() if key.job_id == job_id]
            for running in found:
                running.cancel.set()
            if not found:
                self._cancelled_early[job_id] = None
                while len(self._cancelled_early) > _MAX_EARLY_CANCELS:
                    del self._cancelled_early[next(iter(self._cancelled_early))]
        return bool(found)

    def pending(self) -> list[bytes]:
        """Outcomes that nobody acknowledged, the oldest first, those of agents that died meanwhile
        too; at most about `PENDING_BYTES`."""
        kept = self._places.pending(PENDING_BYTES)
        self.problems()
        with self._lock:
            return kept + list(self._unspooled.values())

    def acknowledge(self, job_id: str, attempt: int) -> bool:
        """The coordinator's store has this outcome: forget it. False when it is gone already."""
        with self._lock:
            in_memory = self._unspooled.pop(Key(job_id, attempt), None) is not None
        return self._places.acknowledge(Key(job_id, attempt)) or in_memory

    def has_file(self, digest: str, path: str = "") -> bool:
        """Whether a job can have the file with this SHA-256 here: at `path`, or shipped."""
        return self._files.has(digest, path)

    def put_file(self, digest: str, offset: int, chunk: bytes, total: int) -> int:
        """Take a piece of a shipped file; how many bytes of it are here (`FileStore.put`)."""
        return self._files.put(digest, offset, chunk, total)

    def forget_files(self) -> None:
        """Remove every shipped file."""
        self._files.forget()

    def close(self) -> None:
        """Cancel what runs, wait for its end, and give the folder back."""
        with self._lock:
            self._closing = True
            running = list(self._running.values())
        for each in running:
            each.cancel.set()
        until = time.monotonic() + _CLOSE_SECONDS
        for each in running:
            each.done.wait(max(0.0, until - time.monotonic()))
        if self._telemetry is not None:
            self._telemetry.stop()
        remove_stale_groups()
        self._places.close()

    def _attempt(self, job: Job, running: _Running) -> bytes:
        try:
            lock, refusal = self._locked(job, running)
        except OSError as error:
            return _ended(job, "error", f"what it measures cannot be locked: {error}")
        if refusal:
            return _ended(job, "cancelled" if running.cancel.is_set() else "busy", refusal)
        folder: Path | None = None
        try:
            folder, params = self._resolved(job)
            with self._own_jobs.running(replace(job, params=params)) as given:
                return self._run_job(
                    given,
                    on_progress=lambda text: setattr(running, "progress", text),
                    cancel=running.cancel,
                    workdir=self._home.work,
                )
        except FileError as error:
            return _ended(job, "refused", str(error))
        except OSError as error:
            return _ended(job, "error", f"its files cannot be made ready: {error}")
        # An attempt has one outcome, also where the agent itself is at fault.
        except Exception as error:  # noqa: BLE001
            _LOG.exception("job %s, attempt %d", job.job_id, job.attempt)
            return _ended(job, "error", f"the agent failed: {type(error).__name__}: {error}")
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock:
                lock.release()
            give_back_freed()

    def _locked(self, job: Job, running: _Running) -> tuple[FileLock | None, str]:
        """What the job measures, held, or why it is not; nothing of both where it measures nothing
        that others could."""
        if not job.lock:
            return None, ""

        def wait(home: Home) -> tuple[FileLock, str]:
            lock = home.measuring_lock(job.lock)
            refusal = wait_for(
                lock,
                job.lock,
                f"job {job.job_id}, attempt {job.attempt}, pid {os.getpid()}",
                limit_seconds=self._lock_wait,
                cancel=running.cancel,
                say=lambda text: setattr(running, "progress", text),
            )
            return lock, refusal

        return self._places.first(wait)

    def _resolved(self, job: Job) -> tuple[Path, dict[str, Any]]:
        """The job's params with the paths of its shipped files, and the folder of these."""

        def fill(home: Home) -> tuple[Path, dict[str, Any]]:
            folder = home.work / f"files-{job.job_id}.{job.attempt}"
            try:
                return folder, self._files.resolve(job.params, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        return self._places.first(fill)

    def _keep(self, key: Key, outcome: bytes) -> None:
        try:
            self._places.keep(outcome)
        except SpoolError as error:
            # It still goes back to the caller, and stays in memory until it is acknowledged.
            self._note(str(error))
            with self._lock:
                self._unspooled[key] = outcome
                while sum(map(len, self._unspooled.values())) > PENDING_BYTES:
                    lost = next(iter(self._unspooled))
                    del self._unspooled[lost]
                    self._note(f"dropped: the outcome of {lost.job_id}, attempt {lost.attempt}")

    def _findings(self) -> list[dict[str, Any]]:
        if self._telemetry is None:
            return []
        found = [f for f in self._telemetry.findings() if f.get("state") != "resolved"]
        return found[:_MAX_FINDINGS]

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            _LOG.warning(problem)
            self._problems.append(problem)


def _ended(job: Job, status: str, error: str) -> bytes:
    """The outcome of a job that had no child."""
    return encode(
        Outcome(
            job.job_id,
            job.attempt,
            job.kind,
            status,
            error=clip_text(error, ERROR_TEXT),
            node=socket.gethostname(),
            started_unix=time.time(),
            versions=own_versions(),
        )
    )
