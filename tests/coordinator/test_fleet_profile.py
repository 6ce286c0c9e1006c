"""The main job through every floor: real Ray clusters, agents, children, store and command.

The nodes are raylets of this machine, so their measurements wait for one another on its lock; most
tests take only few measurements of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pichak_coordinator.cut_runs import open_jobs
from pichak_coordinator.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

WORKLOADS = Path(__file__).parent.parent / "data" / "workloads" / "tiny.py"
PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
LITTLE = ["--only", "cpu", "--only", "software"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"prompt": f"What is {a} and {a % 7}?", "completion": f"It is {a + a % 7}."}
        for a in range(400)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Any]:
    """Two nodes, for what goes wrong on each of them."""
    yield from _cluster(home, 2)


@pytest.fixture
def four_nodes(tmp_path: Path) -> Iterator[Any]:
    yield from _cluster(tmp_path, 4)


def _cluster(home: Path, nodes: int) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = os.environ.get("PICHAK_HOME")
    # The raylets' children, and so the agents, inherit it.
    os.environ["PICHAK_HOME"] = str(home)
    made = Cluster(initialize_head=True, head_node_args=_node_args())
    for _ in range(nodes - 1):
        made.add_node(**_node_args())
    yield made
    made.shutdown()
    os.environ.pop("PICHAK_HOME")
    if before is not None:
        os.environ["PICHAK_HOME"] = before


def _node_args() -> dict[str, Any]:
    return {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def pichak(
    *arguments: str | Path, home: Path, cwd: Path | None = None, address: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PICHAK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(home, address),
        cwd=cwd,
        timeout=500,
    )


def environment(home: Path, address: str) -> dict[str, str]:
    made = {**os.environ, "PICHAK_HOME": str(home), "COLUMNS": "120"}
    made.pop("RAY_ADDRESS", None)
    return {**made, "RAY_ADDRESS": address} if address else made


def profiled(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["schema"] == 1
    return record


def job_children(home: Path) -> list[psutil.Process]:
    """Processes of this test's jobs, wherever they are: their environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            its = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if "PICHAK_JOB" in its and its.get("PICHAK_HOME") == str(home):
            found.append(process)
    return found


def test_four_nodes_give_four_rows_with_plans_and_a_killed_one_costs_its_own(
    four_nodes: Any, corpus: Path, tmp_path: Path
) -> None:
    arguments = ["fleet", "profile", "--data", str(corpus), "--memory-cap", "60MiB", "--json"]
    done = pichak(*arguments, *LITTLE, "--only", "disk", home=tmp_path, address=four_nodes.address)
    assert done.returncode == 0, done.stderr
    record = profiled(done)
    nodes = record["nodes"]
    assert len(nodes) == 4
    assert len({n["node"] for n in nodes}) == 4
    for node in nodes:
        assert node["error"] is None
        values = node["plan"]["values"]
        assert {"seq_len", "micro_batch", "grad_accum", "learning_rate", "noise_scale_tokens"} <= (
            set(values)
        )
        assert all(v["source"].strip() for v in values.values())
        assert "measured once, on" in values["seq_len"]["source"]
        assert "measured once" not in values["micro_batch"]["source"]
        measured = [m for m in node["fingerprint"].values() if "value" in m]
        assert len(measured) > 10
        assert all(m["source"].strip() for m in measured)
    # The same cap on the same machine: the counted edge is the same to the row.
    assert len({n["plan"]["values"]["micro_batch_max"]["value"] for n in nodes}) == 1
    assert len(record["comparison"]["rows"]) == 4
    assert record["comparison"]["pick"]["node"] in {n["node"] for n in nodes}
    with sqlite3.connect(tmp_path / "fleet.db") as db:
        kinds = dict(db.execute("SELECT kind, count(*) FROM jobs WHERE state = 'done' GROUP BY 1"))
        stored = db.execute("SELECT count(*) FROM outcomes").fetchone()[0]
    assert kinds == {"fingerprint": 4, "task": 1, "ramp": 4}
    assert stored == 9

    second = tmp_path / "second"
    process = start(*arguments, *LITTLE, home=second, address=four_nodes.address)
    wait_for(lambda: ended(second, "fingerprint") > 0, process)
    four_nodes.remove_node(next(iter(four_nodes.worker_nodes)), allow_graceful=False)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    nodes = json.loads(out)["nodes"]
    assert len(nodes) == 4
    failed = [n for n in nodes if n["error"]]
    assert len(failed) == 1
    assert any(word in failed[0]["error"] for word in ("died", "lost", "agent")), failed[0]
    assert all("micro_batch" in n["plan"]["values"] for n in nodes if not n["error"])
    wait_for(lambda: not job_children(tmp_path))


