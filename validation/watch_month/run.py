"""A simulated month of 500 watched nodes, held against the rule of README.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from month import BUDGET, DAY, Month

#: A node's probe-seconds a day at pace 1: 12 light probes and a full one.
AT_PACE_ONE = 12 * 8.0 + 25.0

LIMIT_HOURS = {"copies": 9.0, "matmul": 9.0, "disk": 106.0, "drift": 16 * 24.0,
               "daily": 7 * 24.0, "silent": 9.0}  # fmt: skip


def figures(month: Month) -> dict[str, Any]:
    probes = month.healthy_probes()
    wrong = [f for f in month.false if f["node"] not in month.faults]
    confirmed = sum(f["kind"] == "confirmed" for f in wrong)
    changed = sum(f["kind"] == "changed" for f in wrong)
    quiet, noisy = month.paces(noisy=False), month.paces(noisy=True)
    week = [month.days - d for d in range(1, 8)]
    last_week = statistics.mean(month.seconds_on_day(day) for day in week)
    quiet_week = statistics.mean(month.seconds_on_day(day, quiet_only=True) for day in week)
    return {
        "probes": len(month.starts),
        "probe_seconds": sum(month.seconds_on_day(d) for d in range(int(month.days) + 1)),
        "hours_to_find": {
            kind: [round(h, 2) for h in month.hours_to_find(kind)] for kind in LIMIT_HOURS
        },
        "healthy_probes": probes,
        "false_confirmed": confirmed,
        "false_confirmed_percent": round(100 * confirmed / probes, 4),
        "false_changed": changed,
        "false_changed_percent": round(100 * changed / probes, 4),
        "on_ill_nodes_in_other_metrics": len(month.false) - len(wrong),
        "fullest_hour_seconds": month.fullest_hour(),
        "most_probes_in_half_an_hour": month.most_in_a_step(),
        "pace_median_quiet": round(statistics.median(quiet), 2),
        "pace_median_noisy": round(statistics.median(noisy), 2),
        "pace_range": [quiet[0], quiet[-1], noisy[0], noisy[-1]],
        "second_day_seconds": month.seconds_on_day(1),
        "last_week_seconds_a_day": round(last_week, 1),
        "last_week_seconds_a_day_of_a_quiet_node": round(quiet_week / len(quiet), 1),
        "events": dict(sorted(month.events.items())),
        "events_sha256": month.digest.hexdigest(),
    }


def parts(found: dict[str, Any], again: str, cpu_seconds: float) -> dict[str, bool]:
    hours = found["hours_to_find"]
    return {
        "1 all found in time": all(
            max(hours[kind], default=0.0) <= limit for kind, limit in LIMIT_HOURS.items()
        ),
        "2 false alarms at most 0.1 % of probes": max(
            found["false_confirmed_percent"], found["false_changed_percent"]
        )
        <= 0.1,
        "3 budget and bursts": found["fullest_hour_seconds"] <= BUDGET
        and found["most_probes_in_half_an_hour"] <= 100,
        "4 the pace follows the noise": found["pace_median_quiet"] > 1.5
        and 0.5 <= found["pace_median_noisy"] <= 1.5
        and found["last_week_seconds_a_day_of_a_quiet_node"] < AT_PACE_ONE / 2,
        "5 the same again": found["events_sha256"] == again,
        "6 less than a minute": cpu_seconds < 60,
    }


def main() -> int:
    began, cpu = time.monotonic(), time.process_time()
    month = Month().run()
    cpu_seconds, wall = time.process_time() - cpu, time.monotonic() - began
    found = figures(month)
    again = Month().run().digest.hexdigest()
    met = parts(found, again, cpu_seconds)
    result = {
        "question": "Does a month of watching 500 nodes find what falls ill, soon and cheaply, and "
        "leave the rest alone?",
        "rule": "README.md, written before the run",
        "met": all(met.values()),
        "date": date.today().isoformat(),
        "environment": {
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "parts": met,
        "figures": {
            **found, "cpu_seconds": round(cpu_seconds, 1), "wall_seconds": round(wall, 1),
            "simulated_days": month.days, "nodes": month.nodes, "day_seconds": DAY,
        },
    }  # fmt: skip
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
