"""A user's workload file whose factories end in every way that a job can end badly."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any, NoReturn

MIB = 1024**2


def raises(_settings: Any) -> NoReturn:
    raise RuntimeError("this task always fails")


def exits(_settings: Any) -> NoReturn:
    os._exit(3)


def crashes(_settings: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    raise AssertionError


def floods_log(_settings: Any) -> NoReturn:
    for _ in range(200):
        print("x" * 99_999)
    raise RuntimeError("20 MB printed")


def floods_pipe(_settings: Any) -> NoReturn:
    """Writes what is no frame into every pipe that it holds, the one for its result among them."""
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        with contextlib.suppress(OSError):
            if fd > 2 and stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"garbage" * 1000)
    time.sleep(60)
    raise AssertionError


def hangs(_settings: Any) -> NoReturn:
    while True:
        time.sleep(1)


def hangs_deaf(_settings: Any) -> NoReturn:
    """Also takes no SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    while True:
        time.sleep(1)


def forks(_settings: Any) -> NoReturn:
    """Leaves processes behind: one of its own group, and one that left parent, session, group."""
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        os._exit(0)
    raise RuntimeError("two processes left behind")


def hoards(_settings: Any) -> NoReturn:
    """Takes memory step by step until it is stopped."""
    held = []
    while True:
        held.append(bytearray(os.urandom(MIB)) * 16)
        time.sleep(0.02)


def writes_files(_settings: Any) -> NoReturn:
    """Leaves files in its folder and in its temporary folder."""
    for folder in (Path.cwd(), Path(os.environ["TMPDIR"])):
        (folder / "left").mkdir()
        (folder / "left" / "file").write_bytes(os.urandom(MIB // 4))
    raise RuntimeError("files left behind")
