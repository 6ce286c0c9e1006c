"""The process between the agent and a job: nothing below it outlives it.

``python -m pichak_agent.warden CONTROL_FD RESULT_FD`` reads its order (one line of JSON) from the
socket CONTROL_FD, starts the job's process, which alone keeps RESULT_FD, and tells the agent one
line each: ``started WARDEN_PID PID`` or ``failed TEXT``, then ``exit CODE`` or ``signal NUMBER``,
then ``oom COUNT`` (killed by the kernel at the job's limit), and last ``left COUNT``. It takes
``terminate`` (SIGTERM to the job) and ``kill``; the socket's end, which comes whenever and however
the agent dies, means ``kill``.

It adopts the job's orphans, so a double-forked process is still below it. Whatever is left below it
when the job ends is killed, and the job's folders and its control group are removed.

It stands twice: the outer process only waits for the inner one. Ray kills the direct children of a
worker that exits, which must not leave the job without a warden.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pichak_core.devices.job_group import JobGroup
from pichak_core.devices.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    kill_all,
    limit_this_process,
    send_signal,
)

#: How long helpers of a job that ended by itself may take to end too.
_HELPERS_SECONDS = 0.5


def _held(folder: Path) -> JobGroup:
    group = JobGroup(folder)
    try:
        return group.hold()
    except OSError:
        # Its agent died just now and another removes it: joining it will fail, and that is told.
        return group


class Warden:
    """Owns one job's processes. `order` holds `argv`, `memory_cap_bytes`, `folders`, `group` (the
    folder of a control group, or "") and `give_up_seconds`, after which the job is killed even if
    the agent says nothing."""

    def __init__(
        self, control: socket.socket, result_fd: int, order: dict[str, Any], rest: bytes = b""
    ) -> None:
        self._control = control
        self._result_fd = result_fd
        self._order = order
        self._group = _held(Path(order["group"])) if order.get("group") else None
        self._pid = 0
        self._status: int | None = None
        self._told_to_kill = False
        self._lines = rest

    def run(self) -> None:
        """From the job's start until nothing of it is left."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._kill())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        adopt_orphans()
        if self._start():
            self._watch(wake)
        try:
            left = kill_all(self._everyone, reap=self._reap)
        except OSError:
            left = self._kill_unseen()
        if self._group is not None:
            self._tell(f"oom {self._group.oom_kills()}")
            self._group.remove()
        for folder in self._order["folders"]:
            shutil.rmtree(folder, ignore_errors=True)
        self._tell(f"left {len(left)}")

    def _kill_unseen(self) -> list[int]:
        """Where the system shows no processes: the job's own session, and its control group."""
        for pid in self._group.pids() if self._group is not None else []:
            send_signal(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._pid:
                os.killpg(self._pid, signal.SIGKILL)
        return []

    def _everyone(self) -> list[int]:
        members = self._group.pids() if self._group is not None else []
        return list(dict.fromkeys([*descendants(os.getpid()), *members]))

    def _start(self) -> bool:
        cap = int(self._order["memory_cap_bytes"])
        warden = os.getpid()

        def in_the_child() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL, warden)
            limit_this_process(cap)
            if self._group is not None:
                # Without it the cap is held by looking, and the tree by its parents.
                with contextlib.suppress(OSError):
                    self._group.procs.write_text("0")

        try:
            # One thread lives here, so running Python between fork and exec is safe.
            started = subprocess.Popen(
                self._order["argv"],
                pass_fds=(self._result_fd,),
                start_new_session=True,
                preexec_fn=in_the_child,  # noqa: PLW1509
            )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._tell(f"failed {error}")
            return False
        finally:
            os.close(self._result_fd)
        self._pid = started.pid
        started.returncode = 0  # `_reap` collects it, not Popen
        self._tell(f"started {warden} {self._pid}")
        return True

    def _watch(self, wake: int) -> None:
        give_up = time.monotonic() + float(self._order["give_up_seconds"])
        self._obey()
        while not self._told_to_kill and time.monotonic() < give_up:
            self._reap()
            if self._status is not None:
                self._wait_for_helpers()
                return
            timeout = max(0.0, min(give_up - time.monotonic(), 60.0))
            told = self._control.fileno()
            ready, _, _ = select.select([told, wake], [], [], timeout)
            if wake in ready:
                os.read(wake, 4096)
            if told in ready:
                self._listen()

    def _wait_for_helpers(self) -> None:
        until = time.monotonic() + _HELPERS_SECONDS
        with contextlib.suppress(OSError):
            while time.monotonic() < until and descendants(os.getpid()):
                time.sleep(0.01)
                self._reap()

    def _listen(self) -> None:
        try:
            data = self._control.recv(256)
        except OSError:
            data = b""
        if not data:
            self._kill()
        self._lines += data
        self._obey()

    def _obey(self) -> None:
        *lines, self._lines = self._lines.split(b"\n")
        for line in lines:
            if line == b"kill":
                self._kill()
            elif line == b"terminate" and self._status is None:
                send_signal(self._pid, signal.SIGTERM)

    def _kill(self) -> None:
        self._told_to_kill = True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._pid:
                self._status = status
                if os.WIFSIGNALED(status):
                    self._tell(f"signal {os.WTERMSIG(status)}")
                else:
                    self._tell(f"exit {os.WEXITSTATUS(status)}")

    def _tell(self, line: str) -> None:
        try:
            self._control.sendall(" ".join(line.split()).encode() + b"\n")
        except OSError:
            # The agent is gone: what is to be done is done without it.
            self._told_to_kill = True


def read_order(control: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The first line of the socket, which is JSON, and what came behind it."""
    data = b""
    while b"\n" not in data:
        more = control.recv(65536)
        if not more:
            raise EOFError("the agent is gone")
        data += more
    line, _, rest = data.partition(b"\n")
    order: dict[str, Any] = json.loads(line)
    return order, rest


def main(arguments: Sequence[str]) -> int:
    """Entry: fork, wait in the outer process, guard in the inner one."""
    # A worker thread's blocked signals are inherited, and would be by the job.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control = socket.socket(fileno=int(arguments[0]))
    result_fd = int(arguments[1])
    outer = os.getpid()
    inner = os.fork()
    if inner:
        for fd in (0, 1, 2, control.fileno(), result_fd):
            os.close(fd)
        os.waitpid(inner, 0)
        return 0
    die_with_parent(signal.SIGTERM, outer)
    try:
        order, rest = read_order(control)
    except EOFError:
        return 0
    Warden(control, result_fd, order, rest).run()
    return 0


if __name__ == "__main__":
    # Nothing of an interpreter's end is needed, and the outer process has closed its files.
    os._exit(main(sys.argv[1:]))
