"""A stored run read, judged, compared and picked from: `python table.py STORE`."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from pichak_coordinator.compare import compare
from pichak_coordinator.judge import judge
from pichak_coordinator.store import Store


def table(path: Path) -> dict[str, Any]:
    """Seconds and CPU seconds of each part, and the process's peak of resident memory."""
    with Store.open(path, read_only=True) as store:
        run = store.runs(1)[0].run
        clocks = [_now()]
        rows = store.rows_of(run, curves=False)
        clocks.append(_now())
        found = judge(rows)
        clocks.append(_now())
        shown = compare(rows)  # the pick is under the table
        clocks.append(_now())
    wall, cpu = ([round(b[i] - a[i], 3) for a, b in pairwise(clocks)] for i in (0, 1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "nodes": len(rows),
        "accused": sum(any(f.code == "slower_than_peers" for f in some) for some in found.values()),
        "pick": shown.pick.sentence[:120],
        "read_seconds": wall[0],
        "judge_seconds": wall[1],
        "compare_and_pick_seconds": wall[2],
        "read_cpu_seconds": cpu[0],
        "judge_cpu_seconds": cpu[1],
        "compare_and_pick_cpu_seconds": cpu[2],
        "peak_rss_mb": round(peak / 1e6, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


if __name__ == "__main__":
    print(json.dumps(table(Path(sys.argv[1]))))
