"""Outcomes into a store, in batches of one transaction each: `python ingest.py STORE NODES`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fleet import nodes

from pichak_coordinator.store import Store

#: Outcomes in one transaction: what a poll of a large fleet brings at once.
BATCH = 64


def ingest(path: Path, count: int) -> dict[str, Any]:
    """Seconds and CPU seconds until `count` nodes' outcomes, two each, are acknowledged."""
    made = list(nodes(count))
    with Store.open(path) as store:
        run = store.begin_run("fleet profile")
        names = store.record_nodes(run, [node.hello for node in made])
        with store.atomically():
            for node, name in zip(made, names, strict=True):
                for job in node.jobs:
                    store.record_job(run, job, node=name)
        data = [outcome for node in made for outcome in node.outcomes]
        rounds = []
        for first in range(0, len(data), BATCH):
            began, cpu = time.monotonic(), time.process_time()
            new = store.record_outcomes(data[first : first + BATCH])
            rounds.append((time.monotonic() - began, time.process_time() - cpu, len(new)))
            assert all(answer is True for answer in new)
        store.finish_run(run)
    tail = rounds[len(rounds) // 2 :]
    return {
        "nodes": count,
        "outcomes": len(data),
        "bytes_of_an_outcome": round(sum(map(len, data)) / len(data)),
        "per_second": rate(rounds, 0),
        "per_cpu_second": rate(rounds, 1),
        "per_second_of_the_second_half": rate(tail, 0),
        "per_cpu_second_of_the_second_half": rate(tail, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def rate(rounds: list[tuple[float, float, int]], clock: int) -> int:
    """Outcomes a second over these batches."""
    return round(sum(r[2] for r in rounds) / sum(r[clock] for r in rounds))


if __name__ == "__main__":
    print(json.dumps(ingest(Path(sys.argv[1]), int(sys.argv[2]))))
