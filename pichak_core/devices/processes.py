"""Process trees: who descends from whom, what they hold, and how a tree dies with its parent.

Linux is read from ``/proc``; elsewhere psutil answers, and what only Linux can do (orphans that
come back to their grandparent, a signal when the parent dies) returns False.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pichak_core.devices.cgroups import group_chains
from pichak_core.devices.host import IS_LINUX

if TYPE_CHECKING:
    import psutil

PROC = Path("/proc")
SYS = Path("/sys")
_HAS_PROC = (PROC / "self" / "stat").is_file()

#: Where there are no such signals, SIGTERM ends a process without asking it.
_STOP_AND_KILL = [
    getattr(signal, name) for name in ("SIGSTOP", "SIGKILL") if hasattr(signal, name)
] or [signal.SIGTERM]

Answer = TypeVar("Answer")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: What a process may map past its tree's cap before `mmap` is refused: untouched reserves, thread
#: stacks and CUDA's host mappings are memory by that count and not by any other.
RESERVE_BYTES = 4 * 1024**3
#: These remove shared memory and semaphores that killed processes left, then end by themselves.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent dies
    (PR_SET_CHILD_SUBREAPER), so that double-forked ones stay in its tree."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals, parent_pid: int) -> bool:
    """Have `number` sent to this process when its parent dies (PR_SET_PDEATHSIG), at once if the
    parent `parent_pid` is already gone.

    The kernel sends it when the *thread* that forked this process ends.
    """
    done = _prctl(_PR_SET_PDEATHSIG, int(number))
    if done and os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
    return done


def limit_this_process(memory_cap_bytes: int) -> None:
    """The safety net under a memory cap: private writable memory past cap + `RESERVE_BYTES` is
    refused by the kernel, no core file is written, and the out-of-memory killer looks here first.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_cap_bytes:
        limit = memory_cap_bytes + RESERVE_BYTES
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    score = PROC / "self" / "oom_score_adj"
    try:
        if int(score.read_text()) < 500:
            score.write_text("500")
    except (OSError, ValueError):
        return


