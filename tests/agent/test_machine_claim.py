"""One agent a machine: over homes, users and network namespaces, with real processes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from service_tools import PICHAK, Place, place_in

from pichak_agent.machine_claim import MachineClaim, holder, stranger
from pichak_core.devices.host import IS_LINUX

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="abstract socket names are Linux's")
HOLDS = (
    "import sys, time; from pathlib import Path\n"
    "from pichak_agent.machine_claim import MachineClaim\n"
    "claim = MachineClaim(Path('/var/lib/x'), sys.argv[1])\n"
    "print(claim.take(), flush=True)\n"
    "while True: claim.answer(); time.sleep(0.05)\n"
)


@pytest.fixture
def name() -> str:
    return f"pichak-test-{secrets.token_hex(8)}"


@contextmanager
def another(name: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that asks for the claim; its first line says whether it got it."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDS, name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_has_it_and_tells_who_and_where(name: str) -> None:
    assert holder(name) is None
    with another(name) as first:
        assert said(first) == "True"
        found = holder(name)
        assert found is not None
        assert (found.pid, found.home) == (first.pid, "/var/lib/x")
        assert f"pid {first.pid}, user " in found.sentence
        assert not MachineClaim(Path("/home/y"), name).take()
        assert stranger(Path("/home/y"), name) == found
        assert stranger(Path("/var/lib/x"), name) is None
    # However it died.
    mine = MachineClaim(Path("/home/y"), name)
    assert mine.take()
    mine.release()
    mine.release()
    assert holder(name) is None


@pytest.mark.root
def test_another_user_is_refused_too(name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("other users need root")
    mine = MachineClaim(Path("/home/y"), name)
    assert mine.take()
    os.seteuid(65534)
    try:
        assert not MachineClaim(Path("/home/z"), name).take()
        found = holder(name)
    finally:
        os.seteuid(0)
    assert found is not None
    assert (found.pid, found.user) == (os.getpid(), "root")
    mine.release()


@pytest.mark.root
def test_a_host_of_a_network_namespace_is_a_machine_of_its_own(name: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root and unshare")
    with another(name) as here, another(name, "unshare", "--net") as there:
        assert (said(here), said(there)) == ("True", "True")


def test_a_holder_that_says_nothing_or_nonsense_is_named_by_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pichak_agent.machine_claim._ANSWER_SECONDS", 0.1)
    answers = [b"", b"[" * 8000, b'{"home": 5}', b'{"home": "up/../x"}', b"[]", b"\xff"]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0{name}")
        stranger.listen()
        silent = holder(name)
        assert silent is not None
        assert (silent.pid, silent.home) == (os.getpid(), "")
        stranger.accept()[0].close()
        for answer in answers:

            def reply(text: bytes = answer) -> None:
                caller, _ = stranger.accept()
                with caller:
                    caller.send(text)

            thread = threading.Thread(target=reply)
            thread.start()
            found = holder(name)
            thread.join()
            assert found is not None
            assert found.home == ""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


@pytest.mark.root
def test_a_second_home_is_refused_told_of_and_let_in_when_asked(place: Place) -> None:
    """In a network namespace, where no other agent is."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root and unshare")
    agent = [*PICHAK, "agent", "run", "--address", "127.0.0.1:9", "--insecure"]
    first = place.start(["unshare", "--net", *agent], "first.log", place.environment("home one"))
    place.wait_for("joining the cluster", "first.log")
    inside = ["nsenter", f"--net=/proc/{first.pid}/ns/net"]

    def there(*words: str, home: str = "two") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*inside, *PICHAK, *words],
            env=place.environment(home),
            cwd=place.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    who = f"(pid {first.pid}, user root, home {place.folder / 'home one'})"
    refused = there(*agent[len(PICHAK) :])
    assert refused.returncode == 1
    assert f"an agent service runs on this machine already {who}: end it, or" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (place.folder / "two").exists()
    same = there(*agent[len(PICHAK) :], home="home one")
    assert "runs on this node already" in same.stderr
    told = there("agent", "status")
    assert told.returncode == 1
    assert f"another agent service runs on this machine {who}" in told.stderr
    assert f"PICHAK_HOME='{place.folder / 'home one'}' pichak agent status shows it" in told.stderr
    record = json.loads(there("agent", "status", "--json").stdout)
    assert record["services"] == []
    assert record["other"]["pid"] == first.pid
    assert "another" not in there("agent", "status", home="home one").stderr
    beside = place.start(
        [*inside, *agent, "--even-if-another"], "second.log", place.environment("two")
    )
    place.wait_for("another agent service runs on this machine", "second.log")
    place.wait_for("joining the cluster", "second.log")
    host = place.folder / "host.toml"
    host.write_text('host = "sim-a"\n')
    simulated = place.start(
        [*inside, *agent, "--simulate", str(host)], "sim.log", place.environment("three")
    )
    place.wait_for("joining the cluster", "sim.log")
    assert "another agent" not in place.said("sim.log")
    for process in (first, beside, simulated):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
