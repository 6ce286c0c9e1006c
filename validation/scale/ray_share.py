"""A profile of 5-second jobs over real Ray nodes on this machine: `python ray_share.py NODES`."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOBS_IN_A_ROW = 3  # on the node that measures the task: task, fingerprint, ramp


class Silent:
    """Nobody watches."""

    def say(self, text: str) -> None:
        """Not heard."""

    def show(self, targets: Any) -> None:
        """Not seen."""


def profile(address: str, count: int, store_path: Path) -> dict[str, Any]:
    """One whole `fleet profile`: how long it took, and how much CPU time this process."""
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.dispatch import Dispatcher
    from pichak_coordinator.judging import judge_run
    from pichak_coordinator.profile import Profiler
    from pichak_coordinator.request import ProfileRequest
    from pichak_coordinator.store import Store

    request = ProfileRequest(model="builtin:gpt-1m", seq_len=256)
    with Cluster(address) as cluster, Store.open(store_path) as store:
        nodes = cluster.wait_for_nodes()
        while len(nodes) < count:
            time.sleep(0.2)
            nodes = [node for node in cluster.nodes() if node.alive]
        began, cpu = time.monotonic(), time.process_time()
        run = store.begin_run("fleet profile")
        targets = Profiler(request, cluster, Dispatcher(cluster), store, Silent(), run).run(nodes)
        judge_run(store, run)
        store.finish_run(run)
        took, used = time.monotonic() - began, time.process_time() - cpu
        failed = [target.error for target in targets if target.error]
        done = sum(job.state == "done" for job in store.jobs(run))
    return {
        "seconds": round(took, 2),
        "cpu_seconds": round(used, 2),
        "done": done,
        "failed": failed,
    }


def main(count: int) -> dict[str, Any]:
    """A cluster of `count` nodes; two profiles: the first finds no agents, the second does."""
    # Before Ray is imported: a cluster that asks for no token is refused.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray
    import sleeper
    from ray.cluster_utils import Cluster as Nodes

    from pichak_agent import ray_actor

    made = ray.remote(
        num_cpus=0, concurrency_groups={"control": 8}, max_concurrency=16
    )(sleeper.SleepingAgent)  # fmt: skip
    ray_actor._remote_class = lambda: made  # type: ignore[assignment]
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PICHAK_HOME"] = folder
        nodes = Nodes(initialize_head=True, head_node_args=node)
        try:
            del node["include_dashboard"]
            for _ in range(count - 1):
                nodes.add_node(**node)
            runs = [profile(nodes.address, count, Path(folder) / "fleet.db") for _ in range(2)]
        finally:
            nodes.shutdown()
    load = round(os.getloadavg()[0], 1)
    return {"nodes": count, "first": runs[0], "with_agents": runs[1], "load_average": load}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
