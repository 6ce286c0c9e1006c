"""This node's part of a Ray cluster, as a child of the service: started, heard, ended.

Ray itself is never imported here: what starts it is another process (`ray_launcher.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from pichak_agent.ray_launcher import python
from pichak_agent.ray_start import MARK, RayStart, joined
from pichak_core.devices.processes import (
    command_line,
    in_sessions,
    kill_all,
    marked,
    send_signal,
    session_of,
)

#: ``ray start`` says little; the end of it is what tells why it ended.
_KEPT_BYTES = 64 * 1024
#: Of the time to stop, what is left for killing what did not end by itself.
_KILL_SECONDS = 2.0
#: A socket's path may have 107 bytes, and Ray appends up to this many to its folder's.
_SOCKET_PATH_BYTES = 107
_RAYS_PART_BYTES = 64
_POLL_SECONDS = 0.05


class RayNode:
    """One ``ray start --block`` and everything below it, from `start` to `stop`."""

    def __init__(self, how: RayStart, extra: Mapping[str, str] | None = None) -> None:
        """`extra` are variables for everything that Ray starts on this node."""
        self.how = how
        self.mark = secrets.token_hex(16)
        self.folder: Path | None = None
        self._extra = dict(extra or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._output = bytearray()

    def start(self) -> None:
        """Begin to join; from the main thread, with whose end it ends. `OSError` when no process or
        folder can be made."""
        folder = Path(tempfile.mkdtemp(prefix="pichak-ray-"))
        self.folder = folder
        if len(os.fsencode(folder)) + _RAYS_PART_BYTES > _SOCKET_PATH_BYTES:
            self._forget_folder()
            raise OSError(
                f"{folder} is too long a path for Ray's sockets; set TMPDIR to a shorter folder"
            )
        self._output.clear()
        try:
            self._process = subprocess.Popen(
                [
                    *python(),
                    *("-m", "pichak_agent.ray_launcher", str(os.getpid())),
                    *self.how.arguments(folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=self.how.variables(os.environ, {**self._extra, MARK: self.mark}),
                start_new_session=True,
            )
        except OSError:
            self._forget_folder()
            raise
        assert self._process.stdout is not None  # noqa: S101
        os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def running(self) -> bool:
        """Whether ``ray start`` runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How ``ray start`` ended; None while it runs or before."""
        return None if self._process is None else self._process.poll()

    def hear(self) -> str:
        """What it has said up to now, its last 64 KB."""
        if self._process is not None and self._process.stdout is not None:
            with contextlib.suppress(BlockingIOError, ValueError):
                while data := os.read(self._process.stdout.fileno(), 65536):
                    self._output += data
        if len(self._output) > 2 * _KEPT_BYTES:
            # Whether it joined is said early, how it ended last.
            head = b"Ray runtime started.\n" if joined(self._text()) else b""
            self._output[:-_KEPT_BYTES] = head
        return self._text()

    def facts(self) -> dict[str, object]:
        """`pid` of the raylet, Ray's `node_id` and `cluster_id`, as the raylet's arguments have
        them; what is not known (yet) is absent."""
        for pid in self.pids():
            words = command_line(pid)
            if not words or not words[0].endswith(("raylet", "raylet.exe")):
                continue
            found: dict[str, object] = {"pid": pid}
            for word in words:
                name, _, value = word.lstrip("-").replace("-", "_").partition("=")
                if name in ("node_id", "cluster_id"):
                    found[name] = value
            return found
        return {}

    def pids(self) -> list[int]:
        """Every process of this node, the users' tasks and our jobs among them."""
        return _all_of(self.mark, {self._process.pid} if self._process else set())

    def stop(self, seconds: float, idle: Callable[[], None] = lambda: None) -> list[int]:
        """End it all within `seconds`: agents first, so that their jobs end well, then Ray, then
        whatever is left; the processes that could not be ended. `idle` is called while it waits."""
        until = time.monotonic() + max(0.0, seconds - _KILL_SECONDS)
        for pid in self.pids():
            if _is_agent(pid):
                send_signal(pid, signal.SIGTERM)
        if self.running and self._process is not None:
            self._process.terminate()
        while (left := self.pids()) and time.monotonic() < until:
            self.hear()
            idle()
            time.sleep(_POLL_SECONDS)
        if left:
            left = kill_all(self.pids, patience_seconds=_KILL_SECONDS, reap=self._reap)
        self._reap()
        self._forget_folder()
        return left

    def _reap(self) -> None:
        if self._process is not None and self._process.poll() is not None and self._process.stdout:
            self.hear()
            self._process.stdout.close()

    def _forget_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _text(self) -> str:
        return self._output.decode("utf-8", "replace")


def end_leftovers(mark: str, folder: str) -> int:
    """End what a service that was killed had started under `mark`, and remove its `folder`; how
    many processes that were."""
    found = _all_of(mark) if mark else []
    if found:
        kill_all(lambda: _all_of(mark))
    path = Path(folder)
    if folder and path.name.startswith("pichak-ray-"):
        shutil.rmtree(path, ignore_errors=True)
    return len(found)


def _all_of(mark: str, sessions: Set[int] = frozenset()) -> list[int]:
    """What carries `mark`, and what is in the same session: Ray's workers rename themselves, which
    overwrites the variables that would show it."""
    found = set(marked(MARK, mark))
    own = os.getsid(0) if hasattr(os, "getsid") else 0
    theirs = {session for pid in found if (session := session_of(pid)) is not None}
    return sorted(found | set(in_sessions((theirs | sessions) - {own})))


def _is_agent(pid: int) -> bool:
    words = command_line(pid)
    return bool(words) and words[0].startswith("ray::AgentActor")
