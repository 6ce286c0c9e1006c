"""What a service keeps on disk: its lock, which makes it the only one of its node, and its state.

``ROOT/service/NAME/`` holds both while it runs and is removed when it ends. NAME is the host's
name, so that machines which share a home do not stand in each other's way, or a simulated host's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pichak_agent.home import default_root, spare_roots
from pichak_agent.locks import FileLock

_LOCK, _STATE = "lock", "state.json"
_SCHEMA = 1


class ServiceError(RuntimeError):
    """The service cannot go on, and a person has to mend something: what."""


class ServiceTakenError(RuntimeError):
    """Another service has this node: which."""


@dataclass
class ServiceState:
    """What ``pichak agent status`` tells. `state` is ``starting``, ``waiting`` (its head is away),
    ``joining``, ``joined``, ``refused`` or ``stopping``; `why` says it in a sentence.

    `mark` and `folder` are what a successor needs to clear up after a kill.
    """

    name: str
    address: str
    pid: int
    started_unix: float
    versions: dict[str, str] = field(default_factory=dict)
    state: str = "starting"
    why: str = ""
    since_unix: float = 0.0
    joins: int = 0
    node_id: str = ""
    raylet_pid: int = 0
    simulated: str = ""
    metrics: str = ""
    home: str = ""
    mark: str = ""
    folder: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form, without what only a successor needs."""
        made = asdict(self)
        for private in ("mark", "folder"):
            del made[private]
        return made


class ServiceFiles:
    """One service's folder, from `claim` to `release`."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.folder = (root or default_root()) / "service" / safe_name(name)
        self._lock = FileLock(self.folder / _LOCK)
        self._written = ""

    def claim(self, who: str) -> None:
        """Be the only one. `ServiceTakenError` names the other; `OSError` when the folder cannot be
        made."""
        if not self._lock.try_acquire(who):
            other = self._lock.holder() or "unknown"
            raise ServiceTakenError(
                f"an agent service runs on this node already ({other}); `pichak agent status` "
                "shows it, and SIGTERM ends it"
            )

    def left_behind(self) -> tuple[str, str]:
        """Mark and folder of a service that was killed here; ("", "") after one that ended."""
        found = _read(self.folder / _STATE)
        return str(found.get("mark") or ""), str(found.get("folder") or "")

    def write(self, state: ServiceState) -> None:
        """Replace the state's file; a full disk takes the news, not the service."""
        text = json.dumps({"schema": _SCHEMA, **asdict(state)}, indent=1)
        if text == self._written:
            return
        beside = self.folder / f"{_STATE}.part"
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.folder / _STATE)
        except OSError:
            return
        self._written = text

    def release(self) -> None:
        """Leave nothing."""
        if self._lock.held:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()
            for empty in (self.folder.parent, self.folder.parent.parent):
                try:
                    empty.rmdir()
                except OSError:
                    return


def running_services(root: Path | None = None) -> Iterator[tuple[ServiceState, bool]]:
    """Every service that this user's folder knows of, and whether it runs."""
    folder = (root or default_root()) / "service"
    if not folder.is_dir():
        return
    for each in sorted(folder.iterdir()):
        found = _read(each / _STATE)
        known = {k: v for k, v in found.items() if k in ServiceState.__dataclass_fields__}
        try:
            state = ServiceState(**known)
        except TypeError:
            continue
        lock = FileLock(each / _LOCK)
        try:
            alive = not lock.try_acquire(f"pid {os.getpid()} looks at it")
        except OSError:
            # Another user's lock: its process is what there is to go by.
            alive = Path(f"/proc/{state.pid}").exists()
        finally:
            lock.release()
        yield state, alive


def spooled(root: Path | None = None, *, everywhere: bool = False) -> tuple[int, int]:
    """How many outcomes wait below `root` for a coordinator, and their bytes; with `everywhere`
    also where they are kept while that cannot be written."""
    roots = dict.fromkeys([root or default_root(), *(spare_roots() if everywhere else ())])
    files = [path for each in roots for path in each.glob("agent/*/spool/*.mpk")]
    sizes = []
    for path in files:
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def safe_name(name: str) -> str:
    """`name` as a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".")[:80] or "host"


def age(since_unix: float, now: float | None = None) -> str:
    """How long ago, as a person says it."""
    seconds = max(0.0, (time.time() if now is None else now) - since_unix)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
