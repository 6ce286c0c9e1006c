"""Runs one job in a child process and makes exactly one outcome of it, whatever happens.

The job's processes live under a warden (`warden.py`), in a session of their own and in an empty
folder that is removed afterwards. What they print is kept as a bounded tail; what they send comes
as frames (`frames.py`); how they ended is decided by `ending.py`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from pichak_agent.ending import LOG_TAIL, Seen, at_the_limit, conclude
from pichak_agent.frames import FrameError, FrameReader
from pichak_agent.launch import Launched, launched
from pichak_agent.members import Members
from pichak_agent.messages import Job
from pichak_agent.versions import own_versions
from pichak_core.devices.job_group import JobGroup
from pichak_core.devices.processes import (
    kill_all,
    memory_bytes,
    oom_kills,
    send_signal,
)

#: Seconds between two looks at the memory of the job's processes.
MEMORY_SECONDS = 0.25
#: Seconds between two looks at whether the job was cancelled.
_TICK_SECONDS = 0.1
#: Seconds that a child may take to end after its outcome, or its pipe's end, has arrived.
_END_SECONDS = 2.0
#: Seconds after which a warden that was told to kill is taken for lost.
_WARDEN_SECONDS = 15.0
#: Seconds after the deadline at which the warden acts by itself, if this process does not.
_BACKSTOP_SECONDS = 30.0
_GIB = 1024**3


def run(
    job: Job,
    *,
    on_progress: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
    workdir: Path | None = None,
    node: str = "",
    argv: Sequence[str] | None = None,
    grace_seconds: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Run `job` in a child and return its encoded `Outcome`; nothing of the child is left then.

    `on_progress` gets each line the child sends, from this thread. `cancel` ends the job: SIGTERM,
    `grace_seconds` for its partial result, then SIGKILL to the whole tree; so does the deadline.
    `workdir` is where the job's folder is made (the system's temporary folder without it). `argv`
    runs another program than ``pichak_agent.child`` with the job's bytes as its input.
    """
    seen = Seen(started_unix=time.time())
    began = clock()
    before = oom_kills()
    cancel = cancel or threading.Event()
    try:
        if cancel.is_set():
            seen.verdict, seen.why = "cancelled", "it was cancelled before it started"
        else:
            attempt = _Attempt(job, seen, on_progress, cancel, grace_seconds, clock)
            attempt.run(workdir, argv)
    except (OSError, ValueError) as error:
        # No descriptor, no process, no room for the folder, a variable that cannot be one: an end
        # like any other.
        seen.cannot_start = str(error)
    after = oom_kills()
    seen.oom_kills = {
        file: (count, after[file]) for file, count in before.items() if after.get(file, 0) > count
    }
    seen.seconds = clock() - began
    return conclude(job, seen, node=node or socket.gethostname(), versions=own_versions())


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except ConnectionResetError:
        # The warden ended without having read our last word; what it said was read before.
        return b""


