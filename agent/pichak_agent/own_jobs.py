"""Which jobs of this node's agents, and which trainings of the user's own, use a GPU now: as files
that every process of the node can read. The process that samples is seldom the one whose job it is.

``own/`` lists them, ``use/`` holds what each tells of itself (`told_use.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from pichak_agent.environment import MARK
from pichak_agent.home import usable_root
from pichak_agent.host_sampler import steady_seconds
from pichak_agent.messages import Job, check_name
from pichak_agent.readings import OwnUse, ProcessId
from pichak_agent.told_use import read_use, remove_use
from pichak_agent.use_teller import USE_FILE, telling
from pichak_core.devices.processes import boot_id, started_at

#: What nobody who is listed has written to for so long is left over. It is told once a second, so
#: a process that lives, and is only not seen from here, writes it anew.
_LEFT_SECONDS = 60.0


def telemetry_folder(home: Path) -> Path:
    """Where the readings of this machine are kept. A home on a network drive is shared by machines,
    so it is named after this machine's boot."""
    return home / "telemetry" / (boot_id() or "machine")


class OwnJobs:
    """The jobs listed in a folder. One whose process died is dropped."""

    def __init__(self, home: Path, *, steady: Callable[[], float] = steady_seconds) -> None:
        folder = telemetry_folder(home).absolute()
        self._folder, self._use_folder = folder / "own", folder / "use"
        self._steady = steady

    @contextlib.contextmanager
    def running(self, job: Job) -> Iterator[Job]:
        """List the job while the block runs, if it uses a GPU. Yields the job to run: with the path
        of the file to tell its use in, among its params."""
        if not _is_cuda(str(job.params.get("device", ""))):
            yield job
            return
        with self._listed(f"{job.job_id}.{job.attempt}") as path:
            yield replace(job, params={**job.params, USE_FILE: str(path)})

    @contextlib.contextmanager
    def training(self, name: str) -> Iterator[None]:
        """List this process as a training of the user's own while the block runs; it tells its use
        and hears `tell_step`."""
        with self._listed(name) as path, telling(path, steps=True):
            yield

    def uses(self) -> tuple[OwnUse, ...]:
        """The jobs that run, each with what it tells: once for each GPU that it uses, or a single
        time without a GPU's name where it does not say."""
        try:
            paths = sorted(self._folder.iterdir())
        except OSError:
            return ()
        found: list[OwnUse] = []
        listed = set()
        for path in paths:
            pid, _, job = path.name.partition("-")
            with contextlib.suppress(OSError, ValueError):
                lister = ProcessId(int(pid), path.read_text(encoding="utf-8"))
                if started_at(lister.pid) == lister.started:
                    listed.add(path.name)
                    told = self._use_folder / path.name
                    for use in read_use(told, job, steady_seconds=self._steady()):
                        # A training lists itself; of a job only its own process tells who it is.
                        found.append(use if use.process else replace(use, process=lister))
        self._remove_left_over(listed)
        return tuple(found)

    @contextlib.contextmanager
    def _listed(self, name: str) -> Iterator[Path]:
        path = self._folder / f"{os.getpid()}-{name}"
        told = self._use_folder / path.name
        # Without the file the job may be taken for a stranger's, and still runs.
        with contextlib.suppress(OSError):
            self._use_folder.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(started_at(os.getpid()) or "", encoding="utf-8")
        try:
            yield told
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            remove_use(told)

    def _remove_left_over(self, listed: Collection[str]) -> None:
        """What processes that were killed have told last."""
        with contextlib.suppress(OSError):
            for path in self._use_folder.iterdir():
                if path.name.removesuffix(".part") in listed:
                    continue
                with contextlib.suppress(OSError):
                    if abs(time.time() - path.stat().st_mtime) > _LEFT_SECONDS:
                        path.unlink()


@contextlib.contextmanager
def own_training(
    device: str = "cuda:0", name: str = "training", *, home: Path | None = None
) -> Iterator[None]:
    """Make a training that you run yourself known to the agent of its machine while the block runs.

    The agent then takes this process for no stranger, and sees when its memory is moved to the
    system's or its steps (`use_teller.tell_step`) become slow. Every process of a training enters
    it, with its own `device`; one that is no ``cuda`` has nothing to watch. `name` is what findings
    call it. `home` is the agent's, by default PICHAK_HOME or this user's. Inside a job of the agent
    it does nothing, and nothing that fails in it stops the training. `ValueError` for a `name` that
    is more than letters, digits and ``-_.``.
    """
    check_name("name", name)
    if not _is_cuda(device) or MARK in os.environ:
        yield
        return
    with OwnJobs(usable_root() if home is None else home).training(name):
        yield


def _is_cuda(device: str) -> bool:
    return device.startswith("cuda")
