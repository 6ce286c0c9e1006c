"""Looking at a GPU through the real child, with a fake NVML on its path; and waiting for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pichak_core.devices import gpu_look
from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpu_look import GpuBusyError, look_at, wait_until_free
from pichak_core.devices.gpu_use import GpuUse

MIB = 2**20

#: Two L4; on each the processes in the file `rows` ("GPU PID MIB" a line), working at `WORK`.
FAKE = """
import os, time
from types import SimpleNamespace as Made
class NVMLError(Exception):
    value = 3
def _rows(handle):
    lines = [line.split() for line in open({rows!r})]
    return [Made(pid=int(p), usedGpuMemory=int(m) * 2**20) for g, p, m in lines if int(g) == handle]
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return {count}
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetUUID(h): return "GPU-0000000" + str(h)
def nvmlDeviceGetName(h): return "NVIDIA L4"
def nvmlDeviceGetUtilizationRates(h): {work}
def nvmlDeviceGetMemoryInfo(h, version=None):
    used = sum(row.usedGpuMemory for row in _rows(h))
    return Made(total=23000 * 2**20, used=used, free=0, reserved=300 * 2**20)
nvmlMemory_v2 = 2
def nvmlDeviceGetComputeRunningProcesses_v3(h): return _rows(h)
def nvmlDeviceGetGraphicsRunningProcesses_v3(h): return []
"""


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: str,
    *,
    init: str = "pass",
    count: int = 1,
    work: str = "return Made(gpu=95 if _rows(h) else 0)",
) -> None:
    (folder / "rows").write_text(rows)
    text = FAKE.format(rows=str(folder / "rows"), init=init, count=count, work=work)
    (folder / "pynvml.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(gpu_look, "PAUSE_SECONDS", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def stranger() -> int:
    """The id of a living process that is none of ours: the one that started this test's."""
    return os.getppid()


def test_somebody_elses_process_makes_it_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int
) -> None:
    install(tmp_path, monkeypatch, f"0 {stranger} 5000\n")
    use = look_at("cuda:0")
    assert use.state == "busy"
    assert (use.users[0].pid, use.users[0].used_bytes) == (stranger, 5000 * MIB)
    assert use.looks == 5


def test_a_pid_is_looked_up_only_where_it_is_that_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int
) -> None:
    """field case 29: in a container NVML's numbers are the host's, and strangers' here"""
    install(tmp_path, monkeypatch, f"0 {stranger} 5000\n")
    monkeypatch.setattr(gpu_look, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    named = look_at("cuda:0").users[0]
    assert named.name == Path(f"/proc/{stranger}/comm").read_text().strip()
    assert named.owner
    monkeypatch.setattr(gpu_look, "_FIRST_NAMESPACE", "pid:[1]")
    assert look_at("cuda:0").users[0].name == ""
    # One that holds a GPU's device file open is believed there too.
    monkeypatch.setattr(gpu_look, "_DEVICE_FILES", (str(tmp_path),))
    with (tmp_path / "device").open("w") as held:
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=held)
        try:
            (tmp_path / "rows").write_text(f"0 {holder.pid} 5000\n")
            assert look_at("cuda:0").state == "idle"  # and it is this process's own child
        finally:
            holder.communicate(b"\n")


