"""NVML as drivers really behave, with a fake module; and the child that reads it, with a fake one
on its path."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pichak_core.devices import nvml_codes as module
from pichak_core.devices.gpu_join import TorchGpu, from_properties, join
from pichak_core.devices.gpu_memory import device_memory
from pichak_core.devices.gpus import LiveGpu, read_gpus
from pichak_core.devices.nvml import Gpu, read_gpu
from pichak_core.devices.nvml_child import (
    gpu_from_wire,
    gpu_to_wire,
    mismatch,
    records,
    start,
)
from pichak_core.measurement import Reason, Unmeasured

MIB = 2**20
GIB = 2**30
SENTINEL = 2**64 - 1


class FakeNVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value

    def __reduce__(self) -> Any:  # field case 30: such errors could not be unpickled
        raise TypeError("cannot be pickled")


GOOD: dict[str, Any] = {
    "nvmlDeviceGetUUID": "GPU-11111111-2222-3333-4444-555555555555",
    "nvmlDeviceGetName": "NVIDIA L4",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:3B:00.0"),
    "nvmlDeviceGetVbiosVersion": "95.04.29.00.06",
    "nvmlDeviceGetVirtualizationMode": 1,
    "nvmlDeviceGetDriverModel": FakeNVMLError(3),
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetMaxClockInfo": 2040,
    "nvmlDeviceGetPowerUsage": 71_500,
    "nvmlDeviceGetEnforcedPowerLimit": 72_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
    "memory v1": SimpleNamespace(total=24 * GIB, used=912 * MIB, free=24 * GIB - 912 * MIB),
    "memory v2": SimpleNamespace(
        total=24 * GIB, used=8 * MIB, reserved=904 * MIB, free=24 * GIB - 912 * MIB
    ),
}


class FakeNvml:
    """`answers` are given by every GPU; `per_gpu` replaces them for one; an exception is raised.

    `calls` keeps (function, GPU) in order.
    """

    NVMLError = FakeNVMLError
    nvmlMemory_v2 = 0x2000028  # noqa: N815

    def __init__(
        self, answers: dict[str, Any] | None = None, count: int = 1, **per_gpu: dict[str, Any]
    ) -> None:
        self.answers = {**GOOD, **(answers or {})}
        self.per_gpu = {int(name.removeprefix("gpu")): extra for name, extra in per_gpu.items()}
        self.count = count
        self.calls: list[tuple[str, int]] = []

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer("nvmlInit", -1)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._answer("handle", index)
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
        return self._answer("memory v2" if version else "memory v1", handle)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name not in self.answers:
            raise AttributeError(name)
        return lambda handle=-1, *_: self._answer(name, handle)

    def _answer(self, name: str, index: int) -> Any:
        self.calls.append((name, index))
        answer = {**self.answers, **self.per_gpu.get(index, {})}.get(name)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def gap(gpu: Gpu, field: str) -> Unmeasured:
    answer = gpu.get(field)
    assert isinstance(answer, Unmeasured), f"{field} is {answer!r}"
    return answer


def device(**changes: Any) -> TorchGpu:
    parts: dict[str, Any] = {
        "index": 0,
        "name": "NVIDIA L4",
        "uuid": "11111111-2222-3333-4444-555555555555",
        "pci_bus_id": "00000000:3b:00.0",
        "total_bytes": 24 * GIB,
        "integrated": False,
    }
    return TorchGpu(**{**parts, **changes})


def test_a_healthy_gpu_in_its_units() -> None:
    gpu = read_gpu(FakeNvml(), 0)
    assert gpu.text("name") == "NVIDIA L4"
    assert gpu.number("power_watts") == 71.5
    assert gpu.number("sm_clock_mhz") == 1980
    assert gpu.number("throttle_bitmask") == 4
    assert gpu.number("utilisation_percent") == 0  # an idle zero is a value
    assert gpu.lost is None


def test_reserved_memory_is_taken_off_once() -> None:
    # field case 12: version 1 counts the driver's 904 MiB as used, version 2 apart
    both = read_gpu(FakeNvml(), 0)
    assert both.number("memory_query_version") == 2
    assert both.number("memory_used_bytes") == 8 * MIB
    assert both.budget_bytes() == 24 * GIB - 904 * MIB - 8 * MIB
    old = read_gpu(FakeNvml({"memory v2": FakeNVMLError(13)}), 0)
    assert old.number("memory_query_version") == 1
    assert gap(old, "memory_reserved_bytes")
    assert old.budget_bytes() == both.budget_bytes()


@pytest.mark.parametrize(
    "second",
    [
        FakeNVMLError(3),
        SimpleNamespace(total=0, used=0, reserved=0, free=0),
        SimpleNamespace(total=SENTINEL, used=SENTINEL, reserved=0, free=SENTINEL),
    ],
)
def test_unified_memory_is_sized_by_the_system(second: Any) -> None:
    # field case 1: version 1 fails; version 2 fails or misleads; the GPU stays in the fleet
    fake = FakeNvml({"memory v1": FakeNVMLError(3), "memory v2": second})
    gpu = read_gpu(fake, 0)
    assert gpu.lost is None
    assert gap(gpu, "memory_total_bytes").reason is Reason.NOT_SUPPORTED
    assert gpu.budget_bytes() is None
    part = device(integrated=True, total_bytes=121 * GIB)
    memory = device_memory(part, gpu, system_available_bytes=116 * GIB)
    assert not isinstance(memory, Unmeasured)
    # field case 2: page cache is not the GPU's; MemAvailable is what it can have
    assert (memory.total_bytes, memory.free_bytes, memory.unified) == (121 * GIB, 116 * GIB, True)
    assert "MemAvailable" in memory.source
    # without the flag it stays a gap: nothing is invented
    assert isinstance(device_memory(device(), gpu, 116 * GIB), Unmeasured)


def test_unified_memory_where_version_2_works_too() -> None:
    # field case 1, third variant: the answer is there, and still is not what can be had
    gpu = read_gpu(FakeNvml({"memory v1": FakeNVMLError(3)}), 0)
    memory = device_memory(device(integrated=True), gpu, 7 * GIB)
    assert not isinstance(memory, Unmeasured)
    assert memory.free_bytes == 7 * GIB


def test_a_discrete_gpu_is_sized_by_nvml() -> None:
    memory = device_memory(device(), read_gpu(FakeNvml(), 0), 500 * GIB)
    assert not isinstance(memory, Unmeasured)
    assert (memory.total_bytes, memory.free_bytes) == (24 * GIB, 24 * GIB - 912 * MIB)


def test_a_driver_mismatch_names_both_versions() -> None:
    # field case 6
    gone = start(FakeNvml({"nvmlInit": FakeNVMLError(18)}))
    assert gone is not None
    assert gone.reason is Reason.FAILED
    assert "differ" in gone.detail
    assert "\n" not in gone.detail
    line = mismatch(
        "7f00-7f01 r-xp 0 08:01 9 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.163.01\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 2024\n"
        "GCC version: gcc version 12.3.0\n",
    )
    assert "550.163.01" in line
    assert "550.90.07" in line
    assert "unreadable" in mismatch("", "")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (12, Reason.NO_DEVICE),  # field case 7: a Jetson, or no NVIDIA at all
        (9, Reason.NO_DEVICE),
        (4, Reason.NO_PERMISSION),
        (999, Reason.LOST),  # field case 5: the container lost its device
        (1, Reason.FAILED),
    ],
)
def test_why_nvml_does_not_start(code: int, reason: Reason) -> None:
    gone = start(FakeNvml({"nvmlInit": FakeNVMLError(code)}))
    assert gone is not None
    assert gone.reason is reason
    assert str(code) in gone.detail


def test_the_link_time_stub_finds_nothing() -> None:
    # field case 7: init succeeds and there are no GPUs
    assert next(iter(records(FakeNvml(count=0))))["count"] == 0


@pytest.mark.parametrize("wrap", [str, str.encode])
def test_bytes_and_text_are_the_same(wrap: Any) -> None:
    # field case 9: which of two packages named alike is installed
    answers = {
        name: wrap(GOOD[name])
        for name in ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetVbiosVersion")
    }
    answers["nvmlDeviceGetPciInfo"] = SimpleNamespace(busId=wrap("00000000:3B:00.0"))
    made = json.dumps(gpu_to_wire(read_gpu(FakeNvml(answers), 0)))
    assert made == json.dumps(gpu_to_wire(read_gpu(FakeNvml(), 0)))


def test_new_bindings_on_an_old_driver() -> None:
    # field case 10: the new symbol is missing, the old one works
    fake = FakeNvml(
        {
            "nvmlDeviceGetCurrentClocksEventReasons": FakeNVMLError(13),
            "nvmlDeviceGetCurrentClocksThrottleReasons": 8,
            "nvmlDeviceGetUtilizationRates": FakeNVMLError(13),
        }
    )
    gpu = read_gpu(fake, 0)
    assert gpu.number("throttle_bitmask") == 8
    assert gap(gpu, "utilisation_percent").reason is Reason.NOT_SUPPORTED
    assert gpu.lost is None


def test_old_bindings_that_lack_a_call() -> None:
    fake = FakeNvml()
    del fake.answers["nvmlDeviceGetVirtualizationMode"]
    found = gap(read_gpu(fake, 0), "virtualisation_mode")
    assert found.reason is Reason.NOT_SUPPORTED
    assert "nvidia-ml-py" in found.detail


@pytest.mark.parametrize("raw", [None, SENTINEL, 2**32 - 1])
def test_not_available_is_none_before_any_arithmetic(raw: int | None) -> None:
    # field case 14: 2^64 - 1 bytes is what prints as 17179869184 GiB
    assert module.number(raw) is None
    assert module.number(SENTINEL - 1) == SENTINEL - 1
    used = SimpleNamespace(total=24 * GIB, used=raw, reserved=0, free=raw)
    gpu = read_gpu(
        FakeNvml({"memory v1": used, "memory v2": used, "nvmlDeviceGetPowerUsage": raw}), 0
    )
    if raw != 2**32 - 1:  # 4 GiB less one byte could be an amount of memory, but is not believed
        assert gpu.budget_bytes() is None
    assert gap(gpu, "power_watts").reason is Reason.NOT_SUPPORTED


def test_utilisation_that_is_not_there_is_not_idle() -> None:
    # field case 15: WSL2
    gpu = read_gpu(FakeNvml({"nvmlDeviceGetUtilizationRates": FakeNVMLError(3)}), 0)
    assert gpu.number("utilisation_percent") is None
    assert gap(gpu, "utilisation_percent").reason is Reason.NOT_SUPPORTED


def test_a_vgpu_guest_has_blanks_and_a_licence() -> None:
    # field case 21
    gone = FakeNVMLError(3)
    feature = SimpleNamespace(featureState=1)
    gpu = read_gpu(
        FakeNvml(
            {
                "nvmlDeviceGetVirtualizationMode": 2,
                "nvmlDeviceGetCurrPcieLinkGeneration": gone,
                "nvmlDeviceGetCurrPcieLinkWidth": gone,
                "nvmlDeviceGetMaxPcieLinkGeneration": gone,
                "nvmlDeviceGetMaxPcieLinkWidth": gone,
                "nvmlDeviceGetPowerUsage": gone,
                "nvmlDeviceGetEnforcedPowerLimit": gone,
                "nvmlDeviceGetGridLicensableFeatures": SimpleNamespace(
                    licensableFeaturesCount=1, gridLicensableFeatures=[feature]
                ),
            }
        ),
        0,
    )
    for field in ("pcie_generation", "pcie_width", "power_watts", "power_limit_watts"):
        assert gap(gpu, field).reason is Reason.NOT_SUPPORTED
    assert gpu.values["vgpu_licensed"] is True
    assert gpu.number("temperature_celsius") == 61


def test_a_lost_gpu_costs_itself_alone_and_is_not_touched_again() -> None:
    # field case 26: handle(1) is gone; GPU 2 is lost in the middle of its reading
    fake = FakeNvml(
        count=4,
        gpu1={"handle": FakeNVMLError(15)},
        gpu2={"nvmlDeviceGetVbiosVersion": FakeNVMLError(15)},
    )
    header, *gpus, peers = list(records(fake))
    assert header["count"] == 4
    assert [pair[:2] for pair in peers["peers"]] == [[0, 3]]  # no pair with a lost GPU is asked
    made = [gpu_from_wire(record["gpu"]) for record in gpus]
    assert [gpu.lost is not None for gpu in made] == [False, True, True, False]
    assert gap(made[1], "power_watts").reason is Reason.LOST
    assert gap(made[2], "power_watts").reason is Reason.LOST
    assert made[2].text("name") == "NVIDIA L4"  # what it said before stays
    touched = [name for name, index in fake.calls if index == 2]
    assert touched[-1] == "nvmlDeviceGetVbiosVersion"


def test_errors_travel_as_plain_text() -> None:
    # field case 30: the exception object itself refuses to be pickled
    fake = FakeNvml({"nvmlDeviceGetTemperature": FakeNVMLError(3)})
    sent = json.dumps([dict(record) for record in records(fake)])
    gpu = gpu_from_wire(json.loads(sent)[1]["gpu"])
    assert gpu == read_gpu(FakeNvml({"nvmlDeviceGetTemperature": FakeNVMLError(3)}), 0)
    assert "code 3" in gap(gpu, "temperature_celsius").detail


# --- joining with torch ------------------------------------------------------------------------


def test_devices_are_joined_by_uuid_and_never_by_their_number() -> None:
    # field case 19: NVML sorts by PCI address, CUDA by speed
    gpus = [
        Gpu(0, {"uuid": "GPU-aaaa", "pci_bus_id": "00000000:01:00.0", "name": "RTX 3090"}),
        Gpu(1, {"uuid": "GPU-BBBB", "pci_bus_id": "00000000:02:00.0", "name": "RTX 4090"}),
    ]
    found = join(device(index=0, uuid="bbbb", pci_bus_id=""), gpus)
    assert isinstance(found, Gpu)
    assert found.index == 1
    by_address = join(device(index=0, uuid="", pci_bus_id="0000:02:00.0"), gpus)
    assert isinstance(by_address, Gpu)
    assert by_address.index == 1
    nothing = join(device(index=0, uuid="cccc", pci_bus_id="00000000:09:00.0"), gpus)
    assert isinstance(nothing, Unmeasured)
    assert "GPU-aaaa" in nothing.detail
    assert isinstance(join(device(uuid="", pci_bus_id=""), gpus), Unmeasured)


def test_torchs_properties_of_old_and_new_versions() -> None:
    new = SimpleNamespace(
        name="NVIDIA GB10", total_memory=5, uuid="abc", is_integrated=1,
        pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0,
    )  # fmt: skip
    assert from_properties(2, new) == TorchGpu(2, "NVIDIA GB10", "abc", "00000000:3b:00.0", 5, True)
    old = SimpleNamespace(name="NVIDIA L4", total_memory=5)
    assert from_properties(0, old) == TorchGpu(0, "NVIDIA L4", "", "", 5, False)


# --- the child ---------------------------------------------------------------------------------

_FAKE_MODULE = """
import os, signal, sys, time
class NVMLError(Exception):
    value = 3
