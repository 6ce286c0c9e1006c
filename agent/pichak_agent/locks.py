"""A lock that one process on the machine holds at a time; it ends with its holder, however that
dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pichak_core.devices.file_locks import try_lock, unlock

_POLL_SECONDS = 0.1


class FileLock:
    """A lock on a file (`file_locks`). Two objects exclude each other inside one process too.

    A held lock's file says in words who holds it. A folder that holds lock files may be removed by
    a holder: whoever then locks the vanished file notices and makes a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def try_acquire(self, note: str = "") -> bool:
        """Take the lock now or not at all; `OSError` when its file cannot be made."""
        if self._fd is not None:
            return False
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue
            try:
                if not try_lock(fd):
                    os.close(fd)
                    return False
                mine = os.path.samestat(os.fstat(fd), self.path.stat())
            except FileNotFoundError:
                mine = False
            except OSError:
                os.close(fd)
                raise
            if mine:
                break
            os.close(fd)
        self._fd = fd
        self._write_note(note)
        return True

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._fd is not None

    def holder(self) -> str:
        """What the holder wrote about itself; "" when that cannot be read."""
        try:
            return self.path.read_text(errors="replace").strip()
        except OSError:
            return ""

    def release(self) -> None:
        """Give it back; nothing when it is not held."""
        if self._fd is None:
            return
        unlock(self._fd)
        os.close(self._fd)
        self._fd = None

    def _write_note(self, note: str) -> None:
        assert self._fd is not None  # noqa: S101
        try:
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.write(self._fd, note.encode("utf-8", "replace"))
        except OSError:
            # A full disk takes the words, not the lock.
            return


def wait_for(
    lock: FileLock,
    name: str,
    note: str,
    *,
    limit_seconds: float,
    cancel: threading.Event,
    say: Callable[[str], None],
) -> str:
    """The empty text once `lock` (what is called `name`) is held, or the sentence why it is not.

    `note` is what others then read about the holder. While it waits, `say` is told for whom.
    `OSError` when the lock's file cannot be made.
    """
    began = time.monotonic()
    while not lock.try_acquire(note):
        waited = time.monotonic() - began
        who = lock.holder() or "another job"
        if waited >= limit_seconds:
            return f"{name!r} was not free within {limit_seconds:g} s; {who} measures it"
        say(f"waiting for {name!r}: {who}, {waited:.0f} s")
        if cancel.wait(_POLL_SECONDS):
            return "it was cancelled before it started"
    return ""