@pytest.mark.slow
def test_a_second_profile_begins_its_ramps_where_the_first_ended(
    cluster: Any, tmp_path: Path
) -> None:
    arguments = ["fleet", "profile", "--model", f"{WORKLOADS}:wide", "--memory-cap", "100MiB"]
    arguments += ["--json", "--only", "software"]
    kept = []
    for more in ([], ["--at-once", "1"]):
        done = pichak(*arguments, *more, home=tmp_path, address=cluster.address)
        assert done.returncode == 0, done.stderr
        kept.append([n["plan"] for n in profiled(done)["nodes"]])
    edges = {p["values"]["micro_batch_max"]["value"] for plans in kept for p in plans}
    assert len(edges) == 1
    said = [[sum("foretold" in n for n in p["notes"]) for p in plans] for plans in kept]
    assert sum(said[0]) <= 1  # whichever ramps second may know of the first already
    assert said[1] == [1, 1]
    with Store.open(tmp_path / "fleet.db") as store:
        second, first = store.runs(2)
        ramps = [[row.ramp or {} for row in store.rows_of(run.run)] for run in (first, second)]
    assert all(r["steps_run"] <= 3 for r in ramps[1])
    assert max(r["steps_run"] for r in ramps[0]) > 3


@pytest.mark.parametrize(
    ("factory", "ramp_seconds", "words"),
    [
        ("raises", 60, ["RuntimeError", "the tokenizer of this team is not here", "tiny.py"]),
        ("hangs", 6, ["timeout", "6 s"]),
        ("exits", 60, ["exit", "7"]),
        ("greedy", 60, ["1 row does not fit in 200.0 MiB", "forward"]),
    ],
)
def test_a_bad_workload_is_one_clear_error_and_the_agent_goes_on(
    cluster: Any, home: Path, factory: str, ramp_seconds: int, words: list[str]
) -> None:
    done = pichak(
        "fleet", "profile", "--model", f"{WORKLOADS}:{factory}", "--memory-cap", "200MiB",
        "--limit", "4", "--deadline", f"ramp={ramp_seconds}", "--json", *LITTLE,
        home=home, address=cluster.address,
    )  # fmt: skip
    nodes = profiled(done)["nodes"]
    assert len(nodes) == 2
    for node in nodes:
        said = node["error"] or ""
        assert all(word in said for word in words), said
        assert "Traceback" not in said
        # What the machine itself gives was measured all the same.
        assert "value" in node["fingerprint"]["cpu.usable_cores"]
    assert "Traceback" not in done.stderr
    wait_for(lambda: not job_children(home))


