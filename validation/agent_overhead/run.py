"""CPU time and memory of the agent's telemetry, measured from outside over an hour."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "data" / "nvml" / "datacentre_h100.json"
CPU_PERCENT, MEMORY_MB, READINGS_SHARE = 0.5, 150.0, 0.95
QUESTION = "What does the agent's telemetry cost the machine that it watches?"
RULE = (
    f"met if over the time all its processes together, their start included, take at most "
    f"{CPU_PERCENT} % of one core and at most {MEMORY_MB:g} MB (PSS, once a minute), with at least "
    f"{READINGS_SHARE:.0%} of the readings that one a second would be; the time is 60 minutes"
)
SCRAPE_SECONDS, LOOK_SECONDS = 15.0, 60.0
TICK = os.sysconf("SC_CLK_TCK")


def sample(home: str, recording: str) -> None:
    """The process that is measured: samples until its stdin is closed."""
    from pichak_agent.metrics_server import serve_metrics
    from pichak_agent.telemetry import Telemetry
    from pichak_core.devices.nvml_session import NvmlSession

    start = functools.partial(NvmlSession, Path(recording)) if recording else NvmlSession
    telemetry = Telemetry(Path(home), start_nvml=start)
    telemetry.start()
    server = serve_metrics(telemetry)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()
    telemetry.stop()


def fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def children(pid: int) -> list[int]:
    text = "".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(part) for part in text.split()]


def cpu_seconds(pid: int) -> float:
    """Of a process, its living children and those it has waited for."""
    total = 0
    for each, columns in ((pid, (11, 12, 13, 14)), *((c, (11, 12)) for c in children(pid))):
        try:
            found = fields(each)
        except OSError:
            continue
        total += sum(int(found[column]) for column in columns)
    return total / TICK


def memory_mb(pid: int) -> float:
    total = 0
    for each in (pid, *children(pid)):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total * 1024 / 1e6


def fetch(port: int, page: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10) as answer:
        return answer.read().decode()


def scrape(port: int, stop: threading.Event) -> None:
    while not stop.wait(SCRAPE_SECONDS):
        try:
            fetch(port, "metrics")
        except OSError as error:
            print("scrape:", error, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nvml", action="store_true", help="the real NVML, not the recording")
    parser.add_argument("--sample", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    given = parser.parse_args()
    # A shell has it ignored by what it starts in the background, as `make soak` does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.sample:
        sample(*given.sample)
        return 0
    recording = "" if given.nvml else str(RECORDING)
    with tempfile.TemporaryDirectory() as home:
        began = time.monotonic()
        measured = subprocess.Popen(
            [sys.executable, __file__, "--sample", home, recording],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        port = int(measured.stdout.readline())
        stop = threading.Event()
        scraper = threading.Thread(target=scrape, args=(port, stop))
        scraper.start()
        memory, load, minutes = [], [], []
        try:
            while (left := given.minutes * 60 - (time.monotonic() - began)) > 0:
                time.sleep(min(LOOK_SECONDS, left))
                memory.append(memory_mb(measured.pid))
                load.append(os.getloadavg()[0])
                minutes.append(cpu_seconds(measured.pid))
            seconds = time.monotonic() - began
            cpu = cpu_seconds(measured.pid)
            state = json.loads(fetch(port, "ring.json"))
        finally:
            stop.set()
            scraper.join()
            measured.communicate(timeout=30)
    each_minute = [100 * (b - a) / LOOK_SECONDS for a, b in itertools.pairwise(minutes[:-1])]
    figures = {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 2),
        "cpu_percent_of_one_core": round(100 * cpu / seconds, 3),
        "cpu_percent_highest_minute": round(max(each_minute, default=0.0), 3),
        "cpu_seconds_by_its_own_count": state["cpu_seconds"],
        "memory_mb_highest": round(max(memory), 1),
        "memory_mb_last": round(memory[-1], 1),
        "readings": state["readings"],
        "readings_share": round(state["readings"] / seconds, 3),
        "interval_seconds_last": state["interval_seconds"],
        "state": {n: state[n] for n in ("gaps", "problems", "nvml")},
        "findings": state["findings"],
        "load_of_the_machine": {
            "least": min(load),
            "median": sorted(load)[len(load) // 2],
            "most": max(load),
        },
    }
    met = (
        figures["cpu_percent_of_one_core"] <= CPU_PERCENT
        and figures["memory_mb_highest"] <= MEMORY_MB
        and figures["readings_share"] >= READINGS_SHARE
    )
    made = {
        "question": QUESTION,
        "rule": RULE,
        "met": met,
        "nvml": "the driver" if given.nvml else f"recording {RECORDING.relative_to(ROOT)}",
        "figures": figures,
        "environment": {
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "date": date.today().isoformat(),
    }
    given.out.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
