"""A reading is a measurement with its source, or the named reason why there is none."""

from __future__ import annotations

import json

import pytest

from pichak_core.measurement import (
    MAD_TO_SIGMA,
    Fingerprint,
    Measurement,
    Reason,
    Unmeasured,
    median_and_spread,
    reading_from_dict,
)


def reading(**changes: object) -> Measurement:
    parts = {
        "name": "disk.read_mb_s",
        "value": 512.5,
        "unit": "MB/s",
        "source": "median of 8 reads of 256 MB",
        "samples": 8,
        "spread": 3.5,
        "conditions": {"steal_percent": 0.5},
        "detail": {"by_depth": [[1, 300.0], [2, 512.5]]},
    }
    return Measurement(**{**parts, **changes})  # type: ignore[arg-type]


def test_a_measurement_needs_a_source_and_a_finite_value() -> None:
    with pytest.raises(ValueError, match="needs its source"):
        reading(source=" ")
    with pytest.raises(ValueError, match="not a measurement"):
        reading(value=float("nan"))


def test_a_fingerprint_survives_json() -> None:
    made = Fingerprint()
    made.add(reading())
    made.add(reading(name="golden.gradient_digest", value="ab12", unit="", spread=None))
    made.add(Unmeasured("gpu.name", Reason.NO_DEVICE, "no NVML library"))
    again = Fingerprint.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made


def test_what_is_absent_or_impossible_is_no_number() -> None:
    made = Fingerprint()
    made.add(reading())
    made.add(reading(name="a", suspect="faster than its link"))
    made.add(reading(name="b", value="ext4"))
    made.add(reading(name="c", value=True))
    made.add(Unmeasured("d", Reason.TIMED_OUT))
    assert made.number("disk.read_mb_s") == 512.5
    assert [made.number(n) for n in ("a", "b", "c", "d", "e")] == [None] * 5
    assert made.text("b") == "ext4"
    assert made.text("d") is None


@pytest.mark.parametrize("entry", [None, 3, {}, {"value": 1}, {"value": [1], "source": "x"}])
def test_what_is_not_a_reading_is_refused_by_name(entry: object) -> None:
    with pytest.raises(ValueError, match=r"disk\.x"):
        reading_from_dict("disk.x", entry)


def test_an_unknown_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="whatever"):
        reading_from_dict("disk.x", {"unmeasured": "whatever"})


def test_median_and_scaled_mad() -> None:
    # The deviations from 3 are 2, 1, 0, 1, 97: their median is 1.
    assert median_and_spread([1, 2, 3, 4, 100]) == (3, MAD_TO_SIGMA)
    assert median_and_spread([1.0, 3.0]) == (2.0, None)
    with pytest.raises(ValueError, match="no samples"):
        median_and_spread([])


def test_describing() -> None:
    assert reading().describe() == "512.5 MB/s (± 3.5, n = 8)"
    assert "SUSPECT: cached" in reading(suspect="cached").describe()
    assert Unmeasured("x", Reason.BUSY, "pid 12").describe() == "skipped: device busy: pid 12"
