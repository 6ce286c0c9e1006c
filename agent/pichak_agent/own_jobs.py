"""Which jobs of this node's agents use a GPU now, as files that every process of the node can read:
the process that samples is seldom the one whose job it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pichak_agent.messages import Job
from pichak_agent.readings import OwnUse
from pichak_core.devices.processes import boot_id, started_at


def telemetry_folder(home: Path) -> Path:
    """Where the readings of this machine are kept. A home on a network drive is shared by machines,
    so it is named after this machine's boot."""
    return home / "telemetry" / (boot_id() or "machine")


class OwnJobs:
    """The jobs listed in a folder. One whose process died is dropped."""

    def __init__(self, home: Path) -> None:
        self._folder = telemetry_folder(home) / "own"

    @contextlib.contextmanager
    def running(self, job: Job) -> Iterator[None]:
        """List the job while the block runs, if it uses a GPU."""
        if not str(job.params.get("device", "")).startswith("cuda"):
            yield
            return
        path = self._folder / f"{os.getpid()}-{job.job_id}.{job.attempt}"
        # Without the file the job may be taken for a stranger's, and still runs.
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(started_at(os.getpid()) or "", encoding="utf-8")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def uses(self) -> tuple[OwnUse, ...]:
        """The jobs that run. Which GPU each has, and how much of it, they do not say."""
        try:
            paths = sorted(self._folder.iterdir())
        except OSError:
            return ()
        found = []
        for path in paths:
            pid, _, job = path.name.partition("-")
            with contextlib.suppress(OSError, ValueError):
                if started_at(int(pid)) == path.read_text(encoding="utf-8"):
                    found.append(OwnUse(job=job))
        return tuple(found)
