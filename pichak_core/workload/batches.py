"""Rows for a probe: the longest admissible ones for the ramp, real ones for the noise scale.

A label is the token id where the loss scores it and `UNSCORED` elsewhere; the token at position
j is predicted from the ones before it, so a label at position 0 never counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

#: Label of a token that the loss leaves out, as torch and transformers have it.
UNSCORED = -100

#: A micro-batch of the noise scale holds at most this many rows, and of long rows only as many as
#: keep it within `MICRO_BATCH_TOKENS`: hardly more memory than one row of the ramp takes.
MICRO_BATCH_ROWS = 8
MICRO_BATCH_TOKENS = 2_048

#: A small data set is cut into at least this many micro-batches, by fewer rows in each.
LEAST_MICRO_BATCHES = 16


class Row(Protocol):
    """One row: its token ids, and for each whether the loss scores it."""

    @property
    def input_ids(self) -> Sequence[int]: ...

    @property
    def scored(self) -> Sequence[bool]: ...


class RowSource(Protocol):
    """One pass over the data: the next `n` rows, fewer at the end, then none."""

    def rows(self, n: int) -> Sequence[Row]: ...


@dataclass(frozen=True)
class Batch:
    """Right-padded rows: three int64 tensors of (rows, tokens), and how many tokens are scored.

    Padding lies behind every real token, so under causal attention no scored token sees it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    scored_tokens: int

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        return Batch(
            self.input_ids.to(device),
            self.labels.to(device),
            self.attention_mask.to(device),
            self.scored_tokens,
        )


def targets_of(row: Row) -> int:
    """How many tokens of the row the loss scores; the first has nothing to be predicted from."""
    return sum(map(bool, row.scored[1:]))


def pad_right(rows: Sequence[Row], pad_id: int = 0) -> Batch:
    """One batch on the CPU, padded to its longest row. `ValueError` without rows."""
    import torch

    if not rows:
        raise ValueError("a batch needs at least one row")
    longest = max(len(row.input_ids) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    labels = torch.full_like(input_ids, UNSCORED)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        ids = torch.tensor(list(row.input_ids), dtype=torch.int64)
        scored = torch.tensor(list(row.scored), dtype=torch.bool)
        input_ids[index, :length] = ids
        labels[index, :length] = torch.where(scored, ids, UNSCORED)
        attention_mask[index, :length] = 1
    return Batch(input_ids, labels, attention_mask, sum(targets_of(row) for row in rows))


def longest_rows(b: int, seq_len: int, vocabulary: int, *, seed: int, device: str) -> Batch:
    """`b` rows of exactly `seq_len` random tokens, every one scored: the most a row can cost.

    The ids come from a generator of their own, so the global ones do not move.
    """
    import torch

    if b < 1 or seq_len < 2:
        raise ValueError(f"{b} rows of {seq_len} tokens: at least 1 row of 2 tokens is needed")
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(vocabulary, (b, seq_len), generator=generator, device=device)
    return Batch(ids, ids, torch.ones_like(ids), b * (seq_len - 1))


def mean_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over the scored tokens, token j predicted at position j - 1.

    `logits` (rows, tokens, vocabulary), `labels` (rows, tokens).
    """
    from torch.nn import functional

    # The labels are shifted and not the logits, whose slice would be copied.
    targets = functional.pad(labels[:, 1:], (0, 1), value=UNSCORED)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=UNSCORED)


class MicroBatches:
    """The i-th micro-batch of one pass over the data, the same for the same i.

    Rows without a scored token are passed over: they have no mean loss. `open_source` begins a
    pass, and is called again when an earlier micro-batch is asked for.
    """

    def __init__(self, open_source: Callable[[], RowSource], seq_len: int, pad_id: int = 0) -> None:
        self._open_source = open_source
        self._most_rows = max(1, min(MICRO_BATCH_ROWS, MICRO_BATCH_TOKENS // seq_len))
        self._pad_id = pad_id
        self._source: RowSource | None = None
        self._waiting: list[Row] = []
        self._next = 0
        self.rows_each = self._most_rows

    def get(self, i: int) -> Batch:
        """Micro-batch `i` on the CPU; `StopIteration` when the data ends before it."""
        source = self._source
        if source is None or i < self._next:
            source = self._begin()
        while True:
            rows = self._take(source, self.rows_each)
            if not rows:
                raise StopIteration(f"the data ended after {self._next} micro-batches")
            self._next += 1
            if self._next > i:
                return pad_right(rows, self._pad_id)

    def _begin(self) -> RowSource:
        self._source = source = self._open_source()
        self._next = 0
        wanted = self._most_rows * LEAST_MICRO_BATCHES
        self._waiting = []
        self._waiting = self._take(source, wanted)
        if len(self._waiting) < wanted:
            self.rows_each = max(1, len(self._waiting) // LEAST_MICRO_BATCHES)
        return source

    def _take(self, source: RowSource, n: int) -> list[Row]:
        while len(self._waiting) < n:
            more = source.rows(n - len(self._waiting))
            if not more:
                break
            self._waiting += [row for row in more if targets_of(row)]
        taken, self._waiting = self._waiting[:n], self._waiting[n:]
        return taken
