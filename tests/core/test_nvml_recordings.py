"""The recordings under tests/data/nvml, each read to the values that its machine has.

The figures are written down here from the machines' descriptions, not from what was printed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_recording import Recording, load_recording
from pichak_core.measure._replay import Replay, replay
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

FOLDER = Path(__file__).parent.parent / "data" / "nvml"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
MIB = 2**20


def load(name: str) -> Recording:
    return load_recording(FOLDER / f"{name}.json")


def played(name: str) -> Replay:
    return replay(load(name))


def first_gpu(name: str) -> Gpu:
    return load(name).reports()[0].gpus[0]


def gap(found: Fingerprint, name: str) -> Unmeasured:
    reading = found[name]
    assert isinstance(reading, Unmeasured), reading
    return reading


def codes(found: Fingerprint) -> list[str]:
    reading = found["gpu.state_verdict"]
    assert isinstance(reading, Measurement), reading
    return [each["code"] for each in reading.detail["findings"]]


def test_every_kind_of_machine_is_there() -> None:
    assert set(NAMES) == {
        "windows_geforce", "datacentre_h100", "mig_a100", "vgpu_guest", "wsl2", "laptop",
        "unified_gb10", "falls_off_bus", "version_mismatch", "jetson_stub",
        "container_lost_device",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_a_recording_is_a_sentinel_and_none_is_invented(name: str) -> None:
    # field case 14
    for found in played(name).devices.values():
        for reading in found.values():
            if isinstance(reading, Measurement) and not isinstance(reading.value, (str, bool)):
                assert 0 <= float(reading.value) < 2**31, reading
                assert reading.source
            if isinstance(reading, Unmeasured):
                assert reading.detail, reading


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_says_the_same_when_it_is_written_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(load(name).dumps(), encoding="utf-8")
    assert path.read_text() == (FOLDER / f"{name}.json").read_text()
    assert replay(load_recording(path)) == played(name)


def test_a_desktop_card_under_windows() -> None:
    found = played("windows_geforce").devices["cuda:0"]
    assert found.text("gpu.name") == "NVIDIA GeForce RTX 4070"
    assert found.text("gpu.driver_model") == "WDDM"
    assert found.text("software.driver") == "566.36"
    assert found.text("software.cuda_driver") == "12.7"
    assert found.number("gpu.memory_total_mib") == 12282
    assert found.number("gpu.memory_free_mib") == 12282 - 236 - 2930
    assert found.number("gpu.memory_others_mib") == 2930  # browsers, from used and not from rows
    # field cases 11 and 14: rows without memory count, the one with pid 2^32 - 1 does not
    assert found.text("gpu.processes") == "1 compute, 3 graphics"
    # field case 25: an idle link at generation 1 of 4 is no fault
    assert found.text("gpu.link_at_rest") == "generation 1 x16 of generation 4 x16"
    assert codes(found) == ["gpu_shared_memory"]
    assert gap(found, "gpu.ecc_mode").reason is Reason.NOT_SUPPORTED


def test_data_centre_cards_that_cuda_numbers_the_other_way_round() -> None:
    # field case 19: NVML's card 0 is cuda:1
    devices = played("datacentre_h100").devices
    assert list(devices) == ["cuda:0", "cuda:1"]
    lowered, whole = devices["cuda:0"], devices["cuda:1"]
    assert lowered.text("gpu.pci_bus_id") == "00000000:43:00.0"
    assert whole.text("gpu.pci_bus_id") == "00000000:1B:00.0"
    assert lowered.number("gpu.power_limit_watts") == 500
    assert lowered.number("gpu.power_limit_default_watts") == 700
    assert codes(lowered) == ["gpu_ecc_history", "gpu_power_limit"]
    assert codes(whole) == ["gpu_ecc_history"]
    # field case 12: 551 MiB of reserve and 4 MiB in use
    assert whole.number("gpu.memory_free_mib") == 81559 - 551 - 4
    assert whole.number("gpu.memory_others_mib") == 4
    assert whole.text("gpu.name") == "NVIDIA H100 80GB HBM3"  # field case 9: recorded as bytes
    reasons = lowered["gpu.throttle_reasons"]
    assert isinstance(reasons, Measurement)
    assert reasons.value == "idle"
    assert (reasons.detail["power_seconds"], reasons.detail["thermal_seconds"]) == (95.75, 1.25)
    assert whole.number("gpu.ecc_corrected") == 3
    assert whole.number("gpu.ecc_corrected_lifetime") == 17
    assert whole.number("gpu.remapped_rows") == 2
    assert whole.text("gpu.repair_pending") == "no"
    assert whole.text("gpu.peer_access") == "ok with 1"
    assert whole.text("gpu.persistence_mode") == "on"
    assert whole.text("gpu.mig_mode") == "off"


def test_a_mig_device_is_not_its_parent() -> None:
    # field cases 17 and 20: the mask holds a shortened MIG UUID; the parent has 40 GiB
    devices = played("mig_a100").devices
    mine = devices["cuda:0"]
    assert mine.text("gpu.uuid") == "MIG-2c4f9a10-7b6d-5e8c-a1b3-0f9d8e7c6b5a"
    assert mine.number("gpu.memory_total_mib") == 19968
    assert mine.number("gpu.memory_free_mib") == 19968 - 37
    for name in ("gpu.power_limit_watts", "gpu.throttle_reasons", "gpu.ecc_mode"):
        assert gap(mine, name).reason is Reason.NOT_SUPPORTED
    assert codes(mine) == []
    assert mine.text("software.visible_gpus") == "1 of 1"
    other = devices["NVML 0.1"]
    assert other.number("gpu.memory_total_mib") == 4864
    parent = first_gpu("mig_a100")
    assert parent.number("memory_total_bytes") == 40960 * MIB
    assert [each.number("mig_gpu_instance") for each in parent.slices] == [2, 9]


def test_a_vgpu_guest_has_blanks_and_no_licence() -> None:
    # field case 21
    found = played("vgpu_guest").devices["cuda:0"]
    assert found.text("gpu.virtualisation_mode") == "vGPU"
    licence = found["gpu.vgpu_licensed"]
    assert isinstance(licence, Measurement)
    assert licence.value is False
    assert codes(found) == ["gpu_unlicensed"]
    for name in ("gpu.power_limit_watts", "gpu.ecc_mode", "gpu.temperature_load_celsius"):
        assert isinstance(found[name], Unmeasured)
    assert "gpu.link_at_rest" not in found
    assert found.text("gpu.at_rest") == "P0, 1755 MHz, utilisation 0 %"
    # the driver's 736 MiB are not a neighbour's
    assert found.number("gpu.memory_others_mib") == 0
    assert found.number("gpu.memory_free_mib") == 8192 - 736


def test_wsl2_with_an_old_driver() -> None:
    # field cases 10, 14, 15: older calls answer, rows hold nothing, utilisation stays at 0
    found = played("wsl2").devices["cuda:0"]
    assert found.text("gpu.throttle_reasons") == "software power cap"
    total = found["gpu.memory_total_mib"]
    assert isinstance(total, Measurement)
    assert total.value == 10240
    assert "version 1" in total.source
    assert found.number("gpu.memory_free_mib") == 10240 - 1130 - 193
    others = found["gpu.memory_others_mib"]
    assert isinstance(others, Measurement)
    assert others.value == 1130 + 193  # at most: version 1 counts the reserve as used
    assert others.source.startswith("at most")
    assert found.text("gpu.processes") == "0 compute"  # the one row has pid 2^32 - 1
    assert codes(found) == []  # a power cap is no fault, and at most 1.3 GiB accuse nobody
    assert gap(found, "gpu.persistence_mode").reason is Reason.FAILED  # one field's code 999
    assert first_gpu("wsl2").lost is None


def test_a_laptop_on_battery_without_torch() -> None:
    # field cases 7 and 9: no torch, names in bytes
    played_ = played("laptop")
    assert played_.notes == ["torch: No module named 'torch'"]
    found = played_.devices["NVML 0"]
    assert found.text("gpu.name") == "NVIDIA GeForce RTX 4060 Laptop GPU"
    assert codes(found) == ["gpu_power_limit", "gpu_slowed"]
    assert found.text("gpu.throttle_reasons") == "software power cap, software thermal slowdown"
    assert found.number("gpu.power_limit_watts") == 35
    assert found.number("gpu.memory_others_mib") == 14


def test_unified_memory() -> None:
    # field cases 1 and 2: both memory queries fail; the system's MemAvailable is what there is
    found = played("unified_gb10").devices["cuda:0"]
    total, free = found["gpu.memory_total_mib"], found["gpu.memory_free_mib"]
    assert isinstance(total, Measurement)
    assert isinstance(free, Measurement)
    assert total.value == pytest.approx(119.6 * 1024, abs=1)
    assert free.value == 116 * 1024
    assert "MemAvailable" in free.source
    assert isinstance(found["gpu.memory_others_mib"], Unmeasured)
    gpu = first_gpu("unified_gb10")
    assert gpu.lost is None
    assert gpu.number("memory_clock_mhz") is None  # 2^32 - 1 on the wire
    assert codes(found) == []


def test_a_card_that_falls_off_the_bus_between_two_readings() -> None:
    # field cases 26 and 28
    devices = played("falls_off_bus").devices
    assert codes(devices["cuda:0"]) == []
    lost = devices["cuda:1"]
    assert codes(lost) == ["gpu_lost"]
    assert lost.text("gpu.uuid") == "GPU-8e94d0a7-1c5b-4b2f-a630-27f9c6e4d815"
    before, after = load("falls_off_bus").reports()
    assert [gpu.lost is None for gpu in before.gpus] == [True, True]
    assert [gpu.lost is None for gpu in after.gpus] == [True, False]
    assert devices["cuda:0"].text("gpu.peer_access") == "not supported with 1"


def test_a_container_that_lost_its_right_to_the_gpu() -> None:
    # field case 5: fine at first, then 999 at every handle; the first reading stays
    found = played("container_lost_device").devices["cuda:0"]
    assert codes(found) == ["gpu_lost"]
    verdict = found["gpu.state_verdict"]
    assert isinstance(verdict, Measurement)
    assert "recreate it" in verdict.detail["findings"][0]["sentence"]
    assert found.text("gpu.name") == "NVIDIA L4"
    assert found.number("gpu.memory_total_mib") == 23034
    lost = load("container_lost_device").reports()[1].gpus[0].lost
    assert lost is not None
    assert lost.reason is Reason.LOST


def test_library_and_module_of_different_versions() -> None:
    # field case 6: one line, naming both
    found = played("version_mismatch")
    (line,) = [note for note in found.notes if note.startswith("NVML")]
    assert "550.163.01" in line
    assert "550.144.03" in line
    assert "\n" not in line
    assert gap(found.devices["none"], "gpu.memory_total_mib").reason is Reason.FAILED


def test_a_jetson_has_a_gpu_without_nvml() -> None:
    # field case 7: the stub finds nothing; torch drives the GPU all the same
    found = played("jetson_stub")
    assert "should always run with libnvidia-ml.so" in found.notes[0]
    gpu = found.devices["cuda:0"]
    assert gpu.text("gpu.name") == "Orin"
    assert gpu.number("gpu.memory_free_mib") == 52 * 1024
    assert gap(gpu, "gpu.vbios").reason is Reason.NO_DEVICE


def test_an_end_of_null_is_no_early_end(tmp_path: Path) -> None:
    given = next(
        file for file in FOLDER.glob("*.json") if not json.loads(file.read_text())["ended"]
    )
    record = json.loads(given.read_text())
    record["ended"] = record["torch_gap"] = None
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    assert (load_recording(path).ended, load_recording(path).torch_gap) == ("", "")
    assert not [note for note in replay(load_recording(path)).notes if "None" in note]
