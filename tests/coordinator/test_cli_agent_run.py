"""What `pichak agent run` refuses before it starts anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pichak_coordinator.cli import app
from pichak_core.devices import host as devices_host


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["agent", "run", "--address", "h:1", *words])


def test_other_systems_are_told_the_variable_and_the_way_without_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """field case 83"""
    monkeypatch.setattr(devices_host, "IS_LINUX", False)
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    done = call()
    assert done.exit_code == 2
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1" in done.output
    assert "`pichak agent probe --out FILE`" in done.output
    # Nothing of an agent's jobs runs where a process cannot fork.
    with monkeypatch.context() as windows:
        windows.delattr(os, "fork")
        done = call()
        assert done.exit_code == 2
        assert "run the agent inside WSL2" in done.output
        assert "`pichak agent watch`" in done.output
        assert "agent probe" not in done.output
    # With the variable it goes on, to the next thing that is wrong.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    assert "up to 63 letters" in call("--name", "a b").output


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (None, [], "host.toml: it cannot be read (No such file"),
        ("a folder", [], "host.toml: it cannot be read (Is a directory); name the TOML file"),
        ("host = ", [], "host.toml: it is no TOML: "),
        ('host = "a"\ngpu = 3', [], "host.toml: gpu: 3 is not one line of at most 100"),
        ('host = "a"\n[metrics]\ndisk.read_mb_s = 3', [], "stands in quotes"),
        ('gpu = "x"', [], "host: a name is needed"),
        ('host = "a"', ["--metrics-port", "0"], "a simulated host has no readings"),
        ('host = "a"', ["--name", "-a"], "up to 63 letters"),
        (
            'host = "a"\n[metrics]\n"disk.read_mb_s" = 1\n'
            '[[fault]]\nmetric = "disk.read_mb_s"\nstarts = "soon"\nfactor = 2',
            [],
            '"+10m" from its start',
        ),
    ],
)
def test_a_simulated_host_that_is_none(
    tmp_path: Path, text: str | None, words: list[str], says: str
) -> None:
    file = tmp_path / "host.toml"
    if text == "a folder":
        file.mkdir()
    elif text is not None:
        file.write_text(text)
    done = call("--simulate", str(file), *words)
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert done.output.count("\n") == 1
