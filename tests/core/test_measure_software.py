"""Versions, identities and virtualisation, of machines with and without a GPU."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pichak_core import __version__
from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpus import Report
from pichak_core.devices.host import HostKind
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context, probes, run_one, virtualisation, virtualisation_probe
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

L4 = TorchGpu(0, "NVIDIA L4", "1111", "00000000:3b:00.0", 24 * 2**30, False)


def nvml(**values: Any) -> Report:
    fields = {"name": "NVIDIA L4", "uuid": "GPU-1111", "pci_bus_id": "00000000:3B:00.0"}
    system = {"driver_version": "550.90.07", "cuda_driver_version": "12.4"}
    return Report(system, [Gpu(0, {**fields, **values})])


def run(name: str, report: Report, device: str = "cuda:0", **changes: Any) -> Fingerprint:
    context = Context(device=device, **changes)
    context.cache.update({"nvml": report, "torch_gpu": L4})
    made = Fingerprint()
    # a GPU that is not there must not be sampled: the context's own cache says what exists
    for reading in probes()[name].run(context):
        made.add(reading)
    return made


def unmeasured(made: Fingerprint, name: str) -> Unmeasured:
    reading = made[name]
    assert isinstance(reading, Unmeasured), reading
    return reading


def test_versions_are_what_is_installed() -> None:
    made = run("software", Report(gap=Unmeasured("nvml", Reason.NO_DEVICE, "x")), device="cpu")
    assert made.text("software.python") == platform.python_version()
    assert made.text("software.pichak") == __version__
    assert made.text("software.ray") == metadata.version("ray")
    assert made.text("software.torch") == metadata.version("torch")
    assert made.text("software.kernel") == platform.uname().release


def test_the_visible_gpus_are_counted_by_cudas_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 18: "0,0" hides every GPU, and says so
    for mask, count, words in (
        ("0", "1 of 1", "'0'"),
        ("0,0", "0 of 1", "twice"),
        ("", "0 of 1", "empty"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        reading = run("software", nvml(), device="cpu")["software.visible_gpus"]
        assert isinstance(reading, Measurement)
        assert reading.value == count
        assert words in reading.source
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run("software", nvml(), device="cpu").text("software.visible_gpus") == "1 of 1"


def test_a_name_that_the_silicon_contradicts_is_suspect() -> None:
    made = run("software", nvml(compute_capability="7.5"))
    reading = made["gpu.name"]
    assert isinstance(reading, Measurement)
    assert "7.5" in reading.suspect
    assert "8.9" in reading.suspect
    honest = run("software", nvml(compute_capability="8.9"))["gpu.name"]
    assert isinstance(honest, Measurement)
    assert honest.suspect == ""


def test_a_missing_package_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_torch)
    made = run("software", Report(gap=Unmeasured("nvml", Reason.NO_DEVICE, "x")), device="cpu")
    gap = unmeasured(made, "software.torch")
    assert gap.reason is Reason.NOT_INSTALLED
    assert "pip install 'pichak-fleet[torch]'" in gap.detail


def test_a_gpu_is_identified_by_nvml_where_it_is_torchs() -> None:
    made = run("software", nvml(vbios="95.04"))
    assert made.text("gpu.uuid") == "GPU-1111"
    assert made.text("gpu.vbios") == "95.04"
    assert made.text("software.driver") == "550.90.07"
    assert made.text("software.cuda_driver") == "12.4"


def test_no_nvml_is_not_no_gpu() -> None:
    # field cases 6 and 7: a Jetson, or a driver mismatch under which torch still works
    gone = Unmeasured("nvml", Reason.NO_DEVICE, "NVML code 12")
    made = run("software", Report(gap=gone))
    assert made.text("gpu.name") == "NVIDIA L4"
    assert made.text("gpu.uuid") == "1111"
    assert "torch" in made["gpu.name"].source  # type: ignore[union-attr]
    assert unmeasured(made, "gpu.vbios").detail == "NVML code 12"
    assert unmeasured(made, "software.driver").reason is Reason.NO_DEVICE


def test_a_cpu_fingerprint_says_which_gpus_it_is_not_of() -> None:
    made = run("software", nvml(), device="cpu")
    gap = unmeasured(made, "gpu.name")
    assert gap.reason is Reason.NO_DEVICE
    assert "NVIDIA L4" in gap.detail
    assert made.text("software.driver") == "550.90.07"


@pytest.mark.parametrize(
    ("value", "mode"),
    [(0, "none"), (1, "passthrough"), (2, "vGPU"), (3, "host vGPU"), (4, "host vSGA"),
     (9, "unknown (9)")],
)  # fmt: skip
def test_the_mode_is_read_from_nvmls_number(value: int, mode: str) -> None:
    # field case 24
    made = run("virtualisation", nvml(virtualisation_mode=value))
    assert made.text("gpu.virtualisation_mode") == mode


def test_an_absent_mode_is_unknown_and_not_bare_metal() -> None:
    # field case 24
    made = run("virtualisation", nvml())
    assert isinstance(made["gpu.virtualisation_mode"], Unmeasured)
    assert isinstance(made["gpu.vgpu_licensed"], Unmeasured)


def test_only_a_vgpu_has_a_licence() -> None:
    without = run("virtualisation", nvml(virtualisation_mode=1, vgpu_licensed=True))
    assert "only a vGPU" in unmeasured(without, "gpu.vgpu_licensed").detail
    held = run("virtualisation", nvml(virtualisation_mode=2, vgpu_licensed=False))
    reading = held["gpu.vgpu_licensed"]
    assert isinstance(reading, Measurement)
    assert reading.value is False


@pytest.mark.parametrize(("code", "model"), [(0, "WDDM"), (1, "TCC"), (2, "MCDM")])
def test_the_driver_model_of_windows_comes_from_nvml(code: int, model: str) -> None:
    # field case 42
    made = run("virtualisation", nvml(driver_model=code))
    assert made.text("gpu.driver_model") == model


def test_the_driver_model_of_linux_is_linux() -> None:
    assert run("virtualisation", nvml()).text("gpu.driver_model") == "Linux"


def test_an_unreadable_machine_has_named_gaps(tmp_path: Path) -> None:
    roots = {"proc": tmp_path / "proc", "sys": tmp_path / "sys", "root": tmp_path}
    made = run("virtualisation", nvml(), **roots)
    assert unmeasured(made, "host.kind").reason is Reason.NOT_SUPPORTED
    assert "hypervisor" in unmeasured(made, "host.hypervisor").detail
    software = run("software", nvml(), **roots)
    assert unmeasured(software, "software.os").reason is Reason.NOT_SUPPORTED


class _Machine:
    def __init__(self, kind: HostKind) -> None:
        self._kind = kind

    def kind(self) -> HostKind:
        return self._kind


def test_the_public_function_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = HostKind("vm", "kvm", ("the CPU reports a hypervisor",))
    monkeypatch.setattr(virtualisation_probe, "this_host", lambda: _Machine(kind))
    monkeypatch.setattr(virtualisation_probe, "read_gpus", lambda: nvml(virtualisation_mode=2))
    found = virtualisation()
    assert found.virtualised is True
    assert found.describe().splitlines() == [
        "host vm, hypervisor kvm (the CPU reports a hypervisor)",
        "NVIDIA L4: vGPU",
    ]
    gone = Report(gap=Unmeasured("nvml", Reason.NO_DEVICE, "no driver"))
    monkeypatch.setattr(virtualisation_probe, "read_gpus", lambda: gone)
    assert virtualisation().virtualised is None
    assert "no driver" in virtualisation().describe()
    monkeypatch.setattr(virtualisation_probe, "read_gpus", lambda: nvml(virtualisation_mode=1))
    assert virtualisation().virtualised is False


def test_on_this_machine() -> None:
    readings = {r.name: r for r in run_one(probes()["virtualisation"], Context())}
    kind = readings["host.kind"]
    if isinstance(kind, Measurement):
        assert kind.value in ("bare metal", "vm", "container", "wsl2")
    else:
        assert kind.detail
