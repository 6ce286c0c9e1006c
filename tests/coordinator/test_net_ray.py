"""``pichak net`` through Ray: raylets of this machine, whose links are its loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pichak_coordinator.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    # The raylets' children, and so the agents, inherit it.
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path))
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.kept = [made.add_node(**node) for _ in range(2)]
    yield made
    made.shutdown()


def start(cluster: Any, home: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*PICHAK, "net", "--address", cluster.address, "--json", *arguments]
    env = {**os.environ, "PICHAK_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=400)
    assert out, err
    record: dict[str, Any] = json.loads(out)
    return record


def job_processes(home: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            its = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if "PICHAK_JOB" in its and its.get("PICHAK_HOME") == str(home):
            found.append(process.pid)
    return found


def test_three_nodes_are_measured_and_reduce(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record = ended(start(cluster, tmp_path, "--gradient", "1MiB"))
    assert len(record["nodes"]) == 3
    assert all(reach["open"] for reach in record["reach"])
    for link in record["links"]:
        for name in ("rtt_ms", "a_to_b_mb_s", "b_to_a_mb_s"):
            assert link[name].get("value"), link
    bus = record["collective"]["bus_mb_s"]
    assert bus.get("value"), record["collective"]
    assert not bus.get("suspect")
    assert record["collective"]["gradient_seconds"] > 0
    # Each node has both of its links in the history, also those that the other end opened.
    with Store.open(tmp_path / "fleet.db", read_only=True) as store:
        rows = store.rows_of(record["run"])
        sent = [[m for m in row.fingerprint if m.endswith(".send_mb_s")] for row in rows]
        assert [len(metrics) for metrics in sent] == [2, 2, 2]
        assert not any(row.error for row in rows)
    assert job_processes(tmp_path) == []


def test_a_node_that_dies_costs_its_own_links_and_hangs_nobody(
    cluster: Any, tmp_path: Path
) -> None:
    process = start(cluster, tmp_path, "--gradient", "1MiB")
    said: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if "round 1 of" in line:
            cluster.remove_node(cluster.kept[0], allow_graceful=False)
            break
    else:
        pytest.fail("".join(said))
    rest = threading.Thread(target=process.stderr.read, daemon=True)
    rest.start()
    assert process.stdout is not None
    out = process.stdout.read()
    process.wait(60)
    record = json.loads(out)
    errors = {node["name"]: node["error"] for node in record["nodes"]}
    lost = [name for name, error in errors.items() if error]
    assert len(lost) == 1, errors
    assert any(lost[0] in gap for gap in record["gaps"])
    for link in record["links"]:
        if lost[0] not in (link["a"], link["b"]):
            assert link["rtt_ms"].get("value"), link
    # The two that are left still reduce, or it is said who broke it.
    collective = record["collective"]
    assert lost[0] not in collective["nodes"] or "broke" in collective["bus_mb_s"]["detail"]
    deadline = time.monotonic() + 20
    while job_processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert job_processes(tmp_path) == []
