"""What was true of the machine while a job ran is part of its result, for every kind of job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pichak_agent import runner
from pichak_agent.messages import Job, Outcome, decode

RAMP = {
    "model": "builtin:gpt-1m",
    "device": "cpu",
    "seq_len": 16,
    "limit": 2,
    "memory_cap_bytes": 400 * 2**20,
    "step_seconds": 3.0,
}


@pytest.fixture
def neighbour() -> Iterator[None]:
    """A process that is none of the job's and takes what it gets of a core."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        yield
        spinning.kill()


def run(kind: str, params: dict[str, Any]) -> Mapping[str, Any]:
    outcome = decode(runner.run(Job("job", 1, kind, params, 100.0)), Outcome)
    assert outcome.status == "ok", outcome.error
    return outcome.result


def conditions(kind: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
    if kind == "fingerprint":
        return dict(result["fingerprint"]["cpu.single_thread_deflate_mb_s"]["conditions"])
    return dict(result["ramp"]["conditions"] if kind == "ramp" else result["conditions"])


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("fingerprint", {"only": ["cpu"]}),
        ("task", {"model": "builtin:gpt-1m", "device": "cpu", "seq_len": 16}),
        ("ramp", RAMP),
        ("net_reach", {"peers": []}),
    ],
)
def test_a_neighbour_is_seen(kind: str, params: dict[str, Any], neighbour: None) -> None:
    found = conditions(kind, run(kind, params))
    assert found["cpu.load_average_1m"] >= 0
    if kind != "net_reach":  # too short for the system's ticks
        assert found["cpu.load_others_cores"] > 0.1
        assert 0 <= found["cpu.steal_percent"] <= 100
