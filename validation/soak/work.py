"""What the soak dispatches: a seeded stream of short jobs, and how each must end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pichak_agent.messages import Job, file_param

MIB = 1024**2
MISBEHAVES = Path(__file__).with_name("misbehaves.py")


@dataclass(frozen=True)
class Kind:
    """One kind of job: how often, its limits, and the statuses that it ends with undisturbed."""

    name: str
    weight: int
    ends: frozenset[str]
    deadline_seconds: float = 60.0
    memory_cap_bytes: int = 0


def _kind(name: str, weight: int, ends: str, deadline: float = 60.0, cap_mib: int = 0) -> Kind:
    return Kind(name, weight, frozenset(ends.split()), deadline, cap_mib * MIB)


KINDS = (
    _kind("fingerprint", 5, "ok"),
    _kind("ramp", 3, "ok", deadline=120.0),
    _kind("raises", 2, "error"),
    _kind("exits", 1, "error"),
    _kind("crashes", 2, "killed"),
    _kind("floods_log", 2, "error"),
    _kind("floods_pipe", 1, "error"),
    # A loaded machine may need longer than this for the imports alone: a timeout either way.
    _kind("hangs", 1, "timeout", deadline=4.0),
    _kind("hangs_deaf", 1, "timeout", deadline=4.0),
    _kind("forks", 2, "error"),
    # Ended by the agent's count of its memory, or refused by the kernel.
    _kind("hoards", 2, "killed error", cap_mib=192),
    _kind("writes_files", 1, "error"),
)


def make_job(kind: Kind, job_id: str) -> Job:
    params: dict[str, Any]
    lock = ""
    sent = "task"
    if kind.name == "fingerprint":
        sent, lock = "fingerprint", "machine"
        params = {"only": ["software", "virtualisation", "cpu", "host_memory"]}
    elif kind.name == "ramp":
        sent, lock = "ramp", "machine"
        params = {
            "model": "builtin:gpt-1m",
            "device": "cpu",
            "seq_len": 32,
            "limit": 4,
            "memory_cap_bytes": 512 * MIB,
            "target_tokens": 4096,
            "step_seconds": 3.0,
        }
    else:
        params = {"model": file_param(MISBEHAVES), "factory": kind.name, "device": "cpu"}
    return Job(job_id, 1, sent, params, kind.deadline_seconds, kind.memory_cap_bytes, lock)


class Stream:
    """Kinds by weight, the same for the same seed. Every kind comes once before any comes twice, so
    that a short run has them all."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"{seed}/jobs")
        self._first = list(KINDS)
        self._draw.shuffle(self._first)
        self.made = 0

    def next(self) -> tuple[Kind, Job]:
        if self._first:
            kind = self._first.pop()
        else:
            (kind,) = self._draw.choices(KINDS, [each.weight for each in KINDS])
        self.made += 1
        return kind, make_job(kind, f"soak-{self.made:05d}-{kind.name}")
