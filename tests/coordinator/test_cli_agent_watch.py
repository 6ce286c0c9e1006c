"""`pichak agent watch` as a process: what it says, serves, and leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from without_posix import HIDE

from pichak_agent.locks import FileLock
from pichak_agent.own_jobs import telemetry_folder
from pichak_core.devices.processes import children, started_at

COMMAND = [
    sys.executable,
    "-c",
    "from pichak_coordinator.cli import main; main()",
    "agent",
    "watch",
]


class Watching:
    """The command, and what it has said so far."""

    def __init__(self, home: Path, command: list[str], *words: str) -> None:
        environment = {**os.environ, "PICHAK_HOME": str(home)}
        self.process = subprocess.Popen(
            [*command, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=self._listen, args=pair)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, stream: Any, lines: list[str]) -> None:
        lines.extend(iter(lambda: stream.readline().decode(), ""))

    def until(self, words: str, lines: list[str] | None = None) -> str:
        end = time.monotonic() + 15
        while time.monotonic() < end:
            for line in list(self.err if lines is None else lines):
                if words in line:
                    return line
            time.sleep(0.02)
        raise AssertionError((words, self.out, self.err))

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=20)
        for thread in self._threads:
            thread.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def watching(home: Path, command: list[str], *words: str) -> Iterator[Watching]:
    made = Watching(home, command, *words)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.end(signal.SIGKILL)


def test_it_samples_serves_and_ends_with_all_it_started(tmp_path: Path) -> None:
    with watching(tmp_path, COMMAND, "--metrics-port", "0") as made:
        found = re.search(r"metrics at (http://127.0.0.1:\d+/metrics)", made.until("metrics at"))
        assert found is not None
        made.until("watching this machine; Ctrl-C ends it")
        made.until("NVML: ")  # no driver here, or its GPUs' gap
        with urllib.request.urlopen(found[1], timeout=10) as answer:
            text = answer.read().decode()
        assert "pichak_up 1.0" in text
        assert "pichak_host_memory_total_bytes" in text
        port = found[1].split(":")[-1].split("/")[0]
        other = subprocess.run(
            [*COMMAND, "--metrics-port", port],
            capture_output=True,
            text=True,
            env={**os.environ, "PICHAK_HOME": str(tmp_path / "other")},
            check=False,
        )
        assert other.returncode == 2
        assert other.stderr.count("\n") == 1
        assert f"--metrics-port {port}: " in other.stderr
        started = children(made.process.pid) or []
        assert made.end(signal.SIGINT) == 0, "".join(made.err)
        assert [pid for pid in started if started_at(pid) is not None] == []
        assert made.out == []


def test_what_the_service_of_the_machine_finds_is_told_once(
    tmp_path: Path,
) -> None:
    folder = telemetry_folder(tmp_path)
    folder.mkdir(parents=True)
    lock = FileLock(folder / "lock")
    assert lock.try_acquire("pid 77")

    def tell(state: str) -> None:
        found = {
            "code": "gpu_spill",
            "severity": "fail",
            "subject": "GPU-1",
            "sentence": "2.0 GiB lie\x1b[31m in system memory",
            "state": state,
            "episodes": 1,
            "last_unix": 1.8e9,
        }
        whole = {"schema": 1, "at_unix": time.time(), "source": "pid 77", "findings": [found]}
        part = folder / "state.part"
        part.write_text(json.dumps(whole))
        part.replace(folder / "state.json")

    tell("suspected")
    with watching(tmp_path, COMMAND) as made:
        made.until("pid 77 samples this machine already")
        made.until("suspected", made.out)
        tell("confirmed")
        line = made.until("confirmed", made.out)
        assert made.end(signal.SIGTERM) == 0
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d  confirmed  fail  gpu_spill  2\.0 GiB lie.*in system memory\n", line
        )
        assert "\x1b" not in line
        assert len(made.out) == 2
    lock.release()


#: A Windows with what of it can be stood in for: no POSIX, its locks, its counters' libraries.
ON_WINDOWS = """
import functools, shutil, signal, types
kept = os.statvfs, os.WNOHANG, signal.SIGKILL
{hide}
# What shutil and subprocess chose when they were imported.
os.statvfs, os.WNOHANG, signal.SIGKILL = kept
msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK, msvcrt.LK_UNLCK = 2, 0
msvcrt.locking = lambda fd, mode, count: None
sys.modules["msvcrt"] = msvcrt
import pichak_core.devices as devices
import pichak_core.devices.host as host
host.IS_LINUX = False
import pichak_core.devices.processes as processes
processes._HAS_PROC = False
from pichak_core.devices.windows_child import CounterSession
devices.gpu_counter_session = lambda: functools.partial(CounterSession, "fake_windows_child")
from pichak_coordinator.cli import main
sys.argv = ["pichak", "agent", "watch", *sys.argv[1:]]
main()
"""


def test_on_windows_it_watches_without_posix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "windows.json"
    there.write_text(json.dumps({"processes": {}}))
    monkeypatch.setenv("FAKE_WINDOWS", str(there))
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=os.pathsep)
    code = "import os, sys\n" + ON_WINDOWS.format(hide=HIDE)
    command = [sys.executable, "-c", code]
    with watching(tmp_path / "home", command, "--metrics-port", "0") as made:
        found = re.search(r"metrics at (\S+)", made.until("metrics at"))
        assert found is not None
        text, end = "", time.monotonic() + 15
        while "pichak_gpu_card_dedicated_bytes" not in text and time.monotonic() < end:
            with urllib.request.urlopen(found[1], timeout=10) as answer:
                text = answer.read().decode()
            time.sleep(0.1)
        assert f'pci_address="01:00.0"}} {2**30}' in text, (text, made.err)
        part = tmp_path / "part"  # the process may read it at any moment
        part.write_text(json.dumps({"processes": {}, "status": 0xC0000BC6}))
        part.replace(there)
        made.until("GPU memory counters: spill unknown: PdhCollectQueryData failed")
        assert made.end(signal.SIGINT) == 0, "".join(made.err)
