"""On a narrow terminal no table shows a part of a number: it would look measured and be wrong.

What may be there is what the same table shows where it has all the room.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from pichak_coordinator.cli import app
from pichak_coordinator.cli.common import out
from pichak_coordinator.cli.disk import show
from pichak_coordinator.cli.net_view import show_network
from pichak_coordinator.cli.tables import print_grid
from pichak_coordinator.fleet_network import NetReport
from pichak_coordinator.links import LinkMatrix
from pichak_coordinator.net_collective import BUS, Collective
from pichak_core.devices.filesystems import FileSystem
from pichak_core.measure._collective_math import Point
from pichak_core.measure._disk_verdict import depth_rate
from pichak_core.measure.disk import DiskResult
from pichak_core.measurement import Fingerprint, Measurement

WIDTHS = (40, 60, 80)
_NUMBER = re.compile(r"\d[\d,.]*")

Show = Callable[[], str]


def numbers(text: str) -> set[str]:
    return set(_NUMBER.findall(text))


def assert_whole(show_it: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    wide = numbers(show_it())
    assert len(wide) > 5
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        text = show_it()
        assert numbers(text) <= wide, f"at {width}:\n{text}"
        assert "…" not in text


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("narrow") / "fleet.db"
    made = ["--nodes", "6", "--days", "2", "--fault-rate", "0.5", "--seed", "4"]
    done = CliRunner().invoke(app, ["fleet", "simulate", *made, "--store", str(path)])
    assert done.exit_code == 0, done.output
    return path


@pytest.mark.parametrize(
    "command",
    [
        ("compare",),
        ("pick", "2"),
        ("history",),
        ("history", "h100-01"),
        ("history", "h100-01", "host.memory_copy_mb_s"),
        ("history", "h100-01", "cpu.model"),
    ],
)
def test_of_a_history(
    store: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def shown() -> str:
        done = CliRunner().invoke(app, ["fleet", *command, "--store", str(store)])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert_whole(shown, monkeypatch)


def test_of_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        made = ["--nodes", "6", "--days", "1", "--fault-rate", "0.9", "--seed", "4"]
        done = CliRunner().invoke(app, ["fleet", "simulate", *made])
        assert done.exit_code == 0, done.output
        return re.sub(r"took [\d.]+ s", "", done.stdout)

    assert_whole(shown, monkeypatch)


@pytest.mark.parametrize("count", [8, 14])
def test_of_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Eight nodes are a matrix, fourteen a list."""
    names = tuple(f"gpu-worker-{i:02d}" for i in range(count))
    matrix = LinkMatrix(names)
    for index, name in enumerate(names[1:], 1):
        found = Fingerprint()
        found.add(Measurement("network.x.send_mb_s", 11_000.0 + index, "MB/s", "made"))
        detail = {"p95_ms": 0.345 + index}
        found.add(Measurement("network.x.rtt_ms", 0.123 * index, "ms", "made", detail=detail))
        matrix = matrix.with_link(names[0], name, found)
    points = tuple(Point(4**k * 4096, 0.00123 * k, 0.000101 * k, 5) for k in range(1, 9))
    made = Collective(names, Measurement(BUS, 12_178.9, "MB/s", "gloo all-reduce"), points)

    def shown() -> str:
        show_network(NetReport([], matrix, [], collective=made), out())
        return capsys.readouterr().out

    assert_whole(shown, monkeypatch)


def test_of_a_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = depth_rate(1, (15_321.0, 15_408.0, 15_377.0), [0.01234])
    best = depth_rate(64, (118_545.0, 118_611.0, 118_432.0), [0.02345])
    disk = FileSystem("ext4", "disk", "/", "/dev/vda", "254:0", "vda")

    def shown() -> str:
        show(DiskResult(disk, (first, best), best, bypassed=True, block_bytes=2**23, files=1))
        return capsys.readouterr().out

    assert_whole(shown, monkeypatch)


def test_a_grid_becomes_blocks_and_loses_first_what_can_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a-host-with-a-long-name"
    rows = [(name, "118,545", "#" * 30), ("b", "–", "")]

    def at(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        print_grid(out(), ("node", "tok/s", ""), rows, words=("node", ""), dispensable=("",))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    assert at(80)[1] == f"{name}  118,545  {'#' * 30}"
    assert [line.split() for line in at(40)] == [["node", "tok/s"], [name, "118,545"], ["b", "–"]]
    assert at(28) == [name, "  tok/s: 118,545", "b"]
