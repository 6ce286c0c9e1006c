"""Linux control groups, version 1, 2 and both at once: what the group chain allows this process.

A limit anywhere between a process's own group and the root binds it, so every level is read. Roots
are parameters; files that are missing or unreadable are levels that say nothing.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

#: Version 1 writes "no limit" as LONG_MAX rounded down to its page size (4 KiB to 64 KiB).
_UNLIMITED_BYTES = 2**63 - 2**16


@dataclass(frozen=True)
class Mount:
    """One line of ``mountinfo``: `root` is the path inside the file system that is mounted at
    `point`; `options` are the super block's."""

    root: str
    point: str
    fs_type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class MemoryBound:
    """One group's memory limit, and how much of it is left.

    `current_bytes` is what the group uses, None where it could not be read; `reclaimable_bytes` is
    page cache on the inactive list, which the kernel gives back before it refuses.
    """

    directory: str
    file: str
    limit_bytes: int
    current_bytes: int | None
    reclaimable_bytes: int

    @property
    def available_bytes(self) -> int:
        """limit - (current - inactive file cache), never below 0."""
        used = max(0, (self.current_bytes or 0) - self.reclaimable_bytes)
        return max(0, self.limit_bytes - used)


@dataclass(frozen=True)
class CpuQuota:
    """One group's CPU time: `quota_us` microseconds of CPU in every `period_us` of wall clock."""

    directory: str
    quota_us: int
    period_us: int

    @property
    def cores(self) -> float:
        return self.quota_us / self.period_us


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts of ``/proc/self/mountinfo`` in its order; malformed lines are left out."""
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5 or len(rest) < 3:
            continue
        mounts.append(
            Mount(
                _unescape(fields[3]),
                _unescape(fields[4]),
                rest[0],
                _unescape(rest[1]),
                tuple(rest[2].split(",")),
            )
        )
    return mounts


def parse_membership(text: str) -> dict[str, str]:
    """Controller to group path from ``/proc/self/cgroup``; the version 2 group is under ``""``."""
    groups = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not number.isdigit():
            continue
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def group_chains(controller: str, proc: Path, sys: Path) -> list[list[Path]]:
    """The group directories that bind this process for `controller`: a list for each hierarchy,
    the process's own group first and the root last.

    Version 1 and version 2 are both walked: a controller lives in one of them, and the other's
    directories hold none of its files.
    """
    groups = parse_membership(_read(proc / "self" / "cgroup") or "")
    mounts = parse_mountinfo(_read(proc / "self" / "mountinfo") or "")
    chains = []
    for key, fs_type, usual in (
        (controller, "cgroup", Path("fs/cgroup") / controller),
        ("", "cgroup2", Path("fs/cgroup")),
    ):
        if key not in groups:
            continue
        mount = _mount_of(mounts, fs_type, key, groups[key])
        if mount is None:
            chains.append(_upwards(sys / usual, groups[key]))
        else:
            inner = _inside(groups[key], mount.root)
            chains.append(_upwards(_relocate(mount.point, sys), inner))
    return chains


def memory_bounds(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> list[MemoryBound]:
    """Every memory limit above this process, its own group's first.

    ``memory.high`` counts: past it the kernel reclaims and throttles the group instead of refusing.
    """
    bounds = []
    for chain in group_chains("memory", proc, sys):
        for level, directory in enumerate(chain):
            # Before Linux 5.11 a version 1 parent could opt out of binding its children.
            if level and _read(directory / "memory.use_hierarchy") == "0":
                continue
            stat = _parse_flat(_read(directory / "memory.stat") or "")
            limits = {
                name: _bytes_or_none(_read(directory / name))
                for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            }
            if level == 0 and "hierarchical_memory_limit" in stat:
                # Version 1 folds in the ancestors that this mount namespace does not show.
                limits["memory.stat"] = _bytes_or_none(str(stat["hierarchical_memory_limit"]))
            for file, limit in limits.items():
                if limit is not None:
                    bounds.append(_bound(directory, file, limit, stat))
    return bounds


def cpu_quotas(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> list[CpuQuota]:
    """Every CPU quota above this process, its own group's first; "no quota" is left out."""
    quotas = []
    for directory in itertools.chain.from_iterable(group_chains("cpu", proc, sys)):
        both = (_read(directory / "cpu.max") or "").split()
        if len(both) != 2:
            both = [
                _read(directory / "cpu.cfs_quota_us") or "",
                _read(directory / "cpu.cfs_period_us") or "",
            ]
        if all(re.fullmatch(r"[1-9][0-9]*", part) for part in both):
            quotas.append(CpuQuota(str(directory), int(both[0]), int(both[1])))
    return quotas


