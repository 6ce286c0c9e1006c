"""Which cluster is joined, and which is refused before Ray is even asked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner

from pichak_coordinator.cli import app
from pichak_coordinator.cluster import Cluster, ClusterNode, reason_of
from pichak_coordinator.cluster_address import ClusterError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_address_where_nothing_listens_is_said_at_once() -> None:
    port = free_port()
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        Cluster(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    ["nonsense", "host:", "host:port", "127.0.0.1:999999", "10.0.0.1:99999", "h:0", ":6379"],
)
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(ClusterError, match="is not a cluster's address: write HOST:PORT"):
        Cluster(address)


@pytest.mark.parametrize("address", ["", "  "])
def test_an_empty_address_is_no_local_ray(address: str) -> None:
    """A variable that was not set must not profile this machine instead of the fleet."""
    with pytest.raises(ClusterError, match="the address is empty"):
        Cluster(address)


def test_ray_client_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ClusterError, match="RAY_ADDRESS=auto"):
        Cluster("ray://10.0.0.1:10001")


@pytest.mark.parametrize(
    ("address", "refused"),
    [("10.1.2.3:6379", True), ("gpu-box:6379", True), ("127.0.0.1:1", False), ("[::1]:1", False)],
)
def test_no_authentication_off_loopback_is_refused(
    address: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 92."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError) as caught:
        Cluster(address)
    assert ("without authentication" in str(caught.value)) is refused


def test_insecure_is_the_users_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError) as caught:
        Cluster(f"localhost:{free_port()}", insecure=True)
    assert "without authentication" not in str(caught.value)


def test_a_node_that_its_owner_leaves_out_is_not_among_those_to_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def node(name: str, **labels: str) -> ClusterNode:
        return ClusterNode(name, name, "10.0.0.1", True, 4.0, 0, False, labels=labels)

    found = [node("head", **{"pichak.io/measure": "no"}), node("a", **{"pichak.io/measure": "yes"})]
    cluster = Cluster.__new__(Cluster)
    monkeypatch.setattr(cluster, "nodes", lambda: [*found, node("b")])
    assert [n.node_id for n in cluster.wait_for_nodes(0.0)] == ["a", "b"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], "no living node to measure (`ray status` shows why)"),
        (["no"], "its only living node is left out by the label pichak.io/measure=no"),
        (["no", "no"], "all of its 2 living nodes are left out by the label pichak.io/measure=no"),
    ],
)
def test_a_cluster_of_which_nothing_may_be_measured_says_why(
    monkeypatch: pytest.MonkeyPatch, labels: list[str], said: str
) -> None:
    nodes = [
        ClusterNode(
            *(str(number), "h", "10.0.0.1", alive, 4.0, 0, False),
            labels={"pichak.io/measure": value},
        )
        for number, (value, alive) in enumerate([*((v, True) for v in labels), ("no", False)])
    ]
    cluster = Cluster.__new__(Cluster)
    monkeypatch.setattr(cluster, "nodes", lambda: nodes)
    assert cluster.wait_for_nodes(0.0) == []
    assert cluster.why_none().endswith(said)


def test_a_node_as_ray_describes_it() -> None:
    record = {
        "NodeID": "ab",
        "NodeManagerHostname": "box",
        "NodeManagerAddress": "10.0.0.2",
        "Alive": False,
        "DeathReasonMessage": "health check failed",
        "Resources": {"CPU": 8.0, "GPU": 2.0, "node:__internal_head__": 1.0},
    }
    node = ClusterNode.from_ray(record)
    assert node == ClusterNode("ab", "box", "10.0.0.2", False, 8.0, 2, True, "health check failed")
    bare = ClusterNode.from_ray({"NodeID": "cd", "Alive": True})
    assert (bare.cpus, bare.gpus, bare.is_head, bare.host) == (0.0, 0, False, "")


def marked(mark: str) -> list[str]:
    """Processes that were started with `mark` in their variables."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
    return found


@pytest.mark.ray
@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_ctrl_c_while_a_local_ray_starts_leaves_no_process(seconds: float) -> None:
    mark = uuid.uuid4().hex
    code = (
        "import ray, time; print('ready', flush=True)\n"
        "from pichak_coordinator.cluster import Cluster\n"
        "try:\n"
        "    Cluster().close()\n"
        "    time.sleep(60)\n"  # a quick start may be over before it is interrupted
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TEST_MARK": mark, "RAY_ADDRESS": ""},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "interrupted" in out
    end = time.monotonic() + 15
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left


def test_the_reason_at_the_end_of_a_long_error_is_kept() -> None:
    text = (
        "The actor died because of an error raised in its creation task, "
        "\x1b[36mray::AgentActor.__init__()\x1b[39m (pid=12)\n"
        + "".join(f'  File "/somewhere/module_{i}.py", line {i}, in <module>\n' for i in range(40))
        + "ImportError: this pichak_agent is somebody else's"
    )
    said = reason_of(text)
    assert said.startswith("The actor died because of an error")
    assert said.endswith("ImportError: this pichak_agent is somebody else's")
    assert len(said) <= 310
    assert "\x1b" not in said
    assert reason_of("short\n text") == "short text"


def test_auto_that_names_a_cluster_which_is_gone_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head that was killed leaves its address in Ray's own file; here the variable stands for
    it, which Ray asks first."""
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ClusterError, match=f"'auto' is the cluster at 127.0.0.1:{port}"):
        Cluster("auto")


@pytest.mark.parametrize(("host", "refused"), [("10.1.2.3", True), ("127.0.0.1", False)])
def test_auto_is_judged_by_the_address_that_it_stands_for(
    host: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 92: a head that was started here listens on the machine's own address."""
    monkeypatch.setenv("RAY_ADDRESS", f"{host}:{free_port()}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError) as caught:
        Cluster("auto")
    assert ("without authentication" in str(caught.value)) is refused


@pytest.mark.parametrize(
    "command", ["fleet nodes", "fleet profile --seq-len 64", "fleet watch", "net"]
)
@pytest.mark.parametrize(
    ("address", "words"),
    [("", "the address is empty"), (" ", "the address is empty"),
     ("10.0.0.1:99999", "not a cluster's address"), ("10.0.0.1", "not a cluster's address")],
)  # fmt: skip
def test_every_command_that_joins_says_what_is_no_address(
    tmp_path: Path, command: str, address: str, words: str
) -> None:
    """None of them takes the history, or this machine alone, for the fleet that was meant."""
    env = {"PICHAK_HOME": str(tmp_path), "RAY_ADDRESS": ""}
    done = CliRunner().invoke(app, [*command.split(), "--address", address], env=env)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert done.stdout == ""