print("a banner of some library", flush=True)
print("WARNING: this is the stub library", file=sys.stderr)
{at_import}
def nvmlInit(): {at_init}
def nvmlDeviceGetCount(): return {count}
def nvmlSystemGetDriverVersion(): return b"550.90.07"
def nvmlDeviceGetHandleByIndex(i):
    if i == {bad}: {trouble}
    return i
def nvmlDeviceGetName(handle): return b"NVIDIA L4"
def nvmlDeviceGetTemperature(handle, sensor): return 40 + handle
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """A module named pynvml on the path that the child is given."""
    settings = {"at_import": "", "at_init": "pass", "count": 3, "bad": -1, "trouble": "pass"}
    (folder / "pynvml.py").write_text(_FAKE_MODULE.format(**{**settings, **parts}))
    monkeypatch.syspath_prepend(str(folder))


def test_the_child_reports_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    report = read_gpus()
    assert report.gap is None
    assert report.system["driver_version"] == "550.90.07"
    assert [gpu.number("temperature_celsius") for gpu in report.gpus] == [40, 41, 42]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", Reason.LOST),
        ("os._exit(7)", Reason.FAILED),
        ("time.sleep(60)", Reason.TIMED_OUT),
    ],
)
def test_a_gpu_that_kills_or_hangs_nvml_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, reason: Reason
) -> None:
    # field case 26: the process dies on the lost card; the others are still reported
    install(tmp_path, monkeypatch, bad=1, trouble=trouble)
    report = read_gpus(timeout_seconds=3.0 if "sleep" in trouble else 20.0)
    assert [gpu.index for gpu in report.gpus] == [0, 1, 2]
    assert [gpu.lost is not None for gpu in report.gpus] == [False, True, False]
    assert gap(report.gpus[1], "name").reason is reason
    assert report.gpus[2].number("temperature_celsius") == 42


