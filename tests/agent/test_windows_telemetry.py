"""Windows' GPU memory counters through the whole agent: from the libraries' answers by the sampler
to ring, JSON, Prometheus and findings.

The libraries of Windows and NVML are stand-ins; what lies behind them is real, with its files, and
where a test is about that with its processes. Time is told.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_windows import FakeWindows, SessionInProcess
from prometheus_client.parser import text_string_to_metric_families

from pichak_agent.messages import Job
from pichak_agent.own_jobs import OwnJobs
from pichak_agent.readings import COUNTED, TOLD, Reading
from pichak_agent.telemetry import Telemetry
from pichak_agent.use_teller import USE_FILE, UseTeller
from pichak_agent.watch import WatchFinding
from pichak_core.devices import GpuMemoryUse
from pichak_core.devices.cuda_backend import CudaBackend
from pichak_core.devices.gpus import Report
from pichak_core.devices.host import HostKind, this_host
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_session import Answer
from pichak_core.devices.processes import started_at
from pichak_core.devices.windows_child import CounterSession
from pichak_core.testing import GIB, MIB, FakeClock, FakeCuda

UUID = "GPU-5e1f0c7a-3b2d-4a66-9d11-70aa3c5be401"
ME = os.getpid()
#: The machine that the test runs on is real, and an hour of it passes within seconds.
OF_THE_HOST = {"clock_jumped", "cpu_steal", "disk_filling", "memory_pressure", "oom_kill"}


class FakeNvml:
    """Stands for an NVML session: one WDDM card, on which everybody uses what Windows counts."""

    pid, alive, listener_cpu_seconds = 1, True, 0.0

    def __init__(self, windows: FakeWindows) -> None:
        self.windows = windows
        self._answer: Answer | None = None

    @property
    def waiting(self) -> bool:
        return self._answer is not None

    def ask(self, request: Any, budget: float) -> None:
        used = self.windows.others[0] + sum(both[0] for both in self.windows.processes.values())
        values: dict[str, Any] = {"memory_used_bytes": used, "memory_total_bytes": 12 * GIB}
        values["memory_reserved_bytes"] = 300 * MIB
        if request == "full":
            values |= {"uuid": UUID, "name": "NVIDIA GeForce RTX 4070", "driver_model": 0}
            values["pci_bus_id"] = "00000000:01:00.0"
        self._answer = Answer(request, Report({}, [Gpu(0, values)]), count=1)

    def collect(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self, patience_seconds: float = 2.0) -> None:
        self._answer = None


class SilentHost:
    """A machine that tells nothing of itself; what it would tell is other tests' subject."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def silent(*_: Any) -> Any:
            raise NotImplementedError(name)

        return silent


