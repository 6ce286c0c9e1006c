"""Where an agent keeps things on its node, and that no two agents share them.

``ROOT/agent/INSTANCE/`` holds one agent's lock, spool, shipped files and job folders;
``ROOT/locks/BOOT/`` the locks of what is measured, for all agents of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from pichak_agent import room
from pichak_agent.locks import FileLock
from pichak_agent.messages import check_name
from pichak_agent.spool import Spool
from pichak_core.devices.processes import boot_id

_LOCK = "lock"
_SPOOL = "spool"
#: The file in which an agent tells the node's other processes its problems.
PROBLEMS = "problems.json"
#: What an agent makes in its folder.
_NAMES = {_LOCK, _SPOOL, PROBLEMS, "problems.part", "work", "files"}
#: What telemetry makes in its folder.
_TELEMETRY_NAMES = {_LOCK, "state.json", "state.part", "own", "use"}
_MAX_INSTANCES = 32


class InstanceTakenError(RuntimeError):
    """Another living agent has this folder."""


def default_root() -> Path:
    """$PICHAK_HOME, or ``~/.local/state/pichak``."""
    given = os.environ.get("PICHAK_HOME")
    return Path(given) if given else Path("~/.local/state/pichak").expanduser()


def temporary_root() -> Path:
    """Where things are kept while `default_root` cannot be written."""
    return spare_roots()[0]


def spare_roots() -> list[Path]:
    """Where things are kept while the usual place cannot be written, the first that can be."""
    # Windows has a temporary folder for each user, and no numbers for them.
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    return [place / f"pichak{user}" for place in dict.fromkeys(room.scratch_places())]


def usable_root() -> Path:
    """`default_root`, or `temporary_root` while that cannot be written."""
    root = default_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        usable = os.access(root, os.W_OK)
    except OSError:
        usable = False
    return root if usable else temporary_root()


class Home:
    """One agent's claim on its folder, from `open_home` until `close`."""

    def __init__(self, root: Path, instance: str, lock: FileLock) -> None:
        self.root = root
        self.instance = instance
        self.folder = root / "agent" / instance
        self._lock = lock
        # Job folders of an agent that was killed here before; shipped files can be shipped again.
        for left in (self.work, self.files):
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir(parents=True, exist_ok=True)
        self.problems_file.unlink(missing_ok=True)
        self.spool = Spool(self.folder / _SPOOL)
        self.adopt_siblings()

    @property
    def work(self) -> Path:
        """Where job folders are made."""
        return self.folder / "work"

    @property
    def problems_file(self) -> Path:
        """Where its problems are told."""
        return self.folder / PROBLEMS

    @property
    def files(self) -> Path:
        """Where shipped files are kept."""
        return self.folder / "files"

    def measuring_lock(self, name: str) -> FileLock:
        """`measuring_lock` of this home's root."""
        return measuring_lock(self.root, name)

    def close(self) -> None:
        """Give the folder back; what is in the spool stays for the next agent."""
        if not self._lock.held:
            return
        for left in (self.work, self.files):
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.problems_file.unlink(missing_ok=True)
        self._lock.release()

    def adopt_siblings(self) -> dict[Path, str]:
        """Take over the outcomes of agents that have died, beside this one and where they were kept
        while the usual place could not be written; each folder that could not be, with the sentence
        that tells it."""
        spare = [root for root in spare_roots() if root != self.root and _is_private(root)]
        roots: list[Path] = [self.root, *spare]
        failed: dict[Path, str] = {}
        for sibling in (each for root in roots for each in _agents_in(root)):
            if sibling == self.folder:
                continue
            lock = FileLock(sibling / _LOCK)
            try:
                if not lock.try_acquire("being adopted"):
                    continue
                self.spool.adopt(sibling / _SPOOL)
                shutil.rmtree(sibling)
            except OSError as error:
                failed[sibling] = f"{sibling} could not be taken over: {error}"
                self.spool.tell(failed[sibling])
            finally:
                lock.release()
        return failed


def is_alive(folder: Path) -> bool:
    """Whether somebody has this agent's folder; also where that cannot be told."""
    lock = FileLock(folder / _LOCK)
    try:
        return not lock.try_acquire(f"pid {os.getpid()} looks at it")
    except OSError:
        return True
    finally:
        lock.release()


