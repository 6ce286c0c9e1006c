"""What a soak's figures say of the rule of README.md, and what it left on the machine."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet import everybody
from ledger import Key, ends

if TYPE_CHECKING:
    from run import Soak

HOUR = 3600.0
#: Growth over the run that counts as flat: the larger of a share of the median and of a fixed part.
FLAT_SHARE, FLAT_MIB, FLAT_DESCRIPTORS = 0.10, 12.0, 4.0


def flat(figures: dict[str, Any] | None) -> bool:
    if figures is None:
        return False
    allowed = max(FLAT_SHARE * figures["pss_mib_median"], FLAT_MIB)
    return bool(
        figures["pss_mib_growth"] <= allowed and figures["descriptors_growth"] <= FLAT_DESCRIPTORS
    )


def judge(soak: Soak, left: dict[str, Any]) -> tuple[dict[str, bool], dict[str, Any]]:
    """The rule of README.md, part by part, and the figures that decide it."""
    store = soak.store
    warm_up = soak.seconds * 0.2
    lives = {
        pid: found
        for pid, curve in soak.curves.items()
        if (found := curve.growth(warm_up)) is not None
    }
    coordinator = soak.coordinator.growth(warm_up)
    head = [pid for pid in lives if soak.curves[pid].name == "head's agent"]
    states = {job_id: [state for state, _, _ in ended] for job_id, ended in soak.finished.items()}
    jobs = list(store.each("SELECT job_id, state FROM jobs"))
    stored: set[Key] = {(j, a) for j, a in store.each("SELECT job_id, attempt FROM outcomes")}
    lost = soak.spools.lost(store)
    wanted = [*(k for k in ("child killed", "agent killed", "agent told to end", "raylet killed"))]
    wanted += ["spool file damaged", "outcome not acknowledged", "outcome acknowledged twice"]
    wanted += [] if soak.disk.why_not else ["disk full"]
    rule = {
        "1 every job ended once, and the store says how": (
            set(states) == set(soak.sent)
            and all(len(each) == 1 for each in states.values())
            and sorted(jobs) == sorted((job_id, each[0]) for job_id, each in states.items())
        ),
        "2 jobs that nothing disturbed ended as they must": (
            not soak.wrong and (soak.seconds < HOUR / 2 or all(soak.undisturbed.values()))
        ),
        "3 every outcome is in the store once, byte for byte": (
            not lost
            and set(soak.taken) == stored
            and all(count == 1 for count in soak.taken.values())
        ),
        "4 damaged files were put aside and told": (
            not left["spool_files"]
            and left["quarantined"] > 0
            and any("put aside" in problem for problem in soak.problems)
        ),
        "5 memory and descriptors flat": (
            flat(coordinator) and bool(head) and all(flat(each) for each in lives.values())
        ),
        "6 nothing left": not (left["processes"] or left["files"] or left["control_groups"]),
        "7 every fault happened": all(soak.faults.done[kind] for kind in wanted),
    }
    figures = {
        "seconds": round(soak.seconds),
        "seed": soak.seed,
        "rounds": soak.rounds,
        "jobs": len(soak.sent),
        "outcomes": len(stored),
        "outcomes_seen_in_spools": len(soak.spools.seen),
        "faults": dict(sorted(soak.faults.done.items())),
        "no_full_disk_because": soak.disk.why_not,
        "ended_as": {name: dict(count) for name, count in soak.statuses.items()},
        "undisturbed": soak.undisturbed,
        **ends(store),
        "wrong": soak.wrong,
        "lost": lost,
        "left": left,
        "problems_told": sorted(soak.problems)[:20],
        "growth": {
            "coordinator": coordinator,
            "head's agent": lives[head[0]] if head else None,
            "other agents that lived long enough": [
                each for pid, each in lives.items() if pid not in head
            ],
        },
        "agents_seen": len(soak.curves),
        "curves": {
            "columns": ["seconds", "PSS in MiB", "descriptors"],
            "coordinator": soak.coordinator.thinned(),
            "head's agent": soak.curves[head[0]].thinned() if head else [],
        },
    }
    return rule, figures


def control_groups() -> set[str]:
    top = Path("/sys/fs/cgroup")
    return {
        str(path) for depth in ("", "*/", "*/*/", "*/*/*/") for path in top.glob(f"{depth}pichak-*")
    }


def groups_left(before: set[str]) -> list[str]:
    """Groups that are new and empty, or hold processes of this soak, and do not go away. Another
    agent on this machine has groups of its own, with its processes in them."""
    ours, until = set(everybody()), time.monotonic() + 10.0
    while True:
        left = []
        for folder in control_groups() - before:
            try:
                pids = {int(line) for line in (Path(folder) / "cgroup.procs").read_text().split()}
            except OSError:
                continue
            if not pids or pids & ours:
                left.append(folder)
        if not left or time.monotonic() > until:
            return sorted(left)
        time.sleep(0.5)


def environment() -> dict[str, Any]:
    import ray

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "ray": ray.__version__,
        "root": os.geteuid() == 0,
    }
