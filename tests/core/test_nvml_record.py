"""Recording what NVML says, and playing it back."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pichak_core.devices.nvml import read_gpu
from pichak_core.devices.nvml_child import readings, record
from pichak_core.devices.nvml_record import Player, RecordedError, Recorder
from pichak_core.devices.nvml_recording import (
    FORMAT,
    Recording,
    RecordingError,
    load_recording,
    take_recording,
)
from pichak_core.measurement import Reason, Unmeasured

GIB = 2**30


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Union(ctypes.Union):
    _fields_ = [("dVal", ctypes.c_double), ("ullVal", ctypes.c_ulonglong)]


class Field(ctypes.Structure):
    _fields_ = [("valueType", ctypes.c_int), ("nvmlReturn", ctypes.c_int), ("value", Union)]


class Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class FakeNvml:
    NVMLError = FakeError

    def __init__(self) -> None:
        self.temperatures = iter([50, 60, 70])
        self.seen: list[Any] = []

    def nvmlInit(self) -> None:  # noqa: N802
        return None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:  # noqa: N802
        return ("the driver's own handle", index)

    def nvmlDeviceGetName(self, handle: object) -> bytes:  # noqa: N802
        self.seen.append(handle)
        return b"NVIDIA L4\xff"

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:  # noqa: N802
        return next(self.temperatures)

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> Memory:  # noqa: N802
        return Memory(24 * GIB, 23 * GIB, GIB)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802
        raise FakeError(3)

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> Any:  # noqa: N802
        return (Field * 1)(Field(3, 0, Union(ullVal=2_500_000_000)))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[Any]:  # noqa: N802
        rows = [(31337, GIB), (2**32 - 1, None), (2**40, 5)]
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in rows]


def told(rounds: int = 1) -> tuple[list[dict[str, Any]], FakeNvml]:
    fake, lines = FakeNvml(), []
    record(fake, rounds, 0.0, lines.append)
    return lines, fake


def calls(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line["call"] for line in lines if "call" in line]


def test_a_played_recording_reads_like_the_machine_it_was_taken_from() -> None:
    lines, _ = told()
    events = json.loads(json.dumps(calls(lines)))  # as in a file
    played, real = read_gpu(Player(events), 0), read_gpu(FakeNvml(), 0)
    assert played == real
    assert played.text("name") == "NVIDIA L4\ufffd"
    assert played.number("temperature_celsius") == 50
    assert played.number("memory_total_bytes") == 24 * GIB
    assert played.number("throttled_power_seconds") == 2.5  # through a ctypes union
    assert played.number("compute_processes") == 1
    assert played.number("compute_processes_dropped") == 2  # field case 11
    power = played.get("power_watts")
    assert isinstance(power, Unmeasured)
    assert power.reason is Reason.NOT_SUPPORTED
    vbios = played.get("vbios")  # these bindings have no such function, and the recording says so
    assert isinstance(vbios, Unmeasured)
    assert "too old to ask" in vbios.detail


def test_a_recording_keeps_order_arguments_and_raw_results_and_no_process() -> None:
    lines, fake = told()
    events = calls(lines)
    assert events[0] == {"f": "nvmlInit", "result": None}
    assert events[1] == {"f": "nvmlDeviceGetCount", "result": 1}
    by_name = {event["f"]: event for event in events}
    handle = {"handle": "gpu0"}
    assert by_name["nvmlDeviceGetTemperature"]["a"] == [handle, 0]
    assert by_name["nvmlDeviceGetName"]["result"] == {"bytes": "NVIDIA L4\u00ff"}
    assert by_name["nvmlDeviceGetPowerUsage"] == {
        "f": "nvmlDeviceGetPowerUsage",
        "a": [handle],
        "error": 3,
        "text": "error 3",
    }
    assert by_name["nvmlDeviceGetVbiosVersion"] == {
        "f": "nvmlDeviceGetVbiosVersion",
        "absent": True,
    }
    rows = by_name["nvmlDeviceGetComputeRunningProcesses"]["result"]
    assert [row["struct"]["pid"] for row in rows] == [1, 2**32 - 1, 2**40]
    assert "31337" not in json.dumps(events)
    assert fake.seen == [("the driver's own handle", 0)]  # the driver gets its own handle back


def test_each_reading_of_a_recording_stands_alone() -> None:
    lines, _ = told(rounds=2)
    recording = Recording(start=[calls(lines)[0]])
    for line in lines:
        if "round" in line:
            recording.rounds.append([])
        elif recording.rounds:
            recording.rounds[-1].append(line["call"])
    found = [report.gpus[0].number("temperature_celsius") for report in recording.reports()]
    assert found == [50, 60]


def test_the_same_call_gives_its_answers_in_order_and_then_the_last() -> None:
    ask = {"f": "nvmlDeviceGetCount"}
    player = Player([{**ask, "result": 2}, {**ask, "error": 15, "text": "lost"}])
    assert player.nvmlDeviceGetCount() == 2
    for _ in range(3):
        with pytest.raises(RecordedError) as caught:
            player.nvmlDeviceGetCount()
        assert caught.value.value == 15


def test_what_was_never_recorded_is_not_asked_for_and_is_no_answer() -> None:
    gpu = read_gpu(Player([]), 0)
    assert gpu.lost is not None
    assert gpu.lost.reason is Reason.NOT_ASKED
    assert "the recording holds no answer" in gpu.lost.detail


def test_an_error_that_no_pickle_survives_is_two_plain_values() -> None:
    # field case 30
    class StubbornError(FakeError):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    fake = FakeNvml()
    fake.nvmlDeviceGetName = lambda handle: (_ for _ in ()).throw(StubbornError(999))  # type: ignore[method-assign]
    events: list[dict[str, Any]] = []
    recorder = Recorder(fake, events.append)
    for _ in readings(recorder):
        pass
    (event,) = [e for e in events if e["f"] == "nvmlDeviceGetName"]
    assert (event["error"], event["text"]) == (999, "error 999")
    assert json.loads(json.dumps(events)) == events


def test_one_reading_starts_nvml_once_however_many_gpus() -> None:
    # field case 32: starting a card without persistence takes more than a second
    lines, _ = told(rounds=3)
    assert [event["f"] for event in calls(lines)].count("nvmlInit") == 1


def test_this_machine_can_be_recorded_whatever_it_has(tmp_path: Path) -> None:
    recording = take_recording(rounds=1, seconds=0.0)
    path = tmp_path / "out.json"
    path.write_text(recording.dumps())
    again = load_recording(path)
    assert again == recording
    assert again.facts["python"]
    report = again.reports()[0]
    assert report.gpus or report.gap is not None


_DYING = """
import os, signal
class NVMLError(Exception):
    value = 3
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i):
    if i == 1: os.kill(os.getpid(), signal.SIGSEGV)
    return i