class Node:
    """A Windows machine, its telemetry, and a training on it whose allocator is a fake. `reads`:
    the training reads its own counters, too."""

    def __init__(self, home: Path, *, start: Callable[[], Any] | None = None) -> None:
        self.clock = FakeClock(1000.0)
        self.windows = FakeWindows(others=(700 * MIB, 100 * MIB))
        self.sessions: list[SessionInProcess] = []
        self.cpu = 0.001
        self.telemetry = Telemetry(
            home,
            host=SilentHost(),  # type: ignore[arg-type]
            start_nvml=lambda: FakeNvml(self.windows),  # type: ignore[arg-type,return-value]
            start_counters=start or self._start,
            own=OwnJobs(home, steady=self.clock).uses,
            clock=lambda: 1.8e9 + self.clock.now,
            steady=self.clock,
        )
        self.home = home
        self.cuda = FakeCuda(500 * GIB, uuid=UUID.removeprefix("GPU-"))
        self.reads: GpuMemoryUse | None = None
        self.story: dict[str, dict[str, float]] = {}
        self.last: dict[str, WatchFinding] = {}

    def _start(self) -> CounterSession:
        self.sessions.append(SessionInProcess(self.windows, self.clock, self.cpu))
        return self.sessions[-1]  # type: ignore[return-value]

    @contextlib.contextmanager
    def training(self) -> Iterator[UseTeller]:
        torch = SimpleNamespace(
            cuda=self.cuda, _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda i: i == 0)
        )

        def backend(device: str) -> Any:
            counters = (lambda: self.reads) if self.reads else None
            return CudaBackend(device, self.cuda, counters=counters)  # type: ignore[arg-type]

        job = Job("job", 1, "ramp", {"device": "cuda:0"}, 10.0)
        with OwnJobs(self.home, steady=self.clock).running(job) as given:
            yield UseTeller(
                Path(given.params[USE_FILE]),
                find_torch=lambda: torch,
                is_alone=lambda: True,
                steady=self.clock,
                backend=backend,
            )

    def use(self, reserved: int, dedicated: int, shared: int) -> None:
        """The training holds so much, and Windows counts that."""
        self.cuda._allocated = self.cuda._reserved = reserved
        self.windows.processes = {ME: (dedicated, shared)}

    def pass_seconds(self, seconds: float, teller: UseTeller | None = None, step: int = 1) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            if teller is not None:
                teller.tell()
            assert self.telemetry.tick()
            for found in self.telemetry._watch.findings():
                if found.sign.code in OF_THE_HOST:
                    continue
                times = self.story.setdefault(found.sign.code, {})
                times.setdefault(found.state, self.clock.now)
                self.last[found.sign.code] = found
            self.clock.advance(step)

    @property
    def state(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(json.dumps(self.telemetry.as_json()))
        return made


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    # A file system in memory where there is one: a trace renames thousands of files.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as home:
        made = Node(Path(home))
        yield made
        made.telemetry.stop()


def test_from_the_counters_to_ring_json_and_prometheus(node: Node) -> None:
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 90 * MIB)
    with node.training() as teller:
        node.pass_seconds(5, teller)
        state = node.state
        counters = state["memory_counters"]
        assert counters["gap"] == ""
        assert counters["interval_seconds"] == 1.0
        card = {
            "pci_address": "01:00.0",
            "uuid": UUID,
            "dedicated_bytes": 6 * GIB + 776 * MIB,
            "shared_bytes": 190 * MIB,
        }
        mine = {
            "job": "job.1",
            "uuid": UUID,
            "pid": ME,
            "dedicated_bytes": 6 * GIB + 76 * MIB,
            "shared_bytes": 90 * MIB,
            "reserved_bytes": 6 * GIB,
            "source": COUNTED,
        }
        assert state["cards"] == [card]
        assert state["own_memory"] == [mine]
        assert state["latest"]["cards"] == [card]
        assert [r["own_memory"] for r in state["ring"][-3:]] == [[mine]] * 3
        (use,) = node.telemetry.ring()[-1].own
        assert use.held_bytes == 6 * GIB + 76 * MIB
        assert {pid for asked in node.sessions[0].asked for pid in asked} == {ME}
        text = node.telemetry.prometheus().splitlines()
        everybody = 6 * GIB + 776 * MIB
        name = f'gpu="0",uuid="{UUID}",name="NVIDIA GeForce RTX 4070"'
        who = f'{name},job="job.1",pid="{ME}",source="{COUNTED}"'
        for line in (
            "# TYPE pichak_gpu_card_dedicated_bytes gauge",
            f'pichak_gpu_card_dedicated_bytes{{{name},pci_address="01:00.0"}} {everybody}',
            f'pichak_gpu_card_shared_bytes{{{name},pci_address="01:00.0"}} {190 * MIB}',
            "# TYPE pichak_gpu_process_shared_bytes gauge",
            f"pichak_gpu_process_dedicated_bytes{{{who}}} {6 * GIB + 76 * MIB}",
            f"pichak_gpu_process_shared_bytes{{{who}}} {90 * MIB}",
            f"pichak_gpu_process_reserved_bytes{{{who}}} {6 * GIB}",
            "pichak_gpu_memory_counters_up 1.0",
        ):
            assert text.count(line) == 1, line
        # As Prometheus' own library reads it.
        told = text_string_to_metric_families(node.telemetry.prometheus())
        families = {family.name: family for family in told}
        family = families["pichak_gpu_process_shared_bytes"]
        assert (family.type, len(family.samples)) == ("gauge", 1)
        assert "system memory" in family.documentation
        assert family.samples[0].labels["source"] == COUNTED
        assert family.samples[0].value == 90 * MIB
    node.pass_seconds(3)
    assert "own_memory" not in node.state  # the training has ended
    assert node.state["cards"]


