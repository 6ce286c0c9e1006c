"""Runs the experiment of README.md: as root, ``python run.py [--seconds 600] [--seed 1]``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in ("netns_fleet", "soak", "chaos"):
    sys.path.insert(0, str(HERE.parent / folder))

from disturb import KINDS, Disturber  # noqa: E402
from fleet import SmallDisk  # noqa: E402
from hosts import Fleet, Host  # noqa: E402
from ledger import Spools, ends  # noqa: E402
from verdict import conclude, need_root  # noqa: E402

from pichak_coordinator.cut_runs import open_jobs  # noqa: E402
from pichak_coordinator.jobs import FINAL  # noqa: E402
from pichak_coordinator.store import Store  # noqa: E402

_spec = importlib.util.spec_from_file_location("services", HERE.parent / "service_netns/run.py")
assert _spec is not None
assert _spec.loader is not None
services = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(services)

HOSTS = ("h1", "h2", "h3", "h4")
WORKLOAD = """import torch


class Small:
    name, data, seq_len = "small", None, 16

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss_of(self, b):
        return self.model(torch.ones(b * self.seq_len, 64)).square().mean()

    def named_weights(self):
        return self.model.named_parameters()


def make(settings):
    return Small(settings.seed)
"""


class Chaos(services.Experiment):
    """The fleet, its coordinator, and who watches both."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        super().__init__(fleet, folder)
        self.heads = 0
        self.runs: list[dict[str, Any]] = []
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.workload = folder / "small.py"
        self.workload.write_text(WORKLOAD)

    def new_head(self) -> None:
        self.heads += 1
        self.start_head(f"head{self.heads}.log")

    def start_coordinator(self, *more: str) -> subprocess.Popen[bytes]:
        command = [
            *services.PICHAK,
            *("fleet", "profile", "--address", self.address, "--store", str(self.store)),
            *("--model", f"{self.workload}:make", "--limit", "4", "--no-network", "--json"),
            *("--only", "cpu", "--only", "software", *more),
        ]
        inside = self.fleet.inside("h1", *command)
        log = f"profile{len(self.runs)}.log"
        self.coordinator = self.fleet.start(inside, log, self.environment("h1"))
        self.runs.append({"resumed": "--resume" in more, "log": log})
        return self.coordinator

    def stop(self) -> None:
        for process in self.services.values():
            process.send_signal(signal.SIGTERM)
        for process in self.services.values():
            process.wait(60)
        assert self.head is not None
        self.head.send_signal(signal.SIGTERM)
        self.head.wait(60)

    @property
    def store(self) -> Path:
        return Path(self.folder / "fleet.db")


class Watcher:
    """Reads the jobs' states once a second; keeps every final one that changed afterwards."""

    def __init__(self, store: Path) -> None:
        self.changed: list[str] = []
        self._final: dict[str, str] = {}
        self._store = store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(1.0):
            if not self._store.exists():
                continue
            db = sqlite3.connect(f"file:{self._store}?mode=ro", uri=True, timeout=10)
            try:
                states = list(db.execute("SELECT job_id, state FROM jobs"))
            except sqlite3.OperationalError:  # the file is being made
                continue
            finally:
                db.close()
            for job_id, state in states:
                before = self._final.get(job_id)
                if before is not None and before != state:
                    self.changed.append(f"{job_id}: {before}, then {state}")
                if state in FINAL:
                    self._final[job_id] = state


def course(chaos: Chaos, disk: SmallDisk, seconds: float, seed: int) -> Counter[str]:
    """Profiles one after another while faults happen; then the fleet is left to recover."""
    chaos.new_head()
    for name in HOSTS[1:]:
        chaos.start_service(name)
    chaos.wait(lambda: all(chaos.joined(name) for name in HOSTS[1:]), "the services join")
    disturber = Disturber(chaos, disk, seed, seconds)
    cut_off = False
    while not disturber.over:
        process = chaos.start_coordinator(*(["--resume"] if cut_off else []))
        while process.poll() is None:
            disturber.step()
            time.sleep(0.2)
        chaos.runs[-1]["exit"] = process.returncode
        # A killed coordinator had a run by then, or had not begun one.
        cut_off = process.returncode < 0 and _last_is_cut(chaos.store)
    disturber.end()
    chaos.wait(lambda: all(chaos.joined(name) for name in HOSTS[1:]), "all have joined again")
    return disturber.done


