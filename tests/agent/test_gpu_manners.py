"""A job leaves a GPU alone on which somebody works: real children, a fake NVML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pichak_agent import gpu_manners
from pichak_agent.gpu_manners import join_use, leave_alone
from pichak_agent.messages import Job, Outcome, decode
from pichak_agent.runner import run
from pichak_core.devices.gpu_use import GpuUse
from pichak_core.plan import Plan

#: One L4 with the process `PID` on it; its cores work until the file `quiet` is there.
FAKE = """
import os
from types import SimpleNamespace as Made
class NVMLError(Exception):
    value = 3
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetName(h): return "NVIDIA L4"
def nvmlDeviceGetUtilizationRates(h): return Made(gpu=0 if os.path.exists({quiet!r}) else 95)
def nvmlDeviceGetMemoryInfo(h): return Made(total=23000 * 2**20, used=6000 * 2**20, free=0)
def nvmlDeviceGetComputeRunningProcesses(h): return [Made(pid={pid}, usedGpuMemory=5000 * 2**20)]
"""


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU on which the process that started this test's works, until this file is made."""
    folder = tmp_path / "path"
    folder.mkdir()
    made = tmp_path / "quiet"
    (folder / "pynvml.py").write_text(FAKE.format(quiet=str(made), pid=os.getppid()))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return made


def start(kind: str, **params: Any) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    job = Job("job", 1, kind, params, 100.0)
    return decode(run(job, on_progress=said.append), Outcome), said


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("fingerprint", {"only": ["software"]}),
        ("task", {"model": "builtin:gpt-1m"}),
        ("ramp", {"model": "builtin:gpt-1m"}),
        ("collective", {}),
    ],
)
def test_every_kind_that_takes_a_gpu_says_busy_and_who(
    quiet: Path, kind: str, params: dict[str, Any]
) -> None:
    assert not quiet.exists()
    outcome, _ = start(kind, device="cuda:0", **params)
    assert outcome.status == "busy"
    assert outcome.error.startswith(f"cuda:0 (NVIDIA L4) is in use by pid {os.getppid()}")
    assert outcome.error.endswith("utilisation 95 % (5 looks, 0.4 s apart); it was left alone")
    (user,) = outcome.result["gpu_use"]["users"]
    assert (user["pid"], user["used_bytes"]) == (os.getppid(), 5000 * 2**20)


def test_a_job_without_a_gpu_does_not_look(quiet: Path) -> None:
    assert not quiet.exists()
    outcome, said = start("fingerprint", device="cpu", only=["software"])
    assert outcome.status == "ok"
    assert "gpu_use" not in outcome.result
    assert said == ["software"]


def test_who_insists_is_told(quiet: Path) -> None:
    assert not quiet.exists()
    outcome, _ = start("fingerprint", device="cuda:0", only=["software"], even_if_busy=True)
    assert outcome.status == "ok", outcome.error
    assert outcome.result["gpu_use"]["state"] == "busy"
    assert "software.os" in outcome.result["fingerprint"]


def test_a_held_gpu_is_measured_and_the_holder_told(quiet: Path) -> None:
    quiet.touch()
    outcome, said = start("fingerprint", device="cuda:0", only=["software"])
    assert outcome.status == "ok", outcome.error
    assert outcome.result["gpu_use"]["state"] == "held"
    assert said == ["who uses cuda:0", "software"]


def test_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ["busy", "busy", "idle", "idle"]
    said: list[str] = []

    def look(device: str, own_variable: str) -> GpuUse:
        assert (device, own_variable) == ("cuda:1", "PICHAK_JOB")
        return GpuUse(states.pop(0), "it is used")  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_manners, "look_at", look)
    monkeypatch.setattr("pichak_core.devices.gpu_look._AGAIN_SECONDS", 0.01)
    use = leave_alone("ramp", {"device": "cuda:1", "wait_seconds": 60}, progress=said.append)
    assert use is not None
    assert use.state == "idle"
    assert said[0] == "who uses cuda:1"
    assert said[1].startswith("waiting 60 s more: it is used")


def test_a_plan_says_who_was_there() -> None:
    held = GpuUse("held", "cuda:0 is held, not worked on: pid 9")
    result = {"plan": Plan("m", "d").note("first").to_dict(), "ramp": {}}
    made = join_use(result, held)
    assert Plan.from_dict(made["plan"]).notes == [
        "first",
        "before it was measured, cuda:0 is held, not worked on: pid 9",
    ]
    assert result["plan"]["notes"] == ["first"]
    assert join_use(result, GpuUse("idle", "idle")) == result
