"""Tokens and secrets stay where they are kept: no output, log, store, report or process list of any
command holds one. They are looked for as bytes, wherever a command or Ray writes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.service_tools import PICHAK, free_port, place_in, wait_until

HOSTS = Path(__file__).parents[2] / "deploy" / "simulated"


@dataclass
class Secrets:
    """What must be nowhere, and every place where it was found. The files of `kept` are where
    secrets are meant to be."""

    token: bytes = field(default_factory=lambda: secrets.token_hex(32).encode())
    signing: bytes = field(default_factory=lambda: secrets.token_hex(24).encode())
    hook: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())
    kept: set[Path] = field(default_factory=set)
    found: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, bytes]:
        return {"the token": self.token, "the signing key": self.signing, "the hook": self.hook}

    def keep(self, path: Path, secret: bytes) -> Path:
        path.write_bytes(secret)
        path.chmod(0o600)
        self.kept.add(path)
        return path

    def look(self, where: str, data: bytes) -> None:
        self.found += [f"{name} in {where}" for name, text in self.names.items() if text in data]

    def look_at_files(self, folder: Path) -> int:
        """How many files there were."""
        count = 0
        for path in folder.rglob("*"):
            if path in self.kept or path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(OSError):
                self.look(str(path), path.read_bytes())
                count += 1
        return count


class ProcessList:
    """Looks at the command line of every process, again and again; `environments` too, where no
    process was given a secret in a variable."""

    def __init__(self, hidden: Secrets, *, environments: bool = False) -> None:
        self._hidden, self._end = hidden, threading.Event()
        self._parts = ("cmdline", "environ") if environments else ("cmdline",)
        self.seen: set[str] = set()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ProcessList:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            for place in Path("/proc").glob("[0-9]*"):
                for part in self._parts:
                    with contextlib.suppress(OSError):
                        data = (place / part).read_bytes()
                        self._hidden.look(f"/proc/{place.name}/{part}", data)
                        self.seen.add(place.name)


@contextlib.contextmanager
def receiver() -> Iterator[int]:
    """The port of a server that takes every event."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def run(
    hidden: Secrets, env: dict[str, str], folder: Path, *words: str, seconds: float = 300.0
) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [*PICHAK, *words], env=env, cwd=folder, capture_output=True, timeout=seconds, check=False
    )
    hidden.look(f"stdout of {' '.join(words)}", done.stdout)
    hidden.look(f"stderr of {' '.join(words)}", done.stderr)
    return done


def reading_commands(store: Sequence[str]) -> list[list[str]]:
    return [
        *(["fleet", command, *store, *form]
          for command in ("compare", "nodes", "history")
          for form in ([], ["--json"], ["--format", "csv"], ["--format", "md"])),
        ["fleet", "report", "--html", "fleet.html", *store],
        ["fleet", "report", "--html", "-", *store],
        ["export", "--all", "--out", "history.mpk", *store],
        ["doctor"],
        ["doctor", "--json"],
        ["agent", "status"],
        ["agent", "status", "--json"],
    ]  # fmt: skip


def test_what_is_somewhere_is_found(tmp_path: Path) -> None:
    """Of what the tests below look for; a planted secret in each kind of place."""
    hidden = Secrets()
    hidden.keep(tmp_path / "kept", hidden.signing)
    (tmp_path / "log").write_bytes(b"joined with " + hidden.token + b"\n")
    assert hidden.look_at_files(tmp_path) == 1
    assert hidden.found == [f"the token in {tmp_path / 'log'}"]
    hidden.found.clear()
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    env = {**os.environ, "HOOK": hidden.hook.decode()}
    with (
        ProcessList(hidden, environments=True),
        subprocess.Popen([*waiting, hidden.token.decode()], stdin=subprocess.PIPE, env=env) as one,
    ):
        wait_until(lambda: len(set(hidden.found)) >= 2, "both", 30.0)
        assert one.stdin is not None
        one.stdin.close()
    places = {f"the token in /proc/{one.pid}/cmdline", f"the hook in /proc/{one.pid}/environ"}
    assert places <= set(hidden.found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["variable", "file"])