@pytest.mark.parametrize(
    ("parts", "reason", "words"),
    [
        ({"at_init": "time.sleep(60)"}, Reason.TIMED_OUT, "no answer within"),
        ({"at_init": "os.kill(os.getpid(), signal.SIGSEGV)"}, Reason.LOST, "signal 11"),
        ({"at_init": "raise NVMLError('x')"}, Reason.NOT_SUPPORTED, "code 3"),
        ({"at_import": "raise ImportError('no such thing')"}, Reason.NOT_INSTALLED, "pip install"),
        # field case 7: the stub finds nothing, and what it wrote on stderr is passed on
        ({"count": 0}, Reason.NO_DEVICE, "this is the stub library"),
    ],
)
def test_when_nvml_says_nothing_at_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: dict[str, Any],
    reason: Reason,
    words: str,
) -> None:
    install(tmp_path, monkeypatch, **parts)
    report = read_gpus(timeout_seconds=1.0 if reason is Reason.TIMED_OUT else 20.0)
    assert report.gpus == []
    assert report.gap is not None
    assert report.gap.reason is reason
    assert words in report.gap.detail


def test_the_users_own_folder_cannot_break_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    working = tmp_path / "project"
    working.mkdir()
    (working / "json.py").write_text("raise RuntimeError('the wrong json')")
    monkeypatch.chdir(working)
    assert len(read_gpus().gpus) == 3