def _agents_in(root: Path) -> list[Path]:
    """Folders of agents; what else lies there (a user's own ``agent/``) is none of ours."""
    try:
        found = sorted(path.parent for path in (root / "agent").glob(f"*/{_LOCK}"))
        return [path for path in found if _holds_only(path, _NAMES)]
    except OSError:
        return []


def _is_private(root: Path) -> bool:
    """Whether nobody else can have put anything there: others may write into the folder above."""
    try:
        about = root.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(about.st_mode)  # the temporary folder itself is this user's
    private = not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # Windows has no numbers for users, and a temporary folder for each.
    owner = os.getuid() if hasattr(os, "getuid") else about.st_uid
    return stat.S_ISDIR(about.st_mode) and about.st_uid == owner and private


def measuring_lock(root: Path, name: str) -> FileLock:
    """The machine's lock for what `name` says is measured. A home on a network drive is shared by
    machines, so the folder is named after this machine's boot."""
    check_name("lock", name)
    return FileLock(root / "locks" / (boot_id() or "machine") / f"{name}.lock")


def open_home(root: Path, instance: str, *, exactly: bool = False) -> Home:
    """Claim ``root/agent/instance``, or with a number behind it while others have it.

    `InstanceTakenError` when it is taken and has to be `exactly` this one; `OSError` when `root`
    cannot be written. Outcomes that dead agents left beside it are taken over.
    """
    check_name("instance", instance)
    for number in range(1, _MAX_INSTANCES + 1):
        name = instance if number == 1 else f"{instance}.{number}"
        lock = FileLock(root / "agent" / name / _LOCK)
        if lock.try_acquire(f"pid {os.getpid()}"):
            try:
                return Home(root, name, lock)
            except BaseException:
                lock.release()
                raise
        if exactly:
            raise InstanceTakenError(
                f"{lock.path.parent} belongs to another agent ({lock.holder() or 'unknown'})"
            )
    raise InstanceTakenError(f"{_MAX_INSTANCES} agents run in {root} already")


def tidy(root: Path) -> None:
    """Remove the folders of agents that are gone and kept nothing, locks that nobody holds, and the
    readings of a telemetry that has ended. What else lies there is none of ours and stays."""
    for folder in _agents_in(root):
        with _held(folder / _LOCK) as mine:
            kept = any(path.is_file() for path in (folder / _SPOOL).rglob("*"))
            if mine and not kept:
                shutil.rmtree(folder, ignore_errors=True)
    for path in sorted((root / "locks").glob("*/*.lock")):
        with _held(path) as mine:
            if mine:
                path.unlink(missing_ok=True)
        _remove_if_empty(path.parent)
    for lock in sorted((root / "telemetry").glob(f"*/{_LOCK}")):
        with _held(lock) as mine:
            if mine and _holds_only(lock.parent, _TELEMETRY_NAMES):
                shutil.rmtree(lock.parent, ignore_errors=True)
    for folder in (root / "agent", root / "locks", root / "telemetry", root):
        _remove_if_empty(folder)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether the lock at `path` is this process's now."""
    lock = FileLock(path)
    try:
        yield lock.try_acquire("being removed")
    except OSError:
        return
    finally:
        lock.release()


def _holds_only(folder: Path, names: set[str]) -> bool:
    return {path.name for path in folder.iterdir()} <= names


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def open_some_home(instance: str) -> tuple[Home, str]:
    """A home in `default_root`, or in one of `spare_roots` where that cannot be written; and why.

    The second outlives this agent, not the machine's next start.
    """
    try:
        return open_home(default_root(), instance), ""
    except InstanceTakenError:
        raise
    except (OSError, RuntimeError) as error:
        failed = [f"{default_root()}: {error}"]
    for root in spare_roots():
        try:
            home = open_spare_home(root, instance)
        except OSError as error:
            failed.append(f"{root}: {error}")
        else:
            return home, f"outcomes are kept in {root}, because the usual place failed: {failed[0]}"
    raise PermissionError(
        f"an agent needs one folder that it can write, and there is none ({'; '.join(failed)}): "
        "set PICHAK_HOME or TMPDIR to one with room"
    )


def open_spare_home(root: Path, instance: str) -> Home:
    """A home in one of `spare_roots`; `OSError` where that cannot be written, or where others may
    write it too."""
    root.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(root):
        raise PermissionError(
            f"{root} is not a folder of this user's alone, so outcomes cannot be kept there"
        )
    return open_home(root, instance)
