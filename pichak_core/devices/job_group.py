"""A control group of its own for one job's processes, where this process may make one.

It holds a hard memory limit, and it names every process of the job, also one that left its parent,
its session and its variables behind. It is made below this process's own group, or beside it where
version 2 allows no group below one that has processes and nothing limits this process there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pichak_core.devices.cgroups import group_chains

with contextlib.suppress(ImportError):  # where there is none, there are no groups either
    import fcntl

#: Of a group's name. Of the units beside it in ``pichak.slice`` none begins so; nothing else may be
#: taken for a group that was left behind, which ends whoever is in it.
PREFIX = "pichak-job-"
_REMOVE_SECONDS = 1.0
#: A group may be taken for a dead agent's in the moment between its making and its holding.
_MAKE_TRIES = 3
#: Limits that a process would escape by leaving its group (version 2), and what "none" looks like.
_OWN_LIMITS = {"memory.max": "max", "memory.high": "max", "cpu.max": "max"}
_OOM_FILES = ("memory.events", "memory.oom_control")


@dataclass(frozen=True)
class JobGroup:
    """A group directory; `capped` says whether its memory is limited by the kernel. `held` is the
    open directory whose lock says that somebody looks after the group; -1 for none."""

    folder: Path
    capped: bool = False
    held: int = -1

    @property
    def procs(self) -> Path:
        """A process that writes 0 here is in it, with all that it starts from then on."""
        return self.folder / "cgroup.procs"

    def pids(self) -> list[int]:
        """Who is in it; nobody where it cannot be read."""
        try:
            # 0 stands for a process that this one's process namespace does not show.
            return [pid for line in self.procs.read_text().split() if (pid := int(line)) > 0]
        except (OSError, ValueError):
            return []

    def oom_kills(self) -> int:
        """How many processes of it the kernel killed at its limit."""
        for name in _OOM_FILES:
            for line in _read(self.folder / name).splitlines():
                key, _, number = line.partition(" ")
                if key == "oom_kill" and number.strip().isdigit():
                    return int(number)
        return 0

    def hold(self) -> JobGroup:
        """Look after it, as long as this process lives or until it is removed: nobody else takes
        it for one that a dead agent left. `OSError` where it is gone or being removed."""
        return JobGroup(self.folder, self.capped, _lock(self.folder, fcntl.LOCK_SH))

    def remove(self) -> bool:
        """Kill what is left in it, remove it and let go of it; whether it is gone."""
        try:
            return self._remove()
        finally:
            if self.held >= 0:
                with contextlib.suppress(OSError):
                    os.close(self.held)

    def _remove(self) -> bool:
        until = time.monotonic() + _REMOVE_SECONDS
        while True:
            with contextlib.suppress(OSError), (self.folder / "cgroup.kill").open("r+") as file:
                file.write("1")  # version 2 from Linux 5.14 on
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self.folder.rmdir()
                return True
            except FileNotFoundError:
                return True
            except OSError:
                if time.monotonic() > until:
                    return False
            time.sleep(0.01)


def make_group(
    name: str,
    memory_cap_bytes: int,
    *,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> JobGroup | str:
    """An empty group for a job, with a hard limit where `memory_cap_bytes` is not 0; or the
    sentence why there is none. Groups that dead agents left empty beside it are removed."""
    why = _why_nowhere(proc, sys)
    for parent in _parents(proc, sys):
        if not os.access(parent, os.W_OK):
            why = f"{parent} cannot be written by this user"
            continue
        _remove_stale(parent)
        folder = parent / f"{PREFIX}{name}"
        try:
            group = _make_held(folder)
        except OSError as error:
            why = f"{folder} cannot be made: {error.strerror}"
            continue
        try:
            return dataclasses.replace(group, capped=_limit(folder, memory_cap_bytes))
        except OSError as error:
            why = f"{folder} takes no memory limit: {error.strerror}"
            group.remove()
    return why


def remove_stale_groups(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
    """Remove the groups that dead agents left where this process would make its own; a process
    that is still in one is killed, because nobody else knows of it any more."""
    for parent in _parents(proc, sys):
        _remove_stale(parent)


def _make_held(folder: Path) -> JobGroup:
    for left in reversed(range(_MAKE_TRIES)):
        folder.mkdir()
        try:
            return JobGroup(folder).hold()
        except OSError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _lock(folder: Path, how: int) -> int:
    """The open directory, locked; `OSError` where another holds it otherwise or it is gone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), folder.stat()):  # removed, and made again
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except OSError:
        os.close(fd)
        raise
    return fd


def _parents(proc: Path, sys: Path) -> Iterator[Path]:
    """Where a group may be made, the best place first."""
    for chain in group_chains("memory", proc, sys):
        own = chain[0]
        if (own / "memory.limit_in_bytes").exists():
            yield own
        elif (own / "cgroup.subtree_control").exists():
            if hands_on_memory(own):
                yield own
            if len(chain) > 1 and not _is_limited(own) and hands_on_memory(chain[1]):
                yield chain[1]


def _why_nowhere(proc: Path, sys: Path) -> str:
    for chain in group_chains("memory", proc, sys):
        if "memory" in _read(chain[0] / "cgroup.controllers").split():
            return (
                f"{chain[0]} hands the memory controller to no group below it, because it has "
                "processes itself or is not this user's"
            )
    return "no memory control group is mounted here"


def hands_on_memory(folder: Path) -> bool:
    """Whether groups below `folder` (version 2) have the memory controller, switched on if that
    is allowed: not where the folder itself has processes."""
    control = folder / "cgroup.subtree_control"
    if "memory" in _read(control).split():
        return True
    with contextlib.suppress(OSError):
        control.write_text("+memory")
        with contextlib.suppress(OSError):
            control.write_text("+io")  # what a job reads from disks is counted there
    return "memory" in _read(control).split()


def _is_limited(folder: Path) -> bool:
    return any(
        (_read(folder / name).split() or [none])[0] != none for name, none in _OWN_LIMITS.items()
    )


def _limit(folder: Path, cap: int) -> bool:
    if not cap:
        return False
    version_1 = (folder / "memory.limit_in_bytes").exists()
    limit = folder / ("memory.limit_in_bytes" if version_1 else "memory.max")
    limit.write_text(str(cap))
    # The cap is one of memory, not of memory and swap; a kernel without swap has no such file.
    for name, value in (
        ("memory.memsw.limit_in_bytes", str(cap)),
        ("memory.swap.max", "0"),
        ("memory.oom.group", "1"),
    ):
        with contextlib.suppress(OSError):
            if (folder / name).exists():
                (folder / name).write_text(value)
    return True


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.suffix:  # a unit of systemd's
            continue
        # One that an agent or a warden holds stays.
        with contextlib.suppress(OSError):
            JobGroup(folder, held=_lock(folder, fcntl.LOCK_EX)).remove()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
