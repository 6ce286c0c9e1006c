"""How large a fleet the coordinator bears on this machine, held against the rule of README.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NODES = (1250, 2500, 5000, 10_000)
RAY_NODES = (1, 16)
#: Outcomes are read in a few rounds of a small store too: other programs' moments show less.
ROUNDS, ROUND_NODES = 5, 500


def part(script: str, *arguments: str | Path | int) -> dict[str, Any]:
    """What a part printed; each is a process of its own, so that its memory is its own."""
    command = [sys.executable, HERE / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} {arguments}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{script:<14}{found}", flush=True)
    return found


def growth(rows: Sequence[dict[str, Any]], *names: str) -> list[float]:
    """How much more each doubling of the fleet takes of the sum of these figures."""
    sums = [sum(row[name] for name in names) for row in rows]
    return [round(b / a, 2) for a, b in pairwise(sums)]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        small = [
            part("ingest.py", Path(folder) / f"small-{n}.db", ROUND_NODES) for n in range(ROUNDS)
        ]
        ingests, tables = [], []
        for count in NODES:
            path = Path(folder) / f"{count}.db"
            ingests.append(part("ingest.py", path, count))
            tables.append(part("table.py", path))
    rays = [part("ray_share.py", count) for count in RAY_NODES]
    one, many = (found["with_agents"]["seconds"] for found in rays)
    largest = tables[-1]
    seconds = largest["judge_seconds"] + largest["compare_and_pick_seconds"]
    met = {
        "1 judge, compare and pick of 10,000 nodes within 2 s": seconds <= 2.0,
        "2 within 500 MB": largest["peak_rss_mb"] <= 500.0,
        "3 2,000 outcomes a second": max(found["per_second"] for found in small) >= 2000,
        "4 16 nodes take at most 3 s more than one": many - one <= 3.0,
    }
    cpu = ("judge_cpu_seconds", "compare_and_pick_cpu_seconds")
    result = {
        "question": "How large a fleet does the coordinator bear?",
        "rule": "README.md, written before the run",
        "met": all(met.values()),
        "date": date.today().isoformat(),
        "environment": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "ray": version("ray"),
        },
        "parts": met,
        "figures": {
            "ingest_rounds": small,
            "ingest": ingests,
            "table": tables,
            "judge_compare_pick_cpu_growth_per_doubling": growth(tables, *cpu),
            "read_cpu_growth_per_doubling": growth(tables, "read_cpu_seconds"),
            "memory_growth_per_doubling": growth(tables, "peak_rss_mb"),
            "ray": rays,
            "seconds_more_with_16_nodes": round(many - one, 2),
        },
    }
    HERE.joinpath("result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"parts": met, "met": result["met"]}, indent=1))
    return 0 if result["met"] else 1


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
