"""Where a ramp begins when an identical device was ramped before."""

from __future__ import annotations

from typing import Any

import pytest

from pichak_core.testing import MIB, FakeDevice, FakeStep, affine_memory, step_seconds
from pichak_core.tune.first_guess import FirstGuess
from pichak_core.tune.ramp import ramp_micro_batch
from pichak_core.tune.ramp_result import RampResult

BASE, ROW = 400 * MIB, 50 * MIB


def ramp(capacity_rows: int, **options: Any) -> tuple[FakeStep, RampResult]:
    """On a device where `capacity_rows` rows fit and one more does not."""
    capacity = BASE + ROW * capacity_rows + ROW // 2
    device = FakeDevice(capacity, affine_memory(BASE, ROW), seconds_of=step_seconds(0.01, 0.002))
    step = FakeStep(device)
    options = {"headroom": 0.0, "limit": 5000, **options}
    return step, ramp_micro_batch(step, backend=device, clock=device.clock, **options)


def guess_of(result: RampResult) -> FirstGuess:
    made = FirstGuess.from_ramp(result.as_dict(), "node-a")
    assert made is not None
    return made


def test_it_is_scaled_to_the_memory_of_the_next_device() -> None:
    _, first = ramp(100)
    guess = guess_of(first)
    # peak = base + rows · row, so that (budget - base) / row rows fit.
    assert guess.rows_for(BASE + 77 * ROW) == 77
    step, second = ramp(77, first_guess=guess)
    assert second.micro_batch_max == 77
    assert step.calls[0] in (76, 77, 78)
    assert second.steps_run <= 3 < first.steps_run


@pytest.mark.parametrize("rows", [1, 7, 4000])
def test_a_wrong_one_changes_nothing_but_the_way(rows: int) -> None:
    _, result = ramp(100, first_guess=FirstGuess(rows, "memory", where="another kind of device"))
    assert result.micro_batch_max == 100


def test_rows_that_ended_for_another_reason_are_not_scaled_up() -> None:
    """A ramp that ended at the rows of the data, or at its time, says nothing of more memory."""
    for limited_by in ("time", "rows", "limit", "kernel", "host memory"):
        guess = FirstGuess(40, limited_by, BASE, ROW)
        assert guess.rows_for(BASE + 100 * ROW) == 40
        assert guess.rows_for(BASE + 10 * ROW) == 10  # less memory bounds it all the same
    assert FirstGuess(40, "memory").rows_for(BASE + 100 * ROW) == 40  # without a line


def test_it_is_not_used_where_only_neighbouring_sizes_show_paging() -> None:
    device = FakeDevice(
        BASE + 100 * ROW, affine_memory(BASE, ROW), pages=True, seconds_of=step_seconds(0.01, 0.002)
    )
    step = FakeStep(device)
    ramp_micro_batch(
        step,
        backend=device,
        clock=device.clock,
        headroom=0.0,
        first_guess=FirstGuess(90, "memory", BASE, ROW),
    )
    assert step.calls[0] == 1


def test_the_round_trip_over_the_wire() -> None:
    guess = FirstGuess(12, "headroom", 4e8, 5e7, "node-a cuda:1")
    assert FirstGuess.from_dict(guess.as_dict()) == guess


@pytest.mark.parametrize(
    "record",
    [
        {"rows": 0},
        {"rows": True},
        {"rows": "12"},
        {"rows": None},
        {"rows": 12, "base_bytes": float("nan")},
        {"rows": 12, "bytes_per_row": "many"},
        {"rows": 12, "strange": 1},
    ],
)
def test_what_is_no_guess_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="first guess"):
        FirstGuess.from_dict(record)


@pytest.mark.parametrize("record", [None, {}, {"micro_batch_max": None}, ["ramp"]])
def test_a_node_without_a_ramp_foretells_nothing(record: Any) -> None:
    assert FirstGuess.from_ramp(record, "node-a") is None
