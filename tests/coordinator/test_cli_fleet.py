"""The fleet's reading commands on a store that was filled by hand, and what bad input says."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan


def plan(rows_per_second: float) -> Plan:
    made = Plan("builtin:gpt-1m", "train.jsonl", "cpu")
    made.set("micro_batch", 4, "4 ran", unit="rows")
    made.set("supervised_per_row", 20.0, "counted", unit="scored tokens")
    made.set("seconds_per_step", 4 / rows_per_second, "timed", unit="s")
    made.set("scored_tokens_per_second", 20 * rows_per_second, "timed", unit="scored tokens/s")
    return made


def fill(path: Path, disk_mb_s: dict[str, float]) -> str:
    """One run: a row for each host with its disk's rate; a rate of 0 is a host that failed."""
    with Store.open(path) as store:
        run = store.begin_run("fleet profile", {"model": "builtin:gpt-1m"})
        hellos = [{"machine_id": f"m-{h}", "host": h, "cpu_model": "Xeon"} for h in disk_mb_s]
        for (host, rate), node in zip(
            disk_mb_s.items(), store.record_nodes(run, hellos), strict=True
        ):
            job = Job(f"{run}-fingerprint-{host}", 1, "fingerprint", {"device": "cpu"}, 9.0)
            store.record_job(run, job, node=node, device="cpu")
            if not rate:
                store.set_job_state(job.job_id, "failed", error="the node died")
                continue
            fingerprint = Fingerprint()
            fingerprint.add(
                Measurement("disk.read_mb_s", rate, "MB/s", "direct reads", samples=5, spread=2.0)
            )
            result = {"fingerprint": fingerprint.to_dict(), "plan": plan(rate / 10).to_dict()}
            store.record_outcome(encode(Outcome(job.job_id, 1, job.kind, "ok", result)))
            store.set_job_state(job.job_id, "done", attempt=1)
        store.finish_run(run)
    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "fleet.db"
    fill(where, {"alpha": 500.0, "beta": 900.0, "gamma": 0.0})
    return where


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], standalone_mode=True)


def test_compare_shows_the_fastest_first_and_says_why_a_row_failed(path: Path) -> None:
    done = call("fleet", "compare", "--store", path)
    assert done.exception is None or done.exit_code == 0
    out = done.stdout
    assert out.index("beta") < out.index("alpha") < out.index("gamma")
    assert "Pick beta" in out
    assert "the node died" in out


def test_compare_as_json_is_one_document(path: Path) -> None:
    record = json.loads(call("fleet", "compare", "--store", path, "--json").stdout)
    assert record["schema"] == 1
    assert [n["host"] for n in record["nodes"]] == ["alpha", "beta", "gamma"]
    assert record["nodes"][0]["error"] is None
    assert "the node died" in record["nodes"][2]["error"]
    rows = record["comparison"]["rows"]
    # 90 rows a second of 20 scored tokens.
    assert rows[0]["scored_tokens_per_second"] == pytest.approx(1800.0)
    assert record["comparison"]["pick"]["host"] == "beta"


@pytest.mark.parametrize("form", ["csv", "md"])
def test_other_formats(path: Path, form: str) -> None:
    out = call("fleet", "compare", "--store", path, "--format", form).stdout
    assert out.index("beta") < out.index("alpha")
    assert out.startswith({"csv": "host,", "md": "|"}[form]) or form == "csv"


def test_a_second_run_says_what_changed(path: Path) -> None:
    fill(path, {"alpha": 250.0, "beta": 900.0})
    out = call("fleet", "compare", "--store", path).stdout
    changed = out.split("Changed since the last run")[1]
    assert "disk.read_mb_s: 500 → 250 MB/s" in changed
    assert "beta" not in changed
    first = call("fleet", "history", "--store", path, "--json")
    runs = [run["run"] for run in json.loads(first.stdout)["runs"]]
    assert len(runs) == 2
    old = json.loads(call("fleet", "compare", runs[1], "--store", path, "--json").stdout)
    assert old["changes"] == []


