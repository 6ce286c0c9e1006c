"""Rows in, padded batches out: what is scored, what is padding, and each row once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pichak_core.workload.batches import (
    LEAST_MICRO_BATCHES,
    UNSCORED,
    MicroBatches,
    longest_rows,
    pad_right,
)

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class Row:
    input_ids: list[int]
    scored: list[bool]


class Source:
    """One pass over rows, given out at most `most` at a time."""

    def __init__(self, rows: Sequence[Row], most: int = 1000) -> None:
        self.left, self.most = list(rows), most

    def rows(self, n: int) -> list[Row]:
        n = min(n, self.most)
        taken, self.left = self.left[:n], self.left[n:]
        return taken


def numbered(count: int) -> list[Row]:
    """Rows of 2 to 6 tokens, all ids of row i being i."""
    return [Row([i] * (2 + i % 5), [True] * (2 + i % 5)) for i in range(count)]


def first_ids(batches: MicroBatches, i: int) -> list[int]:
    return [int(row[0]) for row in batches.get(i).input_ids]


def test_padding_is_neither_attended_to_nor_scored() -> None:
    batch = pad_right([Row([5, 6, 7], [False, True, False]), Row([8], [True])], pad_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.labels.tolist() == [[UNSCORED, 6, UNSCORED], [8, UNSCORED, UNSCORED]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    # The 8 stands first: nothing predicts it.
    assert batch.scored_tokens == 1


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        pad_right([])


def test_longest_rows_are_full_length_and_all_scored() -> None:  # field case 58
    state = torch.get_rng_state()
    batch = longest_rows(3, 11, 40, seed=7, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert batch.input_ids.shape == batch.attention_mask.shape == (3, 11)
    assert torch.equal(batch.labels, batch.input_ids)
    assert bool(batch.attention_mask.all())
    assert batch.scored_tokens == 3 * 10
    assert 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < 40
    assert len(set(batch.input_ids.flatten().tolist())) > 10
    again = longest_rows(3, 11, 40, seed=7, device="cpu")
    assert torch.equal(again.input_ids, batch.input_ids)


@pytest.mark.parametrize(("b", "seq_len"), [(0, 8), (1, 1)])
def test_rows_that_predict_nothing_are_refused(b: int, seq_len: int) -> None:
    with pytest.raises(ValueError, match="at least 1 row of 2 tokens"):
        longest_rows(b, seq_len, 40, seed=0, device="cpu")


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_each_row_comes_once_and_the_end_is_said(most: int) -> None:
    rows = numbered(200)
    batches = MicroBatches(lambda: Source(rows, most), seq_len=64)
    seen: list[int] = []
    with pytest.raises(StopIteration, match="25 micro-batches"):
        for i in range(100):
            seen += first_ids(batches, i)
    assert seen == list(range(200))


@pytest.mark.parametrize(("seq_len", "rows_each"), [(256, 8), (512, 4), (1024, 2), (8192, 1)])
def test_long_rows_come_fewer_at_a_time(seq_len: int, rows_each: int) -> None:
    batches = MicroBatches(lambda: Source(numbered(500)), seq_len=seq_len)
    assert len(first_ids(batches, 0)) == rows_each


@pytest.mark.parametrize("count", [16, 40, 127, 128])
def test_little_data_still_gives_enough_micro_batches(count: int) -> None:
    batches = MicroBatches(lambda: Source(numbered(count)), seq_len=64)
    sizes = []
    with pytest.raises(StopIteration):
        while True:
            sizes.append(len(first_ids(batches, len(sizes))))
    assert sum(sizes) == count
    assert len(sizes) >= LEAST_MICRO_BATCHES


def test_the_number_alone_decides_the_micro_batch() -> None:
    rows = numbered(200)
    inorder = MicroBatches(lambda: Source(rows), seq_len=64)
    expected = [first_ids(inorder, i) for i in range(6)]
    jumping = MicroBatches(lambda: Source(rows), seq_len=64)
    for i in (4, 1, 1, 5, 0):
        assert first_ids(jumping, i) == expected[i]


def test_rows_without_a_target_are_passed_over() -> None:  # field case 75
    cut = Row([3, 3, 3], [False, False, False])
    only_first = Row([4, 4], [True, False])
    good = numbered(64)
    rows = [cut, only_first, *good[:30], cut, cut, *good[30:], only_first]
    batches = MicroBatches(lambda: Source(rows, 1), seq_len=64)
    seen: list[int] = []
    with pytest.raises(StopIteration):
        for i in range(100):
            seen += first_ids(batches, i)
    assert seen == list(range(64))


def test_no_usable_row_at_all_is_the_end_at_once() -> None:
    batches = MicroBatches(lambda: Source([Row([1, 2], [True, False])] * 5), seq_len=64)
    with pytest.raises(StopIteration, match="after 0 micro-batches"):
        batches.get(0)
