"""``pichak net``: mistakes in one sentence, the page, the record, the exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from pichak_coordinator.cli import app
from pichak_coordinator.cli.common import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NOTHING, UserError
from pichak_coordinator.cli.net import _exit_code, choose
from pichak_coordinator.cli.net_view import show_network
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.fleet_network import NetReport
from pichak_coordinator.link_verdicts import judge_links
from pichak_coordinator.links import LinkMatrix, Reach
from pichak_coordinator.net_collective import BUS, Collective
from pichak_coordinator.net_jobs import named
from pichak_core.measure._collective_math import Point
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured


def node(name: str, address: str = "") -> ClusterNode:
    return ClusterNode(f"id-{name}", name, address or f"10.0.0.{name[-1]}", True, 1.0, 0, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["two nodes", "--address", "ray start --head"]),
        (["--address", "127.0.0.1:1"], ["127.0.0.1:1", "ray status"]),
        (["--address", "nowhere"], ["nowhere", "HOST:PORT"]),
        (["--address", "ray://10.0.0.1:10001"], ["Ray Client"]),
        (["--address", "127.0.0.1:1", "--gradient", "3"], ["--gradient 3", "64MiB"]),
        (["--address", "127.0.0.1:1", "--gradient", "many"], ["many", "600MiB"]),
        (["--address", "127.0.0.1:1", "--pairs", "some"], ["some", "ring"]),
        (["--address", "127.0.0.1:1", "--backend", "mpi"], ["mpi", "gloo"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    tmp_path: Path, arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = CliRunner().invoke(app, ["net", *arguments, "--store", str(tmp_path / "s.db")])
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.stderr, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.output


def test_one_node_is_told_that_two_are_needed() -> None:
    with pytest.raises(UserError, match=r"needs two nodes; there is 1 \(h1\).*ray start"):
        choose([node("h1")], "")
    with pytest.raises(UserError, match=r"needs two nodes.*name more in --nodes"):
        choose([node("h1"), node("h2")], "h2")
    with pytest.raises(UserError, match=r"--nodes h9: no such living node; there are: h1, h2"):
        choose([node("h1"), node("h2")], "h1,h9")
    label = "pichak.io/measure=no"
    with pytest.raises(UserError, match=rf"there is 1 \(h1\).*; 2 more left out by .* {label}"):
        choose([node("h1")], "", [node("h2"), node("h3")])
    with pytest.raises(UserError, match=rf"--nodes h2: it is left out by its label {label}"):
        choose([node("h1"), node("h3")], "h1,h2", [node("h2")])


def test_nodes_are_chosen_by_host_or_address() -> None:
    nodes = [node("h1"), node("h2"), node("h3")]
    assert choose(nodes, "") == nodes
    assert choose(nodes, " h3 , 10.0.0.1 ") == [nodes[0], nodes[2]]


def report(slow: bool = False, **changes: Any) -> NetReport:
    matrix = LinkMatrix(("h1", "h2", "h3"))
    for a, b in (("h1", "h2"), ("h1", "h3"), ("h2", "h3")):
        readings = Fingerprint()
        for part, source in (("send", a), ("receive", b)):
            rate = 11.9 if slow and source == "h2" else 118.0
            readings.add(
                Measurement(f"network.{b}.{part}_mb_s", rate, "MB/s", "made", samples=9, spread=0.5)
            )
        detail = {"min_ms": 0.1, "p95_ms": 0.345}
        readings.add(Measurement(f"network.{b}.rtt_ms", 0.123, "ms", "made", detail=detail))
        matrix = matrix.with_link(a, b, readings)
        matrix = matrix.with_reach([Reach(a, b, True), Reach(b, a, True)])
    pairs = [(node(name), f"m-{name}") for name in ("h1", "h2", "h3")]
    parts: dict[str, Any] = {"nodes": named(pairs), "matrix": matrix}
    parts["findings"] = judge_links(matrix)
    return NetReport(**{**parts, **changes})


def page(made: NetReport) -> str:
    text = io.StringIO()
    show_network(made, Console(file=text, width=100, highlight=False))
    return text.getvalue()


def test_the_page_shows_the_matrix_and_that_nothing_is_wrong() -> None:
    text = page(report())
    rows = [line.split() for line in text.splitlines() if line.startswith("h")]
    assert ["h1", ".", "118", "118"] in rows
    assert ["h1", ".", "0.123", "(0.345)", "0.123", "(0.345)"] in rows
    assert "Nothing is wrong with the 3 measured links." in text


def test_the_page_names_who_is_slow_and_how_sure_that_is() -> None:
    text = page(report(slow=True, gaps=["h3: gone", "h3: gone"]))
    assert ["h2", "11.9", ".", "11.9"] in [line.split() for line in text.splitlines()]
    assert "WARN node_network_slow (suspected, few nodes to compare with): h2 sends at" in text
    assert text.count("h3: gone") == 1


def test_what_was_not_measured_is_a_dash_and_what_was_not_asked_a_blank() -> None:
    made = report()
    made.matrix = made.matrix.without([("h1", "h2"), ("h1", "h3")])
    made.matrix = made.matrix.with_gap("h1", "h2", Reason.LOST, "h1: the node died")
    rows = [line.split() for line in page(made).splitlines() if line.startswith("h")]
    assert ["h1", ".", "-"] in rows
    assert "Not asked for: 1 of 3 links" in page(made)


def test_a_large_fleet_lists_its_slowest_links() -> None:
    names = tuple(f"h{i:02d}" for i in range(14))
    matrix = LinkMatrix(names)
    for index, name in enumerate(names[1:], 1):
        readings = Fingerprint()
        readings.add(Measurement("network.x.send_mb_s", float(index), "MB/s", "made"))
        matrix = matrix.with_link(names[0], name, readings)
    text = page(report(matrix=matrix, findings=[]))
    listed = [line.split() for line in text.splitlines() if line.startswith("h00")]
    assert listed[0][:3] == ["h00", "h01", "1"]
    assert len(listed) == 13


def collective(**changes: Any) -> Collective:
    points = (Point(4096, 0.001, None, 5), Point(64 * 2**20, 0.5, 0.01, 5))
    reading = Measurement(BUS, 178.9, "MB/s", "gloo all-reduce")
    parts: dict[str, Any] = {"nodes": ("h1", "h2", "h3"), "reading": reading, "points": points}
    return Collective(**{**parts, **changes})


def test_the_page_of_an_all_reduce_says_what_a_step_waits_for() -> None:
    text = page(report(slow=True, collective=collective()))
    # 64 MiB in 0.5 s are 134 MB/s; times 2 · 2/3 = 179.
    assert ["67,108,864", "500", "10", "134", "179", "5"] in [
        line.split() for line in text.splitlines()
    ]
    assert "64 MiB of gradients waits 0.5 s" in text
    assert "Its slowest link is h2 → h1 at 11.9 MB/s" in text


def test_an_all_reduce_that_failed_names_its_reason() -> None:
    gap = Unmeasured(BUS, Reason.FAILED, "h2 broke it: the node died")
    text = page(report(collective=collective(reading=gap, points=())))
    assert "not measured: failed: h2 broke it: the node died" in text


def test_what_a_node_calls_itself_is_not_obeyed() -> None:
    evil = "h\x1b[31m[bold]1"
    made = report(gaps=[f"{evil}: gone"])
    text = page(made)
    assert "\x1b" not in text
    assert "[bold]" in text


def test_the_record_is_plain_json_with_reasons() -> None:
    gap = Unmeasured(BUS, Reason.FAILED, "h2 broke it")
    made = report(slow=True, collective=collective(reading=gap, points=()))
    made.matrix = made.matrix.without([("h1", "h3")])
    record = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert [n["name"] for n in record["nodes"]] == ["h1", "h2", "h3"]
    links = {f"{link['a']}{link['b']}": link for link in record["links"]}
    assert links["h1h3"]["a_to_b_mb_s"]["unmeasured"] == "not asked for"
    assert links["h1h2"]["b_to_a_mb_s"]["value"] == 11.9
    assert record["findings"][0]["code"] == "node_network_slow"
    assert record["collective"]["gradient_seconds"] is None
    assert record["collective"]["bus_mb_s"] == {"unmeasured": "failed", "detail": "h2 broke it"}


def test_exit_codes() -> None:
    assert _exit_code(report(), strict=True) == EXIT_DONE
    ill = report(slow=True)
    assert _exit_code(ill, strict=False) == EXIT_DONE
    assert _exit_code(ill, strict=True) == EXIT_DONE  # suspected only
    sure = [
        type(f)(f.nodes, type(f.finding)(**{**f.finding.__dict__, "state": "confirmed"}), f.link)
        for f in ill.findings
    ]
    assert _exit_code(report(slow=True, findings=sure), strict=True) == EXIT_NOTHING
    lost = report()
    lost.nodes[0].error = "the node died"
    assert _exit_code(lost, strict=True) == EXIT_NOTHING
    assert _exit_code(report(matrix=LinkMatrix(("h1", "h2"))), strict=False) == EXIT_NOTHING
    assert _exit_code(report(interrupted=True), strict=False) == EXIT_INTERRUPTED