def test_live_readings_arrive_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    live = LiveGpu(2, interval_seconds=0.01)
    try:
        assert live.wait_for_first(20.0)
        readings = live.latest()
        assert {gpu.number("temperature_celsius") for gpu in readings} == {42}
    finally:
        live.close()
    assert live._process.poll() is not None


def test_a_card_that_is_lost_while_it_is_sampled_is_not_touched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # field case 26: every further call is one that can crash
    log = tmp_path / "calls"
    trouble = (
        f"open({str(log)!r}, 'a').write('x'); e = NVMLError('GPU is lost'); e.value = 15; raise e"
    )
    install(tmp_path, monkeypatch, bad=1, trouble=trouble)
    live = LiveGpu(1, interval_seconds=0.01)
    try:
        assert live.wait_for_first(20.0)
        assert live._process.wait(20.0) == 0  # it ends by itself
        (reading,) = live.latest()
    finally:
        live.close()
    assert reading.lost is not None
    assert reading.lost.reason is Reason.LOST
    assert log.read_text() == "x"


def test_nvml_that_does_not_start_again_behind_a_bad_card_costs_the_rest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # field cases 5 and 26: card 1 kills the process, and the next one hears "unknown error"
    mark = tmp_path / "dead"
    install(
        tmp_path,
        monkeypatch,
        bad=1,
        trouble=f"open({str(mark)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGSEGV)",
        at_init=f"\n    if os.path.exists({str(mark)!r}):\n"
        "        e = NVMLError('Unknown Error'); e.value = 999; raise e",
    )
    report = read_gpus()
    assert report.gap is None
    assert [gpu.lost is None for gpu in report.gpus] == [True, False, False]
    assert report.gpus[0].number("temperature_celsius") == 40
    assert "signal 11" in gap(report.gpus[1], "name").detail
    assert "999" in gap(report.gpus[2], "name").detail
