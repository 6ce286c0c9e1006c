"""`pichak agent run` while no head is there: it waits, says so once, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_tools import PICHAK, Place, place_in, wait_until

from pichak_agent.service_knock import knock


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


def test_a_head_that_is_away_is_a_state_and_said_once(place: Place) -> None:
    """The supervisor is light, alone on its node, watched by systemd, and leaves nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place.folder / "notify"))
        manager.settimeout(60)
        environment = place.environment()
        environment |= {"NOTIFY_SOCKET": str(place.folder / "notify"), "WATCHDOG_USEC": "1000000"}
        place.environment = lambda home="home": environment  # type: ignore[method-assign]
        service = place.service()
        place.wait_for("does not answer")
        told = b""
        while told.count(b"WATCHDOG=1") < 5:
            told += manager.recv(4096) + b"\n"
    assert told.index(b"READY=1") < told.index(b"WATCHDOG=1")
    assert b"STATUS=the head at 127.0.0.1" in told
    assert place.said("service.log").count("does not answer") == 1
    found = place.status()
    assert (found["state"], found["running"], found["joins"]) == ("waiting", True, 0)
    assert found["pid"] == service.pid
    maps = Path(f"/proc/{service.pid}/maps").read_text()
    assert "/ray/" not in maps
    assert "/torch/" not in maps
    status = Path(f"/proc/{service.pid}/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    assert resident < 150 * 1024
    second = place.pichak("agent", "run", "--even-if-another", "--address", place.address)
    assert second.returncode == 1
    assert f"runs on this node already (pid {service.pid}" in second.stderr
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0
    assert "stopped after" in place.said("service.log")
    assert not (place.folder / "home").exists()
    assert place.pichak("agent", "status").returncode == 1


def test_a_service_that_was_killed_is_told_and_followed(place: Place) -> None:
    first = place.service()
    place.wait_for("does not answer")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    listed = json.loads(place.pichak("agent", "status", "--json").stdout)["services"]
    assert [(each["state"], each["running"]) for each in listed] == [("dead", False)]
    second = place.service(log="second.log")
    place.wait_for("does not answer", "second.log")
    second.send_signal(signal.SIGINT)
    assert second.wait(20) == 0
    assert not (place.folder / "home").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--address", "10.0.0.1"], "write HOST:PORT"),
        (["--address", ":6379"], "write HOST:PORT"),
        (["--address", "http://h:6379"], "write HOST:PORT"),
        (["--address", "h:99999"], "write HOST:PORT"),
        (["--address", "h:1", "--token-file", "none"], "cannot be read (No such file"),
        (["--address", "h:1", "--token-file", "empty"], "one word was expected"),
        (["--address", "h:1", "--token-file", "binary"], "bytes that are no text"),
        (["--address", "h:1", "--labels", "a"], "write KEY=VALUE"),
        (["--address", "h:1", "--resources", "{x"], "write JSON"),
        (["--address", "h:1", "--resources", '{"x": "y"}'], "write JSON"),
        (["--address", "h:1", "--", "--head"], "the service decides that itself"),
    ],
)
def test_a_mistake_is_one_sentence(place: Place, words: list[str], says: str) -> None:
    (place.folder / "empty").write_text("\n")
    (place.folder / "binary").write_bytes(b"\xff\xfe")
    done = place.pichak("agent", "run", *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_token_that_others_can_read_is_told_and_not_shown(place: Place) -> None:
    place.token_file.chmod(0o644)
    service = place.service()
    place.wait_for("does not answer")
    said = place.said("service.log")
    assert "others on this machine can read the token" in said
    assert place.token not in said
    assert place.token not in Path(f"/proc/{service.pid}/cmdline").read_text()
    assert place.token not in Path(f"/proc/{service.pid}/environ").read_text()
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0


def test_knocking() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert knock(f"127.0.0.1:{port}") == ""
    assert "does not answer (Connection refused)" in knock(f"127.0.0.1:{port}")
    assert "is not known here" in knock("no-such-host.invalid:1")


def test_a_port_that_is_taken_is_told(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
        words = ["--even-if-another", "--address", "h:1", "--metrics-port", port]
        done = place.pichak("agent", "run", *words)
    assert done.returncode == 2
    assert f"--metrics-port {port}: Address already in use" in done.stderr
    assert not (place.folder / "home").exists()


def test_what_it_samples_is_served_while_its_head_is_away(place: Place) -> None:
    service = place.service("--metrics-port", "0")
    place.wait_for("does not answer")
    where = str(place.status()["metrics"])
    assert where.startswith("http://127.0.0.1:")

    def sampled() -> bool:
        with urllib.request.urlopen(where, timeout=10) as page:
            return b"pichak_up 1" in page.read()

    wait_until(sampled, "no sample")
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0
    assert not (place.folder / "home").exists()


def test_a_cluster_without_authentication_is_refused_off_loopback(place: Place) -> None:
    """field case 92"""
    open_to_all = {**place.environment(), "RAY_AUTH_MODE": "disabled"}
    place.environment = lambda home="home": open_to_all  # type: ignore[method-assign]
    done = place.pichak("agent", "run", "--address", "192.0.2.1:6379")
    assert done.returncode == 2
    assert "without authentication" in done.stderr
    service = place.start(
        [*PICHAK, "agent", "run", "--even-if-another", "--address", "192.0.2.1:6379", "--insecure"],
        "i.log",
        open_to_all,
    )
    place.wait_for("head at 192.0.2.1", "i.log")
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0
