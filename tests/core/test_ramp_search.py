"""The search against doubling and bisecting, on memories whose edge is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pichak_core.tune.ramp_search import EdgeSearch, Sample

MIB = 2**20


def doubling_and_bisecting(edge: int, start: int, ceiling: int) -> int:
    """How many sizes plain doubling and bisecting runs to find `edge`."""
    calls, fits, size = 0, 0, start
    while True:
        calls += 1
        if size > edge:
            fails = size
            break
        fits = size
        if size == ceiling:
            return calls
        size = min(2 * size, ceiling)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        calls += 1
        if middle <= edge:
            fits = middle
        else:
            fails = middle
    return calls


def largest_fitting(reserved: Callable[[int], int], budget: int, ceiling: int) -> int:
    """By trying every size."""
    return max((rows for rows in range(1, ceiling + 1) if reserved(rows) <= budget), default=0)


def run(
    search: EdgeSearch,
    allocated: Callable[[int], int],
    reserved: Callable[[int], int],
    capacity: int,
) -> tuple[int, list[int], int]:
    """(the edge found, the sizes run, how many of them were refused)."""
    ran: list[int] = []
    refusals = 0
    while (size := search.next_size()) is not None:
        assert size not in ran, "a size was run twice"
        ran.append(size)
        refused = reserved(size) > capacity
        refusals += refused
        search.record(
            size,
            fits=reserved(size) <= search.budget_bytes,
            sample=None if refused else Sample(size, allocated(size), reserved(size)),
        )
    return search.low, ran, refusals


def rounded(allocated: Callable[[int], int], granule: int) -> Callable[[int], int]:
    return lambda rows: -(-allocated(rows) // granule) * granule


def affine_cases(edge: int) -> list[tuple[int, int, int, int]]:
    """(base, bytes a row, granule, floor) with rounding up to one row's bytes."""
    noise = random.Random(edge)
    cases = []
    for share, held in itertools.product((0.0, 0.1, 0.3, 0.5, 0.7, 0.9), (0.0, 0.5, 0.9)):
        for granule in (1, 512, 2 * MIB, 20 * MIB):
            per_row = int(granule + 10 ** noise.uniform(5.5, 8.5))
            base = int(share / (1 - share) * per_row * edge) + noise.randrange(1, 512)
            cases.append((base, per_row, granule, int(held * base)))
    return cases


@pytest.mark.parametrize(("edge", "most"), [(23, 7), (100, 10), (1000, 13)])
@pytest.mark.parametrize("headroom", [0.0, 0.12])
@pytest.mark.parametrize("allocator_tells", [True, False])
def test_affine_memory_needs_few_calls(
    edge: int, most: int, headroom: float, allocator_tells: bool
) -> None:
    for base, per_row, granule, floor in affine_cases(edge):

        def allocated(rows: int, base: int = base, per_row: int = per_row) -> int:
            return base + per_row * rows

        reserved = rounded(allocated, granule)
        budget = reserved(edge) + (reserved(edge + 1) - reserved(edge)) // 2
        capacity = math.ceil(budget / (1 - headroom))
        assert reserved(edge) <= budget < reserved(edge + 1)
        search = EdgeSearch(start=1, ceiling=10 * edge, budget_bytes=budget, floor_bytes=floor)
        # Where nothing tells allocated from reserved memory, the fit is through rounded peaks.
        seen = allocated if allocator_tells else reserved
        found, ran, refusals = run(search, seen, reserved, capacity)
        assert found == edge
        assert len(ran) <= most, (base, per_row, granule, ran)
        assert refusals <= (2 if not headroom else 1)


@pytest.mark.parametrize("edge", [23, 100, 1000])
@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_a_good_first_guess_needs_three_calls(edge: int, off_by: int) -> None:
    search = EdgeSearch(
        start=1, ceiling=5000, budget_bytes=100 + 10 * edge, first_guess=edge + off_by
    )
    found, ran, refusals = run(search, lambda b: 100 + 10 * b, lambda b: 100 + 10 * b, 10**9)
    assert found == edge
    assert ran[0] == edge + off_by
    assert len(ran) <= 3
    assert refusals <= 2


@pytest.mark.parametrize("guess", [1, 3, 64, 5000, 10**9])
def test_a_bad_first_guess_costs_two_calls_at_most(guess: int) -> None:
    search = EdgeSearch(start=1, ceiling=5000, budget_bytes=330, first_guess=guess)
    found, ran, _ = run(search, lambda b: 100 + 10 * b, lambda b: 100 + 10 * b, 330)
    assert found == 23
    assert len(ran) <= doubling_and_bisecting(23, 1, 5000) + 2


