"""The node's readings, about one a second, in a bounded ring, and what is wrong in them.

One process of a node samples; a lock in the home decides which. It writes its state to a file about
every ten seconds, which the others read.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pichak_agent.counted_memory import CountedMemory
from pichak_agent.counter_keeper import CounterKeeper
from pichak_agent.host_sampler import HostSampler, steady_seconds
from pichak_agent.locks import FileLock
from pichak_agent.memory_state import memory_state, wsl2_gap
from pichak_agent.metrics_text import metrics_text
from pichak_agent.nvml_keeper import NvmlKeeper
from pichak_agent.own_jobs import OwnJobs, telemetry_folder
from pichak_agent.readings import OwnUse, Reading
from pichak_agent.state_file import SCHEMA, StateFile, known_gpus
from pichak_agent.watch import Watch
from pichak_agent.watch_rules import RULES
from pichak_core.devices import gpu_counter_session
from pichak_core.devices.host import Host, this_host
from pichak_core.devices.nvml_session import NvmlSession
from pichak_core.devices.windows_child import CounterSession

_LOG = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
#: The watch needs a few readings of its window of three minutes.
_LONGEST_INTERVAL_SECONDS = 30.0
#: Of one core: what the sampler and the process that reads NVML may take. The interval is set for
#: less than SPEC's 0.5 %, for what the thread's own clock does not count.
CPU_SHARE = 0.003
#: Of the clock: a driver that takes longer is asked less often, since it locks while it answers.
NVML_SHARE = 0.1
RING_READINGS = 600
_STATE_SECONDS = 10.0
#: A state that is older than this says nothing about now.
STALE_SECONDS = 90.0
_COST_SECONDS = 60.0
#: Starts the process that reads the system's GPU memory counters; None where there are none.
_COUNTERS = gpu_counter_session()


class Telemetry:
    """Samples this node from `start()` to `stop()`, or reads the state of the process that does.

    `home` is the root that every agent of the node shares. `start_nvml` makes the session that
    reads NVML, None for a node without; `start_counters` the one that reads Windows' GPU memory
    counters, None elsewhere. `own` tells which jobs of the node's agents run at that
    moment (by default `OwnJobs`).
    """

    def __init__(
        self,
        home: Path,
        *,
        host: Host | None = None,
        start_nvml: Callable[[], NvmlSession] | None = NvmlSession,
        start_counters: Callable[[], CounterSession] | None = _COUNTERS,
        own: Callable[[], Iterable[OwnUse]] | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        ring_readings: int = RING_READINGS,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_seconds,
    ) -> None:
        self.folder = telemetry_folder(home)
        self.state_file = self.folder / "state.json"
        self._state_file = StateFile(self.state_file, self._note)
        self._file_lock = FileLock(self.folder / "lock")
        self._own = OwnJobs(home).uses if own is None else own
        self._clock, self._steady = clock, steady
        host = host or this_host()
        self._sampler = HostSampler(host, home, clock=clock, steady=steady)
        self._keeper = None if start_nvml is None else NvmlKeeper(start_nvml, clock=steady)
        self._counters: CounterKeeper | None = None
        self._memory: CountedMemory | None = None
        if start_counters is not None:
            self._counters = CounterKeeper(start_counters, clock=steady)
            self._memory = CountedMemory(self._counters)
        self._counters_gap = wsl2_gap(host) if start_nvml and not start_counters else ""
        self._watch = Watch(RULES)
        self._ring: deque[Reading] = deque(maxlen=ring_readings)
        self._lock = threading.Lock()
        self._shortest = interval_seconds
        self.interval_seconds = interval_seconds
        self._costs: deque[tuple[float, float]] = deque()
        self._cpu_seconds = self._own_cpu = self._running_cpu = self._first_cpu = 0.0
        self._written = float("-inf")
        self._problems: deque[str] = deque(maxlen=20)
        self._began = clock()
        self._samples = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to sample in a thread, or to wait for the place of whoever samples already."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and the process that reads NVML; the state file stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None
        self._give_up()

    @property
    def owner(self) -> bool:
        """Whether this object samples the node."""
        return self._file_lock.held

    # -- what it knows ----------------------------------------------------------------------------

    def ring(self) -> list[Reading]:
        """The last minutes' readings, the oldest first; none where another process samples."""
        with self._lock:
            return list(self._ring)

    def latest(self) -> Reading | None:
        """The newest reading of this process."""
        with self._lock:
            return self._ring[-1] if self._ring else None

    def findings(self) -> list[dict[str, Any]]:
        """What the watch found (`WatchFinding.as_dict`), the worst first; of the process that
        samples, where that is another one. Empty where nobody has sampled lately."""
        return list(self.as_json(ring=False)["findings"])

    def as_json(self, *, ring: bool = True) -> dict[str, Any]:
        """Everything, JSON-ready. `stale` says that nobody has sampled lately; `source` who did."""
        if self.owner:
            with self._lock:
                made = self._state()
                made["ring"] = [reading.as_dict() for reading in self._ring] if ring else []
            return made
        made = self._state_file.read()
        made["stale"] = not -STALE_SECONDS < self._clock() - made["at_unix"] < STALE_SECONDS
        if made["stale"]:
            made["findings"] = []
        return made

    def prometheus(self) -> str:
        """The newest readings and the findings in Prometheus' text form."""
        return metrics_text(self.as_json(ring=False))

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        due = self._steady()
        while not self._stop.wait(max(0.0, due - self._steady())):
            try:
                self.tick()
            # One odd answer of a machine must not end the sampling of it; it is told.
            except Exception as error:  # noqa: BLE001
                self._note(
                    f"a reading of this machine failed and is left out: {type(error).__name__}: "
                    f"{error}"
                )
                _LOG.debug("telemetry", exc_info=True)
            due = max(self._steady(), due + self.interval_seconds)
        self._give_up()

    def tick(self) -> bool:
        """Take one reading, if this is the process that samples; whether it was taken."""
        if not self._file_lock.held and not self._take_place():
            self.interval_seconds = _STATE_SECONDS
            return False
        before = time.thread_time()
        reading = self._read()
        with self._lock:
            self._ring.append(reading)
            self._watch.take(reading)
            self._samples += 1
            due = reading.steady_seconds - self._written >= _STATE_SECONDS
            text = json.dumps(self._state()) if due else ""
        if due:
            self._written = reading.steady_seconds
            self._state_file.write(text)
        spent = time.thread_time() - before
        self._own_cpu += spent
        if self._samples == 1:
            self._first_cpu = spent
        self._pace(reading.steady_seconds)
        return True

    def _read(self) -> Reading:
        now, steady, host = self._sampler.read()
        own = tuple(self._own())
        keeper = self._keeper
        answer = None if keeper is None else keeper.poll()
        gpus = () if answer is None else answer.gpus
        reading = Reading(now, steady, host, gpus, own=own)
        if keeper is not None:
            reading = replace(
                reading,
                nvml_gap=keeper.gap,
                nvml_reason=keeper.reason,
                fresh_gap=keeper.fresh_gap,
                full=answer is not None and answer.full,
            )
        if self._memory is not None:
            own, cards = self._memory.read(own, gpus)
            gap = self._memory.keeper.gap
            reading = replace(reading, own=own, cards=cards, counters_gap=gap)
        return reading

    def _pace(self, steady: float) -> None:
        """Set the interval by what the last minute's readings cost."""
        keeper = self._keeper
        keepers = [each for each in (keeper, self._counters) if each is not None]
        starting = sum(each.starting_cpu_seconds for each in keepers)
        total = self._own_cpu + sum(each.cpu_seconds for each in keepers)
        # What happens once, or a few times an hour, sets no pace.
        running = total - starting - self._first_cpu
        self._costs.append((steady, running - self._running_cpu))
        self._cpu_seconds, self._running_cpu = total, running
        while steady - self._costs[0][0] > _COST_SECONDS:
            self._costs.popleft()
        each = sum(cost for _, cost in self._costs) / len(self._costs)
        nvml = keeper.seconds if keeper else 0.0
        wanted = max(self._shortest, each / CPU_SHARE, nvml / NVML_SHARE)
        self.interval_seconds = min(_LONGEST_INTERVAL_SECONDS, wanted)

    # -- place and state --------------------------------------------------------------------------

    def _take_place(self) -> bool:
        try:
            taken = self._file_lock.try_acquire(f"pid {os.getpid()}")
        except OSError as error:
            self._note(
                f"the readings of this machine cannot be kept in {self.folder} "
                f"({error.strerror or error}), so none are taken: let this user write there, or "
                "set PICHAK_HOME to another folder"
            )
            return False
        if taken:
            self.interval_seconds = self._shortest
            # Which GPUs the node had is known from whoever sampled it before, since its boot.
            self._watch = Watch(RULES, known_gpus(self._state_file.read()))
        return taken

    def _give_up(self) -> None:
        for keeper in (self._keeper, self._counters):
            if keeper is not None:
                keeper.close()
        self._file_lock.release()

    def _state(self) -> dict[str, Any]:
        latest = self._ring[-1] if self._ring else None
        with_gpus = next((r for r in reversed(self._ring) if r.gpus), None)
        keeper = self._keeper
        elapsed = max(1e-9, self._clock() - self._began)
        return {
            "schema": SCHEMA,
            "at_unix": latest.at_unix if latest else self._began,
            "source": f"pid {os.getpid()}",
            "stale": False,
            "interval_seconds": round(self.interval_seconds, 3),
            "readings": self._samples,
            "cpu_seconds": round(self._cpu_seconds, 6),
            "cpu_percent": round(100 * self._cpu_seconds / elapsed, 4),
            "nvml": {
                "gap": keeper.gap if keeper else "not asked",
                "system": dict(keeper.system) if keeper else {},
                "incidents": [list(each) for each in keeper.incidents] if keeper else [],
            },
            **memory_state(self._ring, self._counters, self._counters_gap),
            "gaps": dict(self._sampler.gaps),
            "problems": list(self._problems),
            "latest": latest.as_dict() if latest else None,
            "gpus": _gpus(with_gpus),
            "had": dict(self._watch.had),
            "findings": [found.as_dict() for found in self._watch.findings()],
            "ring": [],
        }

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            _LOG.warning(problem)
            self._problems.append(problem)


def _gpus(reading: Reading | None) -> Sequence[dict[str, Any]]:
    """The GPUs as they were last read, each with its facts."""
    if reading is None:
        return []
    return [{**gpu.as_dict(), "facts": dict(gpu.facts)} for gpu in reading.gpus]
