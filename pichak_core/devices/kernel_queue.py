"""Reads that the Linux kernel holds in flight by itself (``io_submit``, see io_submit(2)).

One thread keeps any number of reads going, as fio's ``libaio`` engine does. With a thread for each
read instead, 32 of them on two cores cost the disk's rate a few percent. io_uring would do it too,
but containers forbid it by default.

Only for descriptors opened with ``O_DIRECT``. A file system may carry out a submitted read before
it answers the submission (compressed btrfs, ZFS): then one read is in flight, whatever was asked;
`SubmittedReads.submit` tells.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from types import TracebackType

#: io_setup, io_destroy, io_getevents, io_submit: <asm/unistd.h> of each machine.
_CALLS = {
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_IOCB_CMD_PREAD = 0


class _Request(ctypes.Structure):
    """``struct iocb`` of <linux/aio_abi.h>, little-endian."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_descriptor", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """``struct io_event``."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class QueueUnavailableError(OSError):
    """This system holds no reads in flight: another machine, kernel or security policy."""


class KernelQueue:
    """Up to `depth` reads in flight, one for each slot 0 … depth − 1.

    A context manager: leaving it waits until the kernel has let go of every buffer.
    `QueueUnavailableError` when there is no such thing here.
    """

    def __init__(self, depth: int) -> None:
        machine = platform.machine()
        if machine not in _CALLS or struct.calcsize("P") != 8:
            raise QueueUnavailableError(errno.ENOSYS, f"no numbers of its calls for {machine}")
        self._setup, self._destroy, self._get_events, self._submit = _CALLS[machine]
        self._call_kernel = ctypes.CDLL(None, use_errno=True).syscall
        self._call_kernel.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._open = False
        try:
            self._call(self._setup, ctypes.c_long(depth), ctypes.byref(self._context))
        except OSError as error:
            raise QueueUnavailableError(error.errno, error.strerror) from error
        self._open = True
        self._requests = [_Request() for _ in range(depth)]
        self._memory: list[ctypes.Array[ctypes.c_char] | None] = [None] * depth
        self._events = (_Event * depth)()

    def submit(self, slot: int, fd: int, buffer: mmap.mmap, offset: int, length: int) -> None:
        """Begin to read `length` bytes at `offset` of `fd` to the start of `buffer`.

        `slot` must be free. `OSError` when the kernel refuses the read at once.
        """
        memory = (ctypes.c_char * length).from_buffer(buffer)
        self._memory[slot] = memory
        request = self._requests[slot]
        request.data = slot
        request.opcode = _IOCB_CMD_PREAD
        request.descriptor = fd
        request.buffer = ctypes.addressof(memory)
        request.length = length
        request.offset = offset
        pointers = (ctypes.POINTER(_Request) * 1)(ctypes.pointer(request))
        self._call(self._submit, self._context, ctypes.c_long(1), pointers)

    def finished(self, *, wait: bool = True) -> list[tuple[int, int]]:
        """(slot, bytes read) of reads that ended, at least one of them if `wait`; a failed one has
        its negative `errno` in place of the bytes."""
        least = ctypes.c_long(1 if wait else 0)
        most = ctypes.c_long(len(self._events))
        while True:
            try:
                count = self._call(self._get_events, self._context, least, most, self._events, None)
            except InterruptedError:
                continue
            return [(int(one.data), int(one.result)) for one in self._events[:count]]

    def close(self) -> None:
        """Wait for what is in flight and give it up; a second call does nothing."""
        if self._open:
            self._open = False
            self._call(self._destroy, self._context)
            self._memory.clear()

    def __enter__(self) -> KernelQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, number: int, *arguments: object) -> int:
        answer = int(self._call_kernel(ctypes.c_long(number), *arguments))
        if answer < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return answer
