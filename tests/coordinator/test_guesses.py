"""Which device's ramp foretells which other's."""

from __future__ import annotations

from pichak_coordinator.guesses import RampGuesses
from pichak_coordinator.records import NodeRecord, Row

RAMP = {"micro_batch_max": 23, "limited_by": "memory", "base_bytes": 4e8, "bytes_per_row": 5e7}
NOW = {"model": "builtin:gpt-1m", "data": "a.jsonl", "method": "full", "seq_len": None, "seed": 0}


def row(ramp: object, *, model: str = "L4", simulated: bool = False) -> Row:
    node = NodeRecord("n1", "host-a", device="cuda:0", gpu_model=model, simulated=simulated)
    return Row(node, ramp=ramp)  # type: ignore[arg-type]


def test_an_identical_device_is_one_of_the_same_model() -> None:
    guesses = RampGuesses()
    guesses.learn("L4", RAMP, "host-a cuda:0")
    found = guesses.of("L4")
    assert found is not None
    assert (found["rows"], found["where"]) == (23, "host-a cuda:0")
    assert guesses.of("L40S") is None
    assert guesses.of("") is None


def test_a_device_without_a_name_teaches_nobody() -> None:
    guesses = RampGuesses()
    guesses.learn("", RAMP, "host-a")
    guesses.learn("L4", None, "host-b")
    guesses.learn("L4", {"micro_batch_max": 0}, "host-b")
    assert guesses.of("") is guesses.of("L4") is None


def test_the_run_before_counts_where_it_trained_the_same() -> None:
    for change, counts in (
        ({}, True),
        ({"seed": 1}, True),
        ({"seq_len": 512}, False),
        ({"method": "lora"}, False),
        ({"model": "builtin:gpt-25m"}, False),
    ):
        guesses = RampGuesses()
        guesses.learn_run([row(RAMP), row(None, model="T4")], NOW | change, NOW)
        assert (guesses.of("L4") is not None) == counts, change
        assert guesses.of("T4") is None


def test_a_simulated_ramp_foretells_nothing_of_a_real_device() -> None:
    guesses = RampGuesses()
    guesses.learn_run([row(RAMP, simulated=True)], NOW, NOW)
    assert guesses.of("L4") is None
