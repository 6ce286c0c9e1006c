"""A cluster that serves whoever asks is found out before it is joined."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from pichak_coordinator import cluster_address
from pichak_coordinator.cli import app
from pichak_coordinator.cluster import Cluster
from pichak_coordinator.cluster_address import ClusterError
from pichak_coordinator.cluster_token import why_refused
from pichak_coordinator.open_cluster import Answer, ask, serves_without_token

#: What heads of Ray 2.60 sent.
SETTINGS = bytes.fromhex("00001e040000000000") + bytes(30) + bytes.fromhex("000000040100000000")
OPEN = (
    SETTINGS
    + bytes.fromhex("00001f010400000001") + b"\x88@\x0ccontent-type\x10application/grpc"[:31]
    + bytes.fromhex("000025000000000001") + b"\x00\x00\x00\x00 \n\x00\x12\x1c" + bytes(28)
    + bytes.fromhex("00000f010500000001") + b"@\x0bgrpc-status\x010"
)  # fmt: skip
ASKS = (
    b"\x88@\x0ccontent-type\x10application/grpc\x00\x0bgrpc-status\x0216\x00\x0cgrpc-message\x02no"
)
CLOSED = SETTINGS + len(ASKS).to_bytes(3, "big") + bytes.fromhex("010500000001") + ASKS


#: What a node's manager sent, whose port is another one.
NO_HEAD = (
    bytes.fromhex("000018040000000000 000400400000 000500400000 000600004000 fe0300000001")
    + bytes.fromhex("000004080000000000 003f0001" + "000000040100000000")
    + bytes.fromhex("000030010500000001")
    + b"\x88@\x0ccontent-type\x10application/grpc@\x0bgrpc-status\x0212"
)


@contextmanager
def answering(data: bytes) -> Iterator[int]:
    """A port where each connection gets these bytes and is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link:
                    link.recv(4096)
                    link.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("data", "said"),
    [(OPEN, True), (CLOSED, False), (b"", None), (b"HTTP/1.1 400 Bad Request\r\n\r\n", None),
     (b"\xff" * 100_000, None), (SETTINGS[:20], None)],
)  # fmt: skip
def test_what_a_head_says_without_a_token(data: bytes, said: bool | None) -> None:
    with answering(data) as port:
        assert serves_without_token("127.0.0.1", port, 2.0) is said


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Answer("web server")),
        (b"<!DOCTYPE HTML>\n<html>", Answer("web server")),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Answer("other", "SSH-2.0-OpenSSH_9.6")),
        (b"-ERR wrong number of arguments\r\n", Answer("other", "-ERR wrong number of arguments")),
        (b"\x15\x03\x01\x00\x02\x02\x46", Answer()),  # TLS: it may be a head behind it
        (OPEN, Answer("open")),
        (CLOSED, Answer("asks for a token")),
        (NO_HEAD, Answer("no head")),
        (b"", Answer()),
    ],
)
def test_who_answers(data: bytes, answer: Answer) -> None:
    with answering(data) as port:
        assert ask("127.0.0.1", port, 2.0) == answer


def test_a_web_server_of_pythons_own_is_known() -> None:
    """It leaves the question unread, and the connection is reset with its answer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            found = [ask("127.0.0.1", server.server_address[1], 2.0).who for _ in range(3)]
        finally:
            server.shutdown()
    assert found == ["web server"] * 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is a web server and no Ray head: give the port of"),
        (b"SSH-2.0-x\r\n", "is another program ('SSH-2.0-x') and no Ray head"),
        (NO_HEAD, "is another service, as Ray's nodes have some, and no Ray head: give the port"),
        (CLOSED, "wants its token, and this side is told to use none (RAY_AUTH_MODE=disabled)"),
    ],
)
def test_what_cannot_be_joined_is_told_at_once_also_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, said: str
) -> None:
    """Ray itself knocks for minutes, and blames the network."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    with answering(data) as port:
        with pytest.raises(ClusterError) as told:
            Cluster(f"127.0.0.1:{port}", insecure=True)
        assert said in str(told.value)
        run = ["agent", "run", "--address", f"127.0.0.1:{port}", "--insecure", "--even-if-another"]
        done = CliRunner().invoke(app, run)
    assert done.exit_code == 2, done.output
    assert said in done.output


