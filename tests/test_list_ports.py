"""The script that lists what a fleet listens on, by real sockets of real processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "list_ports.py"
LISTENER = """
import socket, sys
made = []
for kind, host in ((socket.SOCK_STREAM, "127.0.0.1"), (socket.SOCK_STREAM, ""),
                   (socket.SOCK_DGRAM, "127.0.0.1")):
    s = socket.socket(socket.AF_INET, kind)
    s.bind((host, 0))
    if kind == socket.SOCK_STREAM:
        s.listen()
    made.append(s)
print(*(s.getsockname()[1] for s in made), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_ports", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["list_ports"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def listener() -> Iterator[tuple[int, list[int]]]:
    """(pid, ports) of a process that listens: on loopback, on all interfaces, and for datagrams."""
    command = [sys.executable, "-c", LISTENER, "gcs_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as made:
        assert made.stdout is not None
        assert made.stdin is not None
        yield made.pid, [int(port) for port in made.stdout.readline().split()]
        made.stdin.close()


def test_what_a_process_and_its_children_listen_on(
    script: ModuleType, listener: tuple[int, list[int]]
) -> None:
    loopback, everywhere, datagrams = listener[1]
    found = {each.port: each for each in script.listening(script.family(os.getpid()))}
    assert found[loopback].address == "loopback"
    assert found[everywhere].address == "all interfaces"
    assert (found[datagrams].protocol, found[datagrams].address) == ("udp", "loopback")
    assert found[loopback].process == "head: gcs_server"
    assert found[loopback].pin == "--port"
    assert {each.port for each in script.listening(script.running())} >= set(listener[1])


def test_the_table(
    script: ModuleType, listener: tuple[int, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    pid, ports = listener
    assert script.main(["--pid", str(pid)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    assert rows[0] == ["port", "process", "bound address", "purpose", "pinned by"]
    told = {row[2]: row[0].split(", ") for row in rows[2:]}
    assert told["all interfaces"] == [str(ports[1])]
    assert sorted(told["loopback"]) == sorted([str(ports[0]), f"{ports[2]}/udp"])


@pytest.mark.parametrize(
    ("command", "process"),
    [
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "head: gcs_server"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp", "node: raylet"),
        ("ray::AgentActor", "node: pichak agent"),
        ("ray::_GpuHolder", "node: worker"),
        ("python -u /x/ray/autoscaler/_private/monitor.py", "head: autoscaler monitor"),
        ("python /x/ray/_private/runtime_env/agent/main.py", "node: runtime env agent"),
        ("python /opt/bin/pichak agent run --address h:1", "pichak agent run"),
        ("python /opt/bin/pichak fleet watch", "pichak fleet watch"),
        ("sshd: root", "sshd"),
    ],
)  # fmt: skip
def test_processes_are_told_by_their_command(
    script: ModuleType, command: str, process: str
) -> None:
    assert script.kind_of(command.split(), "sshd")[0] == process


def test_a_process_that_is_not_there_is_said(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--pid 999999999: there is no such process"):
        script.main(["--pid", "999999999"])


@pytest.mark.ray
@pytest.mark.slow
def test_a_fleet_that_it_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--nodes", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for process in ("head: gcs_server", "node: raylet", "node: pichak agent"):
        assert f"| {process} |" in done.stdout
