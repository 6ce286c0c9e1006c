"""``pichak fleet watch``: what bad input says, and one round through real Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_coordinator.cli import app
from pichak_coordinator.cli.schedule_options import seconds_of
from pichak_coordinator.database import StoreError
from pichak_coordinator.watch import Tally
from pichak_coordinator.watch_store import WatchStore

PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]


def call(tmp_path: Path, *arguments: Any) -> Result:
    store = ["--store", str(tmp_path / "fleet.db")]
    return CliRunner().invoke(app, ["fleet", "watch", *store, *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--every", "light=0m"], ["light=0m", "10m"]),
        (["--every", "light=1s"], ["light=1s", "at least 10 s"]),
        (["--every", "deep=10m"], ["deep=10m", "full=24h"]),
        (["--every", "light=never", "--every", "full=never"], ["nothing is left to do"]),
        (["--cron", "full=61 * * * *"], ["61 * * * *", "cron expression"]),
        (["--cron", "0 3 * * *"], ["full='0 3 * * *'"]),
        (["--quiet-hours", "22"], ["'22'", "22-06"]),
        (["--budget", "120s/min"], ["120s/min", "120s/h"]),
        (["--budget", "60s/h"], ["light probe may take 65 s", "65s/h"]),
        (["--budget", "80s/h"], ["full probe may take 95 s", "--every full=never"]),
        (["--deadline", "disk=9s"], ["disk=9s", "ramp="]),
        (["--for", "soon"], ["soon", "90s"]),
        (["--strict", "--for", "60s"], ["--strict", "give --once too"]),
        (["--webhook-secret-file", "key"], ["without --webhook"]),
        (["--webhook", "example.com"], ["https://"]),
        (["--webhook", "http://x", "--webhook-secret-file", "/none"], ["/none", "No such file"]),
        (["--metrics-port", "65536"], ["65536"]),
        (["--metrics-port", "0", "--metrics-host", "203.0.113.9"], ["203.0.113.9", "another port"]),
        (["--data", "/none.jsonl"], ["/none.jsonl", "no such file"]),
        (["--model", "builtin:gpt-9"], ["gpt-9"]),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = call(tmp_path, *arguments)
    assert done.exit_code == 2
    for word in words:
        assert word in done.output.replace("\n", " "), done.output
    assert not (tmp_path / "fleet.db").exists()


@pytest.mark.parametrize(
    ("tally", "code", "said"),
    [
        (Tally(), 0, "0 probes in 0 probe-seconds\n"),
        (Tally(open_faults={("n", "cpu"): 1}), 1, "; 1 confirmed fault is open\n"),
        (Tally(open_faults={("n", "cpu"): 2}), 1, "; 2 confirmed faults are open\n"),
        (Tally(silent=1), 1, "; 1 node gave nothing when last asked\n"),
    ],
)
def test_a_strict_round_tells_of_open_faults_also_where_nobody_was_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally, code: int, said: str
) -> None:
    monkeypatch.setattr("pichak_coordinator.cli.fleet_watch._watch", lambda *_: tally)
    round_of_one = ["fleet", "watch", "--once", "--every", "full=never"]
    round_of_one += ["--store", str(tmp_path / "fleet.db")]
    strict = CliRunner().invoke(app, [*round_of_one, "--strict"], standalone_mode=False)
    assert (strict.return_value, strict.output[-len(said) :]) == (code, said)
    assert CliRunner().invoke(app, round_of_one, standalone_mode=False).return_value == 0


def test_a_store_that_is_watched_already_is_refused(tmp_path: Path) -> None:
    with WatchStore.open(tmp_path / "fleet.db") as store, store.held():
        done = call(tmp_path)
    assert done.exit_code == 2
    assert f"already watched by process {os.getpid()}" in done.output


def test_lengths_of_time() -> None:
    assert [seconds_of(t) for t in ("90s", "10m", "1.5h", "7d")] == [90, 600, 5400, 604800]
    for text in ("", "10", "10 m", "-5m", "0s", "nan", "inf", "1e9h", "9999d", "5min"):
        with pytest.raises(ValueError, match="length of time"):
            seconds_of(text)


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call(tmp_path, "--metrics-port", port)
    assert done.exit_code == 2
    assert f"--metrics-port {port}" in done.output
    assert "in use" in done.output
    assert not (tmp_path / "fleet.db").exists()


def environment(tmp_path: Path) -> dict[str, str]:
    env = {**os.environ, "PICHAK_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    return env


@pytest.fixture
def rays() -> Iterator[Path]:
    """Where a local Ray keeps its folder; short, as sockets in it have names of few bytes."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.ray
