"""Which file system a path lies on, and what kind of thing that is.

Names come from ``/proc/self/mountinfo`` (proc(5)), from ``statfs`` where no mount is listed, as in
a chroot, and on Windows from the volume. None of it needs root. Parsers take text; the roots are
parameters.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pichak_core.devices.windows_volumes import DRIVE_RAMDISK, DRIVE_REMOTE, Volume

Kind = Literal["disk", "memory", "network", "host share", "layered", "zfs", "user space", "unknown"]

_KINDS: dict[Kind, frozenset[str]] = {
    "memory": frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs", "rootfs"}),
    "network": frozenset(
        {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs"}
        | {"afs", "orangefs", "pvfs2", "ocfs2", "gfs2", "quobyte", "wekafs", "fuse.sshfs"}
        | {"fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs", "fuse.goofys"}
        | {"fuse.glusterfs", "fuse.ceph", "fuse.mount-s3", "fuse.blobfuse2", "fuse.seaweedfs"}
    ),
    "host share": frozenset(
        {"9p", "virtiofs", "vboxsf", "vmhgfs", "fuse.vmhgfs-fuse", "fakeowner", "fuse.grpcfuse"}
    ),
    "layered": frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "unionfs", "shiftfs"}),
    "zfs": frozenset({"zfs", "fuse.zfs"}),
    "disk": frozenset(
        {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2"}
        | {"ntfs", "ntfs3", "fuseblk", "exfat", "vfat", "msdos", "hfsplus", "apfs"}
        | {"refs", "fat32", "fat"}
        | {"squashfs", "erofs", "cramfs", "iso9660", "udf"}
    ),
}

#: <linux/magic.h> and the file systems' own headers.
_MAGIC: dict[int, str] = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x2FC12FC1: "zfs",
    0x794C7630: "overlay",
    0x61756673: "aufs",
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x01021997: "9p",
    0x786F4256: "vboxsf",
    0x65735546: "fuse",
}


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `device` is ``major:minor``; `source` is what was mounted."""

    mount_point: str
    type: str
    source: str
    device: str


@dataclass(frozen=True)
class FileSystem:
    """Where a path lies. `block_device` is the kernel's name of the disk ("vda1"), "" if none."""

    type: str
    kind: Kind
    mount_point: str = ""
    source: str = ""
    device: str = ""
    block_device: str = ""

    def describe(self) -> str:
        """``ext4 on vda1 (mounted at /data)``."""
        what = self.block_device or self.source
        where = f" on {what}" if what and what not in {self.type, "none"} else ""
        at = f" (mounted at {self.mount_point})" if self.mount_point else ""
        return f"{self.type}{where}{at}"


def filesystem_of(
    path: Path,
    *,
    proc: Path = Path("/proc"),
    sys_root: Path = Path("/sys"),
) -> FileSystem:
    """The file system that holds `path` (which exists); kind ``unknown`` if nothing tells."""
    real = path.resolve()
    if sys.platform == "win32":
        from pichak_core.devices.windows_volumes import volume_of

        return from_volume(volume_of(str(real)))
    mount = find_mount(parse_mountinfo(_read(proc / "self/mountinfo")), str(real))
    if mount is None:
        name = _statfs_type(real)
        return FileSystem(name, kind_of(name)) if name else FileSystem("unknown", "unknown")
    block_device = block_device_name(mount.device, sys_root)
    return FileSystem(
        mount.type,
        # A file system over several devices (btrfs) has a number of its own: its source tells.
        kind_of(mount.type, block_device or PurePosixPath(mount.source).name),
        mount.mount_point,
        mount.source,
        mount.device,
        block_device,
    )


def from_volume(volume: Volume | None) -> FileSystem:
    """The file system of a Windows volume; None is one that Windows does not know."""
    if volume is None:
        return FileSystem("unknown", "unknown")
    name = volume.type.lower() or "unknown"
    by_drive: dict[int, Kind] = {DRIVE_REMOTE: "network", DRIVE_RAMDISK: "memory"}
    return FileSystem(name, by_drive.get(volume.drive, kind_of(name)), volume.root)


def parse_mountinfo(text: str) -> list[Mount]:
    """Mounts in the order in which they were made; a line that is not one is left out."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if separator and len(before) >= 6 and len(after) >= 2:
            mounts.append(Mount(_unescape(before[4]), after[0], _unescape(after[1]), before[2]))
    return mounts


def find_mount(mounts: Sequence[Mount], path: str) -> Mount | None:
    """The mount that holds the absolute `path`: the deepest, and of two at one place the later."""
    best: Mount | None = None
    target = PurePosixPath(path)
    for mount in mounts:
        point = PurePosixPath(mount.mount_point)
        if target.is_relative_to(point) and (
            best is None or len(point.parts) >= len(PurePosixPath(best.mount_point).parts)
        ):
            best = mount
    return best


def kind_of(filesystem_type: str, block_device: str = "") -> Kind:
    """What reading from it means. A disk file system on a RAM disk is memory all the same."""
    if re.fullmatch(r"z?ram\d+(p\d+)?", block_device):
        return "memory"
    for kind, names in _KINDS.items():
        if filesystem_type in names:
            return kind
    return "user space" if filesystem_type.split(".", maxsplit=1)[0] == "fuse" else "unknown"


def block_device_name(device: str, sys_root: Path = Path("/sys")) -> str:
    """The kernel's name for ``major:minor``, "" when there is no such block device."""
    found = re.search(r"^DEVNAME=(.+)$", _read(sys_root / f"dev/block/{device}/uevent"), re.M)
    return found.group(1).strip() if found else ""


def _statfs_type(path: Path) -> str:
    """The type by its magic number, "" when it is not a known one."""
    if sys.platform != "linux":
        return ""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        return ""
    # The first field is f_type, a C long; its upper half is sign or zero.
    magic = int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return _MAGIC.get(magic & 0xFFFFFFFF, "")


def _unescape(text: str) -> str:
    """Mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
