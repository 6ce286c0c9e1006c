"""What of the agent must be there without POSIX. Windows itself is not here: its modules and calls
are hidden or stood in for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from without_posix import HIDE

import pichak_agent
from pichak_core.devices import file_locks

MODULES = sorted(p.stem for p in Path(pichak_agent.__file__).parent.glob("*.py"))


def hidden(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_module_of_the_agent_imports_without_posix() -> None:
    wanted = [name for name in MODULES if name not in ("__init__", "ray_actor")]
    code = (
        "import importlib\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module('pichak_agent.' + name)\n"
        "    except Exception as error:\n"
        "        print(name, type(error).__name__, error)\n"
    )
    done = hidden(code, *wanted)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_job_says_where_it_can_run() -> None:
    code = (
        "from pichak_agent import runner\n"
        "from pichak_agent.messages import Job, Outcome, decode\n"
        "job = Job('j', 1, 'fingerprint', {}, 9.0)\n"
        "print(decode(runner.run(job), Outcome).error)\n"
    )
    done = hidden(code)
    assert "run the agent inside WSL2" in done.stdout, done.stderr


class Windows:
    """`msvcrt.locking` as its reference has it: one byte at the file's position, per descriptor,
    refused with EACCES while another holds it."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}

    def locking(self, fd: int, mode: int, count: int) -> None:
        assert count == 1
        key = (os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR))
        if mode == self.LK_UNLCK:
            del self.held[key]
        elif self.held.setdefault(key, fd) != fd:
            raise PermissionError(13, "Permission denied")


def test_windows_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pichak_agent.locks import FileLock

    windows = Windows()
    monkeypatch.setattr(file_locks, "_fcntl", None)
    monkeypatch.setattr(file_locks, "_msvcrt", windows)
    first, second = FileLock(tmp_path / "x.lock"), FileLock(tmp_path / "x.lock")
    assert first.try_acquire("pid 1")
    assert not second.try_acquire("pid 2")
    # The note is read while the lock is held: the byte that is locked is not one of it.
    assert second.holder() == "pid 1"
    assert (tmp_path / "x.lock").stat().st_size == len("pid 1")
    assert [at for _, at in windows.held] == [file_locks.LOCKED_BYTE]
    first.release()
    assert windows.held == {}
    assert second.try_acquire("pid 2")
    second.release()


def test_a_system_that_locks_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locks, "_fcntl", None)
    monkeypatch.setattr(file_locks, "_msvcrt", None)
    with (tmp_path / "x").open("w") as file, pytest.raises(OSError, match="lock no files"):
        file_locks.try_lock(file.fileno())
