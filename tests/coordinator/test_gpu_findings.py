"""A node's own verdicts on its GPU, as findings of its row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pichak_coordinator.absolute import absolute_findings
from pichak_coordinator.gpu_findings import STATES, gpu_findings
from pichak_coordinator.records import NodeRecord, Row
from pichak_core.measure import _gpu_verdict
from pichak_core.measurement import Fingerprint, Measurement

LIMIT = {
    "code": "gpu_power_limit",
    "severity": "warn",
    "sentence": "the power limit in force is 150 W",
    "evidence": {"limit_watts": 150.0, "default_watts": 300.0},
}


def row(*listed: Any) -> Row:
    made = Fingerprint()
    detail = {"findings": list(listed)}
    made.add(Measurement("gpu.state_verdict", "x", "", "NVML", detail=detail))
    return Row(NodeRecord("n", "h", device="cuda:0"), made)


def test_every_code_of_the_measurement_is_known() -> None:
    text = Path(_gpu_verdict.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"Verdict\(\s*\"([a-z_]+)\"", text)) == set(STATES)


def test_what_is_read_is_confirmed_and_what_was_timed_is_suspected() -> None:
    slow = {"code": "gpu_slowed", "severity": "warn", "sentence": "it slowed itself down"}
    limit, slowed = gpu_findings(row(LIMIT, slow))
    assert (limit.code, limit.state, limit.severity) == ("gpu_power_limit", "confirmed", "warn")
    assert limit.evidence == {"limit_watts": 150.0, "default_watts": 300.0}
    assert (slowed.code, slowed.state) == ("gpu_slowed", "suspected")


def test_they_are_among_the_absolute_findings() -> None:
    assert "gpu_power_limit" in {each.code for each in absolute_findings(row(LIMIT))}
    assert absolute_findings(row()) == []


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "text",
        [],
        {},
        {**LIMIT, "code": "unheard_of"},
        {**LIMIT, "code": ["gpu_ecc"]},
        {**LIMIT, "severity": "panic"},
        {**LIMIT, "severity": []},
        {**LIMIT, "sentence": "  "},
        {**LIMIT, "sentence": 5},
    ],
)
def test_what_a_node_sent_wrongly_is_left_out(entry: Any) -> None:
    (kept,) = gpu_findings(row(entry, LIMIT))
    assert kept.code == "gpu_power_limit"
