"""What is killed, cut and filled, and when: seeded, each kind with its own mean pause."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fleet import SmallDisk

SERVICES = ("h2", "h3", "h4")
FULL_SECONDS = 10.0
#: The longest for which a raylet's silence is borne: Ray's own patience, and some.
LONG_CUT_SECONDS = 75.0


#: Mean pause in seconds of each kind, and what happens once.
PAUSES = {
    "a job's process killed": 25.0,
    "an agent killed": 60.0,
    "a raylet killed": 120.0,
    "the coordinator killed": 100.0,
    "a link cut for seconds": 90.0,
    "a disk filled": 110.0,
}
ONCE = ("the head's host killed", "a link cut until Ray gives up")
KINDS = (*PAUSES, *ONCE)


class Disturber:
    """Does what is due, one step at a time; `over` when its seconds have passed."""

    def __init__(self, chaos: Any, disk: SmallDisk, seed: int, seconds: float) -> None:
        self._chaos, self._disk = chaos, disk
        self._draw = random.Random(seed)
        now = time.monotonic()
        self._end = now + seconds
        self._due = {kind: now + self._pause(kind) for kind in PAUSES}
        self._due |= {kind: now + seconds * (n + 1) / 3 for n, kind in enumerate(ONCE)}
        self._heal: dict[str, float] = {}
        self._full_until = 0.0
        self.done: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    def end(self) -> None:
        """Heal everything."""
        self._disk.free()
        for name in list(self._heal):
            self._chaos.cut(name, up=True)
        self._heal.clear()

    def step(self) -> None:
        now = time.monotonic()
        for name, until in list(self._heal.items()):
            if now >= until:
                self._chaos.cut(name, up=True)
                del self._heal[name]
        if self._full_until and now >= self._full_until:
            self._disk.free()
            self._full_until = 0.0
        if self.over:
            return
        for kind, due in list(self._due.items()):
            if now < due:
                continue
            if not self._do(kind):
                self._due[kind] = now + 1.0  # nothing was there to be hit: soon again
                continue
            self.done[kind] += 1
            if kind in ONCE:
                del self._due[kind]
            else:
                self._due[kind] = now + self._pause(kind)

    def _pause(self, kind: str) -> float:
        return PAUSES[kind] * self._draw.uniform(0.4, 1.6)

    def _do(self, kind: str) -> bool:
        if kind == "a job's process killed":
            return self._kill(self._processes(b"pichak_agent.child", b"pichak_agent.warden"))
        if kind == "an agent killed":
            return self._kill(self._processes(b"ray::AgentActor"))
        if kind == "a raylet killed":
            raylets = [p for n in SERVICES for p in self._of(n, b"/raylet/raylet")]
            return self._kill(raylets)
        if kind == "the coordinator killed":
            process = self._chaos.coordinator
            # At any moment of its life: the next look is a second away, and it lives for many.
            if process.poll() is not None or self._draw.random() < 0.9:
                return False
            process.kill()
            return True
        if kind == "the head's host killed":
            self._chaos.kill_head()
            self._chaos.new_head()
            return True
        if kind == "a disk filled":
            self._disk.fill()
            self._full_until = time.monotonic() + FULL_SECONDS
            return True
        whole = [name for name in SERVICES if name not in self._heal]
        if not whole:
            return False
        name = self._draw.choice(whole)
        long = kind in ONCE
        seconds = LONG_CUT_SECONDS if long else self._draw.uniform(5, 12)
        self._chaos.cut(name)
        self._heal[name] = time.monotonic() + seconds
        return True

    def _processes(self, *marks: bytes) -> list[int]:
        return [p for n in ("h1", *SERVICES) for mark in marks for p in self._of(n, mark)]

    def _of(self, name: str, mark: bytes) -> list[int]:
        found = []
        for pid in self._chaos.pids(name):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def _kill(self, pids: list[int]) -> bool:
        if not pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._draw.choice(sorted(pids)), signal.SIGKILL)
        return True