@pytest.mark.slow
def test_one_round_on_a_local_ray(tmp_path: Path, rays: Path) -> None:
    done = subprocess.run(
        [*PICHAK, "fleet", "watch", "--once", "--json", "--every", "full=never"],
        env=environment(tmp_path) | {"RAY_TMPDIR": str(rays)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["event"] == "joined"
    assert "1 probes" in done.stderr
    assert list(rays.glob("ray/*")) == []  # the Ray that it started took its folder with it
    with WatchStore.open(tmp_path / "fleet.db") as store:
        (run,) = [r.run for r in store.runs() if r.settings == {"depth": "light"}]
        (row,) = store.rows_of(run)
        assert row.fingerprint.number("host.memory_copy_mb_s")
        assert "disk.read_mb_s" not in row.fingerprint
        (entry,) = store.entries().values()
        assert entry.probes == 1
        assert [job.state for job in store.jobs(run)] == ["done"]


@pytest.mark.ray
@pytest.mark.slow
def test_the_metrics_of_a_real_watch(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    said = tmp_path / "said.txt"
    with said.open("w") as stderr:
        process = subprocess.Popen(
            [
                *PICHAK, "fleet", "watch", "--every", "light=10s", "--every", "full=never",
                "--budget", "600s/h", "--metrics-port", "0",
            ],
            env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
    samples: dict[str, list[Any]] = {}
    end = time.monotonic() + 250
    try:
        while "pichak_measured_cpu_usable_cores" not in samples:
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < end, sorted(samples)
            time.sleep(0.5)
            url = re.search(r"metrics: (\S+)", said.read_text())
            if url is None:
                continue
            with urllib.request.urlopen(url.group(1), timeout=60) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                text = answer.read().decode()
            samples = {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append(sample)
        healthz = url.group(1).replace("/metrics", "/healthz") if url else ""
        with urllib.request.urlopen(healthz, timeout=60) as answer:
            assert answer.read() == b"ok\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    (cores,) = samples["pichak_measured_cpu_usable_cores"]
    assert 1 <= cores.value <= (os.cpu_count() or 1)
    with WatchStore.open(tmp_path / "fleet.db") as store:
        (node,) = store.entries()
        points = store.history(node, "host.memory_copy_mb_s")
    (copy,) = samples["pichak_measured_host_memory_copy_mb_s"]
    assert copy.value in [point.value for point in points]
    assert copy.labels["node"] == node
    assert "pichak_measured_disk_read_mb_s" not in samples  # a light probe reads no disk
    assert not [name for name in samples if name.startswith("pichak_measured_gpu_")]
    assert {s.labels["state"] for s in samples["pichak_watch_jobs_total"] if s.value} == {"done"}
    (limit,), (left,) = (
        samples["pichak_watch_budget_seconds"],
        samples["pichak_watch_budget_left_seconds"],
    )
    assert limit.value == 600
    assert 0 < left.value < 600
    (reachable,) = samples["pichak_node_reachable"]
    assert reachable.value == 1


@pytest.mark.ray
@pytest.mark.slow
def test_sigterm_ends_a_watch_and_keeps_everything(tmp_path: Path, rays: Path) -> None:
    path, secret = tmp_path / "fleet.db", tmp_path / "key"
    secret.write_text("correct horse")
    process = subprocess.Popen(
        [
            *PICHAK, "fleet", "watch", "--json", "--every", "light=10s", "--every", "full=never",
            "--webhook-secret-file", str(secret),
        ],
        env={
            **environment(tmp_path), "RAY_TMPDIR": str(rays),
            "PICHAK_WEBHOOK": "http://me:p4ss@127.0.0.1:9/T0KEN",
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 200
        while probes(path) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert list(rays.glob("ray/*")) == []
    assert json.loads(out.splitlines()[0])["event"] == "joined"
    with WatchStore.open(path) as store, store.held():  # the lock is free again
        assert all(run.finished_unix for run in store.runs())
        assert store.pending_deliveries() == 1  # nobody listens there; it is kept
    kept = b"".join(f.read_bytes() for f in tmp_path.glob("fleet.db*"))
    for word in ("p4ss", "T0KEN", "correct horse"):
        assert word not in out + err
        assert word.encode() not in kept


def probes(path: Path) -> int:
    """How many probes have been begun."""
    if not path.exists():
        return 0
    try:
        with WatchStore.open(path, read_only=True) as store:
            return sum(entry.probes for entry in store.entries().values())
    except StoreError:
        return 0
