"""Hosts made of network namespaces on a bridge, each with what is wrong with its network."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

RATE = "1gbit"
#: Ports that the firewall of a closed host leaves open: those of Ray.
PORTS = {
    "node-manager-port": 7001,
    "object-manager-port": 7002,
    "runtime-env-agent-port": 7003,
    "dashboard-agent-grpc-port": 7004,
    "dashboard-agent-listen-port": 7005,
    "metrics-export-port": 7006,
    "min-worker-port": 20000,
    "max-worker-port": 20100,
}


@dataclass(frozen=True)
class Host:
    """A host to be made: `rate` of its token bucket, `delay_ms` and `loss_percent` of what it
    sends, and whether its firewall drops connections to it that are not Ray's."""

    name: str
    rate: str = RATE
    delay_ms: float = 0.0
    loss_percent: float = 0.0
    closed: bool = False


@dataclass
class Fleet:
    """A context manager: the hosts are there inside it, and nothing of them afterwards."""

    hosts: Sequence[Host]
    folder: Path
    tag: str = field(default_factory=lambda: secrets.token_hex(2))
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Fleet:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def namespace(self, name: str) -> str:
        return f"pk{self.tag}-{name}"

    def address(self, name: str) -> str:
        return f"10.77.0.{1 + [host.name for host in self.hosts].index(name)}"

    def inside(self, name: str, *command: str) -> list[str]:
        """`command` as the host `name` would run it: its network, its host name."""
        return [
            *("ip", "netns", "exec", self.namespace(name)),
            *("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh", *command),
        ]

    def start(
        self, command: Sequence[str], log: str, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process that ends with the fleet."""
        with (self.folder / log).open("wb") as file:
            made = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=env
            )
        self._started.append(made)
        return made

    def environment(self, name: str) -> dict[str, str]:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        return {
            **os.environ,
            "PICHAK_HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }

    def _make(self) -> None:
        switch = self.namespace("sw")
        run("ip", "netns", "add", switch)
        within(switch, "ip link add br0 type bridge", "ip link set br0 up", "ip link set lo up")
        rules = (
            "add table bridge pk\n"
            "add chain bridge pk forward { type filter hook forward priority 0; }\n"
        )
        for number, host in enumerate(self.hosts):
            space, port = self.namespace(host.name), f"p{number}"
            run("ip", "netns", "add", space)
            if host.delay_ms:
                self._relay(host, space, port)
            else:
                within(switch, f"ip link add {port} type veth peer name eth0 netns {space}")
            within(switch, f"ip link set {port} master br0", f"ip link set {port} up")
            within(
                space,
                "ip link set lo up",
                f"ip addr add {self.address(host.name)}/24 dev eth0",
                "ip link set eth0 up",
                f"tc qdisc add dev eth0 root tbf rate {host.rate} burst 128kb latency 40ms",
            )
            if host.loss_percent:
                # One packet at a time, so that the drops hit packets and not 64 KB bundles of them.
                within(space, "ip link set eth0 gso_max_segs 1")
                share = round(host.loss_percent * 10)
                rules += (
                    f'add rule bridge pk forward iifname "{port}" ip protocol tcp '
                    f"numgen random mod 1000 < {share} drop\n"
                )
            if host.closed:
                self._close(space)
        run("ip", "netns", "exec", switch, "nft", "-f", "-", feed=rules)

    def _close(self, space: str) -> None:
        ports = ", ".join(str(p) for name, p in PORTS.items() if "worker" not in name)
        workers = f"{PORTS['min-worker-port']}-{PORTS['max-worker-port']}"
        rules = (
            "add table inet pk\n"
            "add chain inet pk in { type filter hook input priority 0; }\n"
            f'add rule inet pk in iifname "eth0" tcp dport != {{ {ports}, {workers} }} '
            "tcp flags & (syn | ack) == syn drop\n"
        )
        run("ip", "netns", "exec", space, "nft", "-f", "-", feed=rules)

    def _relay(self, host: Host, space: str, port: str) -> None:
        relay = Path(__file__).with_name("relay.py")
        command = [
            *("ip", "netns", "exec", self.namespace("sw"), sys.executable, str(relay)),
            *("eth0", port, str(host.delay_ms)),
        ]
        made = self.start(command, f"relay-{host.name}.log", dict(os.environ))
        end = time.monotonic() + 10
        while "eth0" not in said("ip", "-n", self.namespace("sw"), "-br", "link"):
            if time.monotonic() > end or made.poll() is not None:
                raise RuntimeError(f"the relay did not start, see {self.folder}")
            time.sleep(0.1)
        within(self.namespace("sw"), f"ip link set eth0 netns {space}")

    def _remove(self) -> None:
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for name in (*(host.name for host in self.hosts), "sw"):
            space = self.namespace(name)
            if space not in said("ip", "netns", "list"):
                continue
            for pid in said("ip", "netns", "pids", space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "del", space)
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()


def run(*command: str, feed: str | None = None) -> None:
    done = subprocess.run(command, input=feed, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def within(space: str, *lines: str) -> None:
    for line in lines:
        run("ip", "netns", "exec", space, *line.split())