@contextmanager
def head_with(token: str) -> Iterator[str]:
    """HOST:PORT where a head's bytes come back, as they do with its token and without."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                with link:
                    shown = link.recv(4096)
                    link.sendall(OPEN if b"Bearer " + token.encode() in shown else CLOSED)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


NO_TOKEN = "wants its token, and none can be read in"


@pytest.mark.parametrize(
    ("variables", "file", "said"),
    [
        ({"RAY_AUTH_TOKEN": "another"}, "own", "refuses the token in RAY_AUTH_TOKEN: put"),
        ({"RAY_AUTH_TOKEN_PATH": "other"}, "own", "refuses the token in other (RAY_AUTH_TOKEN_PA"),
        ({"RAY_AUTH_TOKEN_PATH": "none"}, "own", f"{NO_TOKEN} none (RAY_AUTH_TOKEN_PATH): put"),
        ({"RAY_AUTH_TOKEN": "own", "RAY_AUTH_TOKEN_PATH": "other"}, "", ""),
        ({"RAY_AUTH_TOKEN_PATH": "mine"}, "another", ""),
        ({}, "own\n", ""),
        ({}, "another", "refuses the token in ~/.ray/auth_token: put"),
        ({}, "", f"{NO_TOKEN} ~/.ray/auth_token: put"),
    ],
)
def test_a_token_of_another_cluster_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], file: str, said: str
) -> None:
    """Ray itself looks in this order, and knocks for 20 s with what it found."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("other").write_text("another")
    Path("mine").write_text("own")
    if file:
        Path(".ray").mkdir()
        Path(".ray/auth_token").write_text(file)
    with head_with("own") as address:
        why = why_refused(address, 2.0)
        assert (said in why) if said else why == ""
        assert "another" not in why
        if said:
            done = CliRunner().invoke(app, ["fleet", "nodes", "--address", address])
            assert done.exit_code == 2
            assert done.output == f"pichak: {why}\n"


def test_nobody_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert serves_without_token("127.0.0.1", probe.getsockname()[1], 1.0) is None


def test_an_open_cluster_is_refused_off_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 92: this side has a token, and the cluster asks for none."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(cluster_address, "is_loopback", lambda _address: False)
    with answering(OPEN) as port, pytest.raises(ClusterError, match="answers without a token"):
        Cluster(f"127.0.0.1:{port}")


def test_auto_that_stands_for_an_open_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_address, "is_loopback", lambda address: address == "auto")
    with answering(OPEN) as port:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        with pytest.raises(ClusterError, match="answers without a token"):
            Cluster("auto")


@pytest.mark.parametrize("token_file", [True, False])
def test_an_agent_with_a_token_joins_no_open_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: bool
) -> None:
    monkeypatch.setattr(cluster_address, "is_loopback", lambda _address: False)
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    (tmp_path / "token").write_text("t" * 48)
    (tmp_path / "token").chmod(0o600)
    given = ["--token-file", str(tmp_path / "token")] if token_file else []
    with answering(OPEN) as port:
        run = ["agent", "run", "--address", f"127.0.0.1:{port}", *given]
        done = CliRunner().invoke(app, run)
    assert done.exit_code == 2, done.output
    assert "answers without a token" in done.output


#: So long that its length takes more than a byte of the question.
TOKEN = "t" * 200


def nodes_with(token: str, port: int) -> subprocess.CompletedProcess[str]:
    """What `fleet nodes` says where RAY_AUTH_MODE is not set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    program = "from pichak_coordinator.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "fleet", "nodes", "--address", f"127.0.0.1:{port}"],
        env={**env, "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def head(folder: Path, host: str, port: int, mode: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": TOKEN}
    ray = Path(sys.executable).with_name("ray")
    command = [
        *(str(ray), "start", "--head", "--block", "--node-ip-address", host, "--port", str(port)),
        *("--include-dashboard=false", "--num-cpus=0", "--object-store-memory=80000000"),
        f"--temp-dir={folder}",
    ]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("mode", "said"), [("disabled", True), ("token", False)])
def test_real_heads_say_so(mode: str, said: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Short: the names of Ray's sockets are long, and a socket's path is of 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="h-"))
    process = head(folder, "127.0.0.1", port, mode)
    try:
        end, found = time.monotonic() + 120, None
        while found is None and time.monotonic() < end:
            found = serves_without_token("127.0.0.1", port)
            time.sleep(0.2)
        assert found is said
        if mode == "token":
            assert ask("127.0.0.1", port, 5.0, TOKEN).who == "open"
            refused = nodes_with(TOKEN[:-1], port)
            assert (refused.returncode, refused.stdout) == (2, "")
            assert refused.stderr.startswith(f"pichak: the cluster at 127.0.0.1:{port} refuses the")
            assert refused.stderr.count("\n") == 1
            joined = nodes_with(TOKEN, port)
            assert (joined.returncode, joined.stderr) == (0, "")
            assert "alive" in joined.stdout
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
