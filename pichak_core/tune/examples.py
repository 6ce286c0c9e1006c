"""Real rows as training examples: token ids and which of them the loss scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pichak_core.tune.encoding import Encoder, TokenRow
from pichak_core.tune.row_formats import normalise
from pichak_core.tune.row_stream import CorpusError
from pichak_core.tune.rows import open_rows
from pichak_core.tune.sampling import Shuffle

LossPolicy = Literal["completion_only", "all_tokens"]

#: Rows read at a time. A compressed file is read through once for each such window.
_WINDOW_ROWS = 256
_COMPRESSED_WINDOW_ROWS = 2048


@dataclass(frozen=True)
class Example:
    """One row cut to the run's length: `input_ids` and, for each of them, whether it is scored.

    `scored[i]` says that the loss of *predicting* token i counts. A causal model cannot predict
    the first token of a row, so a shifted loss leaves ``scored[0]`` out.
    """

    input_ids: list[int]
    scored: list[bool]

    @property
    def scored_tokens(self) -> int:
        """How many tokens the loss scores: the first is left out, as in `CorpusProfile`."""
        return sum(self.scored[1:])


class ExampleStream:
    """Fresh rows of a corpus, uniformly drawn over the whole file and none twice.

    `path` and `tokenizer` are as for `profile_corpus`; rows are cut after `seq_len` tokens. The
    same `seed` gives the same rows in the same order. `loss_policy` of None is decided as there,
    from the first rows drawn: completions alone are scored where at least half of the rows have
    one. Rows without a scored token left are given too (a run meets them); rows that cannot be
    used are passed over and counted in `skipped`.

    Raises `OSError` or `CorpusError` when the corpus or tokenizer cannot be had.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        seq_len: int,
        seed: int = 0,
        *,
        loss_policy: LossPolicy | None = None,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} is not a length; give at least 1 token")
        self.seq_len = seq_len
        self.skipped = 0
        self._encoder = tokenizer if isinstance(tokenizer, Encoder) else Encoder(tokenizer)
        self._file = open_rows(path)
        counted = self._file.count()
        if not counted.rows:
            raise CorpusError(f"{path} holds no rows")
        self.rows_total = counted.rows
        self._window = _WINDOW_ROWS if len(counted.marks) > 1 else _COMPRESSED_WINDOW_ROWS
        self._order = Shuffle(counted.rows, seed)
        self._ready: list[TokenRow] = []
        self._policy = loss_policy

    @property
    def loss_policy(self) -> LossPolicy:
        """What is scored, as decided or given."""
        if self._policy is None:
            self._fill(1)
            with_completion = sum(bool(row.spans) for row in self._ready)
            half = 2 * with_completion >= len(self._ready) > 0
            self._policy = "completion_only" if half else "all_tokens"
        return self._policy

    def rows(self, n: int) -> list[Example]:
        """The next `n` rows; fewer when fewer are left, and none once every row was given."""
        if n < 1:
            raise ValueError(f"{n} rows cannot be given; ask for at least 1")
        policy = self.loss_policy
        self._fill(n)
        taken, self._ready = self._ready[:n], self._ready[n:]
        return [example_of(row, self.seq_len, policy) for row in taken]

    def __iter__(self) -> Iterator[Example]:
        """Row after row until the file is used up."""
        while batch := self.rows(1):
            yield from batch

    def _fill(self, n: int) -> None:
        while len(self._ready) < n and (numbers := self._order.take(self._window)):
            self._ready += self._read(numbers)

    def _read(self, numbers: Sequence[int]) -> list[TokenRow]:
        found = dict(self._file.fetch(numbers))
        raw = [found[number] for number in numbers]
        rows = [normalise(row.value) for row in raw if row.usable]
        rows = [row for row in rows if row.segments]
        tokens = [row for row in self._encoder.rows(rows) if row.length]
        self.skipped += len(raw) - len(tokens)
        return tokens


def example_of(row: TokenRow, seq_len: int, policy: LossPolicy) -> Example:
    """The first `seq_len` tokens of a row with what `policy` scores of them."""
    ids = row.ids()[:seq_len]
    if policy == "all_tokens":
        return Example(ids, [True] * len(ids))
    scored = [False] * len(ids)
    for start, end in row.spans:
        stop = min(end, len(ids))
        if start < stop:
            scored[start:stop] = [True] * (stop - start)
    return Example(ids, scored)
