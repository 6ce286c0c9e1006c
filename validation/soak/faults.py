"""What goes wrong, and when: seeded, each kind with its own mean pause."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

from fleet import Raylets, SmallDisk, agents
from ledger import Spools

from pichak_core.devices.processes import descendants

#: Mean pause in seconds of each fault in a run of an hour; a shorter run has them more often.
PAUSES = {
    "child killed": 45.0,
    "agent killed": 100.0,
    "agent told to end": 400.0,
    "raylet killed": 300.0,
    "disk full": 240.0,
    "spool file damaged": 150.0,
}
FULL_SECONDS = 12.0


class Faults:
    """Does what is due. `windows` holds (from, to, node or "" for all) of each disturbance."""

    def __init__(
        self,
        seed: int,
        raylets: Raylets,
        disk: SmallDisk,
        spools: Spools,
        *,
        pace: float,
    ) -> None:
        self._draw = random.Random(f"{seed}/faults")
        self._raylets, self._disk, self._spools = raylets, disk, spools
        self._pace = pace
        self.done: Counter[str] = Counter()
        self.windows: list[tuple[float, float, str]] = []
        self._full_until, self._full_window = 0.0, 0
        now = time.monotonic()
        self._due = {kind: now + self._pause(kind) for kind in PAUSES}
        if disk.why_not:
            del self._due["disk full"]

    def _pause(self, kind: str) -> float:
        return PAUSES[kind] * self._pace * self._draw.uniform(0.3, 1.7)

    def step(self) -> None:
        now = time.monotonic()
        if self._full_until and now >= self._full_until:
            self._disk.free()
            self._full_until = 0.0
            # The loop may have come late to this: it was full until now.
            since, _, everywhere = self.windows[self._full_window]
            self.windows[self._full_window] = (since, now + 1.0, everywhere)
        for kind, due in list(self._due.items()):
            if now < due:
                continue
            self._due[kind] = now + self._pause(kind)
            if self._do(kind):
                self.done[kind] += 1
            else:  # nothing was there to be hit: soon again
                self._due[kind] = now + 1.0

    def end(self) -> None:
        self._disk.free()

    def _do(self, kind: str) -> bool:
        if kind == "child killed":
            return self._kill_child()
        if kind == "agent killed":
            return self._kill_agent(signal.SIGKILL)
        if kind == "agent told to end":
            return self._kill_agent(signal.SIGTERM)
        if kind == "raylet killed":
            return self._kill_raylet()
        if kind == "disk full":
            if self._full_until:
                return False
            self._disk.fill()
            self._full_until = time.monotonic() + FULL_SECONDS
            self._disturbed("", float("inf"))
            self._full_window = len(self.windows) - 1
            return True
        return self._damage_file()

    def _disturbed(self, node: str, seconds: float) -> None:
        now = time.monotonic()
        self.windows.append((now - 1.0, now + seconds, node))

    def _kill_child(self) -> bool:
        """Any process of a job: its child, its wardens, or what it started."""
        below = [
            (pid, node)
            for agent, node in agents(self._raylets).items()
            for pid in descendants(agent)
        ]
        if not below:
            return False
        pid, node = self._draw.choice(sorted(below))
        self._disturbed(node, 20.0)
        os.kill(pid, signal.SIGKILL)
        return True

    def _kill_agent(self, how: signal.Signals) -> bool:
        """One of an agent other than the head's, whose memory is watched over the whole run."""
        there = sorted(
            pid for pid, node in agents(self._raylets).items() if node != self._raylets.head
        )
        if not there:
            return False
        pid = self._draw.choice(there)
        self._disturbed(agents(self._raylets).get(pid, ""), 30.0)
        os.kill(pid, how)
        return True

    def _kill_raylet(self) -> bool:
        others = sorted(set(self._raylets.nodes) - {self._raylets.head})
        node = self._draw.choice(others)
        self._disturbed(node, 60.0)
        self._raylets.kill(node)
        self._raylets.add()
        return True

    def _damage_file(self) -> bool:
        """One that nobody has acknowledged: cut, flipped, emptied; or a stray one put beside."""
        files = self._spools.files()
        if not files:
            return False
        path = self._draw.choice(files)
        how = self._draw.choice(["cut", "flipped", "emptied", "stray"])
        try:
            data = path.read_bytes()
            if not data:
                return False
            if how == "stray":
                (path.parent / f"stray-{self._draw.randrange(10**6)}.mpk").write_bytes(data[:100])
                return True
            middle = len(data) // 2
            damaged = {
                "cut": data[:middle],
                "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
                "emptied": b"",
            }[how]
            with path.open("r+b") as file:
                self._spools.damaged.add(path.name[: -len(".mpk")])
                file.truncate(0)
                file.write(damaged)
        except OSError:  # acknowledged in this moment, or no room
            return False
        return True
