"""Runs the experiment of README.md: as root, ``python run.py [--out FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "netns_fleet")]

from hosts import Fleet, Host, said  # noqa: E402
from machine import Machine, control_groups, open_to_all, remove_control_groups  # noqa: E402
from verdict import conclude, need_root  # noqa: E402

PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
AGENT, COORDINATOR = "pichak-agent", "pichak-coordinator"
PORT = 6379
PATIENCE_SECONDS = 300.0
END_SECONDS = 10.0
CGROUPS = Path("/sys/fs/cgroup")
PROFILE = ("--seq-len", "64", "--model", "builtin:gpt-1m", "--depth", "quick", "--device", "cpu")


class Experiment:
    """A plain Ray head on h1, and the units on a machine of systemd's."""

    def __init__(self, fleet: Fleet, folder: Path, machine: Machine) -> None:
        self.fleet, self.folder, self.machine = fleet, folder, machine
        self.address = f"{fleet.address('h1')}:{PORT}"
        self.seconds: dict[str, float] = {}
        self.taken_away: list[str] = []

    # -- the two hosts ----------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        made = {**self.fleet.environment("h1"), "TMPDIR": str(self.folder / "h1")}
        made.pop("RAY_ADDRESS", None)
        return made

    def start_head(self) -> None:
        command = [
            *RAY,
            *("start", "--head", f"--port={PORT}", "--block", "--include-dashboard=false"),
            *(f"--node-ip-address={self.fleet.address('h1')}", "--num-cpus=1"),
            *("--object-store-memory=80000000", "--disable-usage-stats"),
            f"--temp-dir={self.folder / 'ray'}",
        ]
        self.fleet.start(self.fleet.inside("h1", *command), "head.log", self.environment())
        log = self.folder / "head.log"
        self.wait(lambda: "Ray runtime started" in log.read_text(errors="replace"), "the head")

    def install(self) -> None:
        """As deploy/systemd/README.md says, with this checkout in the place of /opt/pichak."""
        run, path = self.machine.run, self.machine.path
        run("useradd", "--system", "--home-dir", "/var/lib/pichak", "pichak")
        run("ln", "-s", sys.prefix, "/opt/pichak")
        open_to_all(self.machine, sys.prefix, sys.base_prefix, str(ROOT))
        run("install", "-d", "/etc/pichak")
        for name in ("agent.env", "coordinator.env"):
            text = (ROOT / "deploy/systemd" / name).read_text()
            text = text.replace("10.0.0.1:6379", self.address)
            text = text.replace("--seq-len 1024 --budget 600s/h", "--once --every full=never")
            path(f"/etc/pichak/{name}").write_text(text)
        self.token(self.fleet.token)
        for unit in (f"{AGENT}.service", f"{COORDINATOR}.service", "pichak.slice"):
            shutil.copy(ROOT / "deploy/systemd" / unit, path(f"/etc/systemd/system/{unit}"))
        run("systemctl", "daemon-reload")

    def token(self, text: str) -> None:
        path = self.machine.path("/etc/pichak/token")
        path.touch(0o600)
        path.write_text(text)

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

    def show(self, name: str, unit: str = AGENT) -> str:
        return self.machine.show(f"{unit}.service", name)

    def status(self) -> dict[str, Any]:
        said = self.machine.run(
            *("/opt/pichak/bin/pichak", "agent", "status", "--json"),
            env=["PICHAK_HOME=/var/lib/pichak"],
        )
        try:
            services = json.loads(said)["services"]
        except ValueError:
            return {}
        return dict(services[0]) if services else {}

    def joined(self) -> bool:
        return self.show("ActiveState") == "active" and self.status().get("state") == "joined"

    def main_pid(self) -> int:
        return self.machine.here(int(self.show("MainPID")))

    # -- the course -------------------------------------------------------------------------------

    def run(self) -> dict[str, bool]:
        self.start_head()
        self.install()
        rule = {}
        self.machine.run("systemctl", "start", "--no-block", AGENT)
        rule["1 the agent is active once it has joined"] = self.wait(self.joined, "the unit joins")
        rule["2 it is as small as its unit says"] = self.confined()
        rule["3 its jobs measure what a plain host's do"] = self.profile()
        rule["4 killed, it is started again"] = self.killed()
        rule["5 frozen, it is ended by its watchdog and started again"] = self.frozen()
        rule["6 a refused token ends it for good, with the sentence"] = self.refused()
        rule["7 the coordinator's unit probes through it"] = self.coordinator()
        rule["8 stopped, it leaves nothing"] = self.stopped()
        rule["9 no token is told"] = self.fleet.token not in self.journal()
        return rule

    def confined(self) -> bool:
        status = Path(f"/proc/{self.main_pid()}/status").read_text()
        wanted = ("CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2")
        limit = self.machine.show("pichak.slice", "MemoryMax")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        kernels = [path.read_text().strip() for path in slice_limits()]
        print("slice:", limit, kernels, file=sys.stderr)
        return (
            all(line in status for line in wanted)
            and "Uid:\t0" not in status
            and abs(int(limit) / memory - 0.9) < 0.01
            and kernels == [limit]
        )

    def profile(self) -> bool:
        """Both hosts by one command; what the plain one reads and the unit does not is told."""
        done = subprocess.run(
            self.fleet.inside(
                *("h1", *PICHAK, "fleet", "profile", "--address", self.address),
                *(*PROFILE, "--store", str(self.folder / "fleet.db"), "--json"),
            ),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-3000:], file=sys.stderr)
            return False
        by_host = {row["host"]: row for row in json.loads(done.stdout)["nodes"]}
        plain, unit = by_host.get("h1"), by_host.get("unit")
        if plain is None or unit is None:
            print("hosts:", list(by_host), file=sys.stderr)
            return False
        here, there = measured(plain), measured(unit)
        self.taken_away = sorted(
            f"{name}: {there.get(name, 'not there')}"
            for name, why in here.items()
            if not why and there.get(name, "not there")
        )
        print("taken away:", self.taken_away, "error:", unit["error"], file=sys.stderr)
        return bool(unit["plan"]) and not self.taken_away

    def killed(self) -> bool:
        before = self.status()
        os.kill(self.main_pid(), signal.SIGKILL)
        back = self.wait(
            lambda: self.show("NRestarts") == "1" and self.joined(), "back after kill -9"
        )
        return back and self.status()["node_id"] != before["node_id"]

    def frozen(self) -> bool:
        os.kill(self.main_pid(), signal.SIGSTOP)
        ended = self.wait(lambda: self.show("NRestarts") == "2", "ended by the watchdog")
        return ended and self.wait(self.joined, "back after that")

    def refused(self) -> bool:
        self.token("f" * 64)
        self.machine.run("systemctl", "restart", "--no-block", AGENT)
        failed = self.wait(lambda: self.show("ActiveState") == "failed", "a refused token")
        code = self.show("ExecMainStatus")
        time.sleep(8.0)  # longer than RestartSec=
        still = self.show("ActiveState") == "failed"
        said = "token" in self.journal().splitlines()[-1] or "token" in self.journal()[-3000:]
        self.token(self.fleet.token)
        self.machine.run("systemctl", "start", "--no-block", AGENT)
        back = self.wait(self.joined, "back with the right token")
        print("refused:", failed, code, still, said, back, file=sys.stderr)
        return failed and code == "2" and still and said and back

    def coordinator(self) -> bool:
        self.machine.run("systemctl", "start", "--no-block", COORDINATOR)
        done = self.wait(
            lambda: (
                self.show("ActiveState", COORDINATOR) not in ("active", "activating")
                or self.show("SubState", COORDINATOR) == "auto-restart"
            ),
            "a round of the coordinator's unit",
        )
        result, code = self.show("Result", COORDINATOR), self.show("ExecMainStatus", COORDINATOR)
        self.machine.run("systemctl", "stop", COORDINATOR)
        history = self.machine.run(
            *("/opt/pichak/bin/pichak", "fleet", "nodes", "--json"),
            *("--store", "/var/lib/pichak-coordinator/fleet.db"),
        )
        print("coordinator:", result, code, history[:600], file=sys.stderr)
        print(self.journal(COORDINATOR)[-3000:], file=sys.stderr)
        return done and (result, code) == ("success", "0") and '"unit"' in history

    def stopped(self) -> bool:
        began = time.monotonic()
        self.machine.run("systemctl", "stop", AGENT)
        seconds = round(time.monotonic() - began, 1)
        self.seconds["the unit stops"] = seconds
        people = self.machine.run("ps", "-u", "pichak", "-o", "pid,args", "--no-headers")
        left = self.machine.run(
            *("sh", "-c", "find /tmp -mindepth 1 ! -name 'systemd-private-*' ! -path '/tmp/.*'"),
        )
        state = self.machine.run("find", "/var/lib/pichak", "-type", "f")
        print("left:", people, left, state, seconds, self.show("Result"), file=sys.stderr)
        return seconds < END_SECONDS and self.show("Result") == "success" and not (people or left)

    def journal(self, unit: str = AGENT) -> str:
        return self.machine.run("journalctl", "-u", unit, "--no-pager", "-o", "cat")


