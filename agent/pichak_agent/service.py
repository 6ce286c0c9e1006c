"""The agent as a service: joins a Ray cluster, and joins it again whenever it was lost.

One process that imports neither Ray nor torch. It starts ``ray start`` (`ray_supervisor.py`) when
its head answers, watches both, and says what changed once, not each time it looks. A head that is
away is a state and no error: what this node keeps, it keeps meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from pichak_agent.home import default_root, tidy
from pichak_agent.machine_claim import MachineClaim, holder
from pichak_agent.ray_start import OBJECT_STORE_BYTES, RayStart, joined, refusal, refused_token
from pichak_agent.ray_start import OURS as RAY_OPTIONS_OF_OURS
from pichak_agent.ray_supervisor import RayNode, end_leftovers
from pichak_agent.service_backoff import Backoff
from pichak_agent.service_files import (
    ServiceError,
    ServiceFiles,
    ServiceState,
    ServiceTakenError,
    age,
    running_services,
    safe_name,
    spooled,
)
from pichak_agent.service_knock import Knock
from pichak_agent.service_news import News
from pichak_agent.service_notify import notify, watchdog_seconds
from pichak_agent.service_telemetry import Beside, found_on_node
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
    "running_services",
    "simulated_service",
    "spooled",
]

#: Seconds between two looks at everything.
TICK_SECONDS = 0.5
#: Seconds between two knocks at the head's door while this node is in its cluster.
KNOCK_SECONDS = 5.0
#: ``ray start`` may take so long to join; on a busy machine it takes a minute.
JOIN_SECONDS = 180.0
#: A join that takes longer is told.
SLOW_JOIN_SECONDS = 12.0
#: What a person has to mend is tried again this often by a service that was in the cluster before.
REFUSED_SECONDS = 300.0
#: A node that stays up for so long has joined well.
SETTLED_SECONDS = 60.0
#: From SIGTERM to nothing left.
STOP_SECONDS = 8.0


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
        self._node: RayNode | None = None
        self._watchdog = watchdog_seconds()
        self._next_watchdog = self._next_try = self._next_knock = 0.0
        self._started_at = 0.0
        self._misses = 0
        self._knock: Knock | None = None
        self._news = News(self.clock)
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
            other = holder()
            if other is not None and other.home != str(self.home.absolute()):
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
        self._tell("starting", f"joining the cluster at {self.how.address}")
        while not self._stop.is_set():
            self._attend()
            if self._node is not None:
                self._look_at_node(self._node)
            elif self.clock() >= self._next_try:
                self._try_to_join()
            self._stop.wait(TICK_SECONDS)

    # -- joining ----------------------------------------------------------------------------------

    def _try_to_join(self) -> None:
        why = self._answer_of_head()
        if why is None:
            return
        if why:
            self._wait("waiting", f"{why}; waiting for it")
            return
        if refused := self.objection():
            self._refused(refused)
            return
        node = RayNode(self.how, {**self.variables, "PICHAK_HOME": str(self.home)})
        self.state.mark = node.mark
        try:
            node.start()
        except OSError as error:
            self._wait("waiting", f"Ray cannot be started here: {error}")
            return
        self._node, self._started_at = node, self.clock()
        self.state.folder = str(node.folder)
        self._enter("joining", f"the head at {self.how.address} answers: joining it")

    def _look_at_node(self, node: RayNode) -> None:
        output = node.hear()
        lived = self.clock() - self._started_at
        if not node.running:
            self._lost(node, output)
        elif self.state.state == "joining":
            if joined(output):
                self._joined(node)
            elif refused_token(output):
                self._lost(node, output)
            elif lived > JOIN_SECONDS:
                self._lost(node, output, JOIN_SECONDS)
            elif lived > SLOW_JOIN_SECONDS:
                self._tell(
                    "joining",
                    f"still joining the cluster at {self.how.address}: Ray starts its processes "
                    f"here and registers with the head, which may take {JOIN_SECONDS:g} s on a "
                    "busy machine",
                )
        else:
            if lived > SETTLED_SECONDS:
                self.backoff.reset()
            self._watch_head()

    def _joined(self, node: RayNode) -> None:
        facts = node.facts()
        self.state.joins += 1
        self.state.node_id = str(facts.get("node_id") or "")
        self.state.raylet_pid = int(str(facts.get("pid") or 0))
        self._misses, self._next_knock = 0, self.clock() + KNOCK_SECONDS
        self._news.forget()
        again = " again" if self.state.joins > 1 else ""
        self._tell(
            "joined",
            f"in the cluster at {self.how.address}{again}, as node {self.state.node_id[:12]}",
        )

    def _watch_head(self) -> None:
        """Raylet and head hold on to each other for a while; the state says it earlier."""
        if self.clock() < self._next_knock:
            return
        why = self._answer_of_head()
        if why is None:
            return
        self._next_knock = self.clock() + KNOCK_SECONDS
        self._misses = self._misses + 1 if why else 0
        if self._misses == 2:
            self._tell("away", f"{why}; this node keeps what it has and waits for it")
        elif not why and self.state.state == "away":
            self._news.forget()
            self._tell("joined", f"the head at {self.how.address} answers again")

    def _answer_of_head(self) -> str | None:
        """None while it is waited for; each answer is given once."""
        if self._knock is None:
            self._knock = Knock(self.how.address)
        answer = self._knock.answer
        if answer is not None:
            self._knock = None
        return answer

    def _lost(self, node: RayNode, output: str, waited_seconds: float = 0.0) -> None:
        self._node = None
        said = refusal(
            output,
            self.how.address,
            node.exit_code,
            token_file=self.how.token_file,
            waited_seconds=waited_seconds,
        )
        node.stop(STOP_SECONDS, self._attend)
        self.state.node_id, self.state.raylet_pid = "", 0
        self.state.mark = self.state.folder = ""
        if said.settled:
            self._refused(said.sentence)
        else:
            again = "joining again" if self.state.joins else "trying again"
            self._wait("waiting", f"{said.sentence}; {again}")

    def _refused(self, why: str) -> None:
        if not self.state.joins:
            raise ServiceError(why)
        self._next_try = self.clock() + REFUSED_SECONDS
        self._tell("refused", f"{why}; trying again every {REFUSED_SECONDS / 60:g} min")

    def _wait(self, state: str, why: str) -> None:
        self._next_try = self.clock() + self.backoff.wait()
        self._tell(state, why)

    # -- telling ----------------------------------------------------------------------------------

    def _tell(self, state: str, why: str) -> None:
        """Say it, if it is news."""
        if (state, why) != (self.state.state, self.state.why) and self._news.is_news(why):
            self.say(why)
        self._enter(state, why)

    def _enter(self, state: str, why: str) -> None:
        if state != self.state.state:
            self.state.since_unix = time.time()
        self.state.state, self.state.why = state, why
        self.files.write(self.state)
        notify(f"STATUS={why}")

    def _attend(self) -> None:
        """What must not wait while something takes long."""
        self._machine.answer()
        if self._watchdog is not None and self.clock() >= self._next_watchdog:
            self._next_watchdog = self.clock() + self._watchdog
            notify("WATCHDOG=1")

    # -- ending -----------------------------------------------------------------------------------

    def _clear_up(self) -> None:
        """After a service that was killed: what it had started is no longer watched by anyone."""
        mark, folder = self.files.left_behind()
        if mark:
            ended = end_leftovers(mark, folder)
            if ended:
                self.say(f"ended {ended} processes of a service that was killed here")

    def _end(self) -> None:
        left: list[int] = []
        if self._node is not None:
            self._enter("stopping", "stopping: ending the jobs and leaving the cluster")
            left = self._node.stop(STOP_SECONDS)
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


def simulated_service(how: RayStart, file: Path, say: Callable[[str], None]) -> Service:
    """The service of the host in `file`, called as `how` says or else as the file does.

    It has a home of its own, so that several run beside each other and beside a real one. `OSError`
    when the file cannot be read, `ValueError` when it holds no host.
    """
    from pichak_agent import simulation

    began = time.time()
    host = simulation.load_host(file, how.name, began)
    name = safe_name(host.host)
    marks = {"pichak.io/name": name, "pichak.io/simulated": "true"}
    made = replace(
        how,
        name=name,
        labels={**how.labels, **marks},
        num_cpus=1 if how.num_cpus is None else how.num_cpus,
        num_gpus=host.gpus,
    )
    return Service(
        made,
        name,
        say,
        simulated=str(file.absolute()),
        home=default_root() / "simulated" / name,
        # The machine's own GPUs are not those of the host.
        variables={
            simulation.VARIABLE: simulation.variable(file, name, began),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(host.gpus))),
        },
    )


def _set_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set `stop`, for good: a second one must not cut the clearing up short."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
