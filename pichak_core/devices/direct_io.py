"""Reading files past the operating system's cache, on each platform in its own way.

Linux has the open flag ``O_DIRECT``, macOS ``F_NOCACHE`` on an open descriptor, Windows
``FILE_FLAG_NO_BUFFERING``. A file system may refuse at once, or accept the flag and fail later: an
overlay over squashfs fails in stat, read or even close. Whatever the phase, the refusal is one
exception, `BypassRefusedError`, that names it. Acceptance alone proves nothing: tmpfs takes the
flag and reads memory (see `pichak_core.devices.filesystems`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

#: Buffers, offsets and lengths are multiples of this: it covers devices of 512 and 4,096 bytes a
#: sector, and the pages of every common CPU.
ALIGNMENT = max(4096, mmap.PAGESIZE)

#: What a file system answers when it cannot bypass its cache, as opposed to a failing disk (EIO).
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY})

Result = TypeVar("Result")

_F_NOCACHE = 48  # <sys/fcntl.h> of macOS; the Python module does not name it everywhere


class BypassRefusedError(OSError):
    """The cache could not be bypassed. `phase` is ``open``, ``stat``, ``read`` or ``close``."""

    def __init__(self, phase: str, path: str, error: OSError) -> None:
        super().__init__(error.errno, f"refused at {phase}: {error.strerror or error}", path)
        self.phase = phase


class ReadFile(Protocol):
    """One file open for reading. `read_into` may be called from many threads at once."""

    path: str
    size: int

    @property
    def queue_fd(self) -> int | None:
        """The descriptor for a `KernelQueue`; None where reads cannot be queued."""

    def read_error(self, code: int) -> OSError:
        """What a queued read that failed with this ``errno`` would have raised from `read_into`."""

    def read_into(self, buffer: mmap.mmap, offset: int, length: int) -> int:
        """Read up to `length` bytes at `offset` to the start of `buffer`; returns how many.

        `offset` and `length` are multiples of `ALIGNMENT`. Fewer bytes than asked for means that
        the file ends there.
        """

    def drop_cache(self) -> None:
        """Ask the system to forget what it caches of this file (advice: it may not)."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


class OsCalls(Protocol):
    """The part of module `os` that is used, so that a test can make one call fail."""

    def open(self, path: str, flags: int, /) -> int: ...
    def fstat(self, fd: int, /) -> os.stat_result: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
    def close(self, fd: int, /) -> None: ...


class PosixFile:
    """`ReadFile` on a POSIX descriptor. With `direct`, refusals become `BypassRefusedError`."""

    def __init__(self, path: str, *, direct: bool, system: OsCalls) -> None:
        self.path = path
        self._direct = direct
        self._system = system
        self._fd = -1
        flags = os.O_RDONLY | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if direct else 0)
        self._fd = self._call("open", system.open, path, flags)
        try:
            if direct and not hasattr(os, "O_DIRECT"):
                self._call("open", _set_nocache, self._fd)
            self.size = self._call("stat", system.fstat, self._fd).st_size
        except OSError:
            with contextlib.suppress(OSError):  # the first failure is the one to report
                self.close()
            raise

    def read_into(self, buffer: mmap.mmap, offset: int, length: int) -> int:
        view = memoryview(buffer)
        done = 0
        while done < length:
            got = self._call(
                "read", self._system.preadv, self._fd, [view[done:length]], offset + done
            )
            done += got
            # An unaligned count is the tail of the file; going on from there would be EINVAL.
            if got == 0 or done % ALIGNMENT:
                break
        return done

    @property
    def queue_fd(self) -> int | None:
        queues = self._direct and self._system is os and sys.platform == "linux"
        return self._fd if queues and self._fd >= 0 else None

    def read_error(self, code: int) -> OSError:
        error = OSError(code, os.strerror(code), self.path)
        if self._direct and code in _REFUSALS:
            return BypassRefusedError("read", self.path, error)
        return error

    def drop_cache(self) -> None:
        if self._fd >= 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._call("close", self._system.close, fd)

    def _call(self, phase: str, call: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return call(*arguments)
        except OSError as error:
            if self._direct and error.errno in _REFUSALS:
                raise BypassRefusedError(phase, self.path, error) from error
            raise


class UnnamedFile:
    """A file to write to that nothing can leave behind: `path` opens it while this lives.

    On Linux it never has a name (``O_TMPFILE``), or loses it before a byte is written; on Windows
    the system deletes it when the last handle closes. Either holds after a kill too.
    """

    def __init__(self, directory: Path) -> None:
        self.fd, self.path = _create_unnamed(directory)

    def close(self) -> None:
        """Give the space back; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_direct(path: str, *, system: OsCalls = os) -> ReadFile:
    """Open `path` with the cache bypassed.

    Raises `BypassRefusedError` where the file system does not do that, and the usual `OSError`
    for a file that is missing or may not be read.
    """
    if sys.platform == "win32":
        from pichak_core.devices._direct_windows import WindowsFile

        return WindowsFile(path, direct=True)
    return PosixFile(path, direct=True, system=system)


def open_buffered(path: str, *, system: OsCalls = os) -> ReadFile:
    """Open `path` the usual way, through the cache."""
    if sys.platform == "win32":
        from pichak_core.devices._direct_windows import WindowsFile

        return WindowsFile(path, direct=False)
    return PosixFile(path, direct=False, system=system)


def aligned_buffer(length: int, *, huge_pages: bool = False) -> mmap.mmap:
    """Private memory of at least `length` bytes that starts on a page.

    Ordinary pages are what a program's own buffers have. `huge_pages` asks for few large pieces of
    memory instead (advice: where the system has none, the buffer is an ordinary one).
    """
    size = max(ALIGNMENT, align_up(length))
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def huge_pages_on_request(sys_root: Path = Path("/sys")) -> bool:
    """Whether `aligned_buffer(huge_pages=True)` differs from an ordinary buffer on this system."""
    try:
        setting = (sys_root / "kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False
    return "[madvise]" in setting


def align_up(length: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def _set_nocache(fd: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, _F_NOCACHE, 1)
    else:
        raise OSError(errno.EOPNOTSUPP, "this system has no way to bypass its cache")


def _create_unnamed(directory: Path) -> tuple[int, str]:
    if sys.platform == "win32":
        name = tempfile.mktemp(prefix=".pichak-disk-", dir=directory)  # noqa: S306 - O_EXCL below
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_BINARY | os.O_TEMPORARY
        return os.open(name, flags, 0o600), name
    fd = _open_tmpfile(directory)
    if fd is None:
        fd, name = tempfile.mkstemp(prefix=".pichak-disk-", dir=directory)
        try:
            Path(name).unlink()
        except OSError:  # a file system that keeps what is open: not a file to fill, then
            os.close(fd)
            Path(name).unlink(missing_ok=True)
            raise
    if sys.platform == "darwin":
        _set_nocache(fd)  # else the writes alone would fill the cache that is to be bypassed
        return fd, f"/dev/fd/{fd}"
    return fd, f"/proc/self/fd/{fd}"


def _open_tmpfile(directory: Path) -> int | None:
    """A descriptor of a file without a name, None where kernel or file system has none."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # EISDIR: a kernel that does not know the flag sees an attempt to write to a directory.
        if error.errno in _REFUSALS | {errno.EISDIR, errno.ENOENT}:
            return None
        raise
