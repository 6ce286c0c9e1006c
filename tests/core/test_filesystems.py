"""Mount tables, kinds of file system, block counters."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from pichak_core.devices.disk_counters import (
    Counters,
    DiskCounters,
    parse_block_stat,
    parse_diskstats,
    physical_disks,
    read_counters,
    traffic,
)
from pichak_core.devices.filesystems import (
    FileSystem,
    block_device_name,
    filesystem_of,
    find_mount,
    kind_of,
    parse_mountinfo,
)

MOUNTINFO = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 27 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=65536k
31 27 8:17 / /data rw - xfs /dev/sdb1 rw
32 31 0:50 / /data/my\040models rw master:2 propagate_from:1 - nfs4 10.0.0.2:/m\134x rw
33 27 0:60 / /data rw - overlay overlay rw,lowerdir=/l
not a mount line
"""

# An idle loop device, a virtual disk, an NVMe disk with a partition, a mapped volume on it.
DISKSTATS = """   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 254       0 vda 16951 8056 2423290 9762 3758 44809 3646664 13114 0 6244 23296
 259       0 nvme0n1 10 0 800 1 20 0 1600 2 0 3 3
 259       1 nvme0n1p1 10 0 800 1 20 0 1600 2 0 3 3
 253       0 dm-0 10 0 800 1 20 0 1600 2 0 3 3
 short line
"""


def test_mountinfo_fields_and_escapes() -> None:
    mounts = parse_mountinfo(MOUNTINFO)
    assert [m.type for m in mounts] == ["proc", "ext4", "tmpfs", "xfs", "nfs4", "overlay"]
    assert mounts[4].mount_point == "/data/my models"
    assert mounts[4].source == "10.0.0.2:/m\\x"
    assert mounts[1].device == "254:0"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/etc/passwd", "ext4"),
        ("/", "ext4"),
        ("/dev/shm/a/b", "tmpfs"),
        ("/data/my models/x", "nfs4"),
        ("/data/other", "overlay"),  # mounted later over the xfs at the same place
        ("/database/x", "ext4"),  # shares letters with /data, not the path
    ],
)
def test_the_deepest_and_latest_mount_holds_a_path(path: str, expected: str) -> None:
    mount = find_mount(parse_mountinfo(MOUNTINFO), path)
    assert mount is not None
    assert mount.type == expected


def test_no_mount_for_a_path_outside_the_table() -> None:
    assert find_mount([], "/x") is None


@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        ("ext4", "vda", "disk"),
        ("xfs", "nvme0n1p2", "disk"),
        ("tmpfs", "", "memory"),  # field case 77
        ("ramfs", "", "memory"),
        ("ext4", "zram0", "memory"),
        ("ext4", "ram1", "memory"),
        ("ext4", "zram", "disk"),
        ("zfs", "", "zfs"),  # field case 80
        ("overlay", "", "layered"),  # field case 78
        ("nfs4", "", "network"),
        ("fuse.sshfs", "", "network"),
        ("virtiofs", "", "host share"),
        ("fuse.mergerfs", "", "user space"),
        ("fuse", "", "user space"),
        ("fuseblk", "sdb1", "disk"),
        ("btrfs", "zram0", "memory"),
        ("somethingnew", "", "unknown"),
    ],
)
def test_kinds(name: str, device: str, kind: str) -> None:
    assert kind_of(name, device) == kind


def test_the_file_systems_of_this_machine_as_df_names_them(tmp_path: Path) -> None:
    answer = subprocess.run(
        ["df", "--output=fstype,target", str(tmp_path)], capture_output=True, text=True, check=True
    )
    fstype, target = answer.stdout.splitlines()[1].split(maxsplit=1)
    found = filesystem_of(tmp_path)
    assert (found.type, found.mount_point) == (fstype, target)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_is_memory_also_without_a_mount_table(tmp_path: Path) -> None:
    # field case 77: the type decides, not whether O_DIRECT is accepted
    for proc in (Path("/proc"), tmp_path):
        found = filesystem_of(Path("/dev/shm"), proc=proc)
        assert (found.type, found.kind) == ("tmpfs", "memory")


