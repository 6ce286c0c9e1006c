"""``pichak disk``: its page, its JSON, its errors and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pichak_coordinator.cli import app
from pichak_coordinator.cli.disk import bar, show
from pichak_core.devices.filesystems import FileSystem, filesystem_of
from pichak_core.measure import disk as core
from pichak_core.measure._disk_verdict import depth_rate
from pichak_core.measure.disk import DiskResult
from pichak_core.measurement import Fingerprint

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core.BUDGET_SECONDS, "quick", 0.8)
    monkeypatch.setitem(core.OWN_FILE_MIB, "quick", 16)
    monkeypatch.setenv("COLUMNS", "120")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["disk", *arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    if filesystem_of(tmp_path).kind not in {"disk", "layered"}:
        pytest.skip("temporary files lie on no disk")
    path = tmp_path / "model-00001.safetensors"
    with path.open("wb") as file:
        file.write(os.urandom(4 * MIB))
        file.flush()
        os.fsync(file.fileno())
    return path


def test_the_page_of_a_real_file(model: Path) -> None:
    result = run(str(model), "--block-mb", "1")
    if "cache not bypassed" in result.stdout:
        pytest.skip("no bypass on this file system")
    assert result.exit_code == 0, result.output
    for part in ("in flight", "p99 ms", "Verdict: ", "cache bypassed", "file system: "):
        assert part in result.stdout
    assert "only 4 blocks to read" in result.stdout
    assert result.stderr == ""


def test_json_is_alone_on_stdout_and_reads_back(model: Path) -> None:
    result = run(str(model), "--block-mb", "1", "--json")
    record = json.loads(result.stdout)
    assert record["schema"] == 1
    assert record["disk"]["data_bytes"] == 4 * MIB
    assert record["disk"]["block_bytes"] == MIB
    found = Fingerprint.from_dict(record["fingerprint"])
    assert found.text("disk.filesystem") == filesystem_of(model).type
    if record["disk"]["ranks"]:
        assert found.number("disk.read_mb_s") == record["disk"]["best_mb_s"]


def test_a_directory_gets_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    if filesystem_of(tmp_path).kind not in {"disk", "layered"}:
        pytest.skip("temporary files lie on no disk")
    result = run(str(tmp_path), "--block-mb", "1", "--chunk-mb", "8")
    assert "an own file of" in result.stdout, result.output
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_two_reads_may_be_asked_for(tmp_path: Path) -> None:
    if filesystem_of(tmp_path).kind not in {"disk", "layered"}:
        pytest.skip("temporary files lie on no disk")
    result = run(str(tmp_path), "--chunk-mb", "16")
    assert "an own file of" in result.stdout, result.output
    assert "MB free, and a probe needs" not in result.stderr


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_memory_measures_nothing(model: Path) -> None:
    # field case 77
    result = run("/dev/shm")
    assert result.exit_code == 1
    assert "memory, not a disk" in result.stdout
    result = run("/dev/shm", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["disk"]["is_memory"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nothing/here"], "/nothing/here does not exist"),
        (["/dev/null"], "not a regular file"),
        (["{model}", "--block-mb", "8"], "4,194,304 bytes are less than one read of 8,388,608"),
        (["{model}", "--block-mb", "1024"], "less than one read of 1,073,741,824"),
        (["{directory}", "--chunk-mb", "1"], "holds at least one read of 8 MiB"),
        (["{directory}", "--chunk-mb", "inf"], "chunk_mb inf"),
        (["{directory}", "--chunk-mb", "nan"], "chunk_mb nan"),
        (["{directory}", "--block-mb", "nan"], "block_mb nan"),
        (["{model}", "{directory}"], "is a directory among 2 paths"),
    ],
)
def test_mistakes_are_one_sentence(model: Path, arguments: list[str], message: str) -> None:
    names = {"model": model, "directory": model.parent}
    result = run(*[argument.format(**names) for argument in arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("pichak: ")
    assert result.stderr.count("\n") == 1


def test_usage_errors() -> None:
    assert run("--block-mb", "0").exit_code == 2
    assert run("--depth", "deep").exit_code == 2


def test_help_has_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "pichak disk /mnt/data --depth full" in result.stdout


def test_the_table_marks_the_best_and_draws_to_scale(capsys: pytest.CaptureFixture[str]) -> None:
    first = depth_rate(1, (500.0,), [0.01])
    best = depth_rate(4, (1000.0, 1000.0, 1000.0, 1000.0), [0.02])
    disk = FileSystem("ext4", "disk", "/", "/dev/vda", "254:0", "vda")
    show(DiskResult(disk, (first, best), best, bypassed=True, block_bytes=8 * MIB, files=1))
    rows = [line for line in capsys.readouterr().out.splitlines() if "#" in line]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert rows[1].count("#") == 2 * rows[0].count("#")
    assert ["best" in row for row in rows] == [False, True]
    # field case 78: what a cache answered has no best
    show(DiskResult(disk, (first, best), best, refusal="refused at read", block_bytes=MIB, files=1))
    shown = capsys.readouterr().out
    assert "<- best" not in shown
    assert "cache not bypassed" in shown


def test_bars() -> None:
    assert bar(0) == ""
    assert len(bar(0.001)) == 1
    assert len(bar(1.0)) == 24
