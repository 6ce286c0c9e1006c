"""Files that carry results between machines: frames, each checked, and an end that says it is one.

``PICHAK01``, then frames. A frame is its kind (one byte), the length of its content (four bytes,
big-endian), the first 16 bytes of SHA-256 over kind and content, and the content. Kinds: ``M`` is a
msgpack object, ``O`` an outcome's bytes as its job's process made them, ``E`` the end, which holds
the number of frames before it. What was cut, joined, or changed on its way is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pichak_agent.messages import MAX_BYTES, MessageError, pack_map, unpack_map

MAGIC = b"PICHAK01"
#: More frames than any history has.
MAX_FRAMES = 10_000_000
_HEAD = struct.Struct(">cI16s")
_COUNT = struct.Struct(">Q")
_OBJECT, _OUTCOME, _END = b"M", b"O", b"E"
_UNFINISHED = ".part"


class FramedFileError(ValueError):
    """A file that cannot be written or believed: which, why, and what to do."""


def unfinished_path(path: Path) -> Path:
    """Where `FrameWriter` writes until the file is whole."""
    return path.with_name(path.name + _UNFINISHED)


def check_place(path: Path, *, replace: bool = False) -> None:
    """`FramedFileError` where `FrameWriter` could not make this file, as far as that can be known
    before anything is measured for it. It makes nothing."""
    if path.is_dir():
        raise FramedFileError(f"{path} is a folder: name a file")
    folder, beside = path.absolute().parent, unfinished_path(path)
    if path.exists() and not path.is_file():
        raise FramedFileError(f"{path} is a device or a pipe, not a file: it is left as it is")
    if not folder.is_dir():
        why = "is no folder" if folder.exists() else "does not exist: make that folder first"
        raise FramedFileError(f"{path} cannot be written: {folder} {why}")
    if not replace:
        if path.exists():
            raise FramedFileError(f"{path} exists: name another file, or replace it by --force")
        if beside.exists():
            raise FramedFileError(
                f"{beside} is being written, or was left by a probe that was killed: "
                "`pichak import --partial` takes what is whole in it, --force discards it"
            )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FramedFileError(
            f"{path} cannot be written: this user may not write in {folder}; name another folder"
        )


class FrameWriter:
    """Writes ``PATH.part`` frame by frame, each on the disk when its call returns with `sync`; the
    file gets its name when it is whole. A kill at any moment leaves the whole file, or none, or
    what was written in ``PATH.part``.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        """`FramedFileError` when the file exists and may not be replaced, or cannot be made."""
        self.path = path
        self._replace = replace
        self._beside = unfinished_path(path)
        self._count = 0
        check_place(path, replace=replace)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            if replace:
                self._beside.unlink(missing_ok=True)
            self._file = os.fdopen(os.open(self._beside, flags, 0o600), "wb")
        except OSError as error:
            raise FramedFileError(f"{path} cannot be written: {error.strerror}") from error
        self._put(MAGIC)

    def object(self, record: Mapping[str, Any]) -> None:
        """Add a plain object; `MessageError` when it is not one."""
        self._frame(_OBJECT, pack_map(record))

    def outcome(self, data: bytes) -> None:
        """Add an outcome's bytes as they are."""
        self._frame(_OUTCOME, data)

    def sync(self) -> None:
        """Until all frames so far are on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Write the end, and give the file its name."""
        self._frame(_END, _COUNT.pack(self._count))
        self.sync()
        try:
            mine = os.path.samestat(os.fstat(self._file.fileno()), self._beside.stat())
            if not mine:
                raise FramedFileError(f"{self._beside} was replaced by another process meanwhile")
            if self.path.exists() and not self._replace:
                raise FramedFileError(
                    f"{self.path} was made by another process meanwhile; what was measured is in "
                    f"{self._beside}: rename it"
                )
            self._file.close()
            self._beside.replace(self.path)
            folder = os.open(self.path.absolute().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Leave nothing of a file that is not finished."""
        self.close()
        self._beside.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave ``PATH.part`` as it is."""
        # What could not be written on a full disk cannot be written now either.
        with contextlib.suppress(OSError):
            self._file.close()

    def _frame(self, kind: bytes, content: bytes) -> None:
        self._put(_HEAD.pack(kind, len(content), _digest(kind, content)) + content)
        self._count += 1

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> FramedFileError:
        return FramedFileError(f"{self._beside} cannot be written: {error.strerror or error}")


def read_frames(
    path: Path, *, partial: bool = False, on_cut: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any] | bytes]:
    """Objects as dicts and outcomes as bytes, in their order.

    `FramedFileError` for what is not such a file, and at the first frame that is not whole: unless
    `partial`, where the frames before it are all there is, and `on_cut` is told at the end of them.
    Only one frame is held in memory.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise FramedFileError(f"{path}: {_not_ours(magic)}")
            whole = yield from _frames(path, file, partial)
            if not whole:
                on_cut()
    except OSError as error:
        raise FramedFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _frames(
    path: Path, file: BinaryIO, partial: bool
) -> Generator[dict[str, Any] | bytes, None, bool]:
    """The frames; returns whether their end was there."""
    for number in range(MAX_FRAMES):
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            if partial:
                return False
            raise _cut(path, number)
        kind, length, digest = _HEAD.unpack(head)
        if kind not in (_OBJECT, _OUTCOME, _END) or length > MAX_BYTES:
            raise FramedFileError(f"{path}: part {number + 1} is damaged; copy the file again")
        content = file.read(length)
        if len(content) < length:
            if partial:
                return False
            raise _cut(path, number)
        if _digest(kind, content) != digest:
            raise FramedFileError(f"{path}: part {number + 1} is damaged; copy the file again")
        if kind == _END:
            if content != _COUNT.pack(number) or file.read(1):
                raise FramedFileError(f"{path}: its end is not where it should be; copy it again")
            return True
        if kind == _OUTCOME:
            yield content
            continue
        try:
            record = unpack_map(content)
        except MessageError as error:
            raise FramedFileError(f"{path}: part {number + 1}: {error}") from error
        yield record
    raise FramedFileError(f"{path}: more than {MAX_FRAMES:,} parts")


def _digest(kind: bytes, content: bytes) -> bytes:
    made = hashlib.sha256(kind)
    made.update(content)
    return made.digest()[:16]


def _cut(path: Path, whole: int) -> FramedFileError:
    return FramedFileError(
        f"{path} ends in the middle, behind {whole} whole part{'' if whole == 1 else 's'}: copy it "
        "again; where there is no more of it, --partial takes what is whole"
    )


def _not_ours(magic: bytes) -> str:
    if magic[:6] == MAGIC[:6]:
        return "written by another version of pichak-fleet: install the same version on both sides"
    if not magic:
        return "the file is empty"
    return "not a file of `pichak agent probe` or `pichak export`"