def initial_environment() -> dict[str, str] | None:
    """The variables that this process was started with, None where that cannot be known."""
    try:
        data = (PROC / "self" / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, without itself, parents before children."""
    if not _HAS_PROC:
        return _psutil_descendants(pid)
    below: dict[int, list[int]] = {}
    for child in _pids():
        with contextlib.suppress(OSError, ValueError):
            state, parent = _stat_fields(child)[:2]
            if state not in ("Z", "X"):
                below.setdefault(int(parent), []).append(child)
    found: list[int] = []
    waiting = list(below.get(pid, []))
    while waiting:
        current = waiting.pop(0)
        found.append(current)
        waiting += below.get(current, [])
    return found


def children(pid: int) -> list[int] | None:
    """The living processes that `pid` started itself; None where that cannot be said (a Linux
    kernel need not list them)."""
    try:
        if not _HAS_PROC:
            _refuse_masked()
            return _psutil(pid, lambda p: [child.pid for child in p.children()])
        found = []
        for thread in (PROC / str(pid) / "task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
        return [child for child in found if started_at(child) is not None]
    except (OSError, LookupError, ValueError):
        return None


def started_at(pid: int) -> str | None:
    """A text that differs when the number `pid` is given to another process; None: no such."""
    try:
        if not _HAS_PROC:
            return str(_psutil(pid, lambda p: p.create_time()))
        state, *fields = _stat_fields(pid)
        return None if state in ("Z", "X") else fields[18]
    except (OSError, LookupError, ValueError):
        return None


def name_and_owner(pid: int) -> tuple[str, str]:
    """(name, user) of a process, each "" where this user may not see it."""
    if not _HAS_PROC:
        try:
            return _psutil(pid, lambda p: (p.name(), p.username()))
        except ProcessLookupError:
            return "", ""
    name = owner = ""
    with contextlib.suppress(OSError):
        name = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    with contextlib.suppress(OSError):
        owner = user_name((PROC / str(pid)).stat().st_uid)
    return name, owner


def user_name(uid: int) -> str:
    """What the user of a number is called; the number where nobody knows."""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError, OverflowError):
        return str(uid)


def marked(name: str, value: str) -> list[int]:
    """Other processes that were *started* with the variable `name` set to `value`, as far as this
    user may see that."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        try:
            variables = _environ(pid)
        except (OSError, LookupError):
            continue
        if wanted in variables and pid != os.getpid():
            found.append(pid)
    return found


def session_of(pid: int) -> int | None:
    """The session that a living process is in; None when it is gone or where there are none."""
    try:
        if not _HAS_PROC:
            return os.getsid(pid) if hasattr(os, "getsid") else None
        state, _, _, session = _stat_fields(pid)[:4]
        return None if state in ("Z", "X") else int(session)
    except (OSError, ValueError):
        return None


def in_sessions(sessions: Collection[int]) -> list[int]:
    """Every other living process of these sessions. A process that renames itself may lose the
    variables that `marked` looks for; its session it keeps."""
    if not sessions:
        return []
    return [pid for pid in _pids() if pid != os.getpid() and session_of(pid) in sessions]


def command_line(pid: int) -> list[str]:
    """The arguments of a process, its program first; empty when it is gone, ended or not ours to
    read."""
    try:
        if not _HAS_PROC:
            return list(_psutil(pid, lambda p: p.cmdline()))
        data = (PROC / str(pid) / "cmdline").read_bytes()
    except (OSError, LookupError):
        return []
    return [os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")] if data else []


def memory_bytes(pids: Iterable[int], *, more_than: int = 0) -> int:
    """Bytes of memory that `pids` hold together.

    The sum of their resident sets, which counts shared pages once for each; when that is above
    `more_than` the sum of proportional sets, which counts them once, where it can be read.
    """
    resident = {pid: _resident_bytes(pid) for pid in pids}
    if sum(resident.values()) <= more_than:
        return sum(resident.values())
    shares = {pid: _proportional_bytes(pid) for pid in resident}
    return sum(resident[pid] if share is None else share for pid, share in shares.items())


def oom_kills(proc: Path = PROC, sys: Path = SYS) -> dict[str, int]:
    """How often the out-of-memory killer struck, by the file that says so: this process's own
    memory control group, and the whole machine since boot. Empty where neither is readable."""
    counts: dict[str, int] = {}
    files = [proc / "vmstat"]
    for chain in group_chains("memory", proc, sys):
        files += [chain[0] / "memory.events", chain[0] / "memory.oom_control"] if chain else []
    for path in files:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, number = line.partition(" ")
            if key == "oom_kill" and number.strip().isdigit():
                counts[str(path)] = int(number)
    return counts


def kill_all(
    find: Callable[[], list[int]],
    *,
    patience_seconds: float = 5.0,
    reap: Callable[[], None] = lambda: None,
) -> list[int]:
    """SIGKILL what `find` returns until it returns nothing; what is still there at the end.

    All are stopped before any is killed, so that none forks away meanwhile. Python's and torch's
    cleaners of shared memory get half a second to finish first. `reap` collects ended children.
    """
    started = time.monotonic()
    while True:
        reap()
        everyone = find()
        waited = time.monotonic() - started
        if not everyone or waited > patience_seconds:
            return everyone
        victims = [pid for pid in everyone if waited > 0.5 or not _is_cleaner(pid)]
        for number in _STOP_AND_KILL:
            for pid in victims:
                send_signal(pid, number)
        time.sleep(0.005)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal; False when the process is gone or another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _prctl(option: int, argument: int) -> bool:
    if not _HAS_PROC:
        return False
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return bool(call and call(option, argument, 0, 0, 0) == 0)


def _pids() -> list[int]:
    if not _HAS_PROC:
        import psutil

        _refuse_masked()
        return list(psutil.pids())
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _stat_fields(pid: int) -> list[str]:
    """``stat`` from its third field (state) on; the name before may hold spaces and brackets."""
    text = (PROC / str(pid) / "stat").read_text(errors="replace")
    return text.rpartition(") ")[2].split()


def _environ(pid: int) -> list[bytes]:
    if _HAS_PROC:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return [os.fsencode(f"{k}={v}") for k, v in _psutil(pid, lambda p: p.environ()).items()]


def _resident_bytes(pid: int) -> int:
    """0 for a process that is gone: it holds nothing."""
    try:
        if not _HAS_PROC:
            return int(_psutil(pid, lambda p: p.memory_info().rss))
        pages = (PROC / str(pid) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, LookupError, ValueError):
        return 0


def _proportional_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _is_cleaner(pid: int) -> bool:
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def _psutil(pid: int, ask: Callable[[psutil.Process], Answer]) -> Answer:
    """`ProcessLookupError` when it is gone or not ours to read."""
    import psutil

    try:
        return ask(psutil.Process(pid))
    except psutil.Error as error:
        raise ProcessLookupError(str(error)) from error


def _refuse_masked() -> None:
    """A Linux that shows no processes: "there are none" would be wrong, and psutil breaks."""
    if IS_LINUX:
        raise OSError(f"{PROC} shows no processes here (it is masked)")


def _psutil_descendants(pid: int) -> list[int]:
    _refuse_masked()
    try:
        return _psutil(pid, lambda p: [child.pid for child in p.children(recursive=True)])
    except ProcessLookupError:
        return []


def boot_id() -> str:
    """Names this start of this machine, for all its containers alike; "" where it has no name."""
    try:
        return (PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return ""
