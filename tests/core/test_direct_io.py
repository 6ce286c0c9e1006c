"""Opening past the cache: real files, refusals in every phase, and Windows through a fake."""

# ruff: noqa: N802 - the fake has the names of the Windows API

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pichak_core.devices import direct_io
from pichak_core.devices._direct_windows import (
    ERROR_ACCESS_DENIED,
    ERROR_HANDLE_EOF,
    ERROR_INVALID_PARAMETER,
    ERROR_IO_PENDING,
    FILE_FLAG_NO_BUFFERING,
    FILE_FLAG_OVERLAPPED,
    INVALID_HANDLE,
    Overlapped,
    WindowsFile,
)
from pichak_core.devices.direct_io import (
    ALIGNMENT,
    BypassRefusedError,
    UnnamedFile,
    align_up,
    aligned_buffer,
    huge_pages_on_request,
    open_buffered,
    open_direct,
)


def written(path: Path, length: int) -> bytes:
    content = os.urandom(length)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return content


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class FakeOs:
    """The real calls, except the one named, which fails with `error` from its n-th call on."""

    def __init__(self, phase: str, error: int, *, after: int = 0) -> None:
        self._phase, self._error, self._left = phase, error, after
        self.open_fds: set[int] = set()

    def _maybe_fail(self, phase: str) -> None:
        if phase == self._phase:
            self._left -= 1
            if self._left < 0:
                raise OSError(self._error, os.strerror(self._error))

    def open(self, path: str, flags: int) -> int:
        self._maybe_fail("open")
        fd = os.open(path, flags)
        self.open_fds.add(fd)
        return fd

    def fstat(self, fd: int) -> os.stat_result:
        self._maybe_fail("stat")
        return os.fstat(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("read")
        return os.preadv(fd, buffers, offset)

    def close(self, fd: int) -> None:
        os.close(fd)  # a failing close(2) closes all the same
        self.open_fds.discard(fd)
        self._maybe_fail("close")


class SmallReads(FakeOs):
    """A file system that answers at most two pages at a time."""

    def __init__(self) -> None:
        super().__init__("never", 0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [buffers[0][: 2 * ALIGNMENT]], offset)


@pytest.mark.parametrize("opener", [open_direct, open_buffered])
def test_every_aligned_read_gives_the_bytes_that_were_written(tmp_path: Path, opener: Any) -> None:
    content = written(tmp_path / "f", 5 * ALIGNMENT + 1000)
    file = opener(str(tmp_path / "f"))
    assert file.size == len(content)
    buffer = aligned_buffer(8 * ALIGNMENT)
    for offset in range(0, 7 * ALIGNMENT, ALIGNMENT):
        for length in range(ALIGNMENT, 8 * ALIGNMENT, ALIGNMENT):
            got = file.read_into(buffer, offset, length)
            assert buffer[:got] == content[offset : offset + length]
    file.close()
    file.close()


def test_short_answers_are_put_together(tmp_path: Path) -> None:
    content = written(tmp_path / "f", 7 * ALIGNMENT + 5)
    file = open_direct(str(tmp_path / "f"), system=SmallReads())
    buffer = aligned_buffer(8 * ALIGNMENT)
    assert file.read_into(buffer, 0, 8 * ALIGNMENT) == len(content)
    assert buffer[: len(content)] == content
    file.close()


def test_the_flag_is_really_set(tmp_path: Path) -> None:
    """A misaligned read of written data is refused on a disk: the cache was not asked."""
    from pichak_core.devices.filesystems import filesystem_of

    if filesystem_of(tmp_path).type not in {"ext4", "xfs"}:
        pytest.skip("known to refuse on ext4 and xfs")
    written(tmp_path / "f", 4 * ALIGNMENT)
    file = open_direct(str(tmp_path / "f"))
    with pytest.raises(BypassRefusedError, match="refused at read"):
        file.read_into(aligned_buffer(ALIGNMENT), 100, ALIGNMENT)
    file.close()


@pytest.mark.parametrize("phase", ["open", "stat", "read", "close"])
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refusal_in_any_phase_is_named(tmp_path: Path, phase: str, error: int) -> None:
    # field case 78
    written(tmp_path / "f", ALIGNMENT)
    system = FakeOs(phase, error)
    with pytest.raises(BypassRefusedError, match=f"refused at {phase}") as caught:
        file = open_direct(str(tmp_path / "f"), system=system)
        try:
            file.read_into(aligned_buffer(ALIGNMENT), 0, ALIGNMENT)
        finally:
            file.close()
    assert (caught.value.phase, caught.value.errno) == (phase, error)
    assert not system.open_fds


@pytest.mark.parametrize("phase", ["open", "stat", "read", "close"])
def test_a_failing_disk_is_no_refusal(tmp_path: Path, phase: str) -> None:
    written(tmp_path / "f", ALIGNMENT)
    with pytest.raises(OSError, match="Input/output error") as caught:
        file = open_direct(str(tmp_path / "f"), system=FakeOs(phase, errno.EIO))
        file.read_into(aligned_buffer(ALIGNMENT), 0, ALIGNMENT)
        file.close()
    assert not isinstance(caught.value, BypassRefusedError)


def test_a_buffered_file_has_nothing_to_refuse(tmp_path: Path) -> None:
    written(tmp_path / "f", ALIGNMENT)
    file = open_buffered(str(tmp_path / "f"), system=FakeOs("read", errno.EINVAL))
    with pytest.raises(OSError) as caught:
        file.read_into(aligned_buffer(ALIGNMENT), 0, ALIGNMENT)
    assert not isinstance(caught.value, BypassRefusedError)
    file.drop_cache()
    file.close()


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_direct(str(tmp_path / "nothing"))


@pytest.mark.parametrize("without_tmpfile", [False, True])
def test_an_unnamed_file_can_be_read_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_tmpfile: bool
) -> None:
    if without_tmpfile:
        monkeypatch.setattr(direct_io, "_open_tmpfile", lambda directory: None)
    before = open_descriptors()
    file = UnnamedFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    content = os.urandom(2 * ALIGNMENT + 10)
    os.write(file.fd, content)
    os.fsync(file.fd)
    for opener in (open_direct, open_buffered):
        reading = opener(file.path)
        buffer = aligned_buffer(3 * ALIGNMENT)
        got = reading.read_into(buffer, 0, 3 * ALIGNMENT)
        assert buffer[:got] == content
        reading.close()
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_alignment() -> None:
    assert [align_up(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [
        0,
        ALIGNMENT,
        ALIGNMENT,
        2 * ALIGNMENT,
    ]
    buffer = aligned_buffer(1)
    assert len(buffer) == ALIGNMENT
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert address % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("setting", "on_request"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", False),
        ("always madvise [never]", False),
    ],
)
def test_huge_pages_on_request(tmp_path: Path, setting: str, on_request: bool) -> None:
    assert not huge_pages_on_request(tmp_path)
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text(setting + "\n")
    assert huge_pages_on_request(tmp_path) == on_request


def test_a_buffer_in_huge_pages_is_a_buffer() -> None:
    buffer = aligned_buffer(3 * ALIGNMENT, huge_pages=True)
    buffer[:] = b"x" * len(buffer)
    assert len(buffer) == 3 * ALIGNMENT


class FakeKernel32:
    """kernel32 over one content, answering a read at once or later, as the real one may."""

    def __init__(
        self, content: bytes, *, pending: bool = False, fail: dict[str, int] | None = None
    ):
        self.content, self.pending, self.fail = content, pending, fail or {}
        self.flags = 0
        self.offsets: list[int] = []
        self.open_handles: set[int] = set()
        self._next, self._error, self._done = 100, 0, 0

    def _handle(self) -> int:
        self._next += 1
        self.open_handles.add(self._next)
        return self._next

    def _fails(self, name: str) -> bool:
        self._error = self.fail.get(name, 0)
        return name in self.fail

    def GetLastError(self) -> int:
        return self._error

    def CreateFileW(self, path: str, access: int, share: int, *rest: Any) -> int | None:
        self.flags = rest[2]
        return INVALID_HANDLE if self._fails("CreateFileW") else self._handle()

    def GetFileSizeEx(self, handle: int, size: Any) -> int:
        size._obj.value = len(self.content)
        return 0 if self._fails("GetFileSizeEx") else 1

    def CreateEventW(self, *arguments: Any) -> int:
        return self._handle()

    def ReadFile(self, handle: int, target: Any, length: int, done: None, request: Any) -> int:
        overlapped: Overlapped = request._obj
        offset = overlapped.offset_low | overlapped.offset_high << 32
        self.offsets.append(offset)
        if self._fails("ReadFile"):
            return 0
        part = self.content[offset : offset + length]
        if not part:
            self._error = ERROR_HANDLE_EOF
            return 0
        ctypes.memmove(target, part, len(part))
        self._done = len(part)
        self._error = ERROR_IO_PENDING
        return 0 if self.pending else 1

    def GetOverlappedResult(self, handle: int, request: Any, done: Any, wait: bool) -> int:
        assert wait
        done._obj.value = self._done
        return 0 if self._fails("GetOverlappedResult") else 1

    def CloseHandle(self, handle: int) -> int:
        self.open_handles.discard(handle)
        return 1


@pytest.mark.parametrize("pending", [False, True])
def test_windows_reads_the_bytes_and_gives_every_handle_back(pending: bool) -> None:
    content = os.urandom(3 * ALIGNMENT + 700)
    fake = FakeKernel32(content, pending=pending)
    file = WindowsFile("C:\\f", direct=True, kernel32=fake)
    assert file.size == len(content)
    assert fake.flags == FILE_FLAG_NO_BUFFERING | FILE_FLAG_OVERLAPPED
    buffer = mmap.mmap(-1, 2 * ALIGNMENT)
    for offset in range(0, 5 * ALIGNMENT, ALIGNMENT):
        got = file.read_into(buffer, offset, 2 * ALIGNMENT)
        assert buffer[:got] == content[offset : offset + 2 * ALIGNMENT]
    file.close()
    file.close()
    assert not fake.open_handles


def test_windows_buffered_leaves_the_cache_on() -> None:
    fake = FakeKernel32(b"x")
    WindowsFile("C:\\f", direct=False, kernel32=fake)
    assert fake.flags == FILE_FLAG_OVERLAPPED


def test_windows_offsets_beyond_four_gigabytes() -> None:
    fake = FakeKernel32(b"x")
    file = WindowsFile("C:\\f", direct=True, kernel32=fake)
    offset = (5 << 32) + 3 * ALIGNMENT
    assert file.read_into(mmap.mmap(-1, ALIGNMENT), offset, ALIGNMENT) == 0
    assert fake.offsets == [offset]


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("CreateFileW", "open"),
        ("GetFileSizeEx", "stat"),
        ("ReadFile", "read"),
        ("GetOverlappedResult", "read"),
    ],
)
def test_windows_refusals_are_named(call: str, phase: str) -> None:
    fake = FakeKernel32(b"x" * ALIGNMENT, fail={call: ERROR_INVALID_PARAMETER})
    with pytest.raises(BypassRefusedError) as caught:
        file = WindowsFile("C:\\f", direct=True, kernel32=fake)
        try:
            file.read_into(mmap.mmap(-1, ALIGNMENT), 0, ALIGNMENT)
        finally:
            file.close()
    assert caught.value.phase == phase
    assert not fake.open_handles


def test_windows_waits_for_a_read_in_flight_also_when_interrupted() -> None:
    """The system writes into the buffer until the read is done: it must not be gone by then."""

    class Interrupted(FakeKernel32):
        waits = 0

        def GetOverlappedResult(self, handle: int, request: Any, done: Any, wait: bool) -> int:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            return super().GetOverlappedResult(handle, request, done, wait)

    fake = Interrupted(b"x" * ALIGNMENT, pending=True)
    file = WindowsFile("C:\\f", direct=True, kernel32=fake)
    with pytest.raises(KeyboardInterrupt):
        file.read_into(mmap.mmap(-1, ALIGNMENT), 0, ALIGNMENT)
    assert fake.waits == 2
    file.close()
    assert not fake.open_handles


def test_windows_access_denied_is_permission() -> None:
    fake = FakeKernel32(b"", fail={"CreateFileW": ERROR_ACCESS_DENIED})
    with pytest.raises(PermissionError):
        WindowsFile("C:\\f", direct=True, kernel32=fake)
