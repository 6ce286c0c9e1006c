"""A Ray head and services as processes of their own, for the tests that need real ones."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pichak_core.devices.processes import in_sessions, kill_all

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
STORE = "80000000"
#: A busy machine takes long to start a Ray node.
PATIENCE_SECONDS = 240.0


def wait_until(true: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Place:
    """Where the processes of one test run: a folder, a token, a port."""

    folder: Path
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _folders: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def token_file(self) -> Path:
        path = self.folder / "token"
        if not path.exists():
            path.write_text(self.token)
            path.chmod(0o600)
        return path

    def environment(self, home: str = "home") -> dict[str, str]:
        made = {
            **os.environ,
            "HOME": str(self.folder),
            "PICHAK_HOME": str(self.folder / home),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "PYTHONUNBUFFERED": "1",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        }
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "NOTIFY_SOCKET", "WATCHDOG_USEC"):
            made.pop(name, None)
        return made

    def start(self, argv: list[str], log: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as file:
            made = subprocess.Popen(
                argv,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=self.folder,
                start_new_session=True,
            )
        self._started.append(made)
        return made

    def said(self, log: str) -> str:
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def head(self, log: str = "head.log") -> subprocess.Popen[bytes]:
        """A head at this place's port; up when this returns."""
        temporary = tempfile.mkdtemp(prefix="h-")
        self._folders.append(temporary)
        made = self.start(
            [
                *RAY,
                *("start", "--head", f"--port={self.port}", "--include-dashboard=false"),
                *("--num-cpus=1", f"--object-store-memory={STORE}", "--disable-usage-stats"),
                *("--block", f"--temp-dir={temporary}"),
            ],
            log,
            self.environment(),
        )
        wait_until(lambda: "Ray runtime started" in self.said(log) or made.poll() is not None, log)
        assert made.poll() is None, self.said(log)
        return made

    def service(
        self, *more: str, log: str = "service.log", home: str = "home"
    ) -> subprocess.Popen[bytes]:
        # This machine may have an agent of its own, and other tests run theirs.
        argv = [*PICHAK, "agent", "run", "--even-if-another", "--address", self.address]
        argv += ["--num-cpus", "1"]
        argv += ["--token-file", str(self.token_file), *more]
        return self.start(argv, log, self.environment(home))

    def pichak(self, *words: str, home: str = "home") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PICHAK, *words],
            env=self.environment(home),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )

    def status(self, home: str = "home") -> dict[str, Any]:
        """Of the one service in `home`; empty while there is none."""
        found = json.loads(self.pichak("agent", "status", "--json", home=home).stdout)
        return dict(found["services"][0]) if found["services"] else {}

    def wait_for(self, pattern: str, log: str = "service.log", times: int = 1) -> None:
        wait_until(
            lambda: len(re.findall(pattern, self.said(log))) >= times,
            f"{times} × {pattern!r} in {log}:\n{self.said(log)}",
        )

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            kill_session(process.pid)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def kill_session(leader: int) -> None:
    """Kill all of a session, however many they are, as a power cut would."""
    kill_all(lambda: in_sessions({leader}))


@contextmanager
def place_in(folder: Path) -> Iterator[Place]:
    made = Place(folder)
    try:
        yield made
    finally:
        made.end()


def run_python(place: Place, *words: str) -> str:
    """What a Python program prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *words],
        env=place.environment(),
        cwd=place.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