def test_a_healthy_workload_beside_files_of_the_users_own(
    cluster: Any, corpus: Path, home: Path, tmp_path: Path
) -> None:
    """After the bad ones, on the same agents; and nothing of the working folder is imported."""
    for name in ("agent", "coordinator", "pichak", "messages", "ray_actor"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py was imported')\n")
    for name in ("agent", "coordinator"):
        (tmp_path / name).mkdir()
        text = f"raise RuntimeError('{name}/ was imported')\n"
        (tmp_path / name / "__init__.py").write_text(text)
    shutil.copy(WORKLOADS, tmp_path / "train.py")
    done = pichak(
        "fleet", "profile", "--model", "train.py:make", "--data", corpus, "--limit", "4",
        "--memory-cap", "200MiB", "--json", *LITTLE,
        home=home, cwd=tmp_path, address=cluster.address,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    nodes = profiled(done)["nodes"]
    assert [n["error"] for n in nodes] == [None] * 2
    assert [n["plan"]["values"]["micro_batch_max"]["value"] for n in nodes] == [4] * 2


def test_interrupting_keeps_what_was_measured_and_leaves_no_process(
    cluster: Any, corpus: Path, home: Path
) -> None:
    home = home / "interrupted"
    process = start(
        "fleet", "profile", "--data", str(corpus), "--json", *LITTLE,
        home=home, address=cluster.address,
    )  # fmt: skip
    wait_for(lambda: ended(home, "fingerprint") > 0, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    nodes = json.loads(out)["nodes"]
    assert len(nodes) == 2
    assert any("value" in m for n in nodes for m in n["fingerprint"].values())
    assert any("interrupted" in (n["error"] or "") for n in nodes)
    wait_for(lambda: not job_children(home.parent))


def test_a_killed_coordinator_goes_on_where_it_was(cluster: Any, tmp_path: Path) -> None:
    arguments = ["fleet", "profile", "--model", f"{WORKLOADS}:make", "--limit", "4", "--json"]
    arguments += [*LITTLE, "--at-once", "1"]
    process = start(*arguments, home=tmp_path, address=cluster.address)
    wait_for(lambda: ended(tmp_path, "fingerprint") > 0, process)
    process.kill()
    process.communicate(timeout=60)
    with Store.open(tmp_path / "fleet.db") as store:
        (run,) = store.runs()
        assert run.finished_unix is None
        assert open_jobs(store)
        before = {job.job_id: job for job in store.jobs(run.run) if job.state == "done"}

    shown = pichak("fleet", "compare", home=tmp_path).stdout
    assert f"{run.run} was cut off: its coordinator (process {process.pid}) went away" in shown
    assert "`pichak fleet profile --resume` goes on with it" in shown

    # The cluster and the options are the run's own; only what is printed is asked for anew.
    done = pichak("fleet", "profile", "--resume", "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"on --address {cluster.address} with --at-once 1" in done.stderr
    nodes = profiled(done)["nodes"]
    assert [bool(n["error"]) for n in nodes] == [False, False]
    assert all("micro_batch" in n["plan"]["values"] for n in nodes)
    assert all("value" in n["fingerprint"]["cpu.usable_cores"] for n in nodes)
    with Store.open(tmp_path / "fleet.db") as store:
        (run,) = store.runs()
        assert run.finished_unix is not None
        assert open_jobs(store) == []
        jobs = store.jobs(run.run)
        assert {job.state for job in jobs} <= {"done", "failed", "cancelled"}
        # What was done is done: nothing of it was measured again.
        done_jobs = [job for job in jobs if job.state == "done"]
        assert set(before) <= {job.job_id for job in done_jobs}
        for kind, most in (("fingerprint", 2), ("ramp", 2), ("task", 1)):
            assert len([job for job in done_jobs if job.kind == kind]) == most
    again = pichak(*arguments, "--resume", home=tmp_path, address=cluster.address)
    assert again.returncode == 2
    assert "came to its end: there is nothing to resume" in again.stderr
    wait_for(lambda: not job_children(tmp_path))


def start(*arguments: str, home: Path, address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PICHAK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home, address),
    )


def ended(home: Path, kind: str) -> int:
    """Jobs of a kind in the newest run that are done; 0 before there is a store."""
    if not (home / "fleet.db").exists():
        return 0
    with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(home / "fleet.db") as db:
        (count,) = db.execute(
            "SELECT count(*) FROM jobs WHERE kind = ? AND state = 'done' "
            "AND run = (SELECT run FROM runs ORDER BY started_unix DESC, seq DESC LIMIT 1)",
            (kind,),
        ).fetchone()
        return int(count)
    return 0


def wait_for(
    condition: Callable[[], bool],
    process: subprocess.Popen[str] | None = None,
    seconds: float = 120,
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"it ended too early: {process.communicate()}")
        if time.monotonic() > end:
            pytest.fail("waited too long")
        time.sleep(0.1)
