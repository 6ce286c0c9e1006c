"""What a person sees: every width, no escape of a node's own, nothing repeated."""

from __future__ import annotations

import io
import unicodedata

import pytest
from rich.console import Console

from pichak_coordinator.changes import Change
from pichak_coordinator.cli.comparison_view import (
    own_part,
    render_changes,
    render_comparison,
    render_rows,
    shared_part,
)
from pichak_coordinator.compare import compare
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import CONSTANT, Plan

EVIL = "[bold]x[/bold]\x1b[2J\x1b]0;t\x07\x9b31m\u202ey\r\nz"


def plan(index: int = 0) -> Plan:
    made = Plan("builtin:gpt-1m", "train.jsonl", f"cpu {index}")
    made.set("seq_len", 512, "p95 of 512 rows, measured on alpha", 1.5, unit="tokens")
    made.set("headroom", 0.12, CONSTANT)
    made.set("micro_batch", 8 + index, f"a ramp on node {index}", 5.0, unit="rows")
    made.set("scored_tokens_per_second", 1000.0 + 100 * index, "timed", unit="scored tokens/s")
    return made.note("the noise scale is a lower bound").note(f"a note of node {index}")


def row(index: int, **more) -> Row:
    readings = Fingerprint()
    for name, value in (
        ("gpu.kernel_launch_us", 5.0),
        ("gpu.matmul_bf16_tflop_s", 121.0),
        ("gpu.h2d_pinned_mb_s", 12800.0),
        ("gpu.d2h_pinned_mb_s", 12600.0),
        ("host.memory_copy_mb_s", 9000.0),
        ("disk.read_mb_s", 800.0 + index),
    ):
        readings.add(Measurement(name, value, "MB/s", "s"))
    node = NodeRecord(f"n-{index}", f"node-{index}", device="cuda:0", device_name="NVIDIA L4")
    values = {"fingerprint": readings, "plan": plan(index), **more}
    return Row(node, **values)


def shown(render, *what, width: int = 120, terminal: bool = False, **named) -> str:
    stream = io.StringIO()
    options = {"force_terminal": True, "color_system": "truecolor"} if terminal else {}
    console = Console(file=stream, width=width, highlight=False, **options)
    render(*what, console, **named)
    return stream.getvalue()


def test_the_pick_is_the_first_line_under_the_table() -> None:
    rows = [row(0), row(1), row(2, plan=None, error="ramp: it was killed by SIGKILL")]
    lines = shown(render_comparison, compare(rows), width=200).splitlines()
    assert "node" in lines[1]
    assert [line.split()[0] for line in lines[3:6]] == ["node-1", "node-0", "node-2"]
    assert lines[6].startswith("Pick node-1 cuda:0: 1,100 scored tokens/s")
    assert lines[7] == "node-2 cuda:0 failed: ramp: it was killed by SIGKILL"
    assert "–" in lines[5]
    assert "H2D" in lines[0]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160, 240])
def test_every_width(width: int) -> None:
    rows = [row(i) for i in range(3)] + [Row(NodeRecord("n-9", "dead"), error="the node died")]
    text = shown(render_comparison, compare(rows, prices={"node-0": 1.5}), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    squeezed = "".join(text.split())
    for figure in ("1,000", "1,100", "1,200", "thenodedied", "Picknode-0"):
        assert figure in squeezed
    for index in range(3):
        assert f"node-{index}" in squeezed
    # No figure is cut: it is there in full, or its column is named as left out.
    assert ("12,800" in text) == ("H2D" in text.split("not shown")[0])
    assert "…" not in text


def test_a_fleet_without_a_table_is_still_answered() -> None:
    assert "no node answered" in shown(render_comparison, compare([]))


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [24, 300])
def test_nothing_a_node_says_reaches_the_terminal_raw(width: int, terminal: bool) -> None:
    node = NodeRecord("n-1", EVIL, device=f"cuda:{EVIL}", device_name=EVIL)
    bad = Plan(EVIL, EVIL, EVIL).set("micro_batch", 8, EVIL).set(EVIL, EVIL, EVIL).note(EVIL)
    other = Plan(EVIL, EVIL, EVIL).set("micro_batch", 8, EVIL)
    finding = Finding(EVIL, "warn", EVIL, metric=EVIL)
    evil = Row(node, plan=bad, error=EVIL, findings=(finding,))
    rows = [evil, Row(NodeRecord("n-2", "b"), plan=other)]
    change = Change(node, EVIL, EVIL, EVIL, EVIL, reason=EVIL)
    text = (
        shown(render_comparison, compare(rows), width=width, terminal=terminal)
        + shown(render_rows, rows, width=width, terminal=terminal)
        + shown(render_changes, [change], width=width, terminal=terminal, devices=2, compared=1)
    )
    if terminal:
        # Only the console's own colours are left: ESC [ digits and semicolons m.
        import re

        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    hidden = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"}
    assert not hidden
    assert "\u202e" not in text
    squeezed = "".join(text.split())
    assert "[bold]x[/bold]\\x1b[2J" in squeezed  # shown as it came, and not as markup