def test_history_of_a_metric(path: Path) -> None:
    fill(path, {"alpha": 250.0})
    done = call("fleet", "history", "alpha", "disk.read_mb_s", "--store", path, "--json")
    assert [p["value"] for p in json.loads(done.stdout)["points"]] == [500.0, 250.0]
    shown = call("fleet", "history", "alpha", "disk.read_mb_s", "--store", path).stdout
    assert "500 MB/s" in shown
    assert "250 MB/s" in shown
    listed = call("fleet", "nodes", "--store", path, "--json").stdout
    assert {n["host"] for n in json.loads(listed)["nodes"]} == {"alpha", "beta", "gamma"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fleet", "compare", "--sort", "nothing"], ["--sort nothing", "there are"]),
        (["fleet", "compare", "20990101"], ["no run", "20990101", "fleet history"]),
        (["fleet", "history", "delta"], ["no node 'delta'", "fleet nodes"]),
        (["fleet", "history", "alpha", "nope"], ["no reading", "disk.read_mb_s"]),
        (["fleet", "profile", "--data", "/nope"], ["/nope", "no such file"]),
        (["fleet", "profile", "--data", "/tmp"], ["/tmp", "folder"]),
        (["fleet", "profile", "--model", "builtin:gpt-9"], ["gpt-9", "gpt-1m"]),
        (["fleet", "profile", "--model", "x.py:make"], ["x.py", "no file"]),
        (["fleet", "profile", "--model", "nonsense"], ["nonsense", "builtin:NAME"]),
        (["fleet", "profile", "--memory-cap", "3 parsecs"], ["3 parsecs", "600MiB"]),
        (["fleet", "profile", "--sample", "-3"], ["-3", "all"]),
        (["fleet", "profile", "--deadline", "ramp"], ["--deadline ramp", "ramp=240"]),
        (["fleet", "profile", "--only", "astrology"], ["astrology", "cpu"]),
        (
            ["fleet", "profile", "--address", "127.0.0.1:1", "--seq-len", "64"],
            ["127.0.0.1:1", "ray status"],
        ),
        (["fleet", "profile"], ["--data FILE", "--seq-len"]),
        (["fleet", "profile", "--sort", "nothing"], ["--sort nothing", "there are"]),
        (["plan"], ["--data FILE", "--seq-len"]),
        (["plan", "--device", "tpu"], ["tpu", "cuda:N"]),
        (["plan", "--device", "cuda"], ["no GPU", "doctor"]),
        (["plan", "--headroom", "nan"], ["--headroom", "finite"]),
        (["plan", "--noise-seconds", "nan"], ["--noise-seconds", "finite"]),
        (["plan", "--seed", "1" + "0" * 20], ["--seed", "4294967295"]),
        (["plan", "--data", "/dev/null"], ["/dev/null", "more than once"]),
        (["plan", "--export", "trl", "--json"], ["--export", "--json"]),
        (["fleet", "compare", "--json", "--format", "csv"], ["--json", "--format csv"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    path: Path, arguments: list[str], words: list[str]
) -> None:
    store = ["--store", str(path)] if arguments[0] == "fleet" else []
    done = call(*arguments, *store)
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_no_history_yet_is_said(tmp_path: Path) -> None:
    done = call("fleet", "compare", "--store", tmp_path / "none.db")
    assert done.exit_code == 2
    assert "pichak fleet profile" in done.stderr
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("columns", ["0", "-1", "x", ""])
def test_a_width_that_is_none_says_nothing(path: Path, columns: str) -> None:
    shown = call("fleet", "compare", "--store", path).stdout
    assert "alpha" in shown
    variables = {"COLUMNS": columns}
    done = CliRunner().invoke(app, ["fleet", "compare", "--store", str(path)], env=variables)
    assert done.stdout == shown


def test_a_narrow_history_leaves_nothing_out(path: Path) -> None:
    command = ["fleet", "history", "alpha", "disk.read_mb_s", "--store", str(path)]
    wide = CliRunner().invoke(app, command, env={"COLUMNS": "120"}).stdout
    narrow = CliRunner().invoke(app, command, env={"COLUMNS": "40"}).stdout
    said = [line.replace("█", "").replace("±", "").split() for line in wide.splitlines()[1:]]
    assert sorted(narrow.replace("±", "").split()) == sorted(w for line in said for w in line)
    assert max(map(len, narrow.splitlines())) <= 40


def test_a_history_of_watches_only_is_not_called_empty(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db") as store:
        for _ in range(2):
            store.finish_run(store.begin_run("fleet watch", {"depth": "light"}))
    done = call("fleet", "history", "--store", tmp_path / "fleet.db")
    assert "2 runs of `pichak fleet watch` only: --watch lists them" in done.stderr


def test_a_plan_holds_what_both_of_its_jobs_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    data = tmp_path / "train.jsonl"
    row = json.dumps({"prompt": "p" * 40, "completion": "c" * 20})
    data.write_text(f"{row}\n" * 300, encoding="utf-8")
    done = call("plan", "--data", data, "--limit", "2", "--memory-cap", "60MiB", "--json")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)["plan"]["values"]
    assert {"seq_len", "noise_scale_tokens", "micro_batch", "learning_rate"} <= set(values)
    assert values["target_tokens"]["value"] <= values["noise_scale_tokens"]["value"]


def test_a_target_of_the_users_own_that_is_cut_is_said(tmp_path: Path) -> None:
    from pichak_core.tune import parts

    made = Plan()
    made.set("micro_batch", 1, "1 ran").set("supervised_per_row", 20.0, "counted")
    made.set("rows_total", 300, "counted")
    parts.batch(made, 5000)
    # 300 updates out of 300 rows leave one row of 20 tokens for each.
    assert made.target_tokens == 20
    assert any("5,000" in note and "300 updates" in note for note in made.notes)


def test_a_history_damaged_behind_its_beginning_is_said_by_readers(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    for command in (["compare"], ["history"], ["nodes"]):
        done = call("fleet", *command, "--store", path)
        assert done.exit_code == 2, done.output
        assert "damaged" in done.stderr
        assert "recover" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_history_on_a_read_only_mount_can_be_read(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for beside in path.parent.glob("fleet.db-*"):
        beside.unlink()
    place = tmp_path / "frozen"
    place.mkdir()
    bound = subprocess.run(
        ["mount", "--bind", path.parent, place], capture_output=True, check=False
    )
    if bound.returncode:
        pytest.skip("mounts are not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        done = call("fleet", "compare", "--store", place / path.name)
        assert done.exit_code == 0, done.output
        assert "alpha" in done.stdout
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    "name", ["alpha", "alpha (simulated)", "alpha cuda:0", "alpha cuda:0 (simulated)"]
)
def test_a_node_may_be_named_as_tables_show_it(path: Path, name: str) -> None:
    done = call("fleet", "history", name, "--store", path)
    assert done.exit_code == 0, done.output
    assert "disk.read_mb_s" in done.stdout


def test_a_time_in_markdown_is_a_date(path: Path) -> None:
    asked = ["fleet", "history", "alpha", "disk.read_mb_s", "--store", path, "--format"]
    head, _, row = call(*asked, "md").stdout.splitlines()
    assert head.split(" | ")[2] == "time"
    datetime.strptime(row.split(" | ")[2], "%Y-%m-%d %H:%M:%S")
    assert "time_unix" in call(*asked, "csv").stdout


@pytest.mark.parametrize("start", ["1969-12-31", "9991-01-01"])
def test_a_day_that_sorts_wrongly_is_refused(start: str) -> None:
    done = call("fleet", "simulate", "--nodes", "1", "--days", "1", "--start", start)
    assert done.exit_code == 2
    assert f"--start {start}: a day of the years 1970 to 9990" in done.stderr


def test_the_probes_of_a_watch_hide_no_profile(path: Path) -> None:
    """They are many, and each is of some nodes only."""
    with Store.open(path) as store:
        profile = store.runs()[0].run
        for _ in range(3):
            store.finish_run(store.begin_run("fleet watch", {"depth": "light"}))
    shown = call("fleet", "history", "--store", path, "--json", "--limit", 1).stdout
    listed = [run["run"] for run in json.loads(shown)["runs"]]
    assert listed == [profile]
    every = call("fleet", "history", "--store", path, "--json", "--watch").stdout
    assert len(json.loads(every)["runs"]) == 4
    assert json.loads(call("fleet", "compare", "--store", path, "--json").stdout)["run"] == profile
