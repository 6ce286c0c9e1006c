"""What a job that failed printed last: in the rows, on the screen and in the JSON, safe to show."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli.comparison_view import render_comparison
from pichak_coordinator.compare import compare
from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.store import Store
from pichak_coordinator.text import last_lines

HELLO = {"machine_id": "m", "host": "gpu-a", "gpus": []}


@pytest.mark.parametrize("status", ["timeout", "killed", "error", "cancelled", "refused"])
def test_it_is_in_the_row_of_a_job_that_failed(tmp_path: Path, status: str) -> None:
    with Store.open(tmp_path / "h.db") as store:
        run = store.begin_run("fleet profile", {})
        (node,) = store.record_nodes(run, [HELLO])
        for kind, how in (("fingerprint", "ok"), ("ramp", status)):
            store.record_job(run, Job(kind, 1, kind, {"device": "cpu"}, 9.0), node=node)
            store.set_job_state(kind, "done" if how == "ok" else "failed", error="no")
            text = f"epoch 1\nloss \x1b[31mnan of {kind}\n"
            sent = Outcome(kind, 1, kind, how, error="" if how == "ok" else "no", log_tail=text)
            store.record_outcome(encode(sent))
        (row,) = store.rows_of(run)
    assert row.printed == {"ramp": ("epoch 1", "loss \\x1b[31mnan of ramp")}
    assert row.as_dict()["log_tail"] == {"ramp": ["epoch 1", "loss \\x1b[31mnan of ramp"]}


def screen(*rows: Row) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    render_comparison(compare(list(rows)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def failed(host: str, *lines: str, error: str = "ramp: it was not done within its 60 s") -> Row:
    return Row(NodeRecord(host, host), error=error, printed={"ramp": lines})


def test_a_person_sees_the_end_of_it() -> None:
    lines = [f"line {n}" for n in range(40)]
    shown = screen(failed("gpu-a", *lines))
    assert "gpu-a failed: ramp: it was not done" in shown
    assert "its ramp printed last:" in shown
    assert "line 39" in shown
    assert "line 16" in shown
    assert "line 15" not in shown
    many = screen(*(failed(f"gpu-{n}", *lines) for n in range(9)))
    # The same error is told once, with one of those that it hit.
    assert "gpu-0, gpu-1, gpu-2, gpu-3, gpu-4 and 4 more failed: ramp: it was not done" in many
    assert "the ramp of gpu-0 printed last:" in many
    assert many.count("line 39") == 1
    apart = screen(*(failed(f"gpu-{n}", *lines, error=f"ramp: no {n}") for n in range(9)))
    assert "line 39" not in apart
    assert apart.count("what its ramp printed last is in --json (log_tail)") == 9


def test_the_last_lines_are_bounded_and_plain() -> None:
    text = "\n".join(["first", "", "  ", "x" * 1000, "10 %\r20 %\r\n\u202eabc\x07"])
    assert last_lines(text, 3) == ("x" * 299 + "…", "20 %", "\\u202eabc\\x07")
    assert last_lines("\n" * 100) == ()
    assert len(last_lines("a\n" * 10_000)) == 40
