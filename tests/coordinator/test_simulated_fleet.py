"""Simulated hosts as nodes of a real Ray cluster: they work as others do, and say what they are."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from pichak_core.devices.processes import marked

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

FLEET = Path(__file__).parents[2] / "scripts" / "simulated_fleet.py"
HOST = """
host = "{host}"
gpu = "NVIDIA H100 80GB HBM3"
gpus = {gpus}
noise = 0.001
[metrics]
"disk.read_mb_s" = 3000
"gpu.h2d_pinned_mb_s" = 50000
[training]
capacity_mib = 20000
base_mib = 500
row_mib = 1000
"""
FAULT = """
[[fault]]
metric = "disk.read_mb_s"
starts = "+1s"
factor = 0.5
"""
MARK = "PICHAK_TEST_FLEET"


def test_a_fleet_on_one_machine(tmp_path: Path) -> None:
    hosts, home = tmp_path / "hosts", tmp_path / "home"
    hosts.mkdir()
    for name, gpus, more in (("one", 1, ""), ("two", 2, ""), ("ill", 1, FAULT)):
        (hosts / f"{name}.toml").write_text(HOST.format(host=name, gpus=gpus) + more)
    # Not the hosts' own variable: Ray's workers lose theirs, but each has a parent that keeps it.
    token = uuid.uuid4().hex
    script = tmp_path / "use.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "pichak = [sys.executable, '-c', 'from pichak_coordinator.cli import main; main()']\n"
        "def run(name, *words):\n"
        "    with open(os.path.join(sys.argv[1], name), 'w') as out:\n"
        "        subprocess.run([*pichak, *words], stdout=out, check=True)\n"
        "run('nodes.json', 'fleet', 'nodes', '--json')\n"
        "run('profile.json', 'fleet', 'profile', '--seq-len', '128', '--json')\n"
        "run('table.txt', 'fleet', 'compare')\n"
        "run('watch.txt', 'fleet', 'watch', '--once', '--seq-len', '128')\n"
        "run('pick.json', 'fleet', 'pick', '2', '--batch-rows', '64', '--assume-link-mbit',\n"
        "    '100000', '--json')\n"
        "run('status.json', 'agent', 'status', '--json')\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, str(FLEET), "--hosts", str(hosts), "--keep", str(home)),
            *("--", sys.executable, str(script), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, MARK: token, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    until = time.monotonic() + 20
    while marked(MARK, token) and time.monotonic() < until:
        time.sleep(0.1)
    assert not marked(MARK, token)

    def read(name: str) -> dict[str, object]:
        return dict(json.loads((tmp_path / name).read_text()))

    nodes: list[dict[str, object]] = read("nodes.json")["nodes"]  # type: ignore[assignment]
    assert {str(n["host"]) for n in nodes} == {"one", "two", "ill"}
    assert all(n["simulated"] for n in nodes)

    rows: list[dict[str, object]] = read("profile.json")["nodes"]  # type: ignore[assignment]
    assert sorted((r["host"], r["device"]) for r in rows) == [
        ("ill", "cuda:0"), ("one", "cuda:0"), ("two", "cuda:0"), ("two", "cuda:1")
    ]  # fmt: skip
    assert all(r["simulated"] is True and r["error"] is None for r in rows)
    uuids = {r["fingerprint"]["gpu.uuid"]["value"] for r in rows}  # type: ignore[index]
    assert len(uuids) == 4
    assert len({r["node"] for r in rows}) == 3
    for row in rows:
        disk = row["fingerprint"]["disk.read_mb_s"]["value"]  # type: ignore[index]
        assert disk == pytest.approx(1500 if row["host"] == "ill" else 3000, rel=0.01)
        # 500 + 1,000 b MiB in 88 % of 20,000 MiB.
        assert row["plan"]["values"]["micro_batch_max"]["value"] == 17  # type: ignore[index]

    for name in ("table.txt", "watch.txt"):
        text = (tmp_path / name).read_text()
        for host in ("one", "two", "ill"):
            assert f"{host} cuda:0 (simulated)" in text or f"{host} (simulated)" in text, name
    assert "simulated" in (tmp_path / "pick.json").read_text()
    services: list[dict[str, object]] = read("status.json")["services"]  # type: ignore[assignment]
    # The first host is the head's own node, which no service runs.
    assert sorted(str(s["name"]) for s in services) == ["one", "two"]
    assert all(s["simulated"] and s["state"] == "joined" for s in services)

    with sqlite3.connect(home / "fleet.db") as store:
        marks = store.execute("SELECT simulated, count(*) FROM outcomes GROUP BY simulated")
        assert [mark for mark, _ in marks.fetchall()] == [1]
    assert not list((home / "simulated").glob("*/agent/*/spool/*.mpk"))
    assert not (home / "service").exists()
