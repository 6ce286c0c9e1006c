"""Written ranges of files: real sparse files, and the arithmetic by brute force."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from pichak_core.devices.extents import (
    EXTENT_ENCODED,
    EXTENT_LAST,
    EXTENT_UNWRITTEN,
    Extents,
    RawExtent,
    _seek_ranges,
    extents_from_fiemap,
    parse_fiemap,
    written_extents,
)

MIB = 1 << 20


def _sparse(path: Path) -> None:
    """1 MiB written, 3 MiB hole, 2 MiB written, 2 MiB reserved, a tail of 1,000 bytes."""
    with path.open("wb") as file:
        file.write(os.urandom(MIB))
        file.seek(4 * MIB)
        file.write(os.urandom(2 * MIB))
        file.flush()
        os.posix_fallocate(file.fileno(), 6 * MIB, 2 * MIB)
        file.seek(8 * MIB)
        file.write(os.urandom(1000))
        file.flush()
        os.fsync(file.fileno())


EXPECTED = ((0, MIB), (4 * MIB, 6 * MIB), (8 * MIB, 8 * MIB + 1000))


def test_a_real_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    _sparse(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        found = written_extents(fd, os.fstat(fd).st_size)
        if found.method == "not known":
            pytest.skip("this file system tells of no holes")
        assert found.written == EXPECTED
        assert found.written_bytes == 3 * MIB + 1000
        if found.method == "FIEMAP":
            assert tuple(_seek_ranges(fd, found.size)) == EXPECTED
    finally:
        os.close(fd)


def test_reserved_space_with_zeros_in_the_cache_is_still_not_written(tmp_path: Path) -> None:
    """`SEEK_HOLE` takes such a range for data once something has read it."""
    path = tmp_path / "reserved"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    assert path.read_bytes() == bytes(2 * MIB)
    fd = os.open(path, os.O_RDONLY)
    try:
        found = written_extents(fd, 2 * MIB)
        if found.method != "FIEMAP":
            pytest.skip("needs FIEMAP")
        assert found.written == ()
    finally:
        os.close(fd)


def test_a_file_of_nothing_but_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "hole"
    with path.open("wb") as file:
        file.truncate(5 * MIB)
    fd = os.open(path, os.O_RDONLY)
    try:
        found = written_extents(fd, 5 * MIB)
        assert found.method != "not known"
        assert found.written == ()
        assert _seek_ranges(fd, 5 * MIB) == []
    finally:
        os.close(fd)


def test_more_extents_than_one_call_returns(tmp_path: Path) -> None:
    """700 written pages with a hole after each: more than the 512 of one request."""
    page = 4096
    path = tmp_path / "comb"
    with path.open("wb") as file:
        for index in range(700):
            file.seek(2 * index * page)
            file.write(os.urandom(page))
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(path, os.O_RDONLY)
    try:
        found = written_extents(fd, os.fstat(fd).st_size)
        assert found.written == tuple((2 * i * page, (2 * i + 1) * page) for i in range(700))
    finally:
        os.close(fd)


def test_the_kernels_answer_is_parsed_by_its_layout() -> None:
    head = struct.pack("=QQIIII", 0, 1 << 30, 0, 2, 512, 0)
    one = struct.pack("=QQQQQIIII", 4096, 1 << 40, 8192, 0, 0, 0, 0, 0, 0)
    two = struct.pack("=QQQQQIIII", 1 << 35, 7, 4096, 0, 0, EXTENT_LAST | EXTENT_UNWRITTEN, 0, 0, 0)
    assert parse_fiemap(head + one + two + bytes(56)) == [
        RawExtent(4096, 8192, 0),
        RawExtent(1 << 35, 4096, EXTENT_LAST | EXTENT_UNWRITTEN),
    ]


def test_joining_and_cutting_by_brute_force() -> None:
    generator = random.Random(11)
    for _ in range(300):
        size = generator.randrange(1, 60)
        raw, truth, position = [], [False] * size, 0
        while position < 64:
            position += generator.randrange(0, 8)
            length = generator.randrange(1, 9)
            flags = generator.choice([0, 0, EXTENT_UNWRITTEN, EXTENT_ENCODED])
            raw.append(RawExtent(position, length, flags))
            for byte in range(position, min(position + length, size)):
                truth[byte] = flags != EXTENT_UNWRITTEN
            position += length
        generator.shuffle(raw)
        found = extents_from_fiemap(raw, size)
        told = [any(start <= byte < end for start, end in found.written) for byte in range(size)]
        assert told == truth
        gaps = [b[0] - a[1] for a, b in zip(found.written, found.written[1:], strict=False)]
        assert all(gap > 0 for gap in gaps)  # neighbours are joined
        assert found.encoded == any(e.flags == EXTENT_ENCODED for e in raw)


def test_without_fiemap_the_holes_are_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, size: int) -> list[RawExtent]:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("pichak_core.devices.extents._fiemap", refuse)
    path = tmp_path / "sparse"
    _sparse(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert written_extents(fd, os.fstat(fd).st_size) == Extents(
            8 * MIB + 1000, EXPECTED, "SEEK_HOLE"
        )
    finally:
        os.close(fd)
