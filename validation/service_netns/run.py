"""Runs the experiment of README.md: as root, ``python run.py [--out FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "netns_fleet"))

from hosts import Fleet, Host, said, within
from verdict import conclude, need_root

PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SERVICES = ("h2", "h3")
PORT = 6379
STORE_BYTES = "--object-store-memory=80000000"
#: A busy machine takes long to start a Ray node.
PATIENCE_SECONDS = 400.0
END_SECONDS = 10.0


class Experiment:
    """The fleet and what happens to it."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.address = f"{fleet.address('h1')}:{PORT}"
        self.head: subprocess.Popen[bytes] | None = None
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.seconds: dict[str, float] = {}

    # -- hosts ------------------------------------------------------------------------------------

    def environment(self, name: str) -> dict[str, str]:
        made = self.fleet.environment(name)
        del made["RAY_AUTH_TOKEN"]
        token = self.folder / name / "token"
        if not token.exists():
            token.touch(0o600)
            token.write_text(self.fleet.token)
        made |= {"RAY_AUTH_TOKEN_PATH": str(token), "PYTHONUNBUFFERED": "1"}
        made |= {"TMPDIR": str(self.folder / name), "PICHAK_HOME": str(self.folder / name / "home")}
        made.pop("RAY_ADDRESS", None)
        return made

    def start_head(self, log: str) -> None:
        temporary = self.folder / log.removesuffix(".log")
        command = [
            *RAY,
            *("start", "--head", f"--port={PORT}", "--block", "--include-dashboard=false"),
            *(f"--node-ip-address={self.fleet.address('h1')}", "--num-cpus=1", STORE_BYTES),
            *("--disable-usage-stats", f"--temp-dir={temporary}"),
        ]
        environment = {**self.environment("h1"), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1"}
        self.head = self.fleet.start(self.fleet.inside("h1", *command), log, environment)
        self.wait(lambda: "Ray runtime started" in self.log(log), "the head")

    def kill_head(self) -> None:
        """Everything on its host at once, as if its power had gone."""
        for pid in self.pids("h1"):
            os.kill(pid, signal.SIGKILL)
        assert self.head is not None
        self.head.wait()

    def start_service(self, name: str) -> None:
        command = [
            *PICHAK,
            *("agent", "run", "--address", self.address, "--num-cpus", "1"),
            *("--token-file", str(self.folder / name / "token"), "--name", name),
            *("--", f"--node-ip-address={self.fleet.address(name)}"),
        ]
        environment = self.environment(name)
        inside = self.fleet.inside(name, *command)
        self.services[name] = self.fleet.start(inside, f"{name}.log", environment)

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in said("ip", "netns", "pids", self.fleet.namespace(name)).split()]

    def cut(self, name: str, *, up: bool = False) -> None:
        """The cable between a host and its switch."""
        port = f"p{[host.name for host in self.fleet.hosts].index(name)}"
        within(self.fleet.namespace("sw"), f"ip link set {port} {'up' if up else 'down'}")

    # -- what is known ----------------------------------------------------------------------------

    def log(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self, name: str) -> dict[str, Any]:
        done = subprocess.run(
            self.fleet.inside(name, *PICHAK, "agent", "status", "--json"),
            env=self.environment(name),
            capture_output=True,
            text=True,
            check=False,
        )
        services = json.loads(done.stdout)["services"] if done.stdout else []
        return dict(services[0]) if services else {"state": "none", "spool": {}, "joins": 0}

    def joined(self, name: str) -> bool:
        return bool(self.status(name)["state"] == "joined")

    def spools(self) -> list[int]:
        return [self.status(name)["spool"].get("outcomes", -1) for name in SERVICES]

    def collect(self, *words: str) -> dict[str, Any]:
        command = [sys.executable, str(Path(__file__).with_name("collect.py")), self.address]
        command += [str(self.folder / "fleet.db"), *words]
        done = subprocess.run(
            self.fleet.inside("h1", *command),
            env=self.environment("h1"),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS * 2,
        )
        if done.returncode:
            raise RuntimeError(f"the coordinator failed: {done.stderr[-2000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def wait(self, true: Callable[[], bool], what: str) -> bool:
        """Whether it came true in time; how long that took is kept under `what`."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > PATIENCE_SECONDS:
                print(f"not within {PATIENCE_SECONDS:g} s: {what}", file=sys.stderr)
                return False
            time.sleep(0.5)
        self.seconds[what] = round(time.monotonic() - began, 1)
        print(f"{what}: {self.seconds[what]} s", file=sys.stderr)
        return True

    # -- the course -------------------------------------------------------------------------------

    def run(self) -> dict[str, bool]:
        rule: dict[str, bool] = {}
        self.start_head("ha.log")
        for name in SERVICES:
            self.start_service(name)
        both = self.wait(lambda: all(map(self.joined, SERVICES)), "both services join")
        measured = self.collect("measure")
        well = all(each.get("status") == "ok" for each in measured.values())
        rule["1 both join and keep an outcome"] = both and well and self.spools() == [1, 1]
        rule["2 a killed raylet"] = self.kill_raylet("h2")
        rule["3 a link cut for 8 s"] = self.short_cut("h3", 8)
        rule["3 a link cut for 60 s"] = self.short_cut("h3", 60)
        rule["4 a link cut until Ray gave the node up"] = self.long_cut("h3")
        rule["5 a head that is started anew"] = self.new_head()
        first, second = self.collect(), self.collect()
        rule["6 each outcome is stored once"] = (
            [first[name].get("stored") for name in SERVICES] == [1, 1]
            and [second[name].get("kept") for name in SERVICES] == [0, 0]
            and self.spools() == [0, 0]
        )
        alive = all(process.poll() is None for process in self.services.values())
        rule["7 nothing is left"] = self.end()
        rule["8 no service ended before, and no token is told"] = alive and not self.token_told()
        return rule

    def kill_raylet(self, name: str) -> bool:
        before, other = self.status(name), self.status("h3")
        os.kill(before["raylet_pid"], signal.SIGKILL)
        self.wait(lambda: not self.joined(name), "a killed raylet is noticed")
        back = self.wait(lambda: self.joined(name), "its node is in the cluster again")
        after = self.status("h3")
        return (
            back
            and self.status(name)["node_id"] != before["node_id"]
            and (after["state"], after["joins"]) == ("joined", other["joins"])
        )

    def short_cut(self, name: str, seconds: int) -> bool:
        self.cut(name)
        time.sleep(seconds)
        self.cut(name, up=True)
        # Long enough for Ray's own patience to end, had the cut broken something.
        time.sleep(75)
        back = self.wait(lambda: self.joined(name), f"75 s after a cut of {seconds} s")
        # The cluster's word for it, not only the service's.
        return back and "error" not in self.collect("look").get(name, {"error": "not there"})

    def long_cut(self, name: str) -> bool:
        pattern = r"keeps what it has and waits for it"
        before, said_before = self.status(name), len(re.findall(pattern, self.log(f"{name}.log")))
        self.cut(name)
        gone = self.wait(
            lambda: self.status(name)["raylet_pid"] == 0, "a cut node is given up by Ray"
        )
        time.sleep(5)
        self.cut(name, up=True)
        back = self.wait(lambda: self.joined(name), "after the link is healed")
        said_after = len(re.findall(pattern, self.log(f"{name}.log")))
        return (
            gone
            and back
            and said_after - said_before == 1
            and self.status(name)["joins"] == before["joins"] + 1
        )

    def new_head(self) -> bool:
        joins = {name: self.status(name)["joins"] for name in SERVICES}
        self.kill_head()
        time.sleep(10)
        self.start_head("hb.log")
        return self.wait(
            lambda: all(
                self.joined(name) and self.status(name)["joins"] > joins[name] for name in SERVICES
            ),
            "both services join the new head",
        )

    def end(self) -> bool:
        ended: list[float] = []
        for process in self.services.values():
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            ended.append(time.monotonic() - began)
            if code != 0:
                return False
        self.seconds["a service ends after SIGTERM (longest)"] = round(max(ended), 1)
        left = {name: self.pids(name) for name in SERVICES}
        files = [
            str(path)
            for name in SERVICES
            for path in (self.folder / name).rglob("*")
            if path.name != "token"
        ]
        print(f"left: {left}, {files}", file=sys.stderr)
        return max(ended) < END_SECONDS and not any(left.values()) and not files

    def token_told(self) -> bool:
        return any(self.fleet.token in self.log(f"{name}.log") for name in SERVICES)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    asked = options.parse_args()
    need_root()
    # Short: Ray makes sockets in it, whose paths may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pkn", dir="/tmp"))
    started = time.time()
    logs: dict[str, list[str]] = {}
    try:
        with Fleet([Host("h1"), Host("h2"), Host("h3")], folder) as fleet:
            experiment = Experiment(fleet, folder)
            try:
                rule = experiment.run()
            finally:
                logs = {name: experiment.log(f"{name}.log").splitlines() for name in SERVICES}
                print(json.dumps(logs, indent=1), file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    conclude(
        asked.out,
        "Do services return by themselves, and is each outcome stored once?",
        rule,
        started=started,
        seconds=experiment.seconds,
        said=logs,
    )


if __name__ == "__main__":
    main()
