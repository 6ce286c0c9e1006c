"""The listening ports of a live fleet on this machine: port, process, bound address, purpose.

    python scripts/list_ports.py [--nodes N]     starts a head and N - 1 workers, an agent on each
    python scripts/list_ports.py --local         the Ray that `pichak fleet profile` starts itself
    python scripts/list_ports.py --running       the Ray and the agents that run here already
    python scripts/list_ports.py --pid PID       what a process and its children listen on

Sockets are those that the operating system reports of the processes, not what settings say. What is
started here has a token of its own, and nothing of it is left.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: (in the command line, process, purpose, option of `ray start` that pins its ports); the first
#: that is found counts.
_KINDS = (
    ("gcs_server", "head: gcs_server", "the cluster's directory; nodes join here", "--port"),
    ("raylet/raylet", "node: raylet", "leases, objects", "--node-manager-port, "
     "--object-manager-port"),
    (r"dashboard/agent|DashboardAgent", "node: dashboard agent", "metrics and jobs of the node",
     "--dashboard-agent-grpc-port, --dashboard-agent-listen-port, --metrics-export-port"),
    (r"runtime_env/agent|RuntimeEnvAgent", "node: runtime env agent", "environments of workers",
     "--runtime-env-agent-port"),
    ("dashboard/dashboard", "head: dashboard", "Ray's page", "--dashboard-port; off here"),
    (r"ray_client_server|util/client/server", "head: Ray Client", "not used by pichak",
     "--ray-client-server-port"),
    ("log_monitor", "node: log monitor", "", ""),
    (r"autoscaler/.*monitor\.py", "head: autoscaler monitor", "its metrics", "– (close it)"),
    ("ray::.*AgentActor", "node: pichak agent", "a Ray worker: calls of the coordinator",
     "--min-worker-port, --max-worker-port"),
    (r"ray::|default_worker", "node: worker", "a Ray worker", "--min-worker-port, "
     "--max-worker-port"),
    (r"pichak(_agent|_coordinator|\b).*agent.*\brun\b", "pichak agent run", "its metrics",
     "--metrics-port"),
    (r"pichak.*\bwatch\b", "pichak fleet watch", "its metrics", "--metrics-port"),
    (r"pichak|list_ports", "coordinator", "a Ray driver: answers of workers", "any"),
)  # fmt: skip
_ANY = frozenset({"0.0.0.0", "::"})
_HEADS = ("port", "process", "bound address", "purpose", "pinned by")


@dataclass(frozen=True, order=True)
class Socket:
    """One listening socket."""

    process: str
    address: str
    port: int
    protocol: str
    purpose: str = ""
    pin: str = ""


def listening(processes: Iterable[psutil.Process]) -> list[Socket]:
    """Every listening TCP socket of them, and every UDP socket that is not connected."""
    found: set[Socket] = set()
    for process in processes:
        try:
            name, purpose, pin = kind_of(process.cmdline(), process.name())
            for each in process.net_connections(kind="inet"):
                udp = each.type == socket.SOCK_DGRAM and not each.raddr
                if each.laddr and (udp or each.status == psutil.CONN_LISTEN):
                    protocol = "udp" if udp else "tcp"
                    where = address_of(each.laddr.ip)
                    found.add(Socket(name, where, each.laddr.port, protocol, purpose, pin))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found)


def address_of(ip: str) -> str:
    """As the table says it: "all interfaces", "loopback", or the address itself."""
    plain = ip.removeprefix("::ffff:")
    if plain in _ANY:
        return "all interfaces"
    return "loopback" if ipaddress.ip_address(plain).is_loopback else plain


def family(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def running() -> list[psutil.Process]:
    """Every process of Ray's and of this package on this machine, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        ours = any(re.search(pattern, line) for pattern, *_ in _KINDS)
        if ours and process.pid != os.getpid():
            found.append(process)
    return found


def kind_of(command: Sequence[str], name: str) -> tuple[str, str, str]:
    """(process, purpose, option) by its command line, else by its name."""
    line = " ".join(command)
    for pattern, *known in _KINDS:
        if re.search(pattern, line):
            return known[0], known[1], known[2]
    return name, "", ""


def table(sockets: Sequence[Socket]) -> str:
    """In Markdown, the ports of one process and address in one line."""
    ports: dict[tuple[str, ...], set[tuple[int, str]]] = {}
    for each in sockets:
        key = (each.process, each.address, each.purpose, each.pin)
        ports.setdefault(key, set()).add((each.port, each.protocol))
    lines = [_HEADS, tuple("---" for _ in _HEADS)]
    for (process, address, purpose, pin), held in sorted(ports.items()):
        shown = ", ".join(f"{port}{'/udp' * (kind == 'udp')}" for port, kind in sorted(held))
        lines.append((shown, process, address, purpose, pin))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(title: str, sockets: Sequence[Socket]) -> None:
    print(f"{title}\n\n{table(sockets) if sockets else 'nothing listens'}", flush=True)


def _with_agents(address: str) -> list[Socket]:
    """Join (or start) a cluster as every command does, an agent on each node, and look."""
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.dispatch import Dispatcher

    with Cluster(address) as cluster:
        nodes = cluster.wait_for_nodes()
        answers = Dispatcher(cluster).start_agents(nodes)
        failed = [answer for answer in answers.values() if isinstance(answer, str)]
        if failed:
            raise SystemExit(f"an agent did not start: {failed[0]}")
        return listening(family(os.getpid()))


def _started(nodes: int) -> list[Socket]:
    from ray.cluster_utils import Cluster as Nodes

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            made.add_node(**node)
        return _with_agents(made.address)
    finally:
        made.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--local", action="store_true")
    options.add_argument("--running", action="store_true")
    options.add_argument("--pid", type=int)
    asked = options.parse_args(arguments)
    if asked.pid is not None:
        if not psutil.pid_exists(asked.pid):
            raise SystemExit(f"--pid {asked.pid}: there is no such process")
        show(f"process {asked.pid}", listening(family(asked.pid)))
        return 0
    if asked.running:
        show("what runs here", listening(running()))
        return 0
    # Without these, Ray's test clusters ask nobody for a token, and pichak joins none of that kind.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PICHAK_HOME"] = str(Path(folder) / "pichak")
        if asked.local:
            show("the Ray that a command starts itself", _with_agents("local"))
        else:
            show(f"a cluster of {asked.nodes} nodes", _started(asked.nodes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
