"""What the commands do on a GPU that somebody uses: a fake NVML, real child processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pichak_coordinator.cli import app
from pichak_coordinator.request import ProfileRequest

#: One L4 on which the process `PID` works.
FAKE = """
from types import SimpleNamespace as Made
class NVMLError(Exception):
    value = 3
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetName(h): return "NVIDIA L4"
def nvmlDeviceGetUtilizationRates(h): return Made(gpu=95)
def nvmlDeviceGetMemoryInfo(h): return Made(total=23000 * 2**20, used=6000 * 2**20, free=0)
def nvmlDeviceGetComputeRunningProcesses(h): return [Made(pid={pid}, usedGpuMemory=5000 * 2**20)]
"""


def test_a_plan_is_not_made_where_somebody_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE.format(pid=os.getppid()))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(
        app, ["plan", "--device", "cuda:0", "--seq-len", "64"], standalone_mode=False
    )
    said = str(done.exception)
    assert f"cuda:0 (NVIDIA L4) is in use by pid {os.getppid()}" in said
    assert "--wait-if-busy SECONDS waits for it, --even-if-busy measures it anyway" in said
    assert done.exception.exit_code == 1  # type: ignore[union-attr]
    assert done.stdout == ""


def test_a_fleets_jobs_are_told_what_to_do() -> None:
    plain = ProfileRequest().fingerprint_job("f", 1, "cuda:0")
    assert not {"even_if_busy", "wait_seconds"} & set(plain.params)
    waits = ProfileRequest(wait_seconds=600.0)
    for job in (
        waits.fingerprint_job("f", 1, "cuda:0"),
        waits.task_job("t", 1, "cuda:0", {}),
        waits.ramp_job("r", 1, "cuda:0", {}, None),
    ):
        assert job.params["wait_seconds"] == 600.0
        # The time for the work itself stays what it was.
        assert job.deadline_seconds == 600.0 + waits.deadline(job.kind)
    insists = ProfileRequest(even_if_busy=True).ramp_job("r", 1, "cuda:0", {}, None)
    assert insists.params["even_if_busy"] is True