class _Attempt:
    """One child from start to end. Fills `seen`."""

    def __init__(
        self,
        job: Job,
        seen: Seen,
        on_progress: Callable[[str], None] | None,
        cancel: threading.Event,
        grace_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._seen = seen
        self._on_progress = on_progress
        self._cancel = cancel
        self._grace = grace_seconds
        self._clock = clock
        self._token = uuid.uuid4().hex
        self._frames = FrameReader()
        self._log = bytearray()
        self._lines = b""
        self._warden_pid = 0
        self._members: Members
        self._kill_at = float("inf")
        self._lost_at = float("inf")
        self._child: Launched

    def run(self, workdir: Path | None, argv: Sequence[str] | None) -> None:
        """Start, watch, clean up; `OSError` when it could not even be started."""
        give_up = self._job.deadline_seconds + self._grace + _BACKSTOP_SECONDS
        with launched(
            self._job, argv, workdir=workdir, mark=self._token, give_up_seconds=give_up
        ) as self._child:
            self._members = Members(self._token, self._child.group)
            try:
                self._watch()
            finally:
                self._clean_up()

    def _watch(self) -> None:
        """Until the warden has gone, and with it everything of the job."""
        deadline = self._clock() + self._job.deadline_seconds
        next_look = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.control, selectors.EVENT_READ, self._on_control)
            selector.register(self._child.result, selectors.EVENT_READ, self._on_result)
            selector.register(self._child.log, selectors.EVENT_READ, self._on_log)
            open_ends = True
            while open_ends:
                for key, _ in selector.select(_TICK_SECONDS):
                    data = _read(key.fd)
                    if data:
                        key.data(data)
                        continue
                    selector.unregister(key.fileobj)
                    if key.fileobj is self._child.control:
                        open_ends = False
                    elif key.fileobj is self._child.result:
                        self._on_result_end()
                now = self._clock()
                if self._running and now >= deadline:
                    limit = self._job.deadline_seconds
                    self._end("timeout", f"it was not done within its {limit:g} s")
                if self._running and self._cancel.is_set():
                    self._end("cancelled", "it was cancelled")
                if now >= next_look:
                    next_look = now + MEMORY_SECONDS
                    self._look_at_memory()
                if now >= self._kill_at:
                    self._kill_now()
                if now >= self._lost_at:
                    break
            self._drain(selector)

    @property
    def _running(self) -> bool:
        """Nothing has decided how the job ends."""
        seen = self._seen
        return (
            not seen.verdict
            and self._frames.outcome is None
            and seen.exit_code is None
            and seen.signal_number is None
        )

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """What was written before the end and not read yet; a process that outlived its warden may
        hold a pipe open, so its end is not waited for."""
        waiting = True
        while waiting:
            waiting = False
            for key, _ in selector.select(0):
                data = _read(key.fd)
                if data and key.fileobj is not self._child.control:
                    key.data(data)
                    waiting = True
                else:
                    selector.unregister(key.fileobj)

    def _on_control(self, data: bytes) -> None:
        self._lines += data
        *lines, self._lines = self._lines.split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "started":
                self._warden_pid = int(rest.split()[0])
            elif word == "failed":
                self._seen.cannot_start = rest
            elif word == "exit":
                self._seen.exit_code = int(rest)
            elif word == "signal":
                self._seen.signal_number = int(rest)
            elif word == "oom":
                self._seen.group_oom_kills = int(rest)
            elif word == "left":
                self._seen.left_running = int(rest)

    def _on_result(self, data: bytes) -> None:
        if self._seen.verdict == "error":
            return
        try:
            texts = self._frames.feed(data)
        except FrameError as error:
            self._end("error", f"the job's process {error}", grace=0.0)
            return
        if self._on_progress:
            for text in texts:
                self._on_progress(text)
        if self._frames.outcome is not None:
            self._kill_at = min(self._kill_at, self._clock() + _END_SECONDS)

    def _on_result_end(self) -> None:
        if self._frames.outcome is None:
            # Nothing can come any more. An ending process closes its pipe too: give it that time.
            self._kill_at = min(self._kill_at, self._clock() + self._grace)

    def _on_log(self, data: bytes) -> None:
        self._log += data
        if len(self._log) > 8 * LOG_TAIL:
            del self._log[: -4 * LOG_TAIL]

    def _look_at_memory(self) -> None:
        if not self._warden_pid:
            return
        try:
            members = self._members.below(self._warden_pid)
        except OSError as error:
            self._seen.unseen = str(error)
            return
        cap = self._job.memory_cap_bytes
        if not cap or not self._running:
            return
        group = self._child.group
        if isinstance(group, JobGroup) and group.oom_kills():
            # Version 1 kills one process and lets the others go on.
            self._end("killed", at_the_limit(cap), grace=0.0)
            return
        held = memory_bytes(members, more_than=cap)
        if held > cap:
            self._end(
                "killed",
                f"memory cap exceeded: its processes held {held / _GIB:.2f} GiB where "
                f"{cap / _GIB:.2f} GiB is allowed",
                grace=0.0,
            )

    def _end(self, verdict: str, why: str, *, grace: float | None = None) -> None:
        self._seen.verdict, self._seen.why = verdict, why
        if grace is None:
            self._child.say("terminate")
        wait = self._grace if grace is None else grace
        self._kill_at = min(self._kill_at, self._clock() + wait)

    def _kill_now(self) -> None:
        if self._running:
            self._seen.verdict = "error"
            self._seen.why = "the job's process closed its result pipe and sent no result"
        self._child.say("kill")
        self._kill_at = float("inf")
        self._lost_at = self._clock() + _WARDEN_SECONDS

    def _clean_up(self) -> None:
        """Leave nothing, also where the warden was killed itself."""
        seen, warden, group = self._seen, self._child.warden, self._child.group
        self._child.control.close()
        try:
            warden.wait(_WARDEN_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (self._warden_pid, warden.pid):
                if pid:
                    send_signal(pid, signal.SIGKILL)
        try:
            left = kill_all(self._members.known)
            seen.in_group = isinstance(group, JobGroup)
            if isinstance(group, JobGroup):
                seen.group_oom_kills = max(seen.group_oom_kills, group.oom_kills())
            elif self._job.memory_cap_bytes:
                seen.no_group = group
            seen.left_running = max(seen.left_running, len(left))
        except OSError as error:
            self._seen.unseen = str(error)
        seen.outcome = self._frames.outcome
        seen.partial = self._frames.partial()
        seen.unfinished_frame = self._frames.unfinished
        seen.log = bytes(self._log)
