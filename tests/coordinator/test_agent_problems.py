"""What an agent tells of itself reaches whoever reads a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pichak_coordinator.agent_problems import plain_problems, problem_notes, with_problems
from pichak_coordinator.cli.run_view import run_as_dict
from pichak_coordinator.compare import compare
from pichak_coordinator.report.content import content
from pichak_coordinator.report.page import page
from pichak_coordinator.store import Store

ELSEWHERE = "outcomes are kept in /tmp/pichak-0, because /home takes none: No space left on device"
ASIDE = "job.1.mpk was put aside: <b>its bytes</b> are not those that were written"


def hello(host: str, *problems: str) -> dict[str, Any]:
    return {"machine_id": host, "host": host, "problems": list(problems)}


@pytest.mark.parametrize("told", [None, 5, "text", {"a": 1}, [], [None, 5, "", "  \n"]])
def test_what_is_no_list_of_sentences_tells_nothing(told: Any) -> None:
    assert plain_problems(told) == ()


def test_each_is_one_short_printable_line_told_once() -> None:
    told = plain_problems(["a\nb\x1b[2J", "a\nb\x1b[2J", "x" * 10_000, *map(str, range(1000))])
    assert told[0] == "a b\\x1b[2J"
    assert len(told[1]) == 500
    assert len(told) == 50
    assert with_problems(hello("a", "one"), ["two", "one", 3])["problems"] == ["one", "two"]


def test_they_are_told_wherever_a_run_is_shown(tmp_path: Path) -> None:
    """Also what an agent told only at the run's end."""
    with Store.open(tmp_path / "h.db") as store:
        run = store.begin_run("fleet profile", {})
        first, second = store.record_nodes(run, [hello("first", ELSEWHERE), hello("second")])
        store.record_problems(run, second, [ASIDE])
        store.record_problems(run, first, [])
        store.finish_run(run)
        rows = store.rows_of(run)
        made = run_as_dict(store, run, rows, "")
        for listed in (made["nodes"], made["comparison"]["rows"]):
            assert {each["node"]: each["problems"] for each in listed} == {
                first: [ELSEWHERE],
                second: [ASIDE],
            }
        table = compare(rows)
        assert [note for note in table.notes if "tells" in note] == [
            f"the agent on first tells: {ELSEWHERE}",
            f"the agent on second tells: {ASIDE}",
        ]
        (kept,) = [each for each in store.runs() if each.run == run]
        shown = page(content(store, kept, table, title="t", now=time.time()))
    assert ELSEWHERE in shown
    assert "&lt;b&gt;its bytes" in shown
    assert "<b>its bytes" not in shown


def test_of_many_some_are_told(tmp_path: Path) -> None:
    with Store.open(tmp_path / "h.db") as store:
        run = store.begin_run("fleet profile", {})
        store.record_nodes(run, [hello(f"n{i}", "a", "b") for i in range(15)])
        notes = problem_notes(store.rows_of(run))
    assert len(notes) == 21
    assert notes[-1].startswith("agents tell 10 more")
