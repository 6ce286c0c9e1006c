"""The listening ports of a live fleet on this machine: who listens, on which address.

    python scripts/list_ports.py [--nodes N]     starts a head and N - 1 workers, an agent on each
    python scripts/list_ports.py --local         the Ray that `pichak fleet profile` starts itself
    python scripts/list_ports.py --pid PID       what a process and its children listen on

Sockets are those that the operating system reports of the processes, not what settings say.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

Row = tuple[str, str, str]


def listening(processes: Iterable[psutil.Process]) -> list[Row]:
    """(program, address, port or "varies") of every listening TCP socket and every UDP socket."""
    found: set[Row] = set()
    for process in processes:
        try:
            name = _name(process)
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN or (each.type == 2 and not each.raddr):
                    found.add((name, each.laddr.ip, str(each.laddr.port)))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found)


def family(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _name(process: psutil.Process) -> str:
    """What of Ray or of this package it is."""
    line = " ".join(process.cmdline())
    for part, name in (
        ("gcs_server", "head: gcs_server"), ("raylet/raylet", "node: raylet"),
        ("dashboard/agent", "node: dashboard agent"), ("DashboardAgent", "node: dashboard agent"),
        ("runtime_env/agent", "node: runtime env agent"), ("RuntimeEnvAgent", "node: runtime env "
         "agent"), ("dashboard/dashboard", "head: dashboard"), ("log_monitor", "node: log monitor"),
        ("monitor.py", "head: autoscaler monitor"), ("ray::AgentActor", "node: pichak agent"),
        ("ray::", "node: worker"), ("default_worker", "node: worker"),
    ):  # fmt: skip
        if part in line:
            return name
    return "coordinator" if process.pid == os.getpid() else process.name()


def show(title: str, rows: list[Row]) -> None:
    """A table; the ports of one program and address in one line."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, address, port in rows:
        grouped.setdefault((name, address), []).append(port)
    print(f"\n{title}\n\n| program | address | ports |\n| --- | --- | --- |")
    for (name, address), ports in sorted(grouped.items()):
        print(f"| {name} | {address} | {', '.join(sorted(ports, key=int))} |")


def _with_agents(address: str | None) -> list[Row]:
    """Join (or start) a cluster as every command does, an agent on each node, and look."""
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.dispatch import Dispatcher

    with Cluster(address) as cluster:
        nodes = cluster.wait_for_nodes()
        answers = Dispatcher(cluster).start_agents(nodes)
        failed = [answer for answer in answers.values() if isinstance(answer, str)]
        if failed:
            raise SystemExit(failed[0])
        return listening(family(os.getpid()))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--local", action="store_true")
    options.add_argument("--pid", type=int)
    asked = options.parse_args()
    if asked.pid is not None:
        show(f"process {asked.pid}", listening(family(asked.pid)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PICHAK_HOME"] = str(Path(folder) / "pichak")
        if asked.local:
            show("a local Ray", _with_agents("local"))
            return 0
        from ray.cluster_utils import Cluster as Nodes

        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        nodes = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            for _ in range(asked.nodes - 1):
                nodes.add_node(**node)
            show(f"a cluster of {asked.nodes} nodes", _with_agents(nodes.address))
        finally:
            nodes.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
