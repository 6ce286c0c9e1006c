"""The units, as far as they can be checked without a systemd that runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pichak_coordinator.cli import app

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
NAMES = ["pichak-agent.service", "pichak-coordinator.service", "pichak.slice"]
SERVICES = NAMES[:2]
#: Of `systemd-analyze security`: what the README tells, and no worse.
EXPOSURE = {"pichak-agent.service": 2.3, "pichak-coordinator.service": 2.0}


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Where the program that they start exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    for name in NAMES:
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/pichak/bin/pichak", sys.executable))
    return tmp_path


def analyze(*words: str) -> str:
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_systemd_takes_every_line(units: Path, name: str) -> None:
    assert analyze("verify", "--man=no", str(units / name)) == ""


def test_a_line_that_systemd_does_not_know_would_be_seen(units: Path) -> None:
    unit = units / NAMES[0]
    unit.write_text(unit.read_text().replace("WatchdogSec=30s", "WatchDogSeconds=30s"))
    assert "WatchDogSeconds" in analyze("verify", "--man=no", str(unit))


@pytest.mark.parametrize("name", SERVICES)
def test_how_much_a_service_may_do(units: Path, name: str) -> None:
    said = analyze("security", "--offline=true", "--no-pager", str(units / name))
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", said)
    if exposure is None:
        pytest.skip(f"this systemd-analyze rates no file: {said[:200]}")
    assert float(exposure[1]) <= EXPOSURE[name]
    assert f"{EXPOSURE[name]}" in (UNITS / "README.md").read_text()


def values(name: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (UNITS / name).read_text(), re.M)


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_started_exists(name: str) -> None:
    (line,) = values(name, "ExecStart")
    env = name.removeprefix("pichak-").replace(".service", ".env")
    for variable, text in re.findall(r"^(\w+)=(.*)$", (UNITS / env).read_text(), re.M):
        line = line.replace(f"${{{variable}}}", text).replace(f"${variable}", text)
    assert "$" not in line
    program, *words = shlex.split(line)
    assert program == "/opt/pichak/bin/pichak"
    command: click.Command = app
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None
        command = found
    command.make_context("x", words)


def test_the_agent_may_divide_its_own_group() -> None:
    """Without both lines no job has a limit of the kernel's own."""
    agent = SERVICES[0]
    assert values(agent, "Delegate") == ["memory"]
    assert values(agent, "ProtectControlGroups") == ["no"]


def test_the_agent_is_told_ready_watched_and_given_time_to_end() -> None:
    agent = SERVICES[0]
    assert values(agent, "Type") == ["notify"]
    assert values(agent, "Restart") == ["always"]
    assert values(agent, "WatchdogSec") == ["30s"]
    assert values(agent, "TimeoutStopSec") == ["20s"]
    # Exit code 2: what a person has to mend.
    assert values(agent, "RestartPreventExitStatus") == ["2"]