def slice_limits() -> list[Path]:
    """The kernel's own limit of the slice, wherever the group is (version 1 or 2)."""
    names = ("pichak.slice/memory.limit_in_bytes", "pichak.slice/memory.max")
    found = {path for name in names for path in CGROUPS.glob(f"**/{name}")}
    return sorted(found)


def measured(row: dict[str, Any]) -> dict[str, str]:
    """By reading: "" where it was measured, else why it was not. The two hosts are each other's
    peer, by whose name the readings of the link go."""
    peers = ("network.h1.", "network.unit.")
    return {
        f"network.peer.{name.split('.', 2)[2]}" if name.startswith(peers) else name: str(
            reading.get("unmeasured", "")
        )
        for name, reading in row["fingerprint"].items()
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=HERE / "result.json")
    asked = options.parse_args()
    need_root("nsenter", "/lib/systemd/systemd")
    folder = Path(tempfile.mkdtemp(prefix="pks", dir="/tmp"))
    started, before, journal = time.time(), control_groups(), ""
    try:
        disk = folder / "disk"
        disk.mkdir()
        with Fleet([Host("h1"), Host("unit")], folder) as fleet:
            network = f"/run/netns/{fleet.namespace('unit')}"
            with Machine("unit", network, disk) as machine:
                systemd = machine.run("systemctl", "--version").splitlines()[0]
                experiment = Experiment(fleet, folder, machine)
                try:
                    rule = experiment.run()
                finally:
                    journal = experiment.journal()
                    print(journal[-20000:], file=sys.stderr)
    finally:
        remove_control_groups(before)
        shutil.rmtree(folder, ignore_errors=True)
    conclude(
        asked.out,
        "Do the units do under a systemd that is process 1 what they say?",
        rule,
        started=started,
        environment={
            "systemd": systemd,
            "control_groups": said("stat", "-fc", "%T", str(CGROUPS)).strip(),
        },
        seconds=experiment.seconds,
        taken_away_by_the_unit=experiment.taken_away,
        said=journal.splitlines(),
    )


if __name__ == "__main__":
    main()