def test_without_a_mount_table_statfs_tells(tmp_path: Path) -> None:
    named = subprocess.run(
        ["stat", "-f", "-c", "%t", str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = filesystem_of(tmp_path, proc=tmp_path)
    magic = int(named.stdout, 16)
    expected = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x794C7630: "overlay"}
    if magic not in expected:
        pytest.skip(f"no expectation for magic {magic:x}")
    assert found.type == expected[magic]


def test_a_file_system_over_several_devices_is_known_by_its_source(tmp_path: Path) -> None:
    # field case 77: btrfs has a device number of its own, also on a RAM disk
    (tmp_path / "self").mkdir()
    line = "2 1 0:44 / {0} rw - btrfs {1} rw\n"
    for source, kind in (("/dev/zram0", "memory"), ("/dev/sdb", "disk")):
        (tmp_path / "self/mountinfo").write_text(line.format(tmp_path, source))
        found = filesystem_of(tmp_path, proc=tmp_path, sys_root=tmp_path)
        assert (found.kind, found.block_device) == (kind, "")


def test_a_path_is_resolved_before_it_is_looked_up(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    root = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    inner = f"2 1 0:9 / {real} rw - nfs server:/x rw\n"
    (proc / "self/mountinfo").write_text(root + inner)
    assert filesystem_of(tmp_path / "link", proc=proc).kind == "network"


def test_block_stat_counts_sectors_of_512_bytes() -> None:
    assert parse_block_stat("10 0 800 1 20 0 1600 2 0 3 3") == Counters(800 * 512, 1600 * 512)
    assert parse_block_stat("") is None
    assert parse_block_stat("10 0 x 1 20 0 1600 2 0 3 3") is None


def test_diskstats_rows_and_whole_disks() -> None:
    table = parse_diskstats(DISKSTATS)
    assert table["vda"] == Counters(2423290 * 512, 3646664 * 512)
    assert set(table) == {"loop0", "vda", "nvme0n1", "nvme0n1p1", "dm-0"}
    assert physical_disks(list(table)) == ["vda", "nvme0n1"]


def test_partitions_are_told_from_disks_with_similar_names() -> None:
    names = ["sda", "sda1", "sdaa", "nvme0n1", "nvme0n11", "nvme0n1p1", "mmcblk0", "mmcblk0p2"]
    names += ["md127", "zram0", "xvda1"]
    assert physical_disks(names) == ["sda", "sdaa", "nvme0n1", "nvme0n11", "mmcblk0", "xvda1"]


def _roots(tmp_path: Path) -> tuple[Path, Path]:
    proc, sys_root = tmp_path / "proc", tmp_path / "sys"
    block = sys_root / "dev/block/254:0"
    proc.mkdir()
    block.mkdir(parents=True)
    (proc / "diskstats").write_text(DISKSTATS)
    (block / "stat").write_text("1 0 100 1 2 0 200 2 0 3 3\n")
    (block / "uevent").write_text("MAJOR=254\nMINOR=0\nDEVNAME=vda\nDEVTYPE=disk\n")
    return proc, sys_root


def test_counters_of_the_own_device_and_of_all_disks(tmp_path: Path) -> None:
    proc, sys_root = _roots(tmp_path)
    assert block_device_name("254:0", sys_root) == "vda"
    disk = FileSystem("ext4", "disk", "/", "/dev/vda", "254:0", "vda")
    physical = Counters((2423290 + 800) * 512, (3646664 + 1600) * 512)
    assert read_counters(disk, proc=proc, sys_root=sys_root) == DiskCounters(
        Counters(100 * 512, 200 * 512), physical
    )
    # sysfs not mounted: the row of /proc/diskstats stands in
    assert read_counters(disk, proc=proc, sys_root=tmp_path / "none").own == Counters(
        2423290 * 512, 3646664 * 512
    )
    pool = FileSystem("zfs", "zfs", "/tank", "tank", "0:55")
    assert read_counters(pool, proc=proc, sys_root=sys_root) == DiskCounters(None, physical)
    # a loop device counts what the cache of its backing file answered, so it does not count
    image = FileSystem("ext4", "disk", "/mnt", "/dev/loop0", "7:0", "loop0")
    assert read_counters(image, proc=proc, sys_root=sys_root) == DiskCounters(None, physical)
    # a file system in user space may read any of them
    union = FileSystem("fuse.mergerfs", "user space", "/m", "a:b", "0:51")
    assert read_counters(union, proc=proc, sys_root=sys_root) == DiskCounters(None, physical)
    remote = FileSystem("nfs4", "network", "/n", "server:/x", "0:50")
    assert read_counters(remote, proc=proc, sys_root=sys_root) == DiskCounters()
    assert read_counters(disk, proc=tmp_path / "no", sys_root=tmp_path / "no") == DiskCounters()


def test_the_groups_counter_stands_in_where_no_device_is_shown(tmp_path: Path) -> None:
    # field case 80
    proc, group = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/\n")
    (proc / "self/mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (group / "io.stat").write_text("8:0 rbytes=4096 wbytes=1\n8:16 rbytes=1000 wbytes=2\n")
    layered = FileSystem("overlay", "layered", "/", "overlay", "0:55")
    before = read_counters(layered, proc=proc, sys_root=tmp_path / "sys")
    assert before == DiskCounters(None, Counters(5096, 0))
    (group / "io.stat").write_text("8:0 rbytes=9096 wbytes=1\n8:16 rbytes=1000 wbytes=2\n")
    moved = traffic(before, read_counters(layered, proc=proc, sys_root=tmp_path / "sys"))
    assert (moved.own_read, moved.physical_read) == (None, 5000)


def test_a_counter_that_never_moved_says_nothing() -> None:
    still = DiskCounters(Counters(0, 0), Counters(0, 0))
    moved = traffic(still, still)
    assert (moved.own_read, moved.own_written, moved.physical_read) == (None, None, None)
    before = DiskCounters(Counters(1000, 10), Counters(5000, 10))
    after = DiskCounters(Counters(1000, 30), Counters(9000, 30))
    moved = traffic(before, after)
    assert (moved.own_read, moved.own_written, moved.physical_read) == (0, 20, 4000)


def test_the_real_counters_see_a_direct_read(tmp_path: Path) -> None:
    filesystem = filesystem_of(tmp_path)
    before = read_counters(filesystem)
    if filesystem.kind != "disk" or before.own is None:
        pytest.skip(f"no block counter for {filesystem.describe()}")
    length = 16 << 20
    file = tmp_path / "data"
    with file.open("wb") as writing:
        writing.write(os.urandom(length))
        writing.flush()
        os.fsync(writing.fileno())
    before = read_counters(filesystem)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, length) as buffer:
            assert os.preadv(fd, [buffer], 0) == length
    finally:
        os.close(fd)
    moved = traffic(before, read_counters(filesystem))
    assert moved.own_read is not None
    assert moved.own_read >= length
