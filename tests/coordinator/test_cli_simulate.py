"""``pichak fleet simulate``: what was put in is what the figures say, nothing passes for measured,
and its history is one that the other commands show."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_coordinator.cli import app
from pichak_coordinator.schedule import HOUR, Policy
from pichak_coordinator.simulated_fleet import (
    COPY,
    DAY,
    FAULTS,
    PutIn,
    SimulatedFleet,
    drawn_fleet,
    given_fleet,
)
from pichak_coordinator.simulation import LONGEST_SECONDS, Simulation
from pichak_coordinator.store import Store
from pichak_core.measurement import Reason
from pichak_core.simulated_host import Fault, SimulatedHost

BEGIN = 1_767_225_600.0  # 2026-01-01


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["fleet", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("sim") / "sim.db"
    asked = ("simulate", "--nodes", "10", "--days", "3", "--fault-rate", "0.2", "--seed", "2")
    done = call(*asked, "--store", path, "--json")
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    return path, record


def test_the_same_seed_gives_the_same_figures(made: tuple[Path, dict[str, Any]]) -> None:
    asked = ("simulate", "--nodes", "10", "--days", "3", "--fault-rate", "0.2", "--json")
    again, other = (json.loads(call(*asked, "--seed", s).stdout) for s in ("2", "3"))
    differ = {"store", "runs", "took_seconds"}
    was = {k: v for k, v in made[1].items() if k not in differ}
    assert {k: v for k, v in again.items() if k not in differ} == was
    assert {k: v for k, v in other.items() if k not in differ} != was
    assert (again["store"], again["runs"]) == (None, {})


def test_a_fifth_of_ten_hosts_is_two_faults(made: tuple[Path, dict[str, Any]]) -> None:
    record = made[1]
    assert (record["nodes"], record["faults_put_in"], len(record["faults"])) == (10, 2, 2)
    assert record["probe_seconds"] == pytest.approx(
        record["probe_seconds_a_host_a_day"] * record["nodes"] * record["days"]
    )


def test_nothing_in_its_history_passes_for_measured(made: tuple[Path, dict[str, Any]]) -> None:
    path, record = made
    with sqlite3.connect(path) as db:
        unmarked = "SELECT count(*) FROM outcomes WHERE NOT simulated"
        assert db.execute(unmarked).fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM outcomes").fetchone()[0] > 100
    with Store.open(path, read_only=True) as store:
        node = store.nodes()[0].node
        histories = store.histories(node, store.metric_names(node)).values()
        sources = {point.source for points in histories for point in points}
        assert sources
        assert all("simulated" in source or "nothing is simulated" in source for source in sources)
        assert all(row.node.simulated for row in store.rows_of(record["runs"]["profile"]))
        assert all(run.settings["simulated"] for run in store.runs())


def test_the_other_commands_show_it(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, record = made
    compared = json.loads(call("compare", "--json", "--store", path).stdout)
    assert compared["run"] == record["runs"]["profile"]
    assert len(compared["nodes"]) == 10
    listed = json.loads(call("nodes", "--json", "--store", path).stdout)["nodes"]
    assert [node["simulated"] for node in listed] == [True] * 10
    runs = json.loads(call("history", "--json", "--store", path).stdout)["runs"]
    assert all(run["simulated"] for run in runs)
    picked = json.loads(call("pick", "2", "--json", "--store", path).stdout)
    assert len(picked["pick"]["members"]) == 2
    assert all("simulated" in way["source"] for way in picked["pick"]["ring"])
    team = picked["pick"]
    figures = ("step_seconds", "compute_seconds", "reduce_seconds", "tokens_per_second")
    sources = [m["step_seconds"]["source"] for m in team["members"]]
    sources += [team[name]["source"] for name in figures]
    assert all("simulated" in source for source in sources), sources
    assert all(run["seconds"] is None for run in runs)
    told = call("pick", "2", "--store", path).stdout
    assert "measured in" not in " ".join(told.split())
    for name in ("pace:", "step:", "own part:"):
        (line,) = [line for line in told.splitlines() if line.startswith(name)]
        assert "simulated: " in line
    host = compared["nodes"][0]["host"]
    points = json.loads(
        call("history", host, "host.memory_copy_mb_s", "--json", "--store", path).stdout
    )
    assert len(points["points"]) >= 3
    assert all(point["simulated"] for point in points["points"])
    pytest.importorskip("plotly")
    page = tmp_path / "sim.html"
    assert call("report", "--html", page, "--store", path).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "<dt>took</dt>" not in text
    assert "<dt>measured</dt><dd>0</dd>" in text
    assert re.search(r"directions between [0-9]+ machines simulated, ", text)
    assert "machines measured" not in text
    answered = sum(node["error"] is None for node in compared["nodes"])
    assert f"<dt>simulated</dt><dd>{answered}</dd>" in text


def policy(**changes: Any) -> Policy:
    given: dict[str, Any] = {
        "every_seconds": {"light": 2 * HOUR, "full": DAY},
        "longest_seconds": LONGEST_SECONDS,
        "budget_seconds": 900.0,
        "most_at_once": 64,
    }
    return Policy(**{**given, **changes})


def run(fleet: SimulatedFleet, days: float = 4.0) -> Simulation:
    return Simulation(fleet, policy(), BEGIN, days).run()


def alike(count: int, **changes: Any) -> list[SimulatedHost]:
    metrics = {COPY: 25000.0, "host.memory_copy_mb_s": 18000.0, "disk.read_mb_s": 900.0}
    given: dict[str, Any] = {"gpu": "NVIDIA L4", "gpus": 1, "metrics": metrics, "noise": 0.01}
    return [SimulatedHost(f"h{i}", **{**given, **changes}) for i in range(count)]


def test_a_healthy_fleet_is_left_alone() -> None:
    made = run(given_fleet(alike(8)))
    assert made.wrong == []
    assert made.results() == []
    assert made.as_dict()["events"] == {}


def test_one_slow_host_among_eight_is_found_and_nobody_else() -> None:
    hosts = alike(8)
    begin = BEGIN + 1.5 * DAY
    hosts[3] = alike(8, faults=(Fault(COPY, begin, 0.7),))[3]
    made = run(given_fleet(hosts))
    (result,) = made.results()
    assert (result.fault.host, result.fault.metric, result.by) == ("h3", COPY, "confirmed")
    # The longest interval, 2 h × 4, with a quarter of jitter, a look every ten minutes, twice.
    assert result.hours is not None
    assert 0 < result.hours < 10.7
    assert made.wrong == []
    assert [f.metric for some in made.findings.values() for f in some] == [COPY]


def test_a_reading_that_is_lost_is_a_fault_that_is_found() -> None:
    hosts = alike(8)
    fault = Fault(COPY, BEGIN + DAY, reason=Reason.LOST)
    hosts[0] = alike(8, faults=(fault,))[0]
    made = run(given_fleet(hosts))
    (result,) = made.results()
    assert result.fault.host == "h0"
    assert made.wrong == []


def test_a_silent_host_is_found_by_its_first_failed_probe() -> None:
    fleet = drawn_fleet(8, seed=1, fault_rate=0.0)
    host = fleet.hosts[0].host
    begin = BEGIN + 1.5 * DAY
    fleet.faults.append(PutIn(host, "gives nothing any more", "", begin, silent=True))
    made = run(fleet)
    (result,) = [r for r in made.results() if r.fault.silent]
    assert result.by == "probe_failed"
    assert made.silent(BEGIN + DAY) == set()
    assert made.silent(made.end_unix) == {host}


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.name)
def test_a_fault_multiplies_what_its_host_reads(kind: Any) -> None:
    """8 h a day: in hour 4 it is there, in hour 12 it is not; 1 % a day: 0.99³ in the third."""
    steps = tuple(kind.steps(BEGIN, BEGIN + 5 * DAY))
    if not kind.metric:
        assert steps == ()
        return
    host = alike(1, metrics={kind.metric: 100.0}, noise=0.0, faults=steps)[0]

    def at(hours: float) -> float | None:
        return host.fingerprint("cuda:0", BEGIN + hours * HOUR).number(kind.metric)

    third = kind.factor**3 if kind.each_day else kind.factor
    assert at(-1) == 100.0
    assert at(4) == pytest.approx(100 * kind.factor)
    assert at(52) == pytest.approx(100 * third)
    assert at(12) == pytest.approx(100 * (1 if kind.hours_a_day < 24 else kind.factor))


HOST = """host = "mine-{n}"
gpu = "NVIDIA L4"
[metrics]
"gpu.h2d_pinned_mb_s" = 12000
"host.memory_copy_mb_s" = 15000
{fault}
"""


def test_hosts_of_ones_own(tmp_path: Path) -> None:
    files = []
    for n in range(7):
        fault = '[[fault]]\nmetric = "gpu.h2d_pinned_mb_s"\nstarts = "+1d"\nfactor = 0.5\n'
        path = tmp_path / f"{n}.toml"
        path.write_text(HOST.format(n=n, fault=fault if n == 2 else ""), encoding="utf-8")
        files += ["--host", path]
    done = call("simulate", *files, "--days", "2", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["nodes"] == 7
    (fault,) = record["faults"]
    assert (fault["host"], fault["began_unix"]) == ("mine-2", BEGIN + DAY)
    assert fault["found_by"] == "confirmed"
    assert record["false_accusations"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "no.toml"], ["no.toml", "cannot be read"]),
        (["--host", "a.toml", "--host", "a.toml"], ["another file", "mine-1"]),
        (["--host", "a.toml", "--nodes", "5"], ["--nodes", "choose one"]),
        (["--host", "bad.toml"], ["bad.toml", "host"]),
        (["--store", "there.db"], ["there.db", "new one"]),
        (["--every", "light=never", "--every", "full=never"], ["nothing is left"]),
        (["--budget", "5s/h"], ["--budget 5s/h", "90s/h"]),
        (["--json", "--format", "csv"], ["choose one"]),
        (["--nodes", "0"], ["--nodes"]),
        (["--fault-rate", "nan"], ["--fault-rate"]),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(HOST.format(n=1, fault=""), encoding="utf-8")
    Path("bad.toml").write_text("nodes = 3\n", encoding="utf-8")
    Path("there.db").write_text("mine", encoding="utf-8")
    done = call("simulate", *arguments)
    assert done.exit_code == 2, done.output
    assert all(word in done.stderr for word in words), done.stderr
    assert Path("there.db").read_text(encoding="utf-8") == "mine"


def test_the_table_as_csv_and_markdown() -> None:
    asked = ("simulate", "--nodes", "6", "--days", "1", "--fault-rate", "0.5")
    lines = list(csv.DictReader(io.StringIO(call(*asked, "--format", "csv").stdout)))
    assert sum(int(line["put in"]) for line in lines) == 3
    text = call(*asked, "--format", "md").stdout
    assert text.startswith("| fault | put in | found |")
    assert "no machine was measured" in text


@pytest.mark.skipif(os.name != "posix", reason="a process is killed as Linux kills it")
def test_a_simulation_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    path, part = tmp_path / "x.db", tmp_path / "x.db.part"
    words = ["fleet", "simulate", "--nodes", "40", "--days", "60", "--store", str(path)]
    code = "from pichak_coordinator.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        until = time.monotonic() + 60
        while not part.exists() and running.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        running.kill()
    assert part.exists()
    assert not path.exists()
    assert call("compare", "--store", path).exit_code == 2
    again = call(*words[1:4], "--store", path)
    assert again.exit_code == 2
    assert "x.db.part of a simulation that was killed" in again.stderr


def test_a_simulation_that_breaks_off_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pichak_coordinator.simulated_history.put_profile", broken)
    done = call("simulate", "--nodes", "2", "--days", "0.1", "--store", tmp_path / "x.db")
    assert done.exit_code != 0
    assert list(tmp_path.iterdir()) == []