def _last_is_cut(store: Path) -> bool:
    if not store.exists():
        return False
    with Store.open(store, read_only=True) as reader:
        last = next(iter(reader.runs(1)), None)
        return last is not None and last.finished_unix is None


def last_profile(chaos: Chaos) -> list[str]:
    """The errors of a profile when all is well again, one line a node; nodes without are empty."""
    process = chaos.start_coordinator()
    process.wait(900)
    chaos.runs[-1]["exit"] = process.returncode
    log = chaos.log(chaos.runs[-1]["log"])
    # Progress, which goes before it, shares the file.
    record, _ = json.JSONDecoder().raw_decode(log[log.index("\n{") + 1 :])
    return [f"{n['host']}: {n['error']}" if n["error"] else "" for n in record["nodes"]]


def judge(
    chaos: Chaos, spools: Spools, watcher: Watcher, done: Counter[str], errors: list[str], left: int
) -> dict[str, Any]:
    with Store.open(chaos.store, read_only=True) as store:
        still_open, lost, counts = open_jobs(store), spools.lost(store), ends(store)
    kinds = set(KINDS)
    resumed = [run for run in chaos.runs if run["resumed"] and run["exit"] == 0]
    rule = {
        "1 every job has one final state": not still_open and not watcher.changed,
        "2 every result that a node had is in the store": not lost and bool(spools.seen),
        "3 afterwards all four hosts are measured": errors == [""] * 4 and not spools.files(),
        "4 every kind of fault happened, and a run went on": set(done) == kinds and bool(resumed),
        "5 nothing is left": left == 0,
    }
    return {
        "rule": rule,
        "faults": dict(sorted(done.items())),
        "coordinator_runs": len(chaos.runs),
        "coordinator_runs_resumed": sum(run["resumed"] for run in chaos.runs),
        "exits": dict(sorted(Counter(str(run["exit"]) for run in chaos.runs).items())),
        "outcomes_seen_in_spools": len(spools.seen),
        "lost": lost,
        "still_open": [job.job_id for job in still_open],
        "states_changed": watcher.changed,
        "errors_of_the_last_profile": [error for error in errors if error],
        "left_processes": left,
        **counts,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", type=Path, default=HERE / "result.json")
    options.add_argument("--keep-logs", type=Path, help="copy the hosts' logs here")
    asked = options.parse_args()
    need_root("mkfs.ext4")
    folder = Path(tempfile.mkdtemp(prefix="pkc", dir="/tmp"))
    started = time.time()
    disk = None
    try:
        (folder / "h4").mkdir()
        disk = SmallDisk(folder / "h4")  # its mount point is the agent's folder
        with Fleet([Host(name) for name in HOSTS], folder) as fleet:
            chaos = Chaos(fleet, folder)
            watcher = Watcher(chaos.store)
            spools = Spools(*(folder / name / "home" for name in HOSTS))
            try:
                done = course(chaos, disk, asked.seconds, asked.seed)
                errors = last_profile(chaos)
                time.sleep(2)  # acknowledgements are on their way
                watcher.close()
                spools.close()
                chaos.stop()
                left = sum(len(chaos.pids(name)) for name in HOSTS)
                found = judge(chaos, spools, watcher, done, errors, left)
            finally:
                if asked.keep_logs:
                    asked.keep_logs.mkdir(parents=True, exist_ok=True)
                    for path in folder.glob("*.log"):
                        shutil.copy(path, asked.keep_logs)
    finally:
        if disk is not None:
            disk.close()
        shutil.rmtree(folder, ignore_errors=True)
    conclude(
        asked.out,
        "Has each job one end, and is every result there, whatever was killed?",
        found.pop("rule"),
        started=started,
        seed=asked.seed,
        **found,
    )


if __name__ == "__main__":
    main()
