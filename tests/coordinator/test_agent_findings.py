"""What an agent tells when it is greeted: its form is checked, and it reaches the table."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.testing import SimulatedNode, gpu_fault, host_fault
from pichak_agent.watch import Watch
from pichak_agent.watch_rules import CODES as WATCH_CODES
from pichak_agent.watch_rules import RULES
from pichak_coordinator.agent_findings import CODES, agent_findings, findings_of_each, from_agent
from pichak_coordinator.store import Store


def told(**changes: Any) -> dict[str, Any]:
    return {
        "code": "gpu_slowed",
        "severity": "warn",
        "subject": "GPU-a",
        "sentence": "GPU 0 slowed itself down",
        "evidence": {"share_of_readings": 0.9, "from_unix": 1.8e9},
        "state": "confirmed",
        "first_unix": 1.8e9,
        "last_unix": 1.8e9 + 60,
        "episodes": 1,
        **changes,
    }


def hello(*findings: Any, **more: Any) -> dict[str, Any]:
    return {"machine_id": "m", "host": "node-a", "findings": list(findings), **more}


def test_both_sides_know_the_same_codes() -> None:
    assert CODES == WATCH_CODES


def test_its_source_and_time_are_said() -> None:
    (found,) = agent_findings(hello(told()))
    assert found.sentence == (
        "the agent on node-a saw, at 2027-01-15 08:01:00 UTC (and first at 2027-01-15 08:00:00 UTC)"
        ": GPU 0 slowed itself down"
    )
    assert (found.evidence["first_unix"], found.evidence["last_unix"]) == (1.8e9, 1.8e9 + 60)
    assert (found.code, found.severity, found.state) == ("gpu_slowed", "warn", "confirmed")
    assert found.evidence["share_of_readings"] == 0.9
    assert found.evidence["subject"] == "GPU-a"
    assert from_agent(found)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "text",
        [],
        told(code="rm_rf"),
        told(code=7),
        told(code=["gpu_slowed"]),
        told(severity="fatal"),
        told(severity=["warn"]),
        told(state="resolved"),
        told(state=None),
        told(sentence=""),
        told(sentence=5),
        told(first_unix="now"),
        told(first_unix=math.inf),
        told(first_unix=math.nan),
        told(first_unix=True),
        told(first_unix=-1),
        told(last_unix=math.nan),
        told(last_unix="now"),
        {},
    ],
)
def test_what_is_malformed_is_left_out(entry: Any) -> None:
    found = agent_findings(hello(entry, told()))
    assert [f.code for f in found] == ["gpu_slowed"]


def test_time_words_and_figures_are_of_one_moment() -> None:
    """Processes are killed again and again: what is told is the last look's, and so is its time."""
    killing = host_fault(100, oom_kills=lambda since, _: int(since // 20))
    watch = Watch(RULES)
    for reading in SimulatedNode(jobs=0.0).trace(900, [killing]):
        watch.take(reading)
    (found,) = agent_findings(hello(*(f.as_dict() for f in watch.findings())))
    evidence = found.evidence
    assert evidence["first_unix"] < evidence["from_unix"] < evidence["last_unix"]
    assert evidence["to_unix"] == pytest.approx(evidence["last_unix"], abs=1e-3)
    count = evidence["after"] - evidence["before"]
    when = datetime.fromtimestamp(evidence["last_unix"], timezone.utc).strftime("%H:%M:%S")
    assert f" {when} UTC (and first at " in found.sentence
    assert f"ended {count} processes" in found.sentence


@pytest.mark.parametrize("findings", [None, "x", {"a": 1}, 5])
def test_a_greeting_without_a_list_finds_nothing(findings: Any) -> None:
    assert agent_findings({"findings": findings}) == []
    assert agent_findings({}) == []


def test_text_is_one_short_plain_line_and_figures_are_flat() -> None:
    evil = told(
        sentence="a\n\x1b[2Jb" + "c" * 5000,
        subject="s" * 5000,
        evidence={
            "nested": {"a": 1},
            "long": "y" * 5000,
            "nan": math.nan,
            "n\x1b": 1,
            **{f"k{n}": n for n in range(1000)},
        },
    )
    (found,) = agent_findings(hello(evil, host="h\x1b]0;x"))
    assert found.sentence.isprintable()
    assert len(found.sentence) < 800
    assert len(found.evidence) <= 23
    assert "nested" not in found.evidence
    assert "nan" not in found.evidence
    assert all(len(str(v)) <= 200 for v in found.evidence.values())
    assert len(agent_findings(hello(*[told(code=c) for c in sorted(CODES)] * 100))) <= 27


def test_cards_with_the_same_are_one_sentence() -> None:
    cards = [told(subject=f"GPU-{n}", state="suspected") for n in range(3)]
    (found,) = agent_findings(hello(*cards, told(subject="GPU-x", severity="fail")))
    assert found.severity == "fail"
    assert found.evidence["of_this_kind"] == 4
    assert found.sentence.endswith("(and 3 more of this kind)")


def node_of(host: str, boot: Any, *findings: Any) -> dict[str, Any]:
    return {"machine_id": "m", "host": host, "boot": boot, "findings": list(findings)}


def test_what_a_machine_has_is_told_once_however_many_nodes_it_is(tmp_path: Path) -> None:
    """Three Ray nodes of one machine, and one of a clone that has the same machine id."""
    killed = told(code="oom_kill", subject="", state="suspected")
    sure = {**killed, "state": "confirmed"}
    slowed = told()
    hellos = [
        node_of("a", "b1", killed, slowed),
        node_of("a", "b1", sure, slowed),
        node_of("a", "b1", killed),
        node_of("a", "b2", killed),
    ]
    found = [[(f.code, f.state) for f in each] for each in findings_of_each(hellos)]
    # What is of a card stays with each node that told it.
    assert found == [
        [("gpu_slowed", "confirmed")],
        [("gpu_slowed", "confirmed"), ("oom_kill", "confirmed")],
        [],
        [("oom_kill", "suspected")],
    ]
    with Store.open(tmp_path / "h.db") as store:
        run = store.begin_run("fleet profile", {})
        nodes = store.record_nodes(run, hellos)
        for renewed in (False, True):
            if renewed:
                store.renew_findings(run)
            kept = {
                node: f
                for node in nodes
                for f in store.findings(run).get((node, ""), ())
                if f.code == "oom_kill"
            }
            assert list(kept) == [nodes[1], nodes[3]]
            assert kept[nodes[1]].sentence.endswith("(its machine is 3 nodes of this run)")
            assert kept[nodes[1]].evidence["nodes_of_the_machine"] == 3
            assert "nodes_of_the_machine" not in kept[nodes[3]].evidence


@pytest.mark.parametrize("boot", [None, "", 5, [], {}])
def test_without_a_boot_every_node_stands_alone(boot: Any) -> None:
    hellos = [node_of("a", boot, told(code="oom_kill")) for _ in range(2)]
    assert [[f.code for f in each] for each in findings_of_each(hellos)] == [["oom_kill"]] * 2


def test_it_is_kept_with_the_run_and_again_after_an_import(tmp_path: Path) -> None:
    watch = Watch(RULES)
    for reading in SimulatedNode(jobs=0.0).trace(60, [gpu_fault(0, ecc_uncorrected=2)]):
        watch.take(reading)
    sent = [found.as_dict() for found in watch.findings()]
    with Store.open(tmp_path / "h.db") as store:
        run = store.begin_run("fleet profile", {})
        (node,) = store.record_nodes(run, [hello(*sent)])
        (found,) = store.findings(run)[node, ""]
        assert (found.code, found.severity, found.state) == ("gpu_ecc", "fail", "confirmed")
        assert "the agent on node-a saw" in found.sentence
        assert found.fault  # never picked silently
        store.renew_findings(run)
        assert [f.code for f in store.findings(run)[node, ""]] == ["gpu_ecc"]