def io_read_bytes(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> dict[str, int]:
    """Bytes that this process's group has read, by block device (``major:minor``).

    From ``io.stat`` (version 2) or ``blkio.throttle.io_service_bytes`` (version 1) of its own
    group; empty where there is neither, as at the root. What other groups read is not in it.
    """
    found: dict[str, int] = {}
    for controller, file, parse in (
        ("io", "io.stat", parse_io_stat),
        ("blkio", "blkio.throttle.io_service_bytes", parse_io_service_bytes),
    ):
        for chain in group_chains(controller, proc, sys):
            for device, count in parse(_read(chain[0] / file) or "").items():
                found[device] = max(count, found.get(device, 0))
    return found


def parse_io_stat(text: str) -> dict[str, int]:
    """``8:0 rbytes=1459200 wbytes=…`` lines: bytes read by device."""
    matches = re.finditer(r"^(\d+:\d+)(?= ).*? rbytes=(\d+)", text, re.MULTILINE)
    return {match.group(1): int(match.group(2)) for match in matches}


def parse_io_service_bytes(text: str) -> dict[str, int]:
    """``8:0 Read 1459200`` lines: bytes read by device."""
    matches = re.finditer(r"^(\d+:\d+) Read (\d+)$", text, re.MULTILINE)
    return {match.group(1): int(match.group(2)) for match in matches}


def _bound(directory: Path, file: str, limit: int, stat: dict[str, int]) -> MemoryBound:
    current = _read(directory / "memory.current") or _read(directory / "memory.usage_in_bytes")
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryBound(
        str(directory),
        file,
        limit,
        int(current) if current and current.isdigit() else None,
        reclaimable,
    )


def _bytes_or_none(text: str | None) -> int | None:
    if not text or not text.isdigit() or int(text) >= _UNLIMITED_BYTES:
        return None
    return int(text)


def _parse_flat(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _mount_of(mounts: list[Mount], fs_type: str, controller: str, group: str) -> Mount | None:
    """The hierarchy's mount; of several, the one that shows the most levels above the group."""
    fitting = [
        mount
        for mount in mounts
        if mount.fs_type == fs_type and (not controller or controller in mount.options)
    ]
    holding = [mount for mount in fitting if _holds(mount.root, group)]
    return min(holding or fitting, key=lambda mount: len(mount.root), default=None)


def _holds(root: str, group: str) -> bool:
    return root in ("/", group) or group.startswith(root + "/")


def _inside(group: str, root: str) -> str:
    """The group's path below the mount. A container may see the host's path in ``self/cgroup``
    while only its own subtree is mounted; outside of it, the mount's top is all there is."""
    if ".." in group.split("/") or not _holds(root, group):
        return "/"
    return group if root == "/" else group[len(root) :]


def _upwards(top: Path, inner: str) -> list[Path]:
    parts = [part for part in inner.split("/") if part]
    return [top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _relocate(point: str, sys: Path) -> Path:
    path = Path(point)
    return sys / path.relative_to("/sys") if path.is_relative_to("/sys") else path


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _read(path: Path) -> str | None:
    """The file's text without its end, None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
