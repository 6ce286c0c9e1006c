"""Findings from copies: content that arrives wrong, peers that do not reach each other, a bus."""

from __future__ import annotations

from typing import Any

from pichak_coordinator.absolute import absolute_findings
from pichak_coordinator.copy_findings import copy_findings
from pichak_coordinator.judge import judge
from pichak_coordinator.records import NodeRecord, Row
from pichak_core.measurement import Fingerprint, Measurement


def row(*readings: Measurement) -> Row:
    made = Fingerprint()
    for reading in readings:
        made.add(reading)
    return Row(NodeRecord("n", "host", device="cuda:0", gpu_model="L4"), made)


def reading(name: str, value: Any, unit: str = "", **more: Any) -> Measurement:
    return Measurement(name, value, unit, "a source", **more)


def peers(*pairs: dict[str, Any]) -> Row:
    return row(reading("gpu.peer_copy_verdict", "told", detail={"pairs": list(pairs)}))


GOOD = {"source": "cuda:0", "target": "cuda:1", "verdict": "works"}


def test_copies_that_arrive_wrong_are_a_failure_though_their_rate_is_suspect() -> None:
    bad = row(
        reading("gpu.h2d_pinned_mb_s", 9e5, "MB/s", suspect="wrong", detail={"wrong": 3}),
        reading("gpu.d2h_pinned_mb_s", 2e4, "MB/s", detail={"wrong": 0}),
        reading("disk.read_mb_s", 2e3, "MB/s", detail={"wrong": 9}),
    )
    (finding,) = absolute_findings(bad)
    assert (finding.code, finding.severity, finding.state) == (
        "copies_corrupt",
        "fail",
        "suspected",
    )
    assert finding.evidence == {"wrong": {"gpu.h2d_pinned_mb_s": 3}}
    ((again,),) = judge([bad], earlier=judge([bad])).values()
    assert again.fault


def test_peers_whose_copies_do_not_arrive_gate_plans_with_several_gpus() -> None:
    # field case 99: the driver says yes
    zeros = {"source": "cuda:0", "target": "cuda:2", "verdict": "zeros", "access": True}
    hangs = {"source": "cuda:2", "target": "cuda:0", "verdict": "hangs"}
    (finding,) = copy_findings(peers(GOOD, zeros, hangs))
    assert finding.code == "peer_copies_fail"
    assert "cuda:0 to cuda:2: zeros, cuda:2 to cuda:0: hangs" in finding.sentence
    assert not list(copy_findings(peers(GOOD)))


def test_a_shared_bus_is_a_note() -> None:
    (finding,) = copy_findings(row(reading("gpu.copies_together_ratio", 0.49)))
    assert (finding.code, finding.severity) == ("shared_bus", "info")
    assert "49%" in finding.sentence
    assert not list(copy_findings(row(reading("gpu.copies_together_ratio", 0.97))))


def test_malformed_details_say_nothing() -> None:
    for detail in ({}, {"pairs": 5}, {"pairs": ["x", None]}, {"wrong": "many"}, {"wrong": None}):
        assert not list(copy_findings(row(reading("gpu.peer_copy_verdict", "x", detail=detail))))
