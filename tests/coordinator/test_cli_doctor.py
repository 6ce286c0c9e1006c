"""``pichak doctor``: what is missing is said, with what to do about it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from pichak_coordinator.cli import app, doctor
from pichak_coordinator.cli.doctor import Check, all_checks
from pichak_core.devices import direct_io, gpus, host
from pichak_core.devices.gpus import Report
from pichak_core.devices.host import SharedMemory
from pichak_core.devices.nvml import Gpu
from pichak_core.measurement import Reason, Unmeasured

GIB = 2**30


def fake_host(**answers: Any) -> SimpleNamespace:
    usual = {
        "shared_memory": SharedMemory("/dev/shm", 8 * GIB, 8 * GIB),
        "open_file_limit": 65536,
        "usable_memory_bytes": (16 * GIB, "MemAvailable"),
        "usable_cores": (1, "affinity mask"),
    }
    return SimpleNamespace(
        **{name: (lambda value=value: value) for name, value in {**usual, **answers}.items()}
    )


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without surprises: no NVML, a home of its own, no Ray variables."""
    gone = Report(gap=Unmeasured("nvml", Reason.NO_DEVICE, "no NVIDIA driver library"))
    monkeypatch.setattr(gpus, "read_gpus", lambda: gone)
    monkeypatch.setattr(host, "this_host", fake_host)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PICHAK_HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def check(name: str, folder: Path) -> Check:
    return next(one for one in all_checks(folder) if one.name == name)


def test_every_line_that_is_not_ok_says_what_to_do(quiet: Path) -> None:
    checks = list(all_checks(quiet))
    names = [one.name for one in checks]
    assert len(names) == len(set(names))
    for one in checks:
        assert one.status in ("ok", "warn", "missing")
        assert one.found
        assert bool(one.advice) == (one.status != "ok"), one


def test_json_and_page_hold_the_same_checks(quiet: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"], standalone_mode=False)
    record = json.loads(done.stdout)
    assert record["schema"] == 1
    page = CliRunner().invoke(app, ["doctor"], standalone_mode=False, env={"COLUMNS": "70"}).stdout
    assert max(map(len, page.splitlines())) <= 120
    words = " ".join(page.split())
    for one in record["checks"]:
        assert " ".join(f"{one['status']} {one['name']} {one['found']}".split()) in words
        assert " ".join(one["advice"].split()) in words
    assert done.return_value == 0


def test_a_missing_torch(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def without(name: str) -> str:
        if name in ("torch", "ray"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without)
    assert check("torch", quiet).status == "missing"
    assert "pichak-fleet[torch]" in check("torch", quiet).advice
    assert check("cuda", quiet).status == "missing"
    assert check("ray", quiet).status == "missing"


def test_gpus_that_nvml_sees_and_one_that_is_lost(
    quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Gpu(0, {"name": "NVIDIA L4"})
    report = Report({"driver_version": "550.90.07"}, [good])
    monkeypatch.setattr(gpus, "read_gpus", lambda: report)
    assert check("nvml", quiet).found == "driver 550.90.07: NVIDIA L4"
    report.gpus.append(Gpu(1, lost=Unmeasured("gpu", Reason.LOST, "fell off the bus")))
    lost = check("nvml", quiet)
    assert lost.status == "warn"
    assert "GPU 1: lost: fell off the bus" in lost.found


def test_rays_token(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 92
    assert check("ray token", quiet).status == "warn"
    (quiet / ".ray").mkdir()
    (quiet / ".ray/auth_token").write_text("secret-of-this-test")
    held = check("ray token", quiet)
    assert held.status == "ok"
    assert "secret-of-this-test" not in held.found
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert check("ray token", quiet).status == "warn"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert check("ray token", quiet).status == "ok"


def test_dockers_shared_memory(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 90: fake statvfs(/dev/shm)=67108864
    small = fake_host(shared_memory=SharedMemory("/dev/shm", 67108864, 67108864))
    monkeypatch.setattr(host, "this_host", lambda: small)
    found = check("shared memory", quiet)
    assert found.status == "warn"
    assert "64 MiB" in found.found
    assert "--shm-size" in found.advice


@pytest.mark.parametrize(
    ("answers", "name", "status"),
    [
        ({"open_file_limit": 1024}, "open files", "warn"),
        ({"open_file_limit": -1}, "open files", "ok"),
        ({"usable_memory_bytes": (GIB, "a limit")}, "memory", "warn"),
        ({"usable_cores": (1, "CPU quota")}, "cores", "warn"),
    ],
)
def test_limits_of_the_machine(
    quiet: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], name: str, status: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8 if name == "cores" else 1)
    monkeypatch.setattr(host, "this_host", lambda: fake_host(**answers))
    assert check(name, quiet).status == status


def test_what_a_platform_does_not_have_does_not_break_the_page(
    quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise NotImplementedError("Windows has no such limit")

    machine = fake_host()
    machine.open_file_limit = refuse
    monkeypatch.setattr(host, "this_host", lambda: machine)
    found = check("open files", quiet)
    assert found.status == "warn"
    assert "Windows has no such limit" in found.found


def test_a_disk_that_refuses_to_be_read_past_its_cache(
    quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # field case 77
    def refuse(path: str) -> None:
        raise direct_io.BypassRefusedError("open", path, OSError(22, "Invalid argument"))

    assert check("direct i/o", quiet).status in ("ok", "missing")
    monkeypatch.setattr(direct_io, "open_direct", refuse)
    found = check("direct i/o", quiet)
    assert found.status == "missing"
    assert "refused at open" in found.found
    assert list(quiet.iterdir()) == []  # nothing is left behind
    assert check("direct i/o", quiet / "nowhere").status == "missing"


def test_a_state_folder_that_cannot_be_made(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("state folder", quiet).status == "ok"
    file = quiet / "a file"
    file.write_text("")
    monkeypatch.setenv("PICHAK_HOME", str(file / "below"))
    found = check("state folder", quiet)
    assert found.status == "missing"
    assert "PICHAK_HOME" in found.advice


def test_the_exit_code_is_1_only_when_nothing_works(
    quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(*statuses: Any) -> None:
        made = [Check("python", "ok", "3.11"), *(Check("x", s, "y", "z") for s in statuses)]
        monkeypatch.setattr(doctor, "all_checks", lambda _: iter(made))

    checks("missing", "warn")
    assert CliRunner().invoke(app, ["doctor"], standalone_mode=False).return_value == 1
    checks("missing", "ok")
    assert CliRunner().invoke(app, ["doctor"], standalone_mode=False).return_value == 0
