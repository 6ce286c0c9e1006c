"""The fleet that is soaked: raylets on this machine, an agent on each, all on one small disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from pichak_core.devices.processes import marked, started_at

MARK = "PICHAK_SOAK"
STORE_BYTES = 80 * 1024**2
DISK_MIB = 96


class SmallDisk:
    """An ext4 of its own behind the agents' folder, so that it can be filled; a plain folder where
    none can be mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "home"
        self.folder.mkdir()
        self._image = folder / "home.img"
        self._ballast = self.folder / "ballast"
        self.why_not = self._mount()

    def _mount(self) -> str:
        if os.geteuid() != 0:
            return "a file system of its own needs root"
        with self._image.open("wb") as image:
            image.truncate(DISK_MIB * 1024**2)
        for command in (
            ["mkfs.ext4", "-q", "-m", "0", str(self._image)],
            ["mount", "-o", "loop", str(self._image), str(self.folder)],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError as error:
                return str(error)
            if done.returncode:
                return f"{command[0]}: {done.stderr.strip()}"
        shutil.rmtree(self.folder / "lost+found")
        return ""

    def fill(self) -> None:
        try:
            with self._ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024**2))
        except OSError:
            pass
        try:
            with self._ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        except OSError:
            return

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.why_not:
            subprocess.run(["umount", str(self.folder)], check=True)


class Raylets:
    """The cluster. `nodes` maps a node's id to its handle; the head's stays."""

    def __init__(self, count: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**options, "include_dashboard": False}
        )
        self._options = options
        ray.init(address=self.cluster.address, namespace="pichak", log_to_driver=False)
        self.head = ray.nodes()[0]["NodeID"]
        self.nodes: dict[str, Any] = {self.head: self.cluster.head_node}
        for _ in range(count - 1):
            self.add()

    def add(self) -> str:
        import ray

        known = {node["NodeID"] for node in ray.nodes()}
        handle = self.cluster.add_node(**self._options)
        (node_id,) = {n["NodeID"] for n in ray.nodes() if n["Alive"]} - known
        self.nodes[node_id] = handle
        return str(node_id)

    def kill(self, node_id: str) -> None:
        self.cluster.remove_node(self.nodes.pop(node_id), allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def agents(raylets: Raylets) -> dict[int, str]:
    """Living agents of this soak: process id -> the Ray node that it is pinned to."""
    by_raylet = {
        str(handle.all_processes["raylet"][0].process.pid).encode(): node_id
        for node_id, handle in raylets.nodes.items()
    }
    found = {}
    for pid in marked(MARK, os.environ[MARK]):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not command.startswith(b"ray::AgentActor"):
                continue
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == b"RAY_RAYLET_PID" and value in by_raylet:
                found[pid] = by_raylet[value]
    return found


def everybody() -> list[int]:
    """Processes of this soak, without the driver."""
    return [pid for pid in marked(MARK, os.environ[MARK]) if started_at(pid)]


def wait_gone(seconds: float) -> list[str]:
    """What is still there after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and everybody():
        time.sleep(0.2)
    left = []
    for pid in everybody():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        left.append(f"{pid}: {command[:200].decode(errors='replace')}")
    return left
