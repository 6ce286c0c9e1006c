"""Does `disk_queue_depth` find fio's best read rate, on the same file, in a third of the time?

See README.md for the question, the rule and what this does not show. Needs fio on the path; takes
about a quarter of an hour.

    python validation/disk_vs_fio/run.py [--directory .] [--pairs 12] [--write-result]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pichak_core.measure.disk import DEPTHS, disk_queue_depth

BLOCK_MIB = 8
FILE_MIB = 2048
TOLERANCE = 0.05
MOST_TIME_SHARE = 1 / 3
PAIR_SECONDS = 3
FIO_SECONDS_A_DEPTH = 10
FULL_SECONDS, QUICK_SECONDS = 25.0, 6.0
BOOTSTRAPS = 4000
DATE = "2026-11-30"
QUESTION = "Does disk_queue_depth report fio's best read rate in a third of fio's time?"
RULE = (
    "met if the best over depths of our median rate lies within 5 % of the best over depths of "
    "fio's median rate, both from alternating runs of 3 s at each depth, and a whole measurement "
    "of ours (25 s) takes at most a third of a fio sweep of 10 s a depth"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--pairs", type=int, default=12, help="alternating runs at each depth")
    parser.add_argument("--sweeps", type=int, default=2, help="whole sweeps of each")
    parser.add_argument("--write-result", action="store_true", help="replace result.json")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        print("not run: fio is not installed (apt-get install fio)", file=sys.stderr)
        return
    file = arguments.directory / f"pichak-fio-{os.getpid()}.bin"
    try:
        write_random(file)
        fio(file, 4, PAIR_SECONDS)  # uncounted: the first reads of a new file differ
        pairs, loads = alternate(file, arguments.pairs)
        sweeps = [whole(file) for _ in range(arguments.sweeps)]
        filesystem = disk_queue_depth(file, depths=(1,), budget_seconds=1).filesystem.describe()
    finally:
        file.unlink(missing_ok=True)
    closeness, share = compare(pairs), statistics.median(one["time_share"] for one in sweeps)
    met = abs(closeness["ratio"] - 1) <= TOLERANCE and share <= MOST_TIME_SHARE
    result = {
        "question": QUESTION,
        "rule": RULE,
        "met": met,
        "date": DATE,
        "summary": closeness | {"time_share": share},
        "environment": environment(filesystem, loads),
        "settings": {
            "block_mib": BLOCK_MIB,
            "file_mib": FILE_MIB,
            "pairs": arguments.pairs,
            "fio": fio_command(Path("FILE"), 4, PAIR_SECONDS),
        },
        "sweeps": sweeps,
        "pairs": pairs,
    }
    if arguments.write_result:
        text = json.dumps(result, indent=1) + "\n"
        Path(__file__).with_name("result.json").write_text(text, encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("met", "summary", "environment")}, indent=1))
    sys.exit(0 if met else 1)


def write_random(path: Path) -> None:
    generator = random.Random(0)
    with path.open("wb") as file:
        for _ in range(FILE_MIB // 8):
            file.write(generator.randbytes(8 << 20))
        file.flush()
        os.fsync(file.fileno())


def alternate(file: Path, count: int) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """MB/s of both at each depth, run in turn; who goes first changes from pair to pair."""
    pairs: dict[str, dict[str, list[float]]] = {
        str(depth): {"fio": [], "ours": []} for depth in DEPTHS
    }
    loads = []
    for number in range(count):
        for depth in DEPTHS:
            kept = pairs[str(depth)]
            for who in ("fio", "ours") if number % 2 == 0 else ("ours", "fio"):
                run = fio if who == "fio" else ours
                kept[who].append(run(file, depth, PAIR_SECONDS))
        loads.append(os.getloadavg()[0])
        print(json.dumps({"pair": number, **compare(pairs, bootstraps=0)}), file=sys.stderr)
    return pairs, loads


def fio_command(file: Path, depth: int, seconds: float) -> list[str]:
    return [
        "fio",
        "--name=read",
        f"--filename={file}",
        "--rw=read",
        "--direct=1",
        f"--bs={BLOCK_MIB}M",
        "--ioengine=libaio",
        f"--iodepth={depth}",
        "--time_based",
        f"--runtime={seconds}",
        "--output-format=json",
    ]


def fio(file: Path, depth: int, seconds: float) -> float:
    answer = subprocess.run(
        fio_command(file, depth, seconds), check=True, capture_output=True, text=True
    )
    # fio may print notes before the JSON.
    job = json.loads(answer.stdout[answer.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"]) / 1e6


def ours(file: Path, depth: int, seconds: float) -> float:
    result = disk_queue_depth(file, depths=(depth,), block_mb=BLOCK_MIB, budget_seconds=seconds)
    if not result.ranks:
        raise SystemExit(f"nothing to compare: {result.verdict}")
    return result.mb_s[depth]


def whole(file: Path) -> dict[str, Any]:
    """A fio sweep over all depths, and our two forms; times in seconds, rates in MB/s."""
    started = time.perf_counter()
    rates = {depth: fio(file, depth, FIO_SECONDS_A_DEPTH) for depth in DEPTHS}
    fio_seconds = time.perf_counter() - started
    full = disk_queue_depth(file, block_mb=BLOCK_MIB, budget_seconds=FULL_SECONDS)
    quick = disk_queue_depth(file, block_mb=BLOCK_MIB, budget_seconds=QUICK_SECONDS)
    return {
        "time_share": full.seconds / fio_seconds,
        "fio": {"seconds": fio_seconds, "mb_s": rates},
        "full": {"seconds": full.seconds, "mb_s": full.mb_s, "huge": full.huge_page_mb_s},
        "quick": {"seconds": quick.seconds, "mb_s": quick.mb_s, "huge": quick.huge_page_mb_s},
    }


def compare(pairs: dict[str, dict[str, list[float]]], bootstraps: int = BOOTSTRAPS) -> Any:
    """Ratio of the bests over depths, with a 90 % bootstrap interval over the pairs."""
    count = len(pairs["1"]["fio"])
    generator = random.Random(1)
    drawn = sorted(
        ratio_of_bests(pairs, [generator.randrange(count) for _ in range(count)])
        for _ in range(bootstraps)
    )
    medians = {
        depth: {who: statistics.median(rates) for who, rates in both.items() if rates}
        for depth, both in pairs.items()
    }
    done = {depth: one for depth, one in medians.items() if len(one) == 2}
    return {
        "ratio": ratio_of_bests(pairs, list(range(count))),
        "ratio_90": [drawn[bootstraps // 20], drawn[-bootstraps // 20]] if drawn else None,
        "median_ratio_by_depth": {d: one["ours"] / one["fio"] for d, one in done.items()},
        "median_mb_s_by_depth": medians,
    }


def ratio_of_bests(pairs: dict[str, dict[str, list[float]]], chosen: list[int]) -> float:
    best = {
        who: max(
            statistics.median([both[who][i] for i in chosen if i < len(both[who])] or [0.0])
            for both in pairs.values()
        )
        for who in ("fio", "ours")
    }
    return best["ours"] / best["fio"]


def environment(filesystem: str, loads: list[float]) -> dict[str, Any]:
    version = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True)
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "operating_system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fio": version.stdout.strip(),
        "filesystem": filesystem.partition(" (")[0],
        "load_min_median_max": [min(loads), statistics.median(loads), max(loads)],
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
