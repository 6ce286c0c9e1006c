"""What a process says of its GPUs: a fake torch, real files, threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pichak_agent import child, use_teller
from pichak_agent.daemon import Agent
from pichak_agent.frames import FrameWriter
from pichak_agent.messages import Job, Outcome, decode, encode
from pichak_agent.own_jobs import OwnJobs, telemetry_folder
from pichak_agent.readings import TOLD, OwnUse
from pichak_agent.told_use import read_use
from pichak_agent.use_teller import USE_FILE, UseTeller, gpu_uses, tell_step, telling
from pichak_core.devices import Backend, GpuMemoryUse, ProcessMemory
from pichak_core.devices.cuda_backend import CudaBackend
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.testing import GIB, MIB, FakeCuda

PLAIN = "5f2b3c4d-0000-1111-2222-333344445555"


def one_card(**changes: Any) -> FakeCuda:
    cuda = FakeCuda(8 * GIB, others_bytes=300 * MIB, uuid=PLAIN, **changes)
    cuda.allocate(3 * MIB)
    return cuda


def torch_of(cuda: Any, contexts: set[int] | None = None) -> Any:
    """A torch; with `contexts` it says on which devices this process has one."""
    has = {} if contexts is None else {"_cuda_hasPrimaryContext": lambda i: i in contexts}
    return SimpleNamespace(cuda=cuda, _C=SimpleNamespace(**has))


def test_what_torch_knows_is_told_and_no_more() -> None:
    (use,) = gpu_uses(torch_of(one_card(), {0}), alone=True)
    # The allocator reserved 4 MiB; the context outside it is not known, so nothing is "held".
    told = OwnUse(f"GPU-{PLAIN}", allocated_bytes=3 * MIB, reserved_bytes=4 * MIB)
    assert use == replace(told, processes=1)
    assert gpu_uses(torch_of(one_card()), alone=False) == [told]


def test_cuda_is_never_started() -> None:
    sleeping = SimpleNamespace(is_initialized=lambda: False)  # anything else would raise
    assert gpu_uses(torch_of(sleeping), alone=True) == []


class Cards:
    """Four cards; `nameless` of them has no UUID."""

    def __init__(self, nameless: int = -1) -> None:
        self.nameless = nameless

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"MIG-{index}") if index != self.nameless else object()

    def memory_allocated(self, index: int) -> int:
        return 100 + index

    def memory_reserved(self, index: int) -> int:
        return 200 + index


def test_each_card_with_a_context_is_told() -> None:
    uses = gpu_uses(torch_of(Cards(), {1, 3}), alone=True)
    assert [(use.uuid, use.allocated_bytes) for use in uses] == [("MIG-1", 101), ("MIG-3", 103)]
    # Which ones it uses is not known, or not by name: it may be any.
    assert gpu_uses(torch_of(Cards()), alone=True) == []
    assert gpu_uses(torch_of(Cards(nameless=3), {1, 3}), alone=True) == []


def counting(cuda: FakeCuda, answer: GpuMemoryUse | Unmeasured) -> Callable[[str], Backend]:
    return lambda device: CudaBackend(device, cuda, counters=lambda: answer)


def test_where_the_system_counts_what_is_held_is_known() -> None:
    cuda = one_card()
    counters = GpuMemoryUse(80 * MIB, 5 * MIB, 900 * MIB, 50 * MIB)
    (use,) = gpu_uses(torch_of(cuda), alone=True, backend=counting(cuda, counters))
    assert (use.held_bytes, use.memory_source) == (80 * MIB, TOLD)
    assert use.memory == ProcessMemory(80 * MIB, 5 * MIB, 4 * MIB, 900 * MIB, 50 * MIB)


def test_counters_that_are_missing_are_no_zeros() -> None:  # field case 39
    cuda = one_card()
    missing = Unmeasured("memory", Reason.NOT_SUPPORTED, "no counter")
    (use,) = gpu_uses(torch_of(cuda), alone=True, backend=counting(cuda, missing))
    assert (use.held_bytes, use.memory, use.allocated_bytes) == (None, None, 3 * MIB)
    assert (use.reserved_bytes, use.memory_source) == (4 * MIB, "")


def teller(path: Path, torch: Any, **more: Any) -> UseTeller:
    return UseTeller(path, find_torch=lambda: torch, is_alone=lambda: True, **more)


def read(path: Path) -> tuple[OwnUse, ...]:
    return read_use(path, "job", steady_seconds=use_teller.steady_seconds())


def test_nothing_to_tell_writes_nothing(tmp_path: Path) -> None:
    teller(tmp_path / "told", None).tell()
    teller(tmp_path / "told", torch_of(one_card(initialized=False))).tell()
    assert list(tmp_path.iterdir()) == []


def test_a_reading_that_fails_writes_nothing_and_the_next_one_tells(tmp_path: Path) -> None:
    path = tmp_path / "told"
    torch, asked = torch_of(one_card()), threading.Semaphore(0)
    broken = [KeyError("a torch of another kind"), RuntimeError("CUDA error: device-side assert")]

    def find() -> Any:
        asked.release()
        if broken:
            assert not path.exists()
            raise broken.pop(0)
        return torch

    made = UseTeller(path, find_torch=find, is_alone=lambda: True, interval_seconds=0.01)
    thread = threading.Thread(target=made.run)
    thread.start()
    for _ in range(4):
        assert asked.acquire(timeout=10)
    made.end()
    thread.join(10)
    assert not thread.is_alive()
    assert read(path)[0].allocated_bytes == 3 * MIB


def test_a_disk_that_is_full_disturbs_nobody(tmp_path: Path) -> None:
    path = tmp_path / "no folder" / "told"
    made = teller(path, torch_of(one_card()))
    with pytest.raises(OSError, match="No such file"):
        made.tell()
    made.end()
    made.run()


def test_steps_are_heard_inside_alone(tmp_path: Path) -> None:
    tell_step(0.5)
    with telling(tmp_path / "job"):
        tell_step(0.5)  # a probe's own steps vary in size
    path = tmp_path / "told"
    with telling(path, steps=True):
        assert use_teller._HEARING[-1].seconds_per_step is None
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            tell_step(bad)
        assert use_teller._HEARING[-1].seconds_per_step is None
        tell_step(0.25)
        use_teller._HEARING[-1].tell()
        assert read(path)[0].seconds_per_step == 0.25
    assert use_teller._HEARING == []
    assert [p.name for p in tmp_path.iterdir()] == ["told"]
    assert not [t for t in threading.enumerate() if t.name == "use"]


@pytest.mark.parametrize(
    ("words", "alone"),
    [
        (["-c", "input()"], False),
        (["-c", "import sys; input()", "from pichak_core.devices.nvml_child import main"], True),
    ],
)
def test_what_a_process_started_may_use_the_gpu_too(words: list[str], alone: bool) -> None:
    code = (
        "import subprocess, sys; from pichak_agent.use_teller import _started_nothing as n; "
        "print(n()); p = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=-1); "
        "print(n()); p.communicate(b'\\n'); print(n())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", str(alone), "True"]


def job_in_this_process(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """What the job's kind was given, and whether a thread told meanwhile."""
    seen: list[tuple[dict[str, Any], bool]] = []

    def kind(given: dict[str, Any], **_: Any) -> dict[str, Any]:
        seen.append((given, any(t.name == "use" for t in threading.enumerate())))
        return {}

    monkeypatch.setattr(child, "leave_alone", lambda *_, **__: None)
    monkeypatch.setitem(child.JOBS, "ramp", kind)
    with open(os.devnull, "wb") as sink:
        writer = FrameWriter(sink.fileno())
        assert child.run_job(Job("job", 1, "ramp", params, 10.0), writer).status == "ok"
    until = time.monotonic() + 5
    while any(t.name == "use" for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "use"]
    return seen[0]


