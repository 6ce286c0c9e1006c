"""What one device does in a step, against closed forms: on the ramp and beyond."""

from __future__ import annotations

import random

import pytest
from pick_rows import ramp, row

from pichak_coordinator.members import gradient_of, members_of, rows_of_step
from pichak_coordinator.pick_many import CannotPickError, Wish, pick_many
from pichak_coordinator.prices import NO_PRICES
from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.stored_links import StoredLinks
from pichak_core.plan import Plan


def test_a_rest_lies_on_the_line_between_the_sizes_around_it() -> None:
    """Micro-batches of 8 in 1 s; 2 and 6 ran in 0.3 and 0.7 s of one pass; a size that did not pass
    is not believed. A row more takes 0.1 s from 2 to 6, and 0.15 s from there to 8."""
    (member,), _ = members_of([row("a", 1.0, 8, ramp=ramp(b2=0.3, b6=0.7))])
    times = {1: 0.3, 2: 0.3, 3: 0.4, 5: 0.6, 6: 0.7, 7: 0.85, 8: 1.0, 13: 1.6, 16: 2.0, 26: 3.3}
    assert {rows: member.step_seconds(rows) for rows in times} == pytest.approx(times)
    assert member.describe(13) == (
        "13 rows: 1 × 1 s for micro-batches of 8 + 0.6 s for the last 5, on the line between "
        "2 (0.3 s) and 6 (0.7 s) of the ramp"
    )
    assert member.describe(7) == "7 rows: on the line between 6 (0.7 s) and 8 (1 s) of the ramp"
    assert member.describe(6) == "6 rows: as long as 6 took in the ramp (0.7 s)"
    assert member.describe(1) == (
        "1 row: as long as 2 took (0.3 s), the ramp's smallest that is used: an upper bound"
    )
    (single,), _ = members_of([row("a", 1.5, 1)])
    assert single.describe(1) == "1 row: 1 × 1.5 s for micro-batches of 1"
    # A size that was slower than a larger one is not used: fewer rows never take longer.
    (slow,), _ = members_of([row("a", 1.0, 8, ramp=ramp(b2=5.0))])
    assert slow.step_seconds(1) == 1.0
    (dent,), _ = members_of([row("a", 1.0, 8, ramp=ramp(b2=0.2, b4=0.9, b5=0.8))])
    assert dent.step_seconds(4) == pytest.approx(0.2 + 0.6 * 2 / 3)
    assert "between 2 (0.2 s) and 5 (0.8 s)" in dent.describe(4)
    (bare,), _ = members_of([row("a", 1.0, 8, ramp={"tried": [{"batch": "x"}, 3]})])
    assert bare.step_seconds(9) == 2.0
    assert bare.describe(1).endswith("as long as 8 took (1 s), the only size known: an upper bound")


def test_affine_times_are_given_back_exactly() -> None:
    """A step of b rows takes f + c·b: so it does at every size between the smallest and the whole
    micro-batch, and never less above."""
    rng = random.Random(7)
    for _ in range(50):
        fixed, each = rng.uniform(0, 0.1), rng.uniform(0.001, 0.01)
        sizes = sorted(rng.sample(range(4, 200), 5))
        rungs = {f"b{size}": fixed + each * size for size in sizes[:-1]}
        whole = fixed + each * sizes[-1]
        (member,), _ = members_of([row("a", whole, sizes[-1], ramp=ramp(**rungs))])
        for rows in range(sizes[0], sizes[-1] + 1):
            assert member.step_seconds(rows) == pytest.approx(fixed + each * rows, rel=1e-12)
        for rows in (*range(1, sizes[0]), *range(sizes[-1], 3 * sizes[-1])):
            assert member.step_seconds(rows) >= (fixed + each * rows) * (1 - 1e-12)
        several = 3 * sizes[-1] + sizes[1]
        assert member.step_seconds(several) == pytest.approx(4 * fixed + each * several)


def test_rows_of_a_step() -> None:
    members, _ = members_of([row("a", target=2400.0), row("b", target=2410.0), row("c")])
    found = rows_of_step(members)
    assert found is not None
    assert found == 24
    assert found.measured
    given = rows_of_step(members, 7)
    assert given is not None
    assert given == 7
    assert not given.measured
    bare = Row(
        NodeRecord("n"),
        plan=Plan()
        .set("micro_batch", 2, "ramp")
        .set("seconds_per_step", 1.0, "timed")
        .set("tokens_per_second", 100.0, "timed", unit="tokens/s"),
    )
    found_members, _ = members_of([bare])
    assert rows_of_step(found_members) is None
    assert gradient_of(found_members) is None
    with pytest.raises(CannotPickError, match="--batch-rows"):
        pick_many([bare], StoredLinks(), NO_PRICES, Wish(1))
