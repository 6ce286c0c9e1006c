"""What a process tells of itself, through its file, to what the watch finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pichak_agent.messages import Job
from pichak_agent.own_jobs import OwnJobs
from pichak_agent.readings import GpuReading, OwnUse, Reading
from pichak_agent.testing import Fault, SimulatedCard, SimulatedNode, gpu_fault
from pichak_agent.use_teller import USE_FILE, UseTeller
from pichak_agent.watch import Watch, WatchFinding
from pichak_agent.watch_rules import RULES
from pichak_core.devices import Backend, GpuMemoryUse
from pichak_core.devices.cuda_backend import CudaBackend
from pichak_core.testing import GIB, MIB, FakeCuda

BEGINS = 400.0
SECONDS = 700.0
NODE = SimulatedNode(cards=(SimulatedCard(), SimulatedCard()), jobs=0.0, seed=3, interval_seconds=3)


def uuids(node: SimulatedNode) -> list[str]:
    return [gpu.uuid for gpu in next(iter(node.trace(1))).gpus]


@dataclass
class Training:
    """A job's process on the first card of a node, with a fake torch; `steady` is the trace's."""

    home: Path
    uuid: str
    steady: float = 0.0
    # A driver that pages gives more than the card has.
    cuda: FakeCuda = field(default_factory=lambda: FakeCuda(500 * GIB))
    counters: GpuMemoryUse | None = None

    def __post_init__(self) -> None:
        self.cuda.uuid = self.uuid.removeprefix("GPU-")
        self.jobs = OwnJobs(self.home, steady=lambda: self.steady)

    def backend(self, device: str) -> Backend:
        assert self.counters is not None
        return CudaBackend(device, self.cuda, counters=lambda: self.counters)  # type: ignore[arg-type,return-value]

    def teller(self, given: Job) -> UseTeller:
        torch = SimpleNamespace(
            cuda=self.cuda, _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda i: i == 0)
        )
        return UseTeller(
            Path(given.params[USE_FILE]),
            find_torch=lambda: torch,
            is_alone=lambda: True,
            steady=lambda: self.steady,
            backend=self.backend if self.counters else None,
        )


#: Changes a training that is so many seconds old.
Change = Callable[[float, Training, UseTeller], None]


def found(training: Training, change: Change, *faults: Fault) -> dict[str, WatchFinding]:
    """Every finding that was confirmed, by its code."""
    watch, made = Watch(RULES), {}
    job = Job("job", 1, "ramp", {"device": "cuda:0"}, 10.0)
    with training.jobs.running(job) as given:
        teller = training.teller(given)
        for reading in NODE.trace(SECONDS, faults):
            training.steady = reading.steady_seconds
            change(reading.steady_seconds, training, teller)
            teller.tell()
            watch.take(replace(reading, own=training.jobs.uses()))
            made |= {f.sign.code: f for f in watch.findings() if f.state == "confirmed"}
    return made


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path, uuids(NODE)[0])


def test_a_quiet_job_is_no_finding(training: Training) -> None:
    def change(at: float, training: Training, teller: UseTeller) -> None:
        if at < 1:
            training.cuda.allocate(79 * GIB)
        teller.seconds_per_step = 0.5 + 0.01 * (int(at) % 7)

    assert found(training, change, gpu_fault(0, compute_processes=1)) == {}


def test_more_than_the_card_has(training: Training) -> None:  # field case 36
    def change(at: float, training: Training, teller: UseTeller) -> None:
        if not training.cuda.memory_allocated(0) and at >= BEGINS:
            training.cuda.allocate(90 * GIB)

    (finding,) = found(training, change).values()
    assert (finding.sign.code, finding.sign.subject) == ("gpu_spill", training.uuid)
    assert finding.sign.evidence["held_bytes"] == 90 * GIB
    assert "job.1 holds 90.0 GiB and the card has 80.0 GiB" in finding.sign.sentence
    assert finding.first_unix >= 1.8e9 + BEGINS


def test_a_spill_by_the_counters(training: Training) -> None:  # field cases 33, 34
    training.cuda.allocate(6 * GIB)
    training.counters = GpuMemoryUse(6 * GIB + 76 * MIB, 100 * MIB, 7 * GIB, 300 * MIB)

    def change(at: float, training: Training, teller: UseTeller) -> None:
        if at >= BEGINS:
            training.counters = GpuMemoryUse(
                5 * GIB + 76 * MIB, GIB + 100 * MIB, 6 * GIB, GIB + 300 * MIB
            )

    (finding,) = found(training, change).values()
    assert (finding.sign.code, finding.sign.subject) == ("gpu_spill", training.uuid)
    assert finding.sign.evidence["moved_bytes"] == GIB


def test_another_program_is_pushed_out(training: Training) -> None:
    training.cuda.allocate(6 * GIB)
    training.counters = GpuMemoryUse(6 * GIB + 76 * MIB, 100 * MIB, 7 * GIB, 300 * MIB)

    def change(at: float, training: Training, teller: UseTeller) -> None:
        if at >= BEGINS:
            training.counters = GpuMemoryUse(
                6 * GIB + 76 * MIB, 100 * MIB, 7 * GIB, 2 * GIB + 300 * MIB
            )

    (finding,) = found(training, change).values()
    assert finding.sign.code == "gpu_pushed_out"
    assert finding.sign.evidence["others_bytes"] == 2 * GIB


def test_steps_that_become_slow(training: Training) -> None:  # field cases 33, 35
    def change(at: float, training: Training, teller: UseTeller) -> None:
        teller.seconds_per_step = (0.5 if at < BEGINS else 4.5) + 0.01 * (int(at) % 7)

    (finding,) = found(training, change).values()
    assert (finding.sign.code, finding.sign.subject) == ("throughput_collapse", "job.1")
    assert finding.sign.evidence["before_seconds_per_step"] == pytest.approx(0.53, abs=0.02)
    assert finding.sign.evidence["seconds_per_step"] == pytest.approx(4.53, abs=0.02)


def test_a_stranger_beside_a_job(training: Training) -> None:
    two = gpu_fault(0, compute_processes=lambda at, _: 1 if at < BEGINS else 2)
    (finding,) = found(training, lambda *_: None, two).values()
    assert (finding.sign.code, finding.sign.severity) == ("gpu_foreign_process", "warn")
    assert finding.sign.evidence["processes"] == 1


def test_a_stranger_on_the_other_card_is_none_beside_the_job(training: Training) -> None:
    one = gpu_fault(BEGINS, 1, compute_processes=1)
    (finding,) = found(training, lambda *_: None, one).values()
    assert (finding.sign.code, finding.sign.severity) == ("gpu_foreign_process", "info")
    assert finding.sign.subject == uuids(NODE)[1]


def test_where_others_hold_beside_a_job_whose_share_the_system_counts(training: Training) -> None:
    training.cuda.allocate(6 * GIB)
    training.counters = GpuMemoryUse(6 * GIB + 76 * MIB, 100 * MIB)
    used = gpu_fault(0, memory_used_bytes=lambda at, _: (7 if at < BEGINS else 20) * GIB)
    (finding,) = found(training, lambda *_: None, used).values()
    assert (finding.sign.code, finding.sign.severity) == ("gpu_shared_memory", "warn")
    assert finding.sign.evidence["bytes"] == 14 * GIB - 76 * MIB


def test_what_the_context_takes_is_nobody(training: Training) -> None:
    """Without such counters the job's share is not known: nothing is said of others."""
    training.cuda.allocate(6 * GIB)
    used = gpu_fault(0, memory_used_bytes=20 * GIB)
    assert found(training, lambda *_: None, used) == {}


def test_a_job_on_a_part_of_a_card_may_be_on_any() -> None:
    gpus = (GpuReading(0, "GPU-a"), GpuReading(1, "GPU-b"), GpuReading(2, ""))
    own = tuple(OwnUse(uuid, uuid) for uuid in ("GPU-a", "GPU-slice", ""))
    reading = Reading(0.0, 0.0, gpus=gpus, own=own)
    assert [[use.job for use in reading.own_on(gpu)] for gpu in gpus] == [
        ["GPU-a", "GPU-slice", ""],
        ["GPU-slice", ""],
        ["GPU-slice", ""],
    ]
    late = replace(reading, gpus=())  # NVML has not answered
    assert [[use.job for use in late.own_on(gpu)] for gpu in gpus] == [["GPU-a", ""], [""], [""]]
