"""A fleet of hosts that do not exist, on this machine, for trying everything without GPUs.

    python scripts/simulated_fleet.py                                   until Ctrl-C
    python scripts/simulated_fleet.py -- pichak fleet profile --seq-len 1024

Starts a Ray head on loopback, which answers as the first host, and `pichak agent run --simulate` as
each other one. History, spools and Ray's files lie in one temporary folder (or in --keep FOLDER)
and never meet your own. Everything ends with this script.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pichak_agent import simulation
from pichak_agent.home import tidy

HOSTS = Path(__file__).parents[1] / "deploy" / "simulated"
#: A busy machine takes long to start a Ray node.
PATIENCE_SECONDS = 300.0
_STORE_BYTES = 80_000_000
_PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Fleet:
    """A context manager: the fleet is up inside it, and nothing of it afterwards."""

    def __init__(self, hosts: Sequence[Path], home: Path) -> None:
        self._hosts, self._home = hosts, home
        # Short, because Ray makes sockets in it and their paths may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="pks-"))
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{found.getsockname()[1]}"
        self._token = self._folder / "token"
        self._token.touch(0o600)
        self._token.write_text(secrets.token_hex(32))
        self.variables = {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "PICHAK_HOME": str(home),
        }

    def __enter__(self) -> Fleet:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        first, *others = self._hosts
        self._head(first)
        for host in others:
            words = ["agent", "run", "--address", self.address, "--token-file", str(self._token)]
            words += ["--simulate", str(host), "--object-store-memory", str(_STORE_BYTES)]
            self._start([*_PICHAK, *words], host.stem, {})
        for process, log in self._started[1:]:
            wait_for("in the cluster", process, log)

    def _head(self, host: Path) -> None:
        """The head's own node is a host of the fleet too."""
        began = time.time()
        known = simulation.load_host(host, "", began)
        labels = f"pichak.io/name={known.host},pichak.io/simulated=true"
        process, log = self._start(
            [
                *_RAY,
                *("start", "--head", "--block", "--node-ip-address=127.0.0.1"),
                *(f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"),
                *("--num-cpus=1", f"--num-gpus={known.gpus}", f"--labels={labels}"),
                *(f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"),
                f"--temp-dir={self._folder / 'ray'}",
            ],
            host.stem,
            {
                simulation.VARIABLE: simulation.variable(host, "", began),
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(known.gpus))),
                "PICHAK_HOME": str(self._home / "simulated" / known.host),
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
            },
        )
        wait_for("Ray runtime started", process, log)

    def _start(
        self, argv: Sequence[str], name: str, more: dict[str, str]
    ) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._folder / f"{name}.log"
        made = {**os.environ, **self.variables, "PYTHONUNBUFFERED": "1"}
        del made["RAY_ADDRESS"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**made, **more},
                cwd=self._folder,
                start_new_session=True,
            )
        self._started.append((process, log))
        return process, log

    def close(self) -> None:
        """End every process, the head last."""
        for group in (self._started[1:], self._started[:1]):
            for process, _ in group:
                process.send_signal(signal.SIGTERM)
            for process, _ in group:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for home in (self._home / "simulated").glob("*"):
            tidy(home)
        shutil.rmtree(self._folder, ignore_errors=True)


def wait_for(words: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `words` are in the log; `SystemExit` with its end when they never will be."""
    until = time.monotonic() + PATIENCE_SECONDS
    while words not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(
                f"{log.stem} did not start:\n{log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.2)


def main(arguments: Sequence[str], wait: Callable[[], object] = signal.pause) -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=Path, default=HOSTS, help="a folder of .toml files")
    parser.add_argument("--count", type=int, default=6, help="how many of them")
    parser.add_argument("--keep", type=Path, help="keep the history in this folder")
    parser.add_argument("command", nargs="*", help="run this, then end")
    given = parser.parse_args(arguments)
    hosts = sorted(given.hosts.glob("*.toml"))[: given.count]
    if not hosts:
        parser.error(f"no .toml file in {given.hosts}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pichak-simulated-") as temporary:
        home = (given.keep or Path(temporary)).absolute()
        print(f"starting {len(hosts)} simulated hosts, about 10 s each", file=sys.stderr)
        try:
            with Fleet(hosts, home) as fleet:
                return _use(fleet, given.command, wait)
        except KeyboardInterrupt:
            return 130


def _use(fleet: Fleet, command: Sequence[str], wait: Callable[[], object]) -> int:
    if command:
        argv = [*_PICHAK, *command[1:]] if command[0] == "pichak" else list(command)
        return subprocess.run(argv, env={**os.environ, **fleet.variables}, check=False).returncode
    print("The fleet is up; nothing of it is real. In another shell:\n", file=sys.stderr)
    for name, value in fleet.variables.items():
        print(f"export {name}={json.dumps(value)}")
    print("pichak fleet profile --seq-len 1024", flush=True)
    print("\nCtrl-C ends it.", file=sys.stderr)
    wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
