"""The disk measurement on real file systems: images on loop devices, overlays, memory.

Each file system is made for the test, so its answer is known: what lies in the cache of an image's
file, or in memory under an overlay, is not a disk's speed, whatever the flag that was accepted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pichak_core.devices.direct_io import (
    ALIGNMENT,
    BypassRefusedError,
    aligned_buffer,
    open_direct,
)
from pichak_core.devices.disk_counters import read_counters
from pichak_core.devices.extents import written_extents
from pichak_core.devices.filesystems import filesystem_of
from pichak_core.measure._disk_files import free_margin
from pichak_core.measure.disk import DiskError, DiskResult, disk_queue_depth

MIB = 1 << 20

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(sys.platform != "linux", reason="mounts are Linux's here"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root"
    ),
]


def call(*command: str) -> str:
    """Run a tool of the system; the test is skipped where it is missing or not allowed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Mounts:
    """Mounts below one folder, all taken down at the end, the last one first."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.undo = contextlib.ExitStack()

    def _mount(self, name: str, *arguments: str) -> Path:
        point = self.base / name
        point.mkdir()
        call("mount", *arguments, str(point))
        self.undo.callback(subprocess.run, ["umount", "-l", str(point)], check=False)
        return point

    def image(self, kind: str, mib: int, *options: str, direct: bool = False) -> Path:
        """A file system in a file; `direct` keeps the image out of the page cache."""
        file = self.base / f"{kind}.img"
        with file.open("wb") as made:
            made.truncate(mib * MIB)
        call(f"mkfs.{kind}", *options, str(file))
        return self._loop(kind, file, direct=direct)

    def squashfs(self, content: bytes) -> Path:
        source = self.base / "source"
        source.mkdir()
        (source / "data").write_bytes(content)
        file = self.base / "squash.img"
        call("mksquashfs", str(source), str(file), "-noD", "-quiet")
        return self._loop("squashfs", file)

    def _loop(self, name: str, file: Path, *, direct: bool = False) -> Path:
        flags = ["--direct-io=on"] if direct else []
        device = call("losetup", "--find", "--show", *flags, str(file))
        self.undo.callback(subprocess.run, ["losetup", "--detach", device], check=False)
        return self._mount(name, device)

    def memory(self, mib: int) -> Path:
        return self._mount("memory", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs")

    def overlay(self, lower: Path, upper: Path) -> Path:
        for name in ("up", "work"):
            (upper / name).mkdir()
        options = f"lowerdir={lower},upperdir={upper}/up,workdir={upper}/work"
        return self._mount("overlay", "-t", "overlay", "-o", options, "overlay")


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    made = Mounts(tmp_path)
    with made.undo:
        yield made


def written(path: Path, length: int) -> bytes:
    content = os.urandom(length)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return content


def measured(path: Path, seconds: float = 0.6) -> DiskResult:
    return disk_queue_depth(path, depths=(1, 2), chunk_mb=16, block_mb=1, budget_seconds=seconds)


def physical_counters(path: Path) -> None:
    if read_counters(filesystem_of(path)).physical is None:
        pytest.skip("no counter of a physical disk is readable here")


@pytest.mark.parametrize(("kind", "mib"), [("ext4", 128), ("xfs", 400)])
def test_an_image_in_the_cache_is_found_out(mounts: Mounts, kind: str, mib: int) -> None:
    # field case 80: the flag is accepted, and a cache below answers all the same
    point = mounts.image(kind, mib, "-q")
    physical_counters(point)
    result = measured(point)
    assert (result.filesystem.type, result.filesystem.kind) == (kind, "disk")
    assert result.filesystem.block_device.startswith("loop")
    assert result.bypassed
    assert "a cache answered" in result.suspect
    assert not result.ranks
    assert any("disk image" in fact for fact in result.facts())


def test_an_image_past_the_cache_is_vouched_for_by_its_disk(mounts: Mounts) -> None:
    if filesystem_of(mounts.base).kind != "disk":
        pytest.skip("the image does not lie on a disk")
    point = mounts.image("ext4", 128, "-q", direct=True)
    physical_counters(point)
    result = measured(point)
    assert result.bypassed
    assert result.suspect == ""
    assert result.traffic.physical_read is not None
    assert result.traffic.physical_read >= 0.9 * result.bytes_read


@pytest.mark.parametrize(("kind", "mib"), [("ext4", 64), ("xfs", 400)])
def test_alignment_is_enforced_on_written_data(mounts: Mounts, kind: str, mib: int) -> None:
    # field case 78: offset, length and address; the short tail is read
    point = mounts.image(kind, mib, "-q")
    content = written(point / "data", 3 * ALIGNMENT + 1000)
    file = open_direct(str(point / "data"))
    buffer = aligned_buffer(4 * ALIGNMENT)
    assert file.read_into(buffer, 0, 4 * ALIGNMENT) == len(content)
    assert buffer[: len(content)] == content
    with pytest.raises(BypassRefusedError, match="refused at read"):
        file.read_into(buffer, 100, ALIGNMENT)
    file.close()


def test_memory_is_told_by_its_type(mounts: Mounts) -> None:
    # field case 77
    point = mounts.memory(64)
    written(point / "data", 4 * MIB)
    for path in (point, point / "data"):
        result = disk_queue_depth(path, block_mb=1)
        assert result.is_memory
        assert result.best is None


def test_squashfs_refuses_and_an_overlay_over_it_too(mounts: Mounts, tmp_path: Path) -> None:
    # field case 78
    content = os.urandom(8 * MIB)
    lower = mounts.squashfs(content)
    upper = tmp_path / "upper"
    upper.mkdir()
    merged = mounts.overlay(lower, upper)
    for path, kind in ((lower / "data", "disk"), (merged / "data", "layered")):
        result = measured(path, 0.4)
        assert result.filesystem.kind == kind
        assert not result.bypassed
        assert not result.ranks
        assert result.verdict.startswith("cached: cache not bypassed (refused at ")
    # what is written above lies on the disk below, which does bypass
    if filesystem_of(upper).type in {"ext4", "xfs"}:
        assert measured(merged, 0.4).bypassed
    assert (lower / "data").read_bytes() == content


def test_an_overlay_over_memory_is_found_out(mounts: Mounts, tmp_path: Path) -> None:
    # field case 77, 80: an overlay says nothing of what lies under it; the counters do
    lower = tmp_path / "lower"
    lower.mkdir()
    merged = mounts.overlay(lower, mounts.memory(256))
    physical_counters(merged)
    result = measured(merged)
    assert result.filesystem.kind == "layered"
    assert not result.ranks
    if result.bypassed:
        assert "a cache answered" in result.suspect


def test_a_file_system_in_user_space_that_caches_is_found_out(
    mounts: Mounts, tmp_path: Path
) -> None:
    # field case 78, 80: FUSE takes the flag, and its daemon reads through the page cache
    below = tmp_path / "below"
    below.mkdir()
    written(below / "data", 16 * MIB)
    (below / "data").read_bytes()
    point = tmp_path / "bound"
    point.mkdir()
    call("bindfs", str(below), str(point))
    mounts.undo.callback(subprocess.run, ["umount", "-l", str(point)], check=False)
    physical_counters(point)
    result = measured(point / "data")
    assert result.filesystem.kind == "user space"
    assert not result.ranks
    if result.bypassed:
        assert "a cache answered, or a disk elsewhere" in result.suspect


def test_holes_and_reserved_space_are_told_apart_from_data(mounts: Mounts) -> None:
    point = mounts.image("xfs", 400, "-q")
    path = point / "mixed"
    written(path, 4 * MIB)
    with path.open("r+b") as file:
        file.truncate(12 * MIB)
        os.posix_fallocate(file.fileno(), 8 * MIB, 4 * MIB)
        os.fsync(file.fileno())
        found = written_extents(file.fileno(), 12 * MIB)
    assert found.written == ((0, 4 * MIB),)
    result = measured(path, 0.4)
    assert result.data_bytes == 4 * MIB
    assert any(note.startswith("67% of the data are holes or reserved") for note in result.notes)


def test_a_small_disk_keeps_its_margin(mounts: Mounts) -> None:
    point = mounts.image("ext4", 128, "-q", "-m", "0")
    usage = shutil.disk_usage(point)
    filler = usage.free - free_margin(usage.total) - 6 * MIB
    written(point / "filler", filler)
    seen: list[int] = []

    def look(_: str) -> None:
        seen.append(shutil.disk_usage(point).free)

    result = disk_queue_depth(
        point, depths=(1,), chunk_mb=100, block_mb=1, budget_seconds=1.0, on_progress=look
    )
    assert 4 * MIB <= result.data_bytes <= 6 * MIB
    assert min(seen) >= free_margin(usage.total) - MIB
    written(point / "more", 4 * MIB)
    with pytest.raises(DiskError, match="free some, or name files"):
        disk_queue_depth(point, chunk_mb=100, block_mb=1)
    assert sorted(p.name for p in point.iterdir()) == ["filler", "lost+found", "more"]
