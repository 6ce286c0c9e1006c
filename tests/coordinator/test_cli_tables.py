"""The fleet's commands as tables of every form and width, for few devices and for a thousand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app
from pichak_coordinator.cli.tables import print_records
from pichak_coordinator.records import Finding
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan

EVIL = "=1+1|[bold]\x1b[31m\u202e"


def call(*arguments: Any, columns: int = 120, **environment: str) -> Result:
    given = {"COLUMNS": str(columns), **environment}
    return CliRunner().invoke(app, ["fleet", *(str(a) for a in arguments)], env=given)


def table(*arguments: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(call(*arguments, "--format", "csv").stdout)))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand machines: every hundredth has a confirmed failure, one gave nothing."""
    return filled(tmp_path_factory.mktemp("tables") / "fleet.db", 1000)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine machines, of which one is slow and one gave nothing."""
    return filled(tmp_path_factory.mktemp("tables") / "few.db", 9)


def filled(path: Path, count: int) -> Path:
    with Store.open(path) as made:
        run = made.begin_run("fleet profile", {"model": "m", "name": EVIL})
        hellos = [{"machine_id": f"m{i}", "host": f"h{i:04d}"} for i in range(count)]
        nodes = made.record_nodes(run, hellos)
        with made.atomically():
            for i, node in enumerate(nodes[:-1]):
                plan = Plan("m", "d", "cpu").set("seconds_per_step", 1.0, "timed", unit="s")
                plan.set("scored_tokens_per_second", 100.0 + i, "timed", unit="scored tokens/s")
                found = Fingerprint()
                found.add(Measurement("disk.read_mb_s", 900.0 + i, "MB/s", "timed", 9, 1.0))
                result = {"plan": plan.to_dict(), "fingerprint": found.to_dict()}
                job = Job(f"{run}-{i}", 1, "fingerprint", {}, 9.0)
                made.record_job(run, job, node=node, device="cpu")
                made.record_outcome(encode(Outcome(job.job_id, 1, "fingerprint", "ok", result)))
                if i % 100 == 7:
                    bad = Finding("disk_slow", "fail", f"h{i:04d} is slow", {}, "confirmed")
                    made.record_findings(run, node, "cpu", [bad])
        made.record_node(run, hellos[-1], node=nodes[-1], error="it never answered")
        made.finish_run(run)
    return path


def test_of_a_thousand_the_summary_comes_first_then_the_worst(store: Path) -> None:
    done = call("compare", "--store", store)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == ("1,000 machines, 1,000 devices; 999 measured; 1 failed; 10 confirmed fail")
    assert lines[1] == "Nothing came from 1 of 1,000: h0999 (it never answered)"
    assert lines[2] == "With findings or failures: 10 of 1,000, the worst first"
    hosts = [line.split()[0] for line in lines if line.startswith("h") and "failed:" not in line]
    # The ten slow ones by speed, and the fastest twenty.
    slow = [f"h{i:04d}" for i in range(907, 0, -100)]
    fastest = [f"h{i:04d}" for i in range(998, 978, -1)]
    assert hosts[:30] == [*slow, *fastest]
    assert len(lines) < 80
    assert "--all" in done.stdout


def test_the_worst_of_those_that_answered_are_shown_not_the_lost_ones(tmp_path: Path) -> None:
    """Two hundred of a thousand are lost: one line, and the slow ones are not hidden by them."""
    path = filled(tmp_path / "lost.db", 1000)
    with Store.open(path) as made:
        run = made.begin_run("fleet profile", {})
        hellos = [{"machine_id": f"m{i}", "host": f"h{i:04d}"} for i in range(60)]
        nodes = made.record_nodes(run, hellos)
        with made.atomically():
            for i, node in enumerate(nodes):
                if i < 50:
                    why = f"h{i:04d} died" if i < 45 else "it did not answer in time"
                    made.record_node(run, hellos[i], node=node, error=why)
                    lost = Finding("node_silent", "fail", f"h{i:04d} is lost", {}, "confirmed")
                    made.record_findings(run, node, "cpu", [lost])
                    continue
                found = Fingerprint()
                found.add(Measurement("disk.read_mb_s", 900.0, "MB/s", "timed", 9, 1.0))
                result = {"fingerprint": found.to_dict()}
                job = Job(f"{run}-{i}", 1, "fingerprint", {}, 9.0)
                made.record_job(run, job, node=node, device="cpu")
                made.record_outcome(encode(Outcome(job.job_id, 1, "fingerprint", "ok", result)))
                if i == 55:
                    bad = Finding("disk_slow", "warn", "h0055 is slow", {}, "confirmed")
                    made.record_findings(run, node, "cpu", [bad])
        made.finish_run(run)
    lines = call("compare", "--store", path, columns=200).stdout.splitlines()
    first = next(line for line in lines if line.startswith("Nothing came from"))
    assert first == (
        "Nothing came from 50 of 60: h0000, h0001, h0002, h0003, h0004 and 45 more "
        "(45: … died; 5: it did not answer in time)"
    )
    worst = lines.index("With findings or failures: 1 of 60, the worst first")
    assert any(line.startswith("h0055") for line in lines[worst:])
    assert any("h0055 is slow" in line for line in lines)
    assert not any("is lost" in line for line in lines)
    assert sum(" failed: " in line for line in lines) == 0


def test_csv_and_markdown_say_all_that_the_table_says(few: Path) -> None:
    (slow,) = [row for row in table("compare", "--store", few, "--plans") if row["host"] == "h0007"]
    assert slow["all_findings"] == "fail, confirmed: h0007 is slow"
    assert (slow["plan.seconds_per_step"], slow["plan.seconds_per_step.source"]) == ("1.0", "timed")
    picked = [row["pick"] for row in table("compare", "--store", few) if row["pick"]]
    assert len(picked) == 1
    assert picked[0].startswith("Pick h0006")
    assert "plan.seconds_per_step" not in table("compare", "--store", few)[0]
    text = call("compare", "--store", few, "--format", "md", "--plans").stdout
    assert "- h0008: it never answered" in text
    assert "- h0007, fail, confirmed: h0007 is slow" in text
    assert "\n## h0007\n" in text
    assert "    seconds_per_step     1 s\n        timed\n" in text
    assert "## h0007" not in call("compare", "--store", few, "--format", "md").stdout


def test_a_column_without_a_value_is_no_silent_order(few: Path) -> None:
    done = call("compare", "--store", few, "--sort", "cost")
    assert done.exit_code == 0
    assert "--sort cost: nothing gives any device a value" in done.stderr
    assert "--prices FILE" in done.stderr
    assert call("compare", "--store", few, "--sort", "disk").stderr == ""


def test_all_shows_every_one(store: Path) -> None:
    text = call("compare", "--all", "--store", store).stdout
    hosts = {line.split()[0] for line in text.splitlines() if line[:1] == "h"}
    assert {host for host in hosts if host.isalnum()} == {f"h{i:04d}" for i in range(1000)}


def test_csv_json_and_markdown_hold_every_device(store: Path) -> None:
    rows = list(
        csv.DictReader(io.StringIO(call("compare", "--format", "csv", "--store", store).stdout))
    )
    assert len(rows) == 1000
    assert [row["host"] for row in rows[:2]] == ["h0998", "h0997"]
    assert float(rows[0]["scored_tokens_per_second"]) == 1098.0
    record = json.loads(call("compare", "--format", "json", "--store", store).stdout)
    assert len(record["comparison"]["rows"]) == 1000
    assert call("compare", "--format", "md", "--store", store).stdout.count("\n| h") == 1000


def test_nodes_and_history_in_each_form(store: Path) -> None:
    text = call("nodes", "--store", store).stdout.splitlines()
    assert text[0] == "1,000 nodes with 0 GPUs"
    assert text[-1] == "960 more (--all lists every one)"
    assert len(text) == 1 + 1 + 40 + 1
    rows = list(
        csv.DictReader(io.StringIO(call("nodes", "--format", "csv", "--store", store).stdout))
    )
    assert len(rows) == 1000
    runs = json.loads(call("history", "--format", "json", "--store", store).stdout)["runs"]
    assert (runs[0]["rows"], runs[0]["failed"], runs[0]["simulated"]) == (1000, 1, False)
    asked = ("history", "h0005", "disk.read_mb_s", "--store", store)
    points = table(*asked)
    assert [(float(p["value"]), p["unit"]) for p in points] == [(905.0, "MB/s")]
    assert "| 905 |" in call(*asked, "--format", "md").stdout
    names = call("history", "h0005", "--format", "csv", "--store", store).stdout
    assert names.split() == ["metric", "disk.read_mb_s"]


@pytest.mark.parametrize("command", ["compare", "nodes", "history", "pick 2 --assume-link-mbit 9"])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(few: Path, command: str, columns: int) -> None:
    asked = [*command.split(), "--store", few]
    if command.startswith("pick"):
        asked += ["--gradient-mib", "10", "--batch-rows", "8"]
    done = call(*asked, columns=columns)
    assert done.exit_code in (0, 2), done.output
    assert max((len(line.rstrip()) for line in done.stdout.splitlines()), default=0) <= columns


def test_piped_output_has_no_colour_and_obeys_nothing(few: Path) -> None:
    for asked in (["compare"], ["nodes"], ["history"]):
        for form in ("table", "csv", "md"):
            text = call(*asked, "--store", few, "--format", form, NO_COLOR="1").stdout
            assert "\x1b" not in text
            assert "\u202e" not in text
    assert "\\x1b[31m" in call("history", "--store", few).stdout
    assert "'=1+1" in call("history", "--store", few, "--format", "csv").stdout


@pytest.mark.parametrize("command", ["compare", "nodes", "history", "simulate", "pick 2"])
def test_two_forms_at_once_are_refused(few: Path, command: str) -> None:
    asked = command.split()
    given = [] if command == "simulate" else ["--store", few]
    done = call(*asked, *given, "--json", "--format", "csv")
    assert done.exit_code == 2
    assert "choose one of them" in done.stderr


def test_a_narrow_terminal_drops_what_it_can_do_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"name": "x" * 20, "size": 1, "note": "y" * 20, "none": None}]

    def shown(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        print_records(records, "table", right=("size",), dispensable=("note",))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    wide, narrow, least = shown(80), shown(40), shown(10)
    assert wide[1].split() == ["x" * 20, "1", "y" * 20]
    assert narrow[1].split() == ["x" * 20, "1"]
    assert "  size: 1" in least
    assert "none" not in wide[0]