def nvmlDeviceGetName(handle): return "NVIDIA L4"
"""


def test_what_was_said_before_nvml_died_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # field case 26: the process that reads dies at the second card
    (tmp_path / "pynvml.py").write_text(_DYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    recording = take_recording(rounds=1, seconds=0.0)
    assert "signal 11" in recording.ended
    (report,) = recording.reports()
    assert report.gpus[0].text("name") == "NVIDIA L4"
    assert report.gpus[1].lost is not None


# --- files ------------------------------------------------------------------------------------

TORCH = ("index", "name", "uuid", "pci_bus_id", "total_bytes", "integrated")
GOOD: dict[str, Any] = {
    "format": FORMAT,
    "version": 1,
    "facts": {"python": "3.11"},
    "torch": [],
    "torch_gap": "",
    "ended": "",
    "start": [{"f": "nvmlInit", "error": 12, "text": "no library"}],
    "rounds": [],
}


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD))
    gap = load_recording(path).reports()[0].gap
    assert gap is not None
    assert gap.reason is Reason.NO_DEVICE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1, 2]", "not a recording"),
        ('{"fingerprint": {}}', "not a recording"),
        (json.dumps({**GOOD, "version": 2}), "version 2; this program reads version 1"),
        (json.dumps({**GOOD, "start": []}), "it holds no call"),
        (json.dumps({**GOOD, "start": [{"f": "os.system", "result": 0}]}), "not a recorded call"),
        (json.dumps({**GOOD, "start": [{"f": "nvmlInit"}]}), "neither result nor error"),
        (json.dumps({**GOOD, "start": 5}), "damaged"),
        (json.dumps({**GOOD, "start": [5]}), "damaged"),
        (json.dumps({**GOOD, "torch": [{"index": 0}]}), "damaged"),
        (json.dumps({**GOOD, "torch": [dict.fromkeys(TORCH, 0)]}), "no str as its name"),
        (json.dumps({**GOOD, "facts": {"os": ["x"]}}), "the fact os is neither"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "rounds"}), "damaged"),
        ("[" * 100_000, "not JSON"),
        (
            json.dumps(
                {
                    **GOOD,
                    "start": [{"f": "nvmlInit", "result": None}],
                    "rounds": [[{"f": "nvmlDeviceGetHandleByIndex", "a": [], "result": {"x": 1}}]],
                }
            ),
            "unknown kind",
        ),
    ],
)
def test_a_file_that_is_no_recording_says_why(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=words):
        load_recording(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(RecordingError, match="not JSON"):
        load_recording(path)
    with pytest.raises(OSError):
        load_recording(tmp_path / "missing.json")
