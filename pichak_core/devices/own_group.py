"""A control group (version 2) that was handed to this process, made ready for the groups of jobs.

The kernel gives controllers to groups below one that has no processes itself, and systemd starts a
service in the very group that it delegates (``DelegateSubgroup=`` does otherwise from version 254
on). So the process moves into a leaf before it starts anything, and the groups of its jobs come to
be beside that leaf, inside the limits of the whole.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pichak_core.devices.cgroups import group_chains
from pichak_core.devices.job_group import hands_on_memory

LEAF = "agent"
#: What systemd marks a delegated group with; only root may read the second.
_MARKS = ("user.delegate", "trusted.delegate")


def settle(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Path | None:
    """Move this process into the leaf of its delegated group, and have that group hand the memory
    controller on. The leaf; None where nothing was to be done or could be, and then nothing was.

    A group is left as it is unless this process is alone in it and it was delegated: marked so by
    systemd, or owned by this user, who is not root.
    """
    for chain in group_chains("memory", proc, sys):
        own = chain[0]
        if "memory" not in _words(own / "cgroup.controllers"):
            continue
        alone = _words(own / "cgroup.procs") == [str(os.getpid())]
        if alone and _delegated(own) and _move(own / LEAF):
            return own / LEAF
    return None


def unsettle(leaf: Path) -> None:
    """Undo `settle`: the group is as it was, if no job's group is left in it."""
    own = leaf.parent
    with contextlib.suppress(OSError):
        for controller in _words(own / "cgroup.subtree_control"):
            (own / "cgroup.subtree_control").write_text(f"-{controller}")
        (own / "cgroup.procs").write_text("0")
        leaf.rmdir()


def _move(leaf: Path) -> bool:
    own = leaf.parent
    try:
        leaf.mkdir(exist_ok=True)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        (leaf / "cgroup.procs").write_text("0")
        if hands_on_memory(own):
            return True
    unsettle(leaf)
    return False


def _delegated(folder: Path) -> bool:
    for mark in _MARKS:
        with contextlib.suppress(OSError, AttributeError):  # extended attributes are Linux's
            if os.getxattr(folder, mark) == b"1":
                return True
    try:
        return os.geteuid() != 0 and folder.stat().st_uid == os.geteuid()
    except (OSError, AttributeError):
        return False


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []
