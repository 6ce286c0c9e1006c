"""An exclusive lock on an open file, on every system: ``flock`` where there is one, else the byte
range locks of Windows. It ends with its process, however that dies."""

from __future__ import annotations

import importlib
import os
from typing import Any

#: The byte that stands for the file on Windows. Locks are mandatory there, so it lies far behind
#: anything that is written, where nobody's reading meets it.
LOCKED_BYTE = 2**30


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl: Any = _module("fcntl")
_msvcrt: Any = None if _fcntl else _module("msvcrt")


def try_lock(fd: int) -> bool:
    """Take the lock of the file behind `fd` now or not at all; `OSError` where files cannot be
    locked."""
    if _fcntl is not None:
        try:
            _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    if _msvcrt is None:
        raise OSError("this system's Python can lock no files")
    try:
        _at_byte(fd, _msvcrt.LK_NBLCK)
    except PermissionError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give it back, also where a process that is just being forked holds a copy of `fd`."""
    if _fcntl is not None:
        _fcntl.flock(fd, _fcntl.LOCK_UN)
    elif _msvcrt is not None:
        _at_byte(fd, _msvcrt.LK_UNLCK)


def _at_byte(fd: int, mode: int) -> None:
    os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
    _msvcrt.locking(fd, mode, 1)