def test_commands_without_a_cluster(tmp_path: Path, how: str) -> None:
    pytest.importorskip("plotly")
    hidden = Secrets()
    token = hidden.keep(tmp_path / "token", hidden.token)
    key = hidden.keep(tmp_path / "key", hidden.signing)
    hook = f"http://127.0.0.1:{free_port()}/{hidden.hook.decode()}"
    env = {**os.environ, "HOME": str(tmp_path), "PICHAK_HOME": str(tmp_path / "home")}
    env |= {"RAY_AUTH_MODE": "token", "PICHAK_WEBHOOK": hook}
    env.pop("RAY_AUTH_TOKEN", None)
    given = {"RAY_AUTH_TOKEN": hidden.token.decode()} if how == "variable" else {}
    env |= given or {"RAY_AUTH_TOKEN_PATH": str(token)}
    closed = f"127.0.0.1:{free_port()}"
    host = str(HOSTS / "sim-a.toml")
    store = ["--store", "sim.db"]
    with ProcessList(hidden) as processes:
        for words in (
            ["fleet", "simulate", "--nodes", "3", "--days", "1", *store],
            *reading_commands(store),
            ["import", "history.mpk", "--store", "other.db", "--json"],
            ["fleet", "pick", "2", *store],
            ["agent", "probe", "--simulate", host, "--out", "host.mpk"],
            ["import", "host.mpk", "--store", "other.db"],
            ["fleet", "prune", "--store", "other.db"],
            # What goes wrong, with its traceback.
            ["--debug", "fleet", "nodes", "--address", closed],
            ["--debug", "fleet", "profile", "--address", closed, "--seq-len", "64"],
            ["--debug", "fleet", "watch", "--address", closed, "--webhook-secret-file", str(key)],
            ["--debug", "fleet", "watch", "--webhook-secret-file", str(tmp_path)],
            ["--debug", "agent", "run", "--address", "nowhere", "--token-file", str(token)],
        ):
            run(hidden, env, tmp_path, *words)
        agent = subprocess.Popen(
            [*PICHAK, "agent", "run", "--even-if-another", "--address", closed,
             "--token-file", str(token)],
            env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(3)
        run(hidden, env, tmp_path, "agent", "status", "--json")
        agent.send_signal(signal.SIGTERM)
        for name, data in zip(("stdout", "stderr"), agent.communicate(timeout=60), strict=True):
            hidden.look(f"{name} of agent run", data)
    assert (tmp_path / "fleet.html").stat().st_size > 10**6
    assert hidden.look_at_files(tmp_path) > 5
    assert len(processes.seen) > 5
    assert hidden.found == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("how", ["variable", "file"])
def test_a_live_fleet(tmp_path: Path, how: str) -> None:
    """A head, a service with a token file, and every command that joins, also with a wrong token.
    Ray's own session folder is looked at too. Where the token came in a file, it is in no
    process's environment either."""
    pytest.importorskip("plotly")
    hidden = Secrets()
    with place_in(tmp_path) as place, receiver() as port:
        place.token = hidden.token.decode()
        hidden.kept.add(place.token_file)
        key = hidden.keep(tmp_path / "key", hidden.signing)
        env = place.environment()
        if how == "variable":
            del env["RAY_AUTH_TOKEN_PATH"]
            env["RAY_AUTH_TOKEN"] = place.token
        with ProcessList(hidden, environments=how == "file") as processes:
            place.head()
            place.service("--simulate", str(HOSTS / "sim-a.toml"), "--name", "sim-a")
            place.wait_for("in the cluster at")
            joined = ["--address", place.address]
            little = ["--seq-len", "64", "--limit", "2", "--only", "cpu", "--no-network"]
            for words in (
                ["fleet", "nodes", "--json", *joined],
                ["fleet", "profile", "--json", *joined, *little],
                ["--debug", "net", "--json", *joined],
            ):
                run(hidden, env, tmp_path, *words)
            if how == "variable":
                env["PICHAK_WEBHOOK"] = f"http://127.0.0.1:{port}/{hidden.hook.decode()}"
                watch = ["--once", "--every", "full=never", "--webhook-secret-file", str(key)]
                done = run(hidden, env, tmp_path, "fleet", "watch", *joined, *watch)
                assert done.returncode == 0, done.stderr
            for words in reading_commands([]):
                assert run(hidden, env, tmp_path, *words).returncode == 0, words
            # A token that the cluster does not take is not shown either.
            wrong = {**env, "RAY_AUTH_TOKEN": hidden.signing.decode()}
            if how == "variable":
                done = run(hidden, wrong, tmp_path, "--debug", "fleet", "nodes", *joined)
                assert done.returncode != 0
        sessions = [Path(folder) for folder in place._folders]
        assert sum(map(hidden.look_at_files, sessions)) > 5
        assert hidden.look_at_files(tmp_path) > 5
        assert len(processes.seen) > 10
    assert hidden.found == []