def test_a_spill_is_suspected_confirmed_and_resolved(node: Node) -> None:  # field cases 33, 34
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 100 * MIB)
    with node.training() as teller:
        node.pass_seconds(200, teller)
        assert node.story == {}
        begins = node.clock.now
        # Two more GiB are asked for, and lie in system memory.
        node.use(8 * GIB, 6 * GIB + 76 * MIB, 2 * GIB + 100 * MIB)
        node.pass_seconds(120, teller)
        assert set(node.story) == {"gpu_spill"}
        times = node.story["gpu_spill"]
        assert begins <= times["suspected"] <= begins + 20
        assert times["suspected"] + 30 <= times["confirmed"] <= begins + 60
        sign = node.last["gpu_spill"].sign
        assert (sign.severity, sign.subject) == ("fail", UUID)
        assert "2.0 GiB of the job job.1 lie in system memory" in sign.sentence
        assert sign.evidence["moved_bytes"] == 2 * GIB
        assert sign.evidence["source"] == COUNTED
        assert 'pichak_finding{code="gpu_spill",severity="fail",state="confirmed"' in (
            node.telemetry.prometheus()
        )
        ends = node.clock.now
        node.use(6 * GIB, 6 * GIB + 76 * MIB, 100 * MIB)
        node.pass_seconds(120, teller)
        # A minute after the last look that saw it.
        assert ends + 50 <= times["resolved"] <= ends + 80
    assert set(node.story) == {"gpu_spill"}


def test_a_job_whose_allocator_was_not_known_at_first_is_judged_from_when_it_is(
    node: Node,
) -> None:
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 100 * MIB)
    with node.training() as teller:
        node.pass_seconds(1, teller)
        node.pass_seconds(8)  # it tells once, and what it holds later is not known
        assert "reserved_bytes" not in node.state["own_memory"][0]
        node.pass_seconds(20, teller)
        node.use(6 * GIB, 5 * GIB, GIB + 176 * MIB)
        node.pass_seconds(30, teller)
    assert node.last["gpu_spill"].sign.evidence["moved_bytes"] == GIB + 76 * MIB


def test_an_allocator_at_work_is_not_taken_for_moved_memory(node: Node) -> None:
    """What is counted is newer than what was told: the difference must not be what a later reading
    is held against, or pinned memory would be a spill."""
    node.use(GIB, GIB + 76 * MIB, 80 * MIB)
    with node.training() as teller:
        for second in range(8):
            teller.tell()  # then it allocates, and then it is counted
            node.use((2 + second) * GIB, (2 + second) * GIB + 76 * MIB, 80 * MIB)
            node.pass_seconds(1)
        assert "reserved_bytes" not in node.state["own_memory"][0]
        node.pass_seconds(20, teller)
        assert node.state["own_memory"][0]["reserved_bytes"] == 9 * GIB
        node.use(9 * GIB, 9 * GIB + 76 * MIB, 6 * GIB)
        node.pass_seconds(120, teller)
    assert node.story == {}


def test_another_program_is_pushed_out_also_where_the_training_hangs(node: Node) -> None:
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 100 * MIB)
    with node.training() as teller:
        node.pass_seconds(20, teller)
        node.pass_seconds(100)  # it tells nothing more: what its allocator holds is old
        assert node.state["own_memory"][0]["dedicated_bytes"] == 6 * GIB + 76 * MIB
        assert "reserved_bytes" not in node.state["own_memory"][0]
        node.windows.others = (0, 1100 * MIB)
        node.pass_seconds(80)
        sign = node.last["gpu_pushed_out"].sign
        assert sign.evidence["others_bytes"] == 1000 * MIB
        assert node.last["gpu_pushed_out"].state == "confirmed"
        # Whether its own memory went too cannot be said without what it holds.
        node.windows.processes = {ME: (4 * GIB, 2 * GIB + 100 * MIB)}
        node.pass_seconds(60)
    assert "gpu_spill" not in node.story


