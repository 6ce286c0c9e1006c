"""What stands under a table is in its CSV and its Markdown too."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli.comparison_forms import print_run_as
from pichak_coordinator.cli.run_view import Shown
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement

EVIL = "=cmd|[x](y)\x1b[31m"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A device whose ramp failed and printed something, and one whose disk halved."""
    made = Store.open(tmp_path / "fleet.db")
    for rate in (900.0, 450.0):
        run = made.begin_run("fleet profile", {})
        for host in "ab":
            node = made.record_node(run, {"machine_id": host, "host": host})
            found = Fingerprint()
            found.add(
                Measurement("disk.read_mb_s", rate if host == "b" else 900.0, "MB/s", "timed", 9, 1)
            )
            job = Job(f"{run}-f-{host}", 1, "fingerprint", {}, 9.0)
            made.record_job(run, job, node=node, device="cpu")
            result = {"fingerprint": found.to_dict()}
            made.record_outcome(encode(Outcome(job.job_id, 1, job.kind, "ok", result)))
        node = made.record_node(run, {"machine_id": "a", "host": "a"})
        ramp = Job(f"{run}-r", 1, "ramp", {}, 9.0)
        made.record_job(run, ramp, node=node, device="cpu")
        error = "ValueError: no"
        made.record_outcome(
            encode(Outcome(ramp.job_id, 1, "ramp", "error", {}, error, log_tail=f"one\n{EVIL}\n"))
        )
        made.set_job_state(ramp.job_id, "failed", error=error)
        made.finish_run(run)
    return made


def shown(store: Store, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    run = store.runs()[0].run
    print_run_as(store, run, store.rows_of(run), Shown(), form, plans=False)
    return capsys.readouterr().out


def test_csv(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with store:
        rows = {r["host"]: r for r in csv.DictReader(io.StringIO(shown(store, "csv", capsys)))}
    assert "ValueError: no" in rows["a"]["error"]
    assert "one" in rows["a"]["printed_last"]
    assert "\x1b" not in rows["a"]["printed_last"]
    assert "900 → 450" in rows["b"]["changed"]
    assert rows["a"]["changed"] == ""


def test_markdown(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with store:
        text = shown(store, "md", capsys)
    failed = text.split("## Failed")[1].split("##")[0]
    assert "ValueError: no" in failed
    assert "one" in failed
    assert "[x](y)" not in failed
    assert "\x1b" not in text
    assert "900 → 450" in text.split("## Changed since the last run")[1]