def test_a_child_tells_where_its_agent_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "told")
    for params, told in (
        ({"device": "cuda:0", USE_FILE: path}, True),
        ({"device": "cpu", USE_FILE: path}, False),
        ({"device": "cuda:0"}, False),
        ({"device": "cuda:0", USE_FILE: ["no path"]}, False),
    ):
        given, thread = job_in_this_process(monkeypatch, params)
        assert given == {"device": params["device"]}
        assert thread is told


#: A job's process finds this torch imported; it has a context, and no CUDA for a measurement.
FAKE_TORCH = """
import sys
if "pichak_agent.child" in sys.orig_argv:
    from types import ModuleType, SimpleNamespace
    from pichak_core.testing import FakeCuda
    torch = ModuleType("torch")
    torch.cuda = FakeCuda(8 * 2**30, uuid={uuid!r})
    torch.cuda.is_available = lambda: False
    torch.cuda.allocate(3 * 2**20)
    torch._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: True)
    torch.__version__ = "2.9"
    sys.modules["torch"] = torch
"""
IDLE_GPU = """
from types import SimpleNamespace as Made
class NVMLError(Exception):
    value = 3
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetName(h): return "NVIDIA L4"
def nvmlDeviceGetUtilizationRates(h): return Made(gpu=0)
def nvmlDeviceGetMemoryInfo(h): return Made(total=23000 * 2**20, used=300 * 2**20, free=0)
def nvmlDeviceGetComputeRunningProcesses(h): return []
"""


def test_a_real_job_tells_and_its_agent_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, home = tmp_path / "path", tmp_path / "home"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(FAKE_TORCH.format(uuid=PLAIN))
    (modules / "pynvml.py").write_text(IDLE_GPU)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    seen: set[OwnUse] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            seen.update(OwnJobs(home).uses())

    looking = threading.Thread(target=look)
    looking.start()
    agent = Agent("one", root=home)
    params = {"device": "cuda:0", "only": ["software"]}
    outcome = decode(agent.run(encode(Job("job", 1, "fingerprint", params, 60.0))), Outcome)
    agent.close()
    ended.set()
    looking.join()
    assert outcome.status == "ok", outcome.error
    told = OwnUse(f"GPU-{PLAIN}", "job.1", 1, allocated_bytes=3 * MIB, reserved_bytes=4 * MIB)
    assert seen == {OwnUse("", "job.1"), told}
    # It lists the job, and the job's own process tells.
    (lister,) = {use.process for use in seen if not use.uuid and use.process}
    (teller,) = {use.process for use in seen if use.uuid and use.process}
    assert lister.pid == os.getpid() != teller.pid
    assert list((telemetry_folder(home) / "use").iterdir()) == []
