"""The time of a ring all-reduce, held against its closed form."""

from __future__ import annotations

import pytest

from pichak_coordinator.ring_time import Link, ring_seconds, ring_steps


def test_without_latency_it_is_the_bus_formula() -> None:
    """2(n − 1)/n × S ÷ the slowest rate: 100 MB over 4 at 25 MB/s is 6 s."""
    links = [Link(50.0, 0.0, "m"), Link(25.0, 0.0, "m"), Link(80.0, 0.0, "m"), Link(80.0, 0.0, "m")]
    assert ring_seconds(100_000_000, 4, links) == pytest.approx(6.0)
    for n in (2, 3, 8, 64):
        assert ring_seconds(10**9, n, [Link(100.0, 0.0, "m")] * n) == pytest.approx(
            2 * (n - 1) / n * 10
        )


def test_latency_is_half_a_round_trip_in_each_of_the_steps() -> None:
    """Nothing to send to speak of: 2 × (5 − 1) steps of 20 ms."""
    assert ring_seconds(0, 5, [Link(1e6, 40.0, "m")] * 5) == pytest.approx(8 * 0.020)


def test_the_slowest_link_is_that_of_latency_and_rate_together() -> None:
    """8 MB over 2: 4 MB a step take 0.4 s at 10 MB/s, and 0.04 s at 100 MB/s behind 500 ms."""
    near, far = Link(10.0, 0.0, "m"), Link(100.0, 1000.0, "m")
    assert near.step_seconds(8_000_000, 2) == pytest.approx(0.4)
    assert far.step_seconds(8_000_000, 2) == pytest.approx(0.54)
    assert ring_seconds(8_000_000, 2, [near, far]) == pytest.approx(2 * 0.54)


def test_one_member_reduces_nothing() -> None:
    assert ring_steps(1) == 0
    assert ring_seconds(10**9, 1, []) == 0
    with pytest.raises(ValueError, match="0 members"):
        ring_steps(0)


@pytest.mark.parametrize(("rate", "rtt"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1), (1.0, -1.0)])
def test_a_link_has_a_rate(rate: float, rtt: float) -> None:
    with pytest.raises(ValueError, match="no link"):
        Link(rate, rtt, "m")
