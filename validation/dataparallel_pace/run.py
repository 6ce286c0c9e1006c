"""Runs the experiment of README.md: as root, ``python run.py [--out FILE]``."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "netns_fleet"))

from hosts import Fleet, Host

from pichak_coordinator.pick_many import Wish, pick_many
from pichak_coordinator.prices import NO_PRICES
from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.ring_time import Link
from pichak_coordinator.stored_links import StoredLinks
from pichak_core.measurement import Fingerprint
from pichak_core.plan import Plan

HERE = Path(__file__).resolve().parent
QUESTION = (
    "Does fleet pick predict the pace of data-parallel training, and leave the right one out?"
)
HOSTS = (
    Host("h1", rate="100mbit"),
    Host("h2", rate="100mbit"),
    Host("h3", rate="100mbit"),
    Host("h4", rate="20mbit"),
)
DEVICE_SECONDS = {"h1": 0.10, "h2": 0.14, "h3": 0.12, "h4": 0.05}
SLOW = "h4"
MEMBERS, ROWS, MICRO_BATCH = 3, 48, 8
TOLERANCE = 0.15


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=HERE / "result.json")
    asked = options.parse_args()
    missing = [tool for tool in ("ip", "tc", "nft", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        print("not run: network namespaces need root and", ", ".join(missing or ["nothing else"]))
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="pkp", dir="/tmp"))
    started = time.time()
    try:
        with Fleet(HOSTS, folder) as fleet:
            found = experiment(fleet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    met = all(found["rule"].values())
    record = {
        "question": QUESTION,
        "met": met,
        **found,
        "environment": environment(),
        "seconds": round(time.time() - started),
        "date": time.strftime("%Y-%m-%d"),
    }
    asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["rule"], indent=1))
    sys.exit(0 if met else 1)


def experiment(fleet: Fleet) -> dict[str, Any]:
    alone = {h.name: answer(fleet, h.name, "step", DEVICE_SECONDS[h.name]) for h in HOSTS}
    rows = [row(name, record) for name, record in alone.items()]
    links, told = measured_links(fleet)
    picked = pick_many(rows, links, NO_PRICES, Wish(MEMBERS, batch_rows=ROWS))
    sets = {}
    for out in reversed(HOSTS):
        wish = Wish(MEMBERS, batch_rows=ROWS, without=frozenset({out.name}))
        team = pick_many(rows, links, NO_PRICES, wish)
        names = [member.row.node.host for member in team.members]
        real = trained(fleet, names, team.rows_each // MICRO_BATCH)
        predicted = float(team.step_seconds)  # type: ignore[arg-type]
        sets["+".join(sorted(names))] = {
            "ranks": names,
            "predicted_seconds": predicted,
            "compute_seconds": float(team.compute_seconds),
            "reduce_seconds": float(team.reduce_seconds),  # type: ignore[arg-type]
            "bottleneck": team.bottleneck,
            "measured_seconds": real["seconds"],
            "steps": real["steps"],
            "off": predicted / real["seconds"] - 1,
        }
        print(names, f"{predicted:.3f} s predicted, {real['seconds']:.3f} s measured", flush=True)
    chosen = "+".join(sorted(member.row.node.host for member in picked.members))
    fastest_alone = min(alone, key=lambda name: float(alone[name]["seconds"]))
    return {
        "rule": {
            "1 h4 is left out, and is the fastest alone": SLOW not in chosen
            and fastest_alone == SLOW,
            "2 each set's step is predicted within 15 %": all(
                abs(entry["off"]) <= TOLERANCE for entry in sets.values()
            ),
            "3 the picked set is the fastest in training": chosen
            == min(sets, key=lambda name: float(sets[name]["measured_seconds"])),
        },
        "picked": chosen,
        "alone_seconds": {name: record["seconds"] for name, record in alone.items()},
        "links": told,
        "sets": sets,
    }


def row(name: str, record: dict[str, Any]) -> Row:
    seconds = record["seconds"]
    plan = Plan().set("micro_batch", MICRO_BATCH, "given").set("seconds_per_step", seconds, "timed")
    plan.set("scored_tokens_per_second", MICRO_BATCH / seconds, "timed", unit="scored tokens/s")
    plan.set("gradient_bytes", record["gradient_bytes"], "counted", unit="bytes")
    return Row(NodeRecord(name, name), plan=plan)


def measured_links(fleet: Fleet) -> tuple[StoredLinks, dict[str, Any]]:
    key = secrets.token_hex(32)
    ports = {}
    for host in HOSTS:
        command = worker(fleet, host.name, "listen", fleet.address(host.name), key)
        fleet.start(command, f"listen-{host.name}.log", fleet.environment(host.name))
        ports[host.name] = port_of(fleet.folder / f"listen-{host.name}.log")
    links, told = {}, {}
    for a, b in itertools.combinations([host.name for host in HOSTS], 2):
        readings = Fingerprint.from_dict(
            answer(fleet, a, "link", b, fleet.address(b), ports[b], key)
        )
        parts = ("send_mb_s", "receive_mb_s", "rtt_ms")
        send, receive, rtt = (readings.number(f"network.{b}.{part}") for part in parts)
        if send is None or receive is None or rtt is None:
            raise SystemExit(f"the link {a} - {b} was not measured: {readings.to_dict()}")
        links[a, b] = Link(min(send, receive), rtt, "measured")
        told[f"{a}-{b}"] = {"send_mb_s": send, "receive_mb_s": receive, "rtt_ms": rtt}
    return StoredLinks(links), told


def port_of(log: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        if text.endswith("\n"):
            return int(json.loads(text.splitlines()[0])["port"])
        time.sleep(0.1)
    raise SystemExit(f"no listener started: {log.read_text(encoding='utf-8')}")


def trained(fleet: Fleet, names: list[str], micro_batches: int) -> dict[str, Any]:
    running = []
    for rank, name in enumerate(names):
        command = worker(
            fleet,
            name,
            *("train", rank, len(names), fleet.address(names[0]), fleet.address(name)),
            *(DEVICE_SECONDS[name], micro_batches),
        )
        running.append(fleet.start(command, f"train-{rank}.log", fleet.environment(name)))
    for rank, process in enumerate(running):
        if process.wait(timeout=300):
            raise SystemExit((fleet.folder / f"train-{rank}.log").read_text(encoding="utf-8"))
    lines = (fleet.folder / "train-0.log").read_text(encoding="utf-8").splitlines()
    record: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return record


def answer(fleet: Fleet, name: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        worker(fleet, name, *arguments),
        env=fleet.environment(name),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}: {arguments}: {done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def worker(fleet: Fleet, name: str, *arguments: object) -> list[str]:
    given = [str(each) for each in arguments]
    command: list[str] = fleet.inside(name, sys.executable, str(HERE / "worker.py"), *given)
    return command


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def environment() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


if __name__ == "__main__":
    main()
