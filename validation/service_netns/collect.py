"""What a coordinator does first: agents on every node, and what they still keep into the store.

``python collect.py ADDRESS STORE [measure|look]`` prints JSON, by host: Ray id, kept, stored. With
``measure`` a job is run on each service's node, and nothing is collected; with ``look`` neither.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pichak_agent.messages import Job
from pichak_coordinator.cluster import Cluster
from pichak_coordinator.dispatch import Dispatcher
from pichak_coordinator.store import Store


def main(address: str, path: str, what: str = "collect") -> None:
    told: dict[str, Any] = {}
    with Cluster(address) as cluster, Store.open(Path(path)) as store:
        nodes = [n for n in cluster.wait_for_nodes() if n.alive and not n.is_head]
        dispatcher = Dispatcher(cluster)
        hellos = dispatcher.start_agents(nodes, 200.0)
        for node in nodes:
            hello = hellos[node.node_id]
            about: dict[str, Any] = {"ray_id": node.node_id, "address": node.address}
            told[node.host] = about
            if isinstance(hello, str):
                about["error"] = hello
            elif what == "measure":
                params = {"only": ["software"]}
                dispatcher.submit(
                    node.node_id, Job(f"kept-{node.host}", 1, "fingerprint", params, 120.0)
                )
            elif what == "collect":
                kept = dispatcher.leftovers(node.node_id)
                about["kept"] = len(kept)
                about["stored"] = sum(store.record_outcome(data) for data in kept)
                for data in kept:
                    dispatcher.acknowledge_bytes(node.node_id, data)
        while dispatcher.in_flight:
            for ended in dispatcher.poll(1.0):
                host = ended.job.job_id.removeprefix("kept-")
                told[host]["status"] = ended.outcome.status if ended.outcome else ended.error
        time.sleep(2)  # acknowledgements are not waited for
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
