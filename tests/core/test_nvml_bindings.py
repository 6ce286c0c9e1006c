"""The real bindings (nvidia-ml-py): every call exists as it is asked, and answers of a driver
library in C come through ctypes to the right values."""

from __future__ import annotations

import inspect
import shutil
import subprocess
from pathlib import Path

import pytest

from pichak_core.devices.gpus import Report, read_gpus
from pichak_core.devices.nvml import Gpu, load
from pichak_core.devices.nvml_fields import LICENCE, QUERIES, SYSTEM
from pichak_core.devices.nvml_processes import read_processes
from pichak_core.devices.nvml_recording import load_recording, take_recording
from pichak_core.measurement import Reason, Unmeasured

SOURCE = Path(__file__).parent.parent / "data" / "nvml_stub" / "nvml_stub.c"
MIB = 2**20


@pytest.mark.parametrize("query", [*QUERIES, LICENCE, *SYSTEM], ids=lambda q: q.field)
def test_every_call_exists_with_these_arguments(query: object) -> None:
    nvml = load()
    leading = () if query in SYSTEM else ("handle",)
    known = [call for call in query.calls if hasattr(nvml, call[0])]  # type: ignore[attr-defined]
    assert known
    for name, *arguments in known:
        inspect.signature(getattr(nvml, name)).bind(*leading, *arguments)


def test_the_calls_beside_the_table_exist_too() -> None:
    nvml = load()
    for name, count in (
        ("nvmlInit", 0),
        ("nvmlDeviceGetCount", 0),
        ("nvmlDeviceGetHandleByIndex", 1),
        ("nvmlDeviceGetMaxMigDeviceCount", 1),
        ("nvmlDeviceGetMigDeviceHandleByIndex", 2),
        ("nvmlDeviceGetGpuInstanceId", 1),
        ("nvmlDeviceGetComputeInstanceId", 1),
        ("nvmlDeviceGetP2PStatus", 3),
        ("nvmlDeviceGetMemoryInfo", 2),
        ("nvmlDeviceGetComputeRunningProcesses", 1),
        ("nvmlDeviceGetGraphicsRunningProcesses_v2", 1),
    ):
        inspect.signature(getattr(nvml, name)).bind(*range(count))
    assert nvml.nvmlMemory_v2 == 0x02000028
    assert issubclass(nvml.NVMLError, Exception)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of the driver's name where the child's loader looks first."""
    compiler = shutil.which("cc")
    if compiler is None or load().__name__ != "pynvml":
        pytest.skip("no C compiler here")
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def gap(gpu: Gpu, field: str) -> Unmeasured:
    answer = gpu.get(field)
    assert isinstance(answer, Unmeasured), answer
    return answer


def check(report: Report) -> None:
    assert report.gap is None
    assert report.system == {"driver_version": "550.90.07", "cuda_driver_version": "12.4"}
    first, second = report.gpus
    expected = {
        "name": "NVIDIA L4",
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "pci_bus_id": "00000000:3B:00.0",
        "compute_capability": "8.9",
        "memory_total_bytes": 23034 * MIB,
        "memory_reserved_bytes": 463 * MIB,
        "memory_used_bytes": MIB,
        "memory_query_version": 2,
        "throttled_power_seconds": 7.5,
        "throttled_thermal_seconds": 1.25,  # from the field value: the other call refuses
        "throttled_sync_boost_seconds": 0.0,
        "compute_processes": 2,  # field cases 11 and 14
        "compute_processes_dropped": 1,
        "remapped_rows_corrected": 2,
        "remapped_rows_uncorrected": 1,
        "remapped_rows_pending": True,
        "remapped_rows_failed": False,
        "ecc_mode": True,
        "ecc_corrected": 0,
        "ecc_corrected_lifetime": 1,
        "ecc_uncorrected": 10,
        "ecc_uncorrected_lifetime": 11,
        "power_limit_watts": 60.0,
        "power_limit_default_watts": 72.0,
        "power_limit_max_watts": 72.0,
        "throttle_bitmask": 4,
        "sm_clock_mhz": 1001,
        "memory_clock_mhz": 1002,
        "sm_clock_max_mhz": 2001,
        "temperature_celsius": 44,
        "utilisation_percent": 0,
        "mig_mode": False,
        "mig_mode_pending": True,
    }
    assert {name: first.get(name) for name in expected} == expected
    # field case 10: what the library has not is a gap of its own, and no absent GPU
    assert gap(first, "persistence_mode").reason is Reason.NOT_SUPPORTED
    assert "code 13" in gap(first, "persistence_mode").detail
    assert gap(first, "graphics_processes").reason is Reason.NOT_SUPPORTED
    # field case 26: lost in the middle, and not asked any further
    assert second.lost is not None
    assert second.lost.reason is Reason.LOST
    assert "GPU is lost" in second.lost.detail
    assert second.text("name") == "NVIDIA L4"
    assert "vbios" not in second.values


@pytest.mark.usefixtures("driver")
def test_a_drivers_answers_through_the_real_bindings() -> None:
    report = read_gpus()
    check(report)
    assert report.gpus[0].text("vbios") == "95.04.01"


@pytest.mark.usefixtures("driver")
def test_the_same_answers_recorded_and_played_back(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(take_recording(rounds=2, seconds=0.0).dumps())
    assert "31337" not in path.read_text()
    reports = load_recording(path).reports()
    for report in reports:
        check(report)
    # each reading has its own answers: the library counts how often it was asked
    assert [r.gpus[0].text("vbios") for r in reports] == ["95.04.01", "95.04.02"]


def test_the_bare_name_of_newer_bindings_on_an_older_driver() -> None:
    """field case 10: the bindings raise an error of their own, which is no NVMLError."""
    nvml = load()
    mismatch = nvml.NVMLLibraryMismatchError
    assert not issubclass(mismatch, nvml.NVMLError)

    class Old:
        NVMLError = nvml.NVMLError
        NVMLLibraryMismatchError = mismatch

        def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:  # noqa: N802
            raise mismatch("the driver is older")

    found = read_processes(Old(), 0, "compute", total_bytes=None, pid_limit=10)
    assert isinstance(found, Unmeasured)
    assert found.reason is Reason.NOT_SUPPORTED
