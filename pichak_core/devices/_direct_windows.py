"""Unbuffered reads on Windows: ``FILE_FLAG_NO_BUFFERING`` with overlapped reads.

Everything that can be decided is decided here in Python on plain integers; `kernel32` is only ever
called through the object passed in, so that a fake can stand for it. Sources: the Windows API
reference for CreateFileW, ReadFile, GetOverlappedResult, GetFileSizeEx.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

from pichak_core.devices.direct_io import BypassRefusedError

GENERIC_READ = 0x80000000
FILE_SHARE_ALL = 0x1 | 0x2 | 0x4  # read, write, delete: our own file is open for deletion
OPEN_EXISTING = 3
FILE_FLAG_OVERLAPPED = 0x40000000
FILE_FLAG_NO_BUFFERING = 0x20000000
INVALID_HANDLE = ctypes.c_void_p(-1).value

ERROR_FILE_NOT_FOUND = 2
ERROR_PATH_NOT_FOUND = 3
ERROR_ACCESS_DENIED = 5
ERROR_SHARING_VIOLATION = 32
ERROR_HANDLE_EOF = 38
ERROR_NOT_SUPPORTED = 50
ERROR_INVALID_PARAMETER = 87
ERROR_IO_PENDING = 997

_REFUSALS = frozenset({ERROR_INVALID_PARAMETER, ERROR_NOT_SUPPORTED})
_ERRNO = {
    ERROR_FILE_NOT_FOUND: errno.ENOENT,
    ERROR_PATH_NOT_FOUND: errno.ENOENT,
    ERROR_ACCESS_DENIED: errno.EACCES,
    ERROR_SHARING_VIOLATION: errno.EACCES,
    ERROR_NOT_SUPPORTED: errno.EOPNOTSUPP,
    ERROR_INVALID_PARAMETER: errno.EINVAL,
}


class Overlapped(ctypes.Structure):
    """OVERLAPPED: the offset in two halves, and the event that a finished read sets."""

    _fields_ = (
        ("internal", ctypes.c_void_p),
        ("internal_high", ctypes.c_void_p),
        ("offset_low", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


class WindowsFile:
    """A `ReadFile`. One handle serves all threads: each read brings its own event."""

    def __init__(self, path: str, *, direct: bool, kernel32: Any = None) -> None:
        self.path = path
        self._direct = direct
        self._kernel32: Any = _load_kernel32() if kernel32 is None else kernel32
        flags = FILE_FLAG_OVERLAPPED | (FILE_FLAG_NO_BUFFERING if direct else 0)
        self._handle: int | None = self._kernel32.CreateFileW(
            path, GENERIC_READ, FILE_SHARE_ALL, None, OPEN_EXISTING, flags, None
        )
        if self._handle in (None, INVALID_HANDLE):
            self._handle = None
            raise self._error("open")
        size = ctypes.c_int64(0)
        if not self._kernel32.GetFileSizeEx(self._handle, ctypes.byref(size)):
            failure = self._error("stat")
            self.close()
            raise failure
        self.size = int(size.value)

    #: Reads are not queued for one thread here: the threads' overlapped reads are in flight.
    queue_fd = None

    def read_error(self, code: int) -> OSError:
        """See `ReadFile.read_error`."""
        return self._error("read", code)

    def read_into(self, buffer: mmap.mmap, offset: int, length: int) -> int:
        """See `ReadFile.read_into`; a mapping starts on a page, which is aligned enough."""
        event = self._kernel32.CreateEventW(None, True, False, None)
        if not event:
            raise self._error("read")
        try:
            request = Overlapped(None, None, offset & 0xFFFFFFFF, offset >> 32, event)
            target = (ctypes.c_char * length).from_buffer(buffer)
            done = ctypes.c_uint32(0)
            started = self._kernel32.ReadFile(
                self._handle, target, length, None, ctypes.byref(request)
            )
            if not started:
                code = self._kernel32.GetLastError()
                if code == ERROR_HANDLE_EOF:
                    return 0
                if code != ERROR_IO_PENDING:
                    raise self._error("read", code)
            try:
                finished = self._kernel32.GetOverlappedResult(
                    self._handle, ctypes.byref(request), ctypes.byref(done), True
                )
            except KeyboardInterrupt:
                # The read goes on into `request` and `target`: they must outlive it.
                self._kernel32.GetOverlappedResult(
                    self._handle, ctypes.byref(request), ctypes.byref(done), True
                )
                raise
            if not finished:
                code = self._kernel32.GetLastError()
                if code == ERROR_HANDLE_EOF:
                    return 0
                raise self._error("read", code)
            return int(done.value)
        finally:
            self._kernel32.CloseHandle(event)

    def drop_cache(self) -> None:
        """Windows gives a file no such advice."""

    def close(self) -> None:
        """Close the handle; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None and not self._kernel32.CloseHandle(handle):
            raise self._error("close")

    def _error(self, phase: str, code: int | None = None) -> OSError:
        if code is None:
            code = int(self._kernel32.GetLastError())
        number = _ERRNO.get(code, errno.EIO)
        plain = OSError(number, f"{os.strerror(number)} (Windows error {code})", self.path)
        if self._direct and code in _REFUSALS:
            return BypassRefusedError(phase, self.path, plain)
        return plain


class _Kernel32:
    """The real kernel32 with its signatures; `GetLastError` is the copy that ctypes keeps."""

    def __init__(self, library: Any) -> None:
        handle, dword, address = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "CreateFileW": (
                handle,
                [ctypes.c_wchar_p, dword, dword, address, dword, dword, handle],
            ),
            "GetFileSizeEx": (ctypes.c_int, [handle, address]),
            "CreateEventW": (
                handle,
                [address, ctypes.c_int, ctypes.c_int, ctypes.c_wchar_p],
            ),
            "ReadFile": (ctypes.c_int, [handle, address, dword, address, address]),
            "GetOverlappedResult": (ctypes.c_int, [handle, address, address, ctypes.c_int]),
            "CloseHandle": (ctypes.c_int, [handle]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def GetLastError(self) -> int:  # noqa: N802 - the API's own name
        return int(ctypes.get_last_error())  # type: ignore[attr-defined, unused-ignore]


def _load_kernel32() -> Any:
    library: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined, unused-ignore]
    return _Kernel32(library)
