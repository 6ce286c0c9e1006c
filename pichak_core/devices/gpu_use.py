"""Whether somebody works on a GPU, judged from a few looks at it. Pure.

The rule. A GPU is **busy** when somebody else's compute process (or, where the process list is
empty as in a container, memory that others hold) is there and at least one look saw its cores at
work, or when half of the looks saw work and nobody is listed. It is **held** when others have a
process or memory there and no look saw work (an idle context, a notebook left open), or when only
programs that draw work on it. It is **unknown** when nothing tells whether the cores work (WSL2,
MIG devices and some vGPUs have no such counter): that is neither idle nor busy, and what was seen
is said. Processes of our own do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_processes import GpuProcess
from pichak_core.measurement import Unmeasured

State = Literal["idle", "held", "busy", "unknown"]

#: A look at or above this share of the time with work on the cores is work: a display that is
#: redrawn and a driver that wakes up stay below it.
WORKING_PERCENT = 10.0
#: Memory in use below this is contexts and the driver's own, not somebody's training. The older
#: query counts the driver's reserve as used: 308 MB on an idle card, 912 MB on an A100 (field case
#: 12).
HELD_BYTES = 512 * 2**20
HELD_BYTES_WITH_RESERVE = 1536 * 2**20


@dataclass(frozen=True)
class User:
    """A process on the GPU. `name` and `owner` are "" where this process may not look it up, or
    where its number means nothing here (another container's)."""

    pid: int
    kind: str
    used_bytes: int | None
    name: str = ""
    owner: str = ""

    def describe(self) -> str:
        """``pid 4242 python3 (anna), 18,300 MiB``."""
        said = f"pid {self.pid}"
        if self.name:
            said += f" {self.name}"
        if self.owner:
            said += f" ({self.owner})"
        memory = "memory unknown" if self.used_bytes is None else _mib(self.used_bytes)
        return f"{said}, {memory}"


@dataclass(frozen=True)
class GpuUse:
    """What the looks said. `utilisation_percent` is the highest of them, None where it is not
    known; `sentence` says it all to a person; `users` are others' processes."""

    state: State
    sentence: str
    users: tuple[User, ...] = ()
    utilisation_percent: float | None = None
    used_bytes: int | None = None
    looks: int = 0
    apart_seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a job's result."""
        return {
            "state": self.state,
            "sentence": self.sentence,
            "users": [
                {
                    "pid": user.pid,
                    "kind": user.kind,
                    "name": user.name,
                    "owner": user.owner,
                    "used_bytes": user.used_bytes,
                }
                for user in self.users
            ],
            "utilisation_percent": self.utilisation_percent,
            "used_bytes": self.used_bytes,
            "looks": self.looks,
            "apart_seconds": self.apart_seconds,
        }


def unknown(device: str, why: str) -> GpuUse:
    """Nothing could be looked at."""
    return GpuUse("unknown", f"whether somebody uses {device} cannot be told: {why}")


def judge_use(
    device: str,
    looks: Sequence[Gpu],
    *,
    is_ours: Callable[[int], bool],
    who: Callable[[int], tuple[str, str]],
    zero_means_nothing: bool = False,
    apart_seconds: float = 0.0,
) -> GpuUse:
    """What several looks at one GPU say; see the module for the rule.

    `is_ours` tells processes of our own, which never count; `who` gives the name and the owner of
    a process. `zero_means_nothing`: on WSL2 the counter may stand at 0 under full load. Between two
    looks were `apart_seconds`.
    """
    seen = [look for look in looks if look.lost is None]
    if not seen:
        lost = next((look.lost for look in looks if look.lost is not None), None)
        return unknown(device, lost.describe() if lost else "NVML gave no reading")
    ours, users = _split(seen, is_ours)
    named = [(user, *who(user.pid)) for user in users]
    users = tuple(replace(user, name=name, owner=owner) for user, name, owner in named)
    held, by_memory = _memory(seen, ours)
    work = [value for look in seen if (value := look.number("utilisation_percent")) is not None]
    if zero_means_nothing and not any(work):
        work = []
    compute = any(user.kind == "compute" for user in users)
    drawing = any(user.kind == "graphics" for user in users)
    # Work that a process of ours may be doing accuses nobody who is not seen there.
    others = compute or (by_memory and not drawing)
    unseen = not others and not drawing and not ours
    most, usual = max(work, default=None), statistics.median(work or [0.0])
    state: State = "held" if others or drawing else "idle"
    if most is None:
        state = "unknown"
    elif (others and most >= WORKING_PERCENT) or (unseen and usual >= WORKING_PERCENT):
        state = "busy"
    found = GpuUse(state, "", users, most, held, len(seen), apart_seconds)
    return replace(found, sentence=_sentence(device, seen, found, work))


def _split(
    seen: Sequence[Gpu], is_ours: Callable[[int], bool]
) -> tuple[list[GpuProcess], tuple[User, ...]]:
    """Our rows, and everybody else's. Windows lists a program with a window as both kinds."""
    rows: dict[int, GpuProcess] = {}
    for look in seen:
        for row in look.processes:
            known = rows.get(row.pid)
            if known is None or (known.used_bytes or 0) < (row.used_bytes or 0):
                kind = "graphics" if known and known.kind == "graphics" else row.kind
                rows[row.pid] = replace(row, kind=kind)
            elif row.kind == "graphics":
                rows[row.pid] = replace(known, kind="graphics")
    ours = [row for row in rows.values() if is_ours(row.pid)]
    theirs = [row for row in rows.values() if row not in ours]
    theirs.sort(key=lambda row: (row.kind, -(row.used_bytes or 0), row.pid))
    return ours, tuple(User(row.pid, row.kind, row.used_bytes) for row in theirs)


def _memory(seen: Sequence[Gpu], ours: Sequence[GpuProcess]) -> tuple[int | None, bool]:
    """Bytes that others hold at most, and whether that is more than contexts."""
    used = [value for look in seen if (value := look.number("memory_used_bytes")) is not None]
    if not used:
        return None, False
    held = max(0, int(max(used)) - sum(row.used_bytes or 0 for row in ours))
    apart = all(look.number("memory_reserved_bytes") is not None for look in seen)
    return held, held > (HELD_BYTES if apart else HELD_BYTES_WITH_RESERVE)


def _sentence(device: str, seen: Sequence[Gpu], use: GpuUse, work: Sequence[float]) -> str:
    name = next((text for look in seen if (text := look.text("name"))), "")
    what = f"{device} ({name})" if name else device
    users = [user for user in use.users if user.kind == "compute"] or list(use.users)
    who = "; ".join(user.describe() for user in users[:4])
    if len(users) > 4:
        who += f"; and {len(users) - 4} more"
    memory = "memory in use unknown" if use.used_bytes is None else f"{_mib(use.used_bytes)} in use"
    by = who or f"somebody whom NVML does not list, {memory}"
    on_it = who or f"nobody that NVML lists, {memory}"
    looked = f"{len(seen)} look{'s' * (len(seen) > 1)}"
    if len(seen) > 1 and use.apart_seconds:
        looked += f", {use.apart_seconds:g} s apart"
    if use.state == "busy":
        return f"{what} is in use by {by}; utilisation {_percents(work)} ({looked})"
    if use.state == "held":
        if users and users[0].kind == "graphics":
            return f"{what} draws for {by}; utilisation {_percents(work)} ({looked})"
        return f"{what} is held, not worked on: {by}; utilisation {_percents(work)} ({looked})"
    if use.state == "idle":
        return f"{what} is idle: utilisation {_percents(work)}, {memory} ({looked})"
    gap = seen[-1].get("utilisation_percent")
    why = gap.describe() if isinstance(gap, Unmeasured) else "the counter stands at 0, which means"
    if not isinstance(gap, Unmeasured):
        why += " nothing on WSL2"
    return f"whether {what} is worked on is not known (utilisation: {why}); on it: {on_it}"


def _percents(work: Sequence[float]) -> str:
    low, high = min(work), max(work)
    return f"{high:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
