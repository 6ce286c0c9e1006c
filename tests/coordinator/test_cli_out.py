"""`--out` and its like: what is wrong with the file is told before anything else is done."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pichak_agent import machine_claim
from pichak_coordinator.cli import app
from pichak_coordinator.cli.agent_probe import _tell_of_service
from pichak_core.devices.host import IS_LINUX

COMMANDS = [
    # Nothing says how long the rows are, which would be told next.
    pytest.param(("agent", "probe", "--out"), id="probe"),
    pytest.param(("agent", "probe", "--simulate", "none.toml", "--out"), id="simulated probe"),
    # There is no history, which would be told next.
    pytest.param(("export", "--all", "--store", "none.db", "--out"), id="export"),
    pytest.param(("gpu", "--record"), id="recording"),
]


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.mark.parametrize("words", COMMANDS)
def test_a_file_that_cannot_be_made_is_told_first(tmp_path: Path, words: tuple[str, ...]) -> None:
    missing = tmp_path / "nodir" / "x.mpk"
    for file, says in ((missing, "nodir"), (tmp_path, "folder")):
        done = call(*words, file)
        assert done.exit_code == 2, done.output
        assert says in done.output
        assert done.output.count("\n") == 1
        assert done.output.startswith("pichak: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        *COMMANDS,
        pytest.param(("fleet", "report", "--html"), id="page"),
        pytest.param(("fleet", "simulate", "--store"), id="simulated history"),
        pytest.param(("fleet", "compare", "--store"), id="history"),
    ],
)
@pytest.mark.parametrize("end", ["/", "/.", "/.."])
def test_the_name_of_a_folder_is_no_file(tmp_path: Path, words: tuple[str, ...], end: str) -> None:
    """A path drops the end of such a name, and the file would take the folder's."""
    done = call(*words, f"{tmp_path}/new{end}")
    assert done.exit_code == 2, done.output
    assert f"{words[-1]} {tmp_path}/new{end}: that is the name of a folder" in done.output
    assert done.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", COMMANDS[:3])
def test_a_file_that_is_there_is_told_first(tmp_path: Path, words: tuple[str, ...]) -> None:
    there = tmp_path / "there.mpk"
    there.write_text("precious")
    done = call(*words, there)
    assert done.exit_code == 2
    assert "exists: name another file, or replace it by --force" in done.output
    assert there.read_text() == "precious"


def test_then_the_rest_is(tmp_path: Path) -> None:
    out = tmp_path / "a.mpk"
    assert "--seq-len" in call("agent", "probe", "--out", out).output
    simulated = call("agent", "probe", "--out", out, "--simulate", tmp_path / "none.toml")
    assert "it cannot be read (No such file" in simulated.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not IS_LINUX, reason="one agent a machine is told on Linux")
def test_a_probe_says_that_an_agent_of_another_home_may_measure_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_claim, "NAME", f"pichak-test-{secrets.token_hex(8)}")
    monkeypatch.setattr(machine_claim, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    said: list[str] = []
    _tell_of_service(said.append)
    assert said == []
    claim = machine_claim.MachineClaim(Path("/var/lib/pichak"))
    assert claim.take()
    _tell_of_service(said.append)
    claim.release()
    (text,) = said
    assert text.startswith(f"an agent service of another home runs here (pid {os.getpid()}, user ")