def test_colours_only_on_terminals() -> None:
    table = compare([row(0), row(1, plan=None, error="dead")])
    assert "\x1b" not in shown(render_comparison, table)
    assert "\x1b[" in shown(render_comparison, table, terminal=True)


def test_findings_are_told_the_worst_first() -> None:
    mild = Finding("small_shm", "info", "a mild thing")
    slow = Finding("slower_than_peers", "warn", "a slow thing", confidence="low")
    wrong = Finding("computes_differently", "fail", "wrong bits", state="confirmed")
    text = shown(
        render_comparison, compare([row(0, findings=(mild, slow)), row(1, findings=(wrong,))])
    )
    first, second = (text.index(s) for s in ("wrong bits", "a slow thing"))
    assert first < second
    assert "node-1 cuda:0, fail, confirmed: wrong bits" in text
    assert "node-0 cuda:0, warn, suspected, low confidence: a slow thing" in text
    assert "a mild thing" not in text
    assert "1 more finding (--json has them)" in text


def test_what_all_plans_share_is_shown_once() -> None:
    text = shown(render_rows, [row(0), row(1), row(2, plan=None, error="the node died")])
    for once in (
        "p95 of 512 rows, measured on alpha",
        "builtin:gpt-1m",
        "train.jsonl",
        "the noise scale is a lower bound",
        "NOT MEASURED (1): headroom = 0.12",
        "a ramp on node 0",
        "a ramp on node 1",
        "a note of node 1",
        "failed: the table's end says why",
    ):
        assert text.count(once) == 1, once
    assert text.index("The task, the same on all 2") < text.index("== node-0 cuda:0: NVIDIA L4")
    assert "total 1.5 s of measuring" in text


def test_one_plan_is_shown_whole() -> None:
    text = shown(render_rows, [row(0)])
    assert "The task" not in text
    assert plan(0).report(100) in text


def test_shared_and_own_parts_are_the_whole() -> None:
    plans = [plan(0), plan(1), plan(2)]
    plans[2].set("seq_len", 512, "measured on beta", unit="tokens")  # the same number, elsewhere
    shared = shared_part(plans)
    assert list(shared) == ["headroom"]
    for each in plans:
        own = own_part(each, shared)
        assert {**own.values, **shared.values} == each.values
        assert sorted([*own.notes, *shared.notes]) == sorted(each.notes)
        assert own.seconds == pytest.approx(each.seconds)
    assert not shared_part([]).values
    assert not shared_part(plans[:1]).values


def test_a_row_without_anything_says_so() -> None:
    assert "no plan was derived" in shown(render_rows, [Row(NodeRecord("n-1", "a"))])


def test_changes_are_told_by_node() -> None:
    node = NodeRecord("n-1", "alpha")
    found = [
        Change(node, "disk.read_mb_s", 900.0, 450.0, "MB/s", -0.5, 10.0, True),
        Change(node, "software.driver", "550", "555"),
    ]
    lines = shown(render_changes, found, devices=1, compared=1).splitlines()
    assert lines == [
        "Changed since the last run:",
        "  alpha",
        "    disk.read_mb_s: 900 → 450 MB/s (-50.0%, more than the measured spread of 10)",
        "    software.driver: 550 → 555",
    ]


@pytest.mark.parametrize(
    ("devices", "compared", "said"),
    [
        (3, 3, "Nothing changed beyond the measured spread since the last run."),
        (
            *(3, 2),
            "Nothing changed beyond the measured spread since the last run. 1 of 3 devices could "
            "not be compared: this run or the one before has no results of it.",
        ),
        (
            *(3, 0),
            "There was nothing to compare with the last run: this run or the one before has no "
            "results of them.",
        ),
    ],
)
def test_no_change_is_told_only_of_what_was_compared(
    devices: int, compared: int, said: str
) -> None:
    told = shown(render_changes, [], devices=devices, compared=compared, width=200)
    assert " ".join(told.split()) == said
