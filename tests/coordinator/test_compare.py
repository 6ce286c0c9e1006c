"""The comparison's figures by closed form, its order, and its formats."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest

from pichak_coordinator.compare import COLUMNS, compare
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import CONSTANT, Plan

BY_KEY = {column.key: column for column in COLUMNS}


def fingerprint(**values) -> Fingerprint:
    made = Fingerprint()
    for name, value in values.items():
        metric = name.replace("__", ".")
        given = isinstance(value, (Measurement, Unmeasured))
        made.add(value if given else Measurement(metric, value, "MB/s", "a source"))
    return made


def trained(batch: int = 8, seconds: float = 0.5, scored: float = 100.0, rows: int = 36000) -> Plan:
    plan = Plan("m", "d")
    plan.set("micro_batch", batch, "ramp").set("seconds_per_step", seconds, "timed", unit="s")
    plan.set("rows_total", rows, "counted").set("supervised_per_row", scored, "mean")
    plan.set("tokens_per_second", batch * 512 / seconds, "timed", unit="tokens/s")
    return plan.set(
        "scored_tokens_per_second", batch * scored / seconds, "timed", unit="scored tokens/s"
    )


def row(name: str, plan: Plan | None = None, device: str = "cpu", **more) -> Row:
    values = more.pop("values", {})
    return Row(NodeRecord(name, f"h-{name}", device=device), fingerprint(**values), plan, **more)


def cells(rows: list[Row], **options) -> list[dict]:
    return compare(rows, **options).as_dict()["rows"]


def test_figures_of_a_row() -> None:
    """8 rows in 0.5 s is 16 rows/s: 1,600 scored tokens/s at 100 a row. 36,000 rows at 16/s are
    2,250 s = 0.625 h. At 0.72 $/h a million scored tokens (625 s) cost 0.125 $."""
    (one,) = cells([row("a", trained())], prices={"h-a": 0.72})
    assert one["micro_batch"] == 8
    assert one["scored_tokens_per_second"] == 1600
    assert one["tokens_per_second"] == 8192
    assert one["hours_per_epoch"] == pytest.approx(0.625)
    assert one["price_per_hour"] == 0.72
    assert one["cost_per_million_scored_tokens"] == pytest.approx(0.125)
    # The cost of an epoch by both ways: hours × price, and scored tokens × cost.
    epoch = one["hours_per_epoch"] * 0.72
    assert epoch == pytest.approx(36000 * 100 / 1e6 * one["cost_per_million_scored_tokens"])


def test_the_gpus_of_a_node_share_its_price() -> None:
    rows = [row("a", trained(), device=f"cuda:{i}") for i in range(4)]
    assert [c["price_per_hour"] for c in cells(rows, prices={"a": 8.0})] == [2.0] * 4


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_is_a_positive_number(price: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        compare([row("a", trained())], prices={"a": price})


def test_a_plan_whose_speed_is_in_scored_tokens_says_so_by_its_unit() -> None:
    plan = Plan().set("tokens_per_second", 900.0, "timed", unit="scored tokens/s")
    (one,) = cells([row("a", plan)])
    assert (one["scored_tokens_per_second"], one["tokens_per_second"]) == (900.0, None)
    plan = Plan().set("tokens_per_second", 900.0, "timed", unit="tokens/s")
    (one,) = cells([row("a", plan)], prices={"a": 1.0})
    assert (one["scored_tokens_per_second"], one["tokens_per_second"]) == (None, 900.0)
    assert one["cost_per_million_scored_tokens"] is None


def test_what_was_not_measured_has_no_figure() -> None:
    """A constant, a text, a suspect value, a gap: none is a number of the table."""
    plan = Plan().set("micro_batch", 8, CONSTANT).set("seconds_per_step", "fast", "a word")
    bad = Measurement("disk.read_mb_s", 9e9, "MB/s", "reads", suspect="faster than its device")
    gap = Unmeasured("gpu.h2d_pinned_mb_s", Reason.NO_DEVICE)
    (one,) = cells([row("a", plan, values={"disk": bad, "gap": gap})])
    for key in ("micro_batch", "hours_per_epoch", "disk_read_mb_s", "h2d_mb_s"):
        assert one[key] is None
    zero = cells([row("a", values={"disk__read_mb_s": 0.0})])[0]
    assert zero["disk_read_mb_s"] == 0.0  # measured, and zero


def test_columns_without_a_value_are_hidden() -> None:
    shown = [c.key for c in compare([row("a", trained()), row("b")]).columns]
    assert shown == [
        "host",
        "device_name",
        "micro_batch",
        "scored_tokens_per_second",
        "tokens_per_second",
        "hours_per_epoch",
    ]


def test_the_fastest_comes_first_and_what_failed_last() -> None:
    rows = [
        row("slow", trained(seconds=1.0)),
        row("dead", error="the node died"),
        row("fast", trained(seconds=0.25)),
    ]
    table = compare(rows)
    assert [line.row.node.node for line in table.lines] == ["fast", "slow", "dead"]
    assert table.lines[2].cells["error"] == "the node died"


@pytest.mark.parametrize("descending", [None, True, False])
def test_absent_values_sort_last_either_way(descending: bool | None) -> None:
    # field case 21
    speeds = {"a": 3.0, "b": None, "c": 1.0, "d": None, "e": 2.0}
    rows = [row(n, values={} if v is None else {"disk__read_mb_s": v}) for n, v in speeds.items()]
    order = [line.row.node.node for line in compare(rows, sort="disk", descending=descending).lines]
    assert order[3:] == ["b", "d"]
    assert order[:3] == (["c", "e", "a"] if descending is False else ["a", "e", "c"])


def test_sorting_is_stable_and_by_any_column() -> None:
    rng = random.Random(3)
    rows = [
        row(f"n{i}", trained(), values={"disk__read_mb_s": float(rng.randrange(3))})
        for i in range(30)
    ]
    for descending in (True, False):
        lines = compare(rows, sort="disk_read_mb_s", descending=descending).lines
        for value in (0.0, 1.0, 2.0):
            same = [x.row.node.node for x in lines if x.cells["disk_read_mb_s"] == value]
            assert same == [r.node.node for r in rows if r.node.node in same]
    for column in COLUMNS:
        assert len(compare(rows, sort=column.key).lines) == 30
    assert compare(rows, sort="node").lines[0].row.node.node == "n0"
    with pytest.raises(ValueError, match="disk_read_mb_s"):
        compare(rows, sort="colour")


def test_text_sorts_by_letter_whatever_its_case() -> None:
    rows = [row(n) for n in ("beta", "Alpha", "gamma")]
    assert [x.row.node.node for x in compare(rows, sort="host").lines] == [
        "Alpha",
        "beta",
        "gamma",
    ]


def test_findings_in_a_cell() -> None:
    found = (
        Finding("small_shm", "warn", "s"),
        Finding("wrong", "fail", "s", state="confirmed"),
    )
    assert cells([row("a", findings=found)])[0]["findings"][0]["code"] == "small_shm"
    lines = compare([row("a", findings=found), row("b", findings=found[:1])]).lines
    assert [line.cells["findings"] for line in lines] == ["fail: wrong +1", "warn: small_shm?"]


def test_the_slowest_link_stands_for_the_network() -> None:
    values = {"network__to_a_mb_s": 900.0, "network__to_b_mb_s": 11.2, "network__rtt": 1.0}
    assert cells([row("a", values=values)])[0]["network_mb_s"] == 11.2


def test_json_has_every_column_and_the_pick() -> None:
    record = compare([row("a", trained()), row("b", error="x")]).as_dict()
    assert set(record) == {"rows", "pick", "notes"}
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    beside = {"node", "device", "simulated", "problems", "economics"}
    assert set(BY_KEY) | beside == set(record["rows"][0])
    assert record["pick"]["node"] == "a"
    assert record["pick"]["why"].startswith("Pick h-a")


def test_a_note_says_that_five_alike_accuse_nobody() -> None:
    def alike(count: int) -> list[Row]:
        node = [NodeRecord(f"n{i}", device="cuda:0", gpu_model="L4") for i in range(count)]
        return [Row(one, fingerprint(disk__read_mb_s=100.0), trained()) for one in node]

    five = compare(alike(5)).sorted_by("host")
    told = "L4: too few peers to judge: 4 of 5 needed"
    assert five.notes == (told,)
    assert five.as_dict()["notes"] == [told]
    assert five.to_markdown().endswith(f"\n\n{told}\n")
    assert compare(alike(6)).as_dict()["notes"] == []


def test_csv_reads_back() -> None:
    nasty = Row(NodeRecord("n", '=cmd|"x",1\n2'), error="a, b")
    table = compare([row("a", trained()), nasty])
    read = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert float(read[0]["scored_tokens_per_second"]) == 1600
    assert read[1]["scored_tokens_per_second"] == ""
    assert read[1]["host"] == '\'=cmd|"x",1 2'
    assert read[1]["error"] == "a, b"


def test_markdown_is_one_table_whatever_a_node_says() -> None:
    nasty = Row(NodeRecord("n", "a|b\n<script>*x*\x1b[1m"))
    text = compare([row("a", trained()), nasty]).to_markdown()
    table, _, sentence = text.partition("\n\n")
    lines = table.splitlines()
    assert len(lines) == 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {lines[0].count("|")}
    assert "<script>" not in text
    assert "\x1b" not in text
    assert sentence.startswith("Pick h-a")
    assert "| 1,600 |" in text


def test_an_empty_fleet() -> None:
    table = compare([])
    assert table.lines == ()
    assert "no node answered" in table.pick.sentence
    assert table.as_dict()["rows"] == []