@pytest.mark.parametrize("cpu", [0.001, 0.006])
def test_what_others_hold_is_known_where_the_agent_counts_its_own(node: Node, cpu: float) -> None:
    """Also where the counters cost so much that they are read every fourth second."""
    node.cpu = cpu
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 0)
    with node.training() as teller:
        node.pass_seconds(150, teller)
        assert node.story == {}
        node.windows.others = (3 * GIB, 0)
        node.pass_seconds(130, teller)
    sign = node.last["gpu_shared_memory"].sign
    assert (sign.severity, sign.evidence["bytes"]) == ("warn", 3 * GIB)


def test_a_healthy_hour_is_no_finding(node: Node) -> None:
    """Pinned memory comes and goes, the allocator grows and gives back, a tell is late, the desktop
    moves."""
    with node.training() as teller:
        for second in range(0, 3600, 3):
            reserved = (2 + second // 7 % 9) * GIB
            pinned = (second // 11 % 5) * GIB
            node.use(reserved, reserved + 76 * MIB, pinned + 80 * MIB)
            desktop = 500 + second // 60 % 5 * 40
            node.windows.others = (desktop * MIB, 60 * MIB)
            late = second % 60 == 33
            node.pass_seconds(3, None if late else teller, step=3)
    assert node.story == {}
    known = [use.memory for reading in node.telemetry.ring() for use in reading.own if use.memory]
    assert len(known) > 500
    assert sum(memory.reserved is not None for memory in known) > 100


def test_what_a_process_reads_itself_stands(node: Node) -> None:
    """One source for each number: the process's, in one moment with its allocator."""
    node.use(6 * GIB, 5 * GIB, 7 * MIB)
    node.reads = GpuMemoryUse(6 * GIB + 76 * MIB, 100 * MIB, 7 * GIB, 300 * MIB)
    with node.training() as teller:
        node.pass_seconds(4, teller)
        (mine,) = node.state["own_memory"]
        assert (mine["dedicated_bytes"], mine["source"]) == (6 * GIB + 76 * MIB, TOLD)
        assert node.telemetry.ring()[-1].own[0].held_bytes == 6 * GIB + 76 * MIB
        node.reads = None  # its own counters fail: the agent's reading takes over
        node.pass_seconds(4, teller)
        (mine,) = node.state["own_memory"]
        assert (mine["dedicated_bytes"], mine["source"]) == (5 * GIB, COUNTED)


def test_counters_that_vanish_are_a_gap_and_no_zero(node: Node) -> None:
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 100 * MIB)
    with node.training() as teller:
        node.pass_seconds(30, teller)
        node.windows.status = 0xC0000BC6
        node.pass_seconds(80, teller)
        state = node.state
        gap = "spill unknown: PdhCollectQueryData failed with 0xC0000BC6 (invalid data)"
        assert state["memory_counters"]["gap"] == gap
        assert state["latest"]["counters_gap"] == gap
        assert "cards" not in state
        assert "own_memory" not in state
        assert node.telemetry.ring()[-1].own[0].held_bytes is None
        text = node.telemetry.prometheus()
        assert "pichak_gpu_memory_counters_up 0.0" in text
        assert "pichak_gpu_card" not in text
        assert "pichak_gpu_process" not in text
        found = node.last["spill_unknown"]
        assert (found.state, found.sign.severity) == ("confirmed", "warn")
        assert gap in found.sign.sentence
        node.windows.status = 0
        node.pass_seconds(150, teller)
    assert node.last["spill_unknown"].state == "resolved"
    assert set(node.story) == {"spill_unknown"}
    assert node.state["cards"]


def test_a_number_that_another_process_has_now_is_not_the_training(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own process ends, and its number goes to another before the job's end is noticed."""
    node.use(6 * GIB, 6 * GIB + 76 * MIB, 0)
    with node.training() as teller:
        node.pass_seconds(4, teller)
        assert node.state["own_memory"]
        node.windows.processes = {ME: (1 * GIB, 3 * GIB)}
        memory = node.telemetry._memory
        assert memory is not None
        monkeypatch.setattr(memory, "_started", lambda pid: "another time")
        node.pass_seconds(4, teller)
        # Also what was asked for before, and is answered now, is nobody's.
        for reading in node.telemetry.ring()[-4:]:
            assert (reading.own[0].memory, reading.own[0].held_bytes) == (None, None)
        last = node.telemetry.ring()[-1]
        assert last.cards[0].dedicated_bytes == GIB + 700 * MIB  # the card's is everybody's
        assert node.sessions[0].asked[-1] == []


def test_the_readings_cost_is_in_the_cost_of_the_telemetry(tmp_path: Path) -> None:
    windows, clock = FakeWindows(), FakeClock()
    telemetry = Telemetry(
        tmp_path,
        host=SilentHost(),  # type: ignore[arg-type]
        start_nvml=None,
        start_counters=lambda: SessionInProcess(windows, clock, 0.030),  # type: ignore[arg-type,return-value]
        clock=lambda: 1.8e9 + clock.now,
        steady=clock,
    )
    for _ in range(100):
        telemetry.tick()
        clock.advance(1.0)
    assert telemetry._counters is not None
    counting = telemetry._counters.cpu_seconds
    assert counting == pytest.approx(0.030 * (1 + 100 / 15), rel=0.2)  # never rarer than 15 s
    assert telemetry.as_json()["cpu_seconds"] >= counting
    telemetry.stop()


# --- with the process that reads them ------------------------------------------------------------


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_read_that_hangs_is_given_up_and_told_while_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "windows.json"

    def windows(**does: str) -> None:
        part = tmp_path / "part"  # the process may read it at any moment
        part.write_text(json.dumps({"processes": {}, **does}))
        part.replace(there)

    windows()
    monkeypatch.setenv("FAKE_WINDOWS", str(there))
    start = functools.partial(CounterSession, "fake_windows_child")
    node = Node(tmp_path / "home", start=start)
    telemetry = node.telemetry

    def tick() -> Reading:
        node.clock.advance(1.0)
        telemetry.tick()
        return telemetry.ring()[-1]

    monkeypatch.setattr("pichak_agent.counter_keeper.BUDGET_SECONDS", 1.0)
    try:
        until(lambda: tick().cards)
        assert telemetry._counters is not None
        (pid,) = telemetry._counters.pids
        windows(does="hang")
        until(lambda: tick().counters_gap)
        hung = "spill unknown: Windows' GPU memory counters gave no answer within 1 s"
        counters = node.state["memory_counters"]
        assert counters["gap"] == hung
        assert [text for _, text in counters["incidents"]] == [hung]
        assert started_at(pid) is None
        assert any(reading.gpus for reading in telemetry.ring()[-3:])  # NVML has gone on
        windows()
        until(lambda: tick().cards)
        assert node.state["memory_counters"]["gap"] == ""
    finally:
        telemetry.stop()
    assert telemetry._counters.pids == []


# --- elsewhere -----------------------------------------------------------------------------------


def test_where_nothing_pages_there_is_no_word_of_it(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, start_nvml=None, start_counters=None)
    telemetry.tick()
    state = telemetry.as_json()
    assert not {"memory_counters", "cards", "own_memory"} & set(state)
    assert "counters_gap" not in state["latest"]
    assert "memory_counters" not in telemetry.prometheus()
    telemetry.stop()


def test_wsl2_pages_and_shows_no_counters(tmp_path: Path) -> None:  # field case 36
    class Wsl2:
        def __getattr__(self, name: str) -> Any:
            return getattr(this_host(), name)

        def kind(self) -> HostKind:
            return HostKind("wsl2", "hyper-v", ())

    nvml = FakeNvml(FakeWindows())
    telemetry = Telemetry(
        tmp_path,
        host=Wsl2(),  # type: ignore[arg-type]
        start_nvml=lambda: nvml,  # type: ignore[arg-type,return-value]
        start_counters=None,
    )
    telemetry.tick()
    gap = telemetry.as_json()["memory_counters"]["gap"]
    assert gap.startswith("not measured: Windows' GPU memory counters are not shown inside WSL2")
    assert "pichak_gpu_memory_counters_up 0.0" in telemetry.prometheus()
    assert telemetry.findings() == []
    telemetry.stop()


def test_a_linux_host_loads_nothing_of_it_for_nothing() -> None:
    """No library of Windows is asked for by what imports the telemetry."""
    code = (
        "import ctypes, sys; import pichak_agent.telemetry as t; "
        "print(t._COUNTERS, 'pichak_core.devices.windows' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]
