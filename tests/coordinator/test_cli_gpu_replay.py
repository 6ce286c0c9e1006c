"""``pichak gpu --record`` and ``--replay``: the page of every recording, and every bad file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pichak_coordinator.cli import app

FOLDER = Path(__file__).parent.parent / "data" / "nvml"


def run(*arguments: object, columns: int = 90) -> Result:
    return CliRunner().invoke(
        app,
        ["gpu", *map(str, arguments)],
        standalone_mode=False,
        env={"COLUMNS": str(columns)},
    )


#: What a person looks for on the page of each machine.
KEY_LINES = {
    "windows_geforce": [
        "  driver    566.36 (WDDM), for CUDA up to 12.7",
        "  warn  other programs hold 2.9 GiB of the GPU's memory",
        "  gpu.memory_free_mib              9,116 MiB",
    ],
    "datacentre_h100": [
        "REPLAY: cuda:0",
        "  PCI       00000000:43:00.0, VBIOS 96.00.89.00.01",
        "  warn  the power limit in force is 500 W, 71 % of the card's default of 700 W",
        "  info  1 uncorrected memory error in the card's life, none since the driver was loaded",
        "REPLAY: cuda:1",
    ],
    "mig_a100": [
        "  GPU       NVIDIA A100-SXM4-40GB MIG 3g.20gb, compute capability 8.0",
        "  UUID      MIG-2c4f9a10-7b6d-5e8c-a1b3-0f9d8e7c6b5a",
        "  gpu.memory_total_mib             19,968 MiB",
        "  nothing found by the rules that could be applied",
    ],
    "vgpu_guest": [
        "  virtual   vGPU, NOT licensed",
        "  warn  the vGPU holds no licence: the driver slows it down after a while",
    ],
    "wsl2": [
        "  host      wsl2 (hyper-v), Ubuntu 24.04.1 LTS, kernel 5.15.167.4-microsoft-standard-WSL2",
        "      at most: NVML's used; the driver's reserve is in it and not told apart",
    ],
    "laptop": [
        "note: torch: No module named 'torch'",
        "REPLAY: NVML 0",
        "  warn  the card slowed itself down when it was read: software thermal slowdown",
    ],
    "unified_gb10": [
        "  GPU       NVIDIA GB10, compute capability 12.1",
        "      the GPU shares the system's memory: total as torch gives it, free is MemAvailable",
        "  gpu.memory_free_mib              118,784 MiB",
    ],
    "falls_off_bus": [
        "  fail  the GPU was lost between two readings, what follows is from the first: NVML code",
        "        15 (GPU is lost); the GPU fell off the bus or became unreachable",
    ],
    "version_mismatch": [
        "  fail  the GPUs cannot be read: the NVIDIA library (550.163.01) and the kernel module",
        "        (550.144.03) differ: reboot, or reload the module, after a driver update",
    ],
    "jetson_stub": [
        "  GPU       Orin",
        "  gpu.memory_free_mib              53,248 MiB",
    ],
    "container_lost_device": [
        "        999 (Unknown Error); in a container this often means that it lost its right to "
        "the",
    ],
}


@pytest.mark.parametrize("name", sorted(KEY_LINES))
def test_the_page_of_a_recording(name: str) -> None:
    done = run("--replay", FOLDER / f"{name}.json")
    assert done.return_value == 0, done.exception
    lines = done.stdout.splitlines()
    for line in KEY_LINES[name]:
        assert line in lines, f"{line!r} in\n{done.stdout}"
    assert max(len(line) for line in lines if not line.startswith("REPLAY ")) <= 90
    # marked as no measurement, where a reader starts and where he ends
    assert "REPLAY of a recording: nothing below was measured on this machine" in lines[0]
    assert "end of the REPLAY" in lines[-1]
    titles = [line for line in lines if line.startswith("REPLAY: ")]
    assert titles


def test_every_recording_has_its_page_looked_at() -> None:
    assert set(KEY_LINES) == {path.stem for path in FOLDER.glob("*.json")}


@pytest.mark.parametrize("columns", [78, 100])
def test_pages_keep_their_width(columns: int) -> None:
    for path in FOLDER.glob("*.json"):
        lines = run("--replay", path, columns=columns).stdout.splitlines()
        assert max(len(line) for line in lines if not line.startswith("REPLAY ")) <= columns


def test_a_replay_as_json_says_that_it_is_one() -> None:
    done = run("--replay", FOLDER / "datacentre_h100.json", "--json")
    record = json.loads(done.stdout)
    assert record["measured_here"] is False
    assert [each["device"] for each in record["devices"]] == ["cuda:0", "cuda:1"]
    limit = record["devices"][0]["fingerprint"]["gpu.power_limit_watts"]
    assert limit["value"] == 500


def test_one_device_of_a_recording() -> None:
    path = FOLDER / "datacentre_h100.json"
    text = run("--replay", path, "--device", "cuda:1").stdout
    assert "REPLAY: cuda:1" in text
    assert "REPLAY: cuda:0" not in text
    refused = run("--replay", path, "--device", "cuda:7")
    assert "holds cuda:0, cuda:1" in str(refused.exception)


def test_nothing_of_this_machine_is_on_the_page_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the recording's own mask counts
    text = run("--replay", FOLDER / "mig_a100.json").stdout
    assert "MIG-2c4f9a10-7b6d-5e8c-a1b3-0f9d8e7c6b5a" in text
    for word in ("host.machine_id", "software.pichak", "cpu."):
        assert word not in text


def test_recording_this_machine_and_showing_it_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("--record", path)
    assert done.return_value == 0, done.exception
    assert re.search(r"\b(1 call|([2-9]|\d\d+) calls) of NVML", done.stdout)
    assert "no host name" in done.stdout
    assert list(tmp_path.iterdir()) == [path]
    assert run("--replay", path).return_value == 0
    record = json.loads(run("--record", path, "--json").stdout)
    assert record["recording"] == str(path)
    assert record["calls"] >= 1


BAD = {
    "missing.json": None,
    "empty.json": b"",
    "half.json": b'{"format": "pichak-nvml-recording", "ver',
    "foreign.json": b'{"schema": 1, "fingerprint": {}}',
    "newer.json": b'{"format": "pichak-nvml-recording", "version": 9}',
    "hollow.json": b'{"format": "pichak-nvml-recording", "version": 1}',
    "binary.json": b"\xff\xfe\x00\x01",
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_file_is_one_clear_sentence(name: str, tmp_path: Path) -> None:
    content = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = run("--replay", tmp_path / name)
    assert done.exception is not None
    message = str(done.exception)
    assert done.exception.exit_code == 2  # type: ignore[attr-defined]
    assert name in message
    assert "pichak gpu --record" in message
    assert "\n" not in message
    assert "Traceback" not in done.output


def test_a_folder_is_no_recording(tmp_path: Path) -> None:
    done = run("--replay", tmp_path)
    assert done.exception.exit_code == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--record", "a.json", "--replay", "b.json"), "one of them at a time"),
        (("--record", "a.json", "--only", "cpu"), "measure nothing"),
        (("--replay", "a.json", "--only", "cpu"), "measure nothing"),
        (("--record", "no/such/folder/a.json"), "there is no folder no/such/folder"),
    ],
)
def test_usage(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert words in str(done.exception)
    assert done.exception.exit_code == 2  # type: ignore[union-attr]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.json.part").mkdir()
    done = run("--record", tmp_path / "a.json")
    assert done.exception.exit_code == 2  # type: ignore[union-attr]
    assert "name a file that can be written" in str(done.exception)
