"""Runs the experiment of README.md: as root, ``python run.py [--out FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "service_systemd"), str(HERE.parent / "netns_fleet")]

from hosts import Fleet, Host  # noqa: E402
from machine import Machine, control_groups, open_to_all, remove_control_groups  # noqa: E402
from verdict import conclude, need_root  # noqa: E402

HEAD, WORKERS = "head", ("w1", "w2")
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
JOIN_SECONDS = 120.0
#: A raylet ends itself when it has not heard of its head for a minute.
END_SECONDS = 120.0


class Experiment:
    """The desk's side of it. `machines` are booted, by name."""

    def __init__(self, fleet: Fleet, folder: Path, machines: dict[str, Machine]) -> None:
        self.fleet, self.machines = fleet, machines
        self.home = folder / "desk"
        (self.home / ".ssh").mkdir(parents=True)
        (self.home / ".ray").mkdir()
        self.token = secrets.token_hex(32)
        self.said: dict[str, str] = {}
        self.told_in_arguments = False

    # -- before -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """What a person has before: keys, machines with an ssh server, a token, the file."""
        key = self.home / ".ssh/id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        public = key.with_suffix(".pub").read_text()
        for machine in self.machines.values():
            machine.run("useradd", "--create-home", "--shell", "/bin/bash", "fleet")
            machine.run("install", "-d", "-o", "fleet", "-m", "700", "/home/fleet/.ssh")
            machine.path("/home/fleet/.ssh/authorized_keys").write_text(public)
            open_to_all(machine, sys.prefix, sys.base_prefix, str(ROOT))
            # Until then nobody but root may log in.
            machine.run("systemctl", "start", "systemd-user-sessions")
            machine.run("ssh-keygen", "-A")
            machine.run("install", "-d", "/run/sshd")
            machine.run("/usr/sbin/sshd")
        token = self.home / ".ray/auth_token"
        token.touch(0o600)
        token.write_text(self.token)
        wheel = self.home / "dist"
        wheel.mkdir()
        (wheel / "pichak_fleet-0-none.whl").touch()
        (self.home / "cluster.yaml").write_text(self.file())

    def file(self) -> str:
        """deploy/ray/cluster.yaml with this fleet's own values."""
        text = (ROOT / "deploy/ray/cluster.yaml").read_text()
        install = [line for line in text.splitlines() if "pip install" in line and "#" not in line]
        changes = {
            "head_ip: 10.0.0.1\n": f"head_ip: {self.fleet.address(HEAD)}\n",
            "--node-ip-address=10.0.0.1": f"--node-ip-address={self.fleet.address(HEAD)}",
            "[10.0.0.2, 10.0.0.3, 10.0.0.4]": json.dumps([*map(self.fleet.address, WORKERS)]),
            "ssh_user: ubuntu": "ssh_user: fleet",
            # ssh looks for ~ in the list of users, not in this desk's HOME.
            "key: ~/.ssh/id_ed25519": f"key: {self.home}/.ssh/id_ed25519",
            "  - python3 -m venv ~/pichak\n": f"  - ln -sfn {sys.prefix} ~/pichak\n",
            f"{install[0]}\n": "",
        }
        for old, new in changes.items():
            if text.count(old) != 1:
                raise RuntimeError(f"deploy/ray/cluster.yaml has no single {old!r}")
            text = text.replace(old, new)
        return text

    # -- the desk ---------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        made = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        made |= {"HOME": str(self.home), "RAY_AUTH_MODE": "token", "TMPDIR": str(self.home)}
        return {**made, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

    def desk(self, name: str, *command: str, seconds: float = 600.0) -> tuple[int, str]:
        """Its exit code and what it says on either output, which is kept under `name`."""
        done = subprocess.run(
            ["timeout", f"{seconds:g}", *self.fleet.inside("desk", *command)],
            cwd=self.home,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.said[name] = done.stdout
        return done.returncode, done.stdout

    def pichak(self, name: str, command: str) -> dict[str, Any]:
        """The JSON that `pichak COMMAND --json` gives on the head; nothing when it gave none."""
        line = f"~/pichak/bin/pichak {command} --address auto --json > ~/said.json"
        self.desk(name, *RAY, "exec", "cluster.yaml", line)
        try:
            return dict(json.loads(self.machines[HEAD].path("/home/fleet/said.json").read_text()))
        except (OSError, ValueError) as error:
            self.said[name] += str(error)
            return {}

    def watch_arguments(self, stop: threading.Event) -> None:
        """Look at every process here, those of the machines included, until `stop`."""
        token = self.token.encode()
        while not stop.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.told_in_arguments |= token in path.read_bytes()
                except OSError:
                    continue

    # -- the course -------------------------------------------------------------------------------

    def run(self) -> dict[str, bool]:
        self.prepare()
        stop = threading.Event()
        looker = threading.Thread(target=self.watch_arguments, args=(stop,))
        looker.start()
        try:
            code, said = self.desk("up", *RAY, "up", "--yes", "cluster.yaml")
        finally:
            stop.set()
            looker.join()
        rule = {"1 up, and every machine is there": code == 0 and self.everybody()}
        self.said["monitor"] = self.machines[HEAD].run(
            "sh", "-c", "tail -n 60 /tmp/ray/session_latest/logs/monitor.[lo]*"
        )
        modes = [m.run("stat", "-c", "%a", "/home/fleet/.ray/auth_token") for m in self.each]
        self.said["token"] = f"modes {modes}, in arguments: {self.told_in_arguments}"
        rule["2 the token is told to nobody"] = (
            modes == ["600"] * len(modes) and not self.told_in_arguments and self.token not in said
        )
        rule["3 who has no token is refused"] = self.refuses_strangers()
        rule["4 every worker is profiled"] = self.profile()
        code, _ = self.desk("down", *RAY, "down", "--yes", "cluster.yaml")
        left = self.left()
        self.said["left"] = "\n".join(text[:2000] for text in left)
        rule["5 down, and nothing is left"] = code == 0 and not any(left)
        return rule

    def left(self) -> list[str]:
        """Ray's processes on the machines, once they had the time to end by themselves."""
        end = time.monotonic() + END_SECONDS
        while True:
            left = [
                m.run("pgrep", "-u", "fleet", "-fa", "raylet|gcs_server|ray::") for m in self.each
            ]
            if not any(left) or time.monotonic() > end:
                return left
            time.sleep(2.0)

    @property
    def each(self) -> list[Machine]:
        return list(self.machines.values())

    def everybody(self) -> bool:
        end = time.monotonic() + JOIN_SECONDS
        while time.monotonic() < end:
            found = self.pichak("nodes", "fleet nodes")
            nodes = {n["address"]: n for n in found.get("nodes", [])}
            workers = [nodes.get(self.fleet.address(name)) for name in WORKERS]
            if all(n is not None and n["state"] == "alive" for n in workers):
                return True
            time.sleep(3.0)
        return False

    def refuses_strangers(self) -> bool:
        code = (
            "import ray, sys\n"
            "try:\n    ray.init(address=sys.argv[1], log_to_driver=False)\n"
            "except Exception as error:\n    print('refused', type(error).__name__, error)\n"
        )
        address = f"{self.fleet.address(HEAD)}:6379"
        bare = ["env", "-u", "RAY_AUTH_MODE", f"HOME={self.home / 'dist'}"]
        _, said = self.desk("stranger", *bare, sys.executable, "-c", code, address, seconds=90)
        return "refused" in said and "uthenti" in said

    def profile(self) -> bool:
        command = "fleet profile --seq-len 64 --model builtin:gpt-1m --depth quick --device cpu"
        found = self.pichak("profile", command)
        rows = {row["address"]: row for row in found.get("nodes", [])}
        wanted = {self.fleet.address(name) for name in WORKERS}
        return set(rows) == wanted and all(row["fingerprint"] for row in rows.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=HERE / "result.json")
    asked = options.parse_args()
    need_root("nsenter", "ssh", "rsync", "/usr/sbin/sshd", "/lib/systemd/systemd")
    folder = Path(tempfile.mkdtemp(prefix="pku", dir="/tmp"))
    started, before = time.time(), control_groups()
    hosts = [Host("desk"), Host(HEAD), *map(Host, WORKERS)]
    try:
        with ExitStack() as stack:
            fleet = stack.enter_context(Fleet(hosts, folder))
            machines = {}
            for name in (HEAD, *WORKERS):
                disk = folder / f"disk-{name}"
                disk.mkdir()
                network = f"/run/netns/{fleet.namespace(name)}"
                machines[name] = stack.enter_context(Machine(name, network, disk))
            experiment = Experiment(fleet, folder, machines)
            try:
                rule = experiment.run()
            finally:
                for name, text in experiment.said.items():
                    print(f"== {name}\n{text[-4000:]}", file=sys.stderr)
    finally:
        remove_control_groups(before)
        shutil.rmtree(folder, ignore_errors=True)
    conclude(
        asked.out,
        "Does deploy/ray/cluster.yaml make a fleet with Ray's cluster launcher?",
        rule,
        started=started,
    )


if __name__ == "__main__":
    main()