def test_own_processes_and_jobs_of_others_of_ours_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_look, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    install(tmp_path, monkeypatch, f"0 {os.getpid()} 5000\n")
    assert look_at("cuda:0").state == "idle"
    # A job's process that has left its parents: found by the variable it was started with.
    code = (
        "import subprocess as s, sys; p = s.Popen([sys.executable, '-c', 'input()'], stdin=0);"
        "print(p.pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=-1,
        stdout=-1,
        text=True,
        env={**os.environ, "OWN_MARK": "x"},
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.wait()
        (tmp_path / "rows").write_text(f"0 {pid} 5000\n")
        assert look_at("cuda:0", own_variable="OWN_MARK").state == "idle"
        assert look_at("cuda:0").state == "busy"
        assert parent.stdin
        parent.stdin.close()


def test_the_gpu_is_found_by_its_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int
) -> None:
    # field case 19: never by its number
    install(tmp_path, monkeypatch, f"1 {stranger} 5000\n", count=2)
    for mask, state in (("GPU-00000001", "busy"), ("GPU-00000000", "idle")):
        assert look_at("cuda:0", environment={"CUDA_VISIBLE_DEVICES": mask}).state == state
    second = TorchGpu(0, "NVIDIA L4", "00000001", "", 1, False)
    monkeypatch.setattr(gpu_look, "torch_gpu", lambda _index: second)
    assert look_at("cuda:0").state == "busy"

    def absent(_index: int) -> TorchGpu:
        raise RuntimeError("torch sees no CUDA device")

    monkeypatch.setattr(gpu_look, "torch_gpu", absent)
    use = look_at("cuda:0")
    assert use.state == "unknown"
    assert "which of 2 GPUs" in use.sentence


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"init": "time.sleep(60)"}, "no answer within"),
        ({"init": "os.kill(os.getpid(), 11)"}, "signal 11"),
        ({"init": "raise NVMLError('x')"}, "code 3"),
        ({"count": 0}, "no GPU"),
        ({"work": "raise NVMLError('x')"}, "not known"),
        # It lies: more than all of the time, on no process that can be.
        ({"work": "return Made(gpu=2**64 - 1)"}, "not known"),
    ],
)
def test_nvml_that_hangs_dies_or_lies_is_not_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, object],
    words: str,
) -> None:
    install(tmp_path, monkeypatch, "0 4294967295 5000\n", **how)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_look, "_TIMEOUT_SECONDS", 1.0 if "sleep" in str(how) else 20.0)
    use = look_at("cuda:0")
    assert use.state == "unknown"
    assert words in use.sentence


def test_what_was_seen_before_nvml_hung_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int
) -> None:
    work = (
        "\n    globals().setdefault('n', []).append(1)\n"
        "    if len(n) == 3: time.sleep(60)\n    return Made(gpu=95)"
    )
    install(tmp_path, monkeypatch, f"0 {stranger} 5000\n", work=work)
    monkeypatch.setattr(gpu_look, "_TIMEOUT_SECONDS", 3.0)
    use = look_at("cuda:0")
    assert (use.state, use.looks) == ("busy", 2)


# -- waiting --------------------------------------------------------------------------------------


class Looks:
    """Answers in turn, and a clock that only sleeping moves."""

    def __init__(self, states: Sequence[str]) -> None:
        self.states = list(states)
        self.now = 0.0
        self.said: list[str] = []

    def look(self) -> GpuUse:
        state = self.states.pop(0)
        return GpuUse(state, f"cuda:0 is {state}")  # type: ignore[arg-type]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> GpuUse:
        return wait_until_free(
            self.look,
            wait_seconds=seconds,
            say=self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.mark.parametrize("state", ["idle", "held", "unknown"])
def test_one_quiet_look_is_enough_at_first(state: str) -> None:
    looks = Looks([state])
    assert looks.wait(0).state == state
    assert looks.said == []


def test_busy_is_refused_at_once_without_a_wait() -> None:
    with pytest.raises(GpuBusyError, match="cuda:0 is busy; it was left alone"):
        Looks(["busy"]).wait(0)


def test_after_a_busy_look_two_quiet_ones_are_asked_for() -> None:
    looks = Looks(["busy", "idle", "busy", "held", "idle"])
    assert looks.wait(100).state == "idle"
    assert looks.now == 40
    assert looks.said[0] == "waiting 100 s more: cuda:0 is busy"


def test_the_wait_ends() -> None:
    looks = Looks(["busy"] * 9)
    with pytest.raises(GpuBusyError):
        looks.wait(25)
    assert looks.now == 25
    pausing = Looks(["busy", "busy", "busy", "idle"])
    with pytest.raises(GpuBusyError, match="cuda:0 is busy"):
        pausing.wait(25)