@st.composite
def monotone_memories(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int | None]:
    """Any non-decreasing memory of up to 100 sizes: (allocated, reserved, budget, start, guess)."""
    ceiling = draw(st.integers(1, 100))
    jump = st.one_of(st.just(0), st.integers(0, 10), st.integers(0, 10**6))
    rises = draw(st.lists(jump, min_size=ceiling, max_size=ceiling))
    allocated = list(itertools.accumulate(rises, initial=draw(st.integers(1, 10**5))))[1:]
    slack = draw(st.integers(0, 1000))
    budget = draw(st.integers(0, allocated[-1] + 2 * slack + 1))
    start = draw(st.integers(1, ceiling))
    guess = draw(st.one_of(st.none(), st.integers(1, 2 * ceiling)))
    return allocated, [a + slack for a in allocated], budget, start, guess


@settings(max_examples=200)
@given(monotone_memories(), st.booleans())
@example(([10**9] * 300, [10**9] * 300, 5, 300, None), True)
def test_never_two_more_than_doubling_and_bisecting(
    memory: tuple[list[int], list[int], int, int, int | None], refuses: bool
) -> None:
    allocated, reserved, budget, start, guess = memory
    ceiling = len(allocated)
    edge = largest_fitting(lambda b: reserved[b - 1], budget, ceiling)
    search = EdgeSearch(start=start, ceiling=ceiling, budget_bytes=budget, first_guess=guess)
    found, ran, _ = run(
        search,
        lambda b: allocated[b - 1],
        lambda b: reserved[b - 1],
        budget if refuses else 10**12,
    )
    assert found == edge
    assert len(ran) <= doubling_and_bisecting(edge, start, ceiling) + 2


@settings(max_examples=200)
@given(
    knee=st.integers(0, 2000),
    per_row=st.integers(1, 10**7),
    base=st.integers(0, 10**9),
    edge=st.integers(1, 2000),
    granule=st.sampled_from([1, 512, 2 * MIB]),
)
def test_an_optimizer_phase_above_the_small_sizes_does_not_mislead(
    knee: int, per_row: int, base: int, edge: int, granule: int
) -> None:
    def allocated(rows: int) -> int:
        return max(base + per_row * knee, base + per_row * rows)

    reserved = rounded(allocated, granule)
    budget = reserved(edge)
    search = EdgeSearch(start=1, ceiling=3000, budget_bytes=budget)
    found, ran, _ = run(search, allocated, reserved, budget)
    assert found == largest_fitting(reserved, budget, 3000)
    assert len(ran) <= doubling_and_bisecting(found, 1, 3000) + 2


# field case 3
@settings(max_examples=200)
@given(
    per_row=st.integers(1, 10**6),
    base=st.integers(0, 10**8),
    knee=st.integers(0, 50),
    edge=st.integers(2, 500),
    held=st.floats(0, 1),
)
def test_where_memory_is_the_systems_no_size_is_run_that_may_not_fit(
    per_row: int, base: int, knee: int, edge: int, held: float
) -> None:
    def peak(rows: int) -> int:
        return max(base + per_row * knee, base + per_row * rows)

    safe = peak(edge)
    if peak(1) > safe:
        return
    search = EdgeSearch(
        start=1,
        ceiling=10_000,
        budget_bytes=safe,
        safe_bytes=safe,
        floor_bytes=int(held * base),
        first_guess=9_999,
    )
    found, ran, refusals = run(search, peak, peak, safe)
    assert refusals == 0
    assert max(peak(size) for size in ran) <= safe
    assert found == max(ran)


def test_a_prediction_ends_a_cautious_search_at_the_edge() -> None:
    search = EdgeSearch(start=1, ceiling=512, budget_bytes=335, safe_bytes=335, floor_bytes=90)
    found, _, _ = run(search, lambda b: 100 + 10 * b, lambda b: 100 + 10 * b, 335)
    assert found == 23
    assert search.stopped_on_prediction
    assert search.predicted_peak(24) == pytest.approx(340, abs=1)


def test_what_failed_later_moves_the_edge_down() -> None:
    search = EdgeSearch(start=1, ceiling=64, budget_bytes=10**9)
    run(search, lambda b: b, lambda b: b, 10**9)
    assert search.low == 64
    search.record(64, fits=False)
    found, ran, _ = run(search, lambda b: b, lambda b: b, 10**9)
    assert found == 63
    assert ran


def test_a_start_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start 9 is not within 1\.\.8"):
        EdgeSearch(start=9, ceiling=8, budget_bytes=1)
