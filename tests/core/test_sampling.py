"""Draws over row numbers: each row as likely as any other, none twice, the same for a seed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_core.tune.sampling import Shuffle, draw_rows


def test_all_rows_when_all_are_asked_for_or_there_are_no_more():
    assert draw_rows(5, None, 0) == draw_rows(5, 5, 0) == draw_rows(5, 9, 1) == [0, 1, 2, 3, 4]


def test_the_seed_decides():
    assert draw_rows(1000, 10, 7) == draw_rows(1000, 10, 7) != draw_rows(1000, 10, 8)


@pytest.mark.parametrize("draw", ["draw_rows", "Shuffle"])
def test_every_row_is_as_likely(draw):
    # 4,000 draws of 5 out of 20: each row is drawn 1,000 times, standard deviation 27.4.
    counts: Counter[int] = Counter()
    for seed in range(4000):
        counts.update(draw_rows(20, 5, seed) if draw == "draw_rows" else Shuffle(20, seed).take(5))
    assert set(counts) == set(range(20))
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 27.4


@given(n=st.integers(0, 200), steps=st.lists(st.integers(1, 50)), seed=st.integers(0, 5))
def test_a_shuffle_is_a_permutation_in_pieces(n, steps, seed):
    shuffle = Shuffle(n, seed)
    drawn = [number for step in steps for number in shuffle.take(step)]
    assert len(drawn) == min(n, sum(steps))
    assert len(set(drawn)) == len(drawn)
    assert sorted(drawn + shuffle.take(n)) == list(range(n))
    assert shuffle.take(1) == []


def test_a_shuffle_of_much_keeps_little():
    shuffle = Shuffle(10**12, 0)
    assert len(set(shuffle.take(1000))) == 1000
    assert len(shuffle._moved) <= 1000
