"""Runs the experiment of README.md: as root, ``python run.py [--out FILE] [--raw FOLDER]``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from hosts import PORTS, Fleet, Host

HOSTS = (
    Host("h1"),
    Host("h2", rate="100mbit"),
    Host("h3", delay_ms=30.0),
    Host("h4", loss_percent=2.0),
    Host("h5", closed=True),
    Host("h6"),
    Host("h7"),
)
HEALTHY = ("h1", "h6", "h7")
EXPECTED = {
    ("node_network_slow", "h2"),
    ("node_network_delay", "h3"),
    ("node_network_loss", "h4"),
    ("node_unreachable", "h5"),
}
PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options.add_argument("--raw", type=Path, help="also keep the command's own JSON here")
    asked = options.parse_args()
    missing = [tool for tool in ("ip", "tc", "nft", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        print("not run: network namespaces need root and", ", ".join(missing or ["nothing else"]))
        print("(on Debian and Ubuntu: apt install iproute2 nftables util-linux)")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Short: Ray makes sockets in it, whose paths may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pkn", dir="/tmp"))
    started = time.time()
    try:
        with Fleet(HOSTS, folder) as fleet:
            address = start_ray(fleet)
            whole = pichak_net(fleet, address, [])
            healthy = pichak_net(fleet, address, ["--nodes", ",".join(HEALTHY)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.raw:
        asked.raw.mkdir(parents=True, exist_ok=True)
        for name, record in (("whole", whole), ("healthy", healthy)):
            (asked.raw / f"{name}.json").write_text(json.dumps(record, indent=1))
    found = judge(whole, healthy)
    result = {
        "question": "Does pichak net name the slow, far, lossy and closed hosts, and nobody else?",
        "met": all(found["rule"].values()),
        **found,
        "environment": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "load_at_the_end": round(os.getloadavg()[0], 1),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            **{name: version(name) for name in ("ray", "torch")},
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.time() - started),
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    for part, met in result["rule"].items():
        print("met    " if met else "NOT MET", part)
    print(f"wrote {asked.out}")
    sys.exit(0 if result["met"] else 1)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith("model name")), "")


def start_ray(fleet: Fleet) -> str:
    head = fleet.hosts[0].name
    address = f"{fleet.address(head)}:6379"
    ports = [f"--{name}={port}" for name, port in PORTS.items()]
    common = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats"]
    for host in fleet.hosts:
        where = [f"--node-ip-address={fleet.address(host.name)}", "--block", *ports, *common]
        if host.name == head:
            where += ["--head", "--port=6379", "--include-dashboard=false"]
            where += [f"--temp-dir={fleet.folder / 'ray'}"]
        else:
            where += [f"--address={address}"]
        env = {**fleet.environment(host.name), "RAY_USAGE_STATS_ENABLED": "0"}
        log = f"ray-{host.name}.log"
        fleet.start(fleet.inside(host.name, *RAY, "start", *where), log, env)
        # One after the other: on one file system they would name their sockets alike.
        wait_for(lambda log=log: "Ray runtime started" in (fleet.folder / log).read_text(), log)
    wait_for(lambda: alive(fleet, address) == len(fleet.hosts), f"ray-{head}.log")
    return address


def wait_for(met: Callable[[], bool], log: str) -> None:
    end = time.monotonic() + 90
    while not met():
        if time.monotonic() > end:
            raise RuntimeError(f"the fleet did not start within 90 s; see {log}")
        time.sleep(0.5)


def alive(fleet: Fleet, address: str) -> int:
    """How many hosts have joined."""
    head = fleet.hosts[0].name
    done = subprocess.run(
        fleet.inside(head, *PICHAK, "fleet", "nodes", "--address", address, "--json"),
        capture_output=True,
        text=True,
        env=fleet.environment(head),
        check=False,
        timeout=90,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 0
    return sum(node["state"] == "alive" for node in json.loads(done.stdout)["nodes"])


def pichak_net(fleet: Fleet, address: str, more: list[str]) -> dict[str, Any]:
    head = fleet.hosts[0].name
    command = [*PICHAK, "net", "--address", address, "--gradient", "8MiB", "--json", *more]
    done = subprocess.run(
        fleet.inside(head, *command),
        stdout=subprocess.PIPE,
        text=True,
        env=fleet.environment(head),
        check=False,
        timeout=900,
    )
    if not done.stdout:
        raise RuntimeError(f"pichak net ended with {done.returncode} and without a result")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def judge(whole: dict[str, Any], healthy: dict[str, Any]) -> dict[str, Any]:
    """The rule of README.md, part by part."""
    accused = [f for f in whole["findings"] if f["severity"] != "info"]
    confirmed = {
        (f["code"], f["nodes"][0])
        for f in accused
        if f["state"] == "confirmed" and len(f["nodes"]) == 1
    }
    once = [f for f in whole["not_repeated"] if f["severity"] != "info"]
    others = [f for f in [*accused, *once] if (f["code"], *f["nodes"]) not in EXPECTED]
    rates, trips, losses = directions(whole, "mb_s"), {}, directions(whole, "loss_percent")
    for link in whole["links"]:
        detail = link["rtt_ms"].get("detail") or {}
        trips[f"{link['a']}-{link['b']}"] = detail.get("min_ms")
    h2 = [rates[f"h2>{to}"] for to in ("h1", "h5", "h6", "h7")]
    h3 = [trip for pair, trip in trips.items() if "h3" in pair.split("-")]
    h4 = [loss for way, loss in losses.items() if way.startswith("h4>")]
    made = whole["collective"] or {}
    bus = (made.get("bus_mb_s") or {}).get("value")
    sick_again = [
        f for f in [*healthy["findings"], *healthy["not_repeated"]] if f["severity"] != "info"
    ]
    rule = {
        "1 all four are found, named and confirmed": confirmed >= EXPECTED,
        "2 nobody else is accused": not others,
        "3 h2 sends at 10.5 to 12.5 MB/s": all(r and 10.5 <= r <= 12.5 for r in h2),
        "3 h3 is 30 to 33 ms away": all(t and 30 <= t <= 33 for t in h3),
        "3 h4 loses 1 to 4 %": all(loss is not None and 1 <= loss <= 4 for loss in h4),
        "4 every link is measured both ways": all(v is not None for v in rates.values())
        and all(v is not None for v in trips.values())
        and len(trips) == 21,
        "5 the all-reduce has right sums, h5 left out, no faster than h2": bool(
            bus and bus <= 12.5 and "h5" not in made["nodes"] and len(made["nodes"]) == 6
        )
        and not made["bus_mb_s"].get("suspect"),
        "6 three healthy hosts alone have no finding": not sick_again
        and len(healthy["links"]) == 3,
    }
    return {
        "rule": rule,
        "findings": whole["findings"],
        "seen_once": whole["not_repeated"],
        "mb_s": rates,
        "rtt_min_ms": trips,
        "loss_percent": losses,
        "all_reduce": made,
        "gaps": whole["gaps"],
        "healthy_alone": {
            "findings": healthy["findings"],
            "seen_once": healthy["not_repeated"],
            "mb_s": directions(healthy, "mb_s"),
            "all_reduce_bus_mb_s": ((healthy["collective"] or {}).get("bus_mb_s") or {}).get(
                "value"
            ),
        },
    }


def directions(record: dict[str, Any], what: str) -> dict[str, float | None]:
    made = {}
    for link in record["links"]:
        a, b = link["a"], link["b"]
        made[f"{a}>{b}"] = link[f"a_to_b_{what}"].get("value")
        made[f"{b}>{a}"] = link[f"b_to_a_{what}"].get("value")
    return made


if __name__ == "__main__":
    main()
