"""The agent as a service, from its claim on the machine to its end that leaves nothing.

One process that imports neither Ray nor torch. It joins a Ray cluster, and again whenever that was
lost (`service_membership.py`); what this node keeps, it keeps meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from pichak_agent.home import default_root, tidy
from pichak_agent.machine_claim import Holder, MachineClaim, holder, stranger
from pichak_agent.problems_file import told_problems
from pichak_agent.ray_start import OBJECT_STORE_BYTES, RayStart
from pichak_agent.ray_start import OURS as RAY_OPTIONS_OF_OURS
from pichak_agent.ray_supervisor import end_leftovers
from pichak_agent.service_backoff import Backoff
from pichak_agent.service_files import (
    ServiceError,
    ServiceFiles,
    ServiceState,
    ServiceTakenError,
    age,
    running_services,
    spooled,
)
from pichak_agent.service_membership import Membership
from pichak_agent.service_notify import notify, watchdog_seconds
from pichak_agent.service_telemetry import Beside, found_on_node, problems_on_node
from pichak_agent.service_voice import Voice
from pichak_agent.versions import own_versions
from pichak_core.devices.own_group import settle, unsettle

__all__ = [
    "OBJECT_STORE_BYTES",
    "RAY_OPTIONS_OF_OURS",
    "Beside",
    "RayStart",
    "Service",
    "ServiceError",
    "ServiceTakenError",
    "age",
    "found_on_node",
    "holder",
    "problems_on_node",
    "running_services",
    "spooled",
    "stranger_here",
]

#: Seconds between two looks at everything.
TICK_SECONDS = 0.5
#: Between two looks at what the node's agent tells as problems.
PROBLEMS_SECONDS = 5.0


class Companion(Protocol):
    """What else lives in the service's process: started when the node is this service's."""

    def start(self) -> str:
        """Begin; where its metrics are, "" where nowhere. `ServiceError` when that cannot be."""

    def stop(self) -> None:
        """End it, also where it was never started."""


@dataclass
class Service:
    """One node's service. `say` gets each sentence once. `name` is what the node is called; a
    machine has one real service, whatever its name, and as many simulated ones as names. `home` is
    where its agent keeps things; `variables` go to everything that Ray starts here; `simulated` is
    the file of a simulated host. `even_if_another` runs beside a service of another home.
    `objection` is asked whenever a head answers that is to be joined: why it is not, "" where it
    may be."""

    how: RayStart
    name: str
    say: Callable[[str], None]
    beside: Companion | None = None
    simulated: str = ""
    home: Path = field(default_factory=default_root)
    even_if_another: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    objection: Callable[[], str] = lambda: ""
    backoff: Backoff = field(default_factory=Backoff)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.files = ServiceFiles(
            f"simulated-{self.name}" if self.simulated else socket.gethostname()
        )
        self.state = ServiceState(
            name=self.name,
            address=self.how.address,
            pid=os.getpid(),
            started_unix=time.time(),
            since_unix=time.time(),
            versions=dict(own_versions()),
            simulated=self.simulated,
            home=str(self.home),
        )
        self._watchdog = watchdog_seconds()
        self._next_watchdog = self._next_problems = 0.0
        self._voice = Voice(self.state, self.files, self.say, self.clock)
        self._membership = Membership(
            self.how,
            {**self.variables, "PICHAK_HOME": str(self.home)},
            self._voice,
            self._attend,
            self._objection,
            clock=self.clock,
            backoff=self.backoff,
        )
        self._leaf: Path | None = None
        self._machine = MachineClaim(self.home.absolute())

    def run(self) -> None:
        """Until SIGTERM, SIGINT or `stop`; nothing that it started is left then.

        `ServiceTakenError` when another service has this node; `ServiceError` when the cluster
        refuses this node before it was ever in it.
        """
        self._claim()
        try:
            self._clear_up()
            _set_on_signals(self._stop)
            if not self.simulated:
                self._leaf = settle()
            if self.beside is not None:
                self.state.metrics = self.beside.start()
            notify("READY=1")
            self._look_until_stopped()
        finally:
            notify("STOPPING=1")
            self._end()

    def stop(self) -> None:
        """End `run` soon; from any thread."""
        self._stop.set()

    def _claim(self) -> None:
        if not self.simulated and not self._machine.take():
            other = stranger(self.home)
            if other is not None:
                if not self.even_if_another:
                    raise ServiceTakenError(
                        f"an agent service runs on this machine already ({other.sentence}): end "
                        "it, or run this one beside it with --even-if-another"
                    )
                self.say(
                    f"another agent service runs on this machine ({other.sentence}): what both "
                    "measure at the same time is wrong for both"
                )
        try:
            self.files.claim(f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        except BaseException:
            self._machine.release()
            raise

    def _look_until_stopped(self) -> None:
        self._voice.tell("starting", f"joining the cluster at {self.how.address}")
        while not self._stop.is_set():
            self._attend()
            self._membership.look()
            self._mention_problems()
            self._stop.wait(TICK_SECONDS)

    def _mention_problems(self) -> None:
        """Those of the agents; what this process itself is warned of is said already."""
        if self.clock() >= self._next_problems:
            self._next_problems = self.clock() + PROBLEMS_SECONDS
            self._voice.mention(told_problems(self.home, everywhere=not self.simulated))

    def _objection(self) -> str:
        return self.objection()  # it may be set after this service was made

    def _attend(self) -> None:
        """What must not wait while something takes long."""
        self._machine.answer()
        if self._watchdog is not None and self.clock() >= self._next_watchdog:
            self._next_watchdog = self.clock() + self._watchdog
            notify("WATCHDOG=1")

    def _clear_up(self) -> None:
        """After a service that was killed: what it had started is no longer watched by anyone."""
        mark, folder = self.files.left_behind()
        if mark:
            ended = end_leftovers(mark, folder)
            if ended:
                self.say(f"ended {ended} processes of a service that was killed here")

    def _end(self) -> None:
        left = self._membership.stop()
        if self.beside is not None:
            self.beside.stop()
        if left:
            self.say(f"these processes could not be ended: {', '.join(map(str, left))}")
        tidy(self.home)
        if self.simulated:
            with contextlib.suppress(OSError):
                self.home.parent.rmdir()
        if self._leaf is not None:
            unsettle(self._leaf)
        self.files.release()
        self._machine.release()
        self.say(f"stopped after {age(self.state.started_unix)}")


def stranger_here() -> Holder | None:
    """The agent service of another home than this process's, where there is one."""
    return stranger(default_root())


def _set_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set `stop`, for good: a second one must not cut the clearing up short."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
