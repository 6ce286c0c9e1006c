"""Rows to tokens: one encoder over every kind of tokenizer, chat templates, exactly one BOS."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from pichak_core.tune.chat_template import ChatTemplate
from pichak_core.tune.row_text import Row, Segment
from pichak_core.tune.tokenizers import BytesTokenizer, batch_call, input_ids, load_tokenizer

_BATCH_ROWS = 1024
_BATCH_CHARACTERS = 4_000_000


class TokenRow(NamedTuple):
    """One row in tokens.

    `parts` joined are its ids, with the tokenizer's BOS if it has one. `spans` are the half-open
    stretches that a completion loss scores, rising. `length` counts the ids; `longest` is the same,
    or the length with the longer answer of a preference pair. `defects` are the row's and the chat
    template's.
    """

    parts: Sequence[Sequence[int]]
    spans: tuple[tuple[int, int], ...]
    length: int
    longest: int
    format: str
    defects: tuple[str, ...] = ()

    def ids(self) -> list[int]:
        """The whole row's token ids."""
        return [token for part in self.parts for token in part]


class _Batch(NamedTuple):
    """Rows laid out as text: their segments, their alternatives', and the texts of both."""

    rows: Sequence[Row]
    laid: list[list[Segment]]
    others: list[list[Segment]]
    defects: list[list[str]]
    texts: list[str]


class Encoder:
    """A tokenizer as ids without special tokens, plus what it puts before and after a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self._bare_options: dict[str, Any] = {}
        self.prefix, self.suffix = self._frame()
        in_batches = batch_call(self.tokenizer) if self._bare_options else None
        self.batched = in_batches is not None
        self._encode = in_batches or self._one_by_one
        if isinstance(self.tokenizer, BytesTokenizer):
            self._encode = lambda texts: [text.encode("utf-8", "replace") for text in texts]
        self.template = ChatTemplate.of(self.tokenizer)
        named = [getattr(self.tokenizer, name, None) for name in ("bos_token", "cls_token")]
        self._bos_words = tuple(word for word in named if isinstance(word, str) and word)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Ids of each text, without BOS, EOS and the like."""
        return self._encode(texts) if texts else []

    def rows(self, rows: Iterable[Row]) -> Iterator[TokenRow]:
        """Tokenise rows in batches, in order; every row must have segments.

        A fast tokenizer works on a batch without holding the interpreter, so the next batch is
        read meanwhile; up to two batches of `rows` are taken ahead of what is given.
        """
        if not self.batched:
            for batch in map(self._lay_out_all, _batches(rows)):
                yield from self._join_all(batch, self.encode(batch.texts))
            return
        with ThreadPoolExecutor(1, "tokenise") as pool:
            ahead: list[tuple[_Batch, Future[list[Sequence[int]]]]] = []
            for batch in map(self._lay_out_all, _batches(rows)):
                ahead.append((batch, pool.submit(self.encode, batch.texts)))
                if len(ahead) > 1:
                    done, ids = ahead.pop(0)
                    yield from self._join_all(done, ids.result())
            for done, ids in ahead:
                yield from self._join_all(done, ids.result())

    def _lay_out_all(self, rows: Sequence[Row]) -> _Batch:
        defects: list[list[str]] = [[] for _ in rows]
        laid = [self._lay_out(row, found) for row, found in zip(rows, defects, strict=True)]
        others = [self._lay_out(r.alternative, []) if r.alternative else [] for r in rows]
        texts = [segment.text for segments in (*laid, *others) for segment in segments]
        return _Batch(rows, laid, others, defects, texts)

    def _join_all(self, batch: _Batch, encoded: Iterable[Sequence[int]]) -> list[TokenRow]:
        ids = iter(encoded)
        made = [
            self._join(row, segments, [next(ids) for _ in segments])
            for row, segments in zip(batch.rows, batch.laid, strict=True)
        ]
        for number, (row, segments) in enumerate(zip(batch.rows, batch.others, strict=True)):
            if segments:
                other = self._join(row, segments, [next(ids) for _ in segments])
                longest = max(made[number].longest, other.longest)
                made[number] = made[number]._replace(longest=longest)
            if row.defects or batch.defects[number]:
                defects = (*row.defects, *batch.defects[number])
                made[number] = made[number]._replace(defects=defects)
        return made

    def _lay_out(self, row: Row, defects: list[str]) -> list[Segment]:
        """The row's segments that hold text, rendered where there is a chat template."""
        segments: Sequence[Segment] = row.segments
        if row.turns and self.template:
            segments = self.template.segments(row, defects)
        elif row.turns:
            defects.append("no_template")
        return [segment for segment in segments if segment.text]

    def _join(
        self, row: Row, segments: Sequence[Segment], ids: Sequence[Sequence[int]]
    ) -> TokenRow:
        templated = bool(row.turns and self.template)
        prefix = self.prefix
        parts: list[Sequence[int]] = list(ids)
        if prefix and parts and self._spells_prefix(segments[0].text, parts[0], templated):
            parts[0] = parts[0][len(prefix) :]
        length = len(prefix)
        spans: list[tuple[int, int]] = []
        for segment, part in zip(segments, parts, strict=True):
            start = length
            length += len(part)
            if segment.scored and length > start:
                spans.append((start, length))
        if prefix:
            parts.insert(0, prefix)
        if self.suffix and not templated:
            if spans and spans[-1][1] == length:
                spans[-1] = (spans[-1][0], length + len(self.suffix))
            length += len(self.suffix)
            parts.append(self.suffix)
        return TokenRow(parts, tuple(spans), length, length, row.format)

    def _spells_prefix(self, text: str, ids: Sequence[int], templated: bool) -> bool:
        """The text has the BOS in it (a template's, or rendered rows'): it gets no second one."""
        if not self.prefix or list(ids[: len(self.prefix)]) != self.prefix:
            return False
        return text.startswith(self._bos_words) if self._bos_words else templated

    def _one_by_one(self, texts: Sequence[str]) -> list[Sequence[int]]:
        tok, options = self.tokenizer, self._bare_options
        if options or not (self.prefix or self.suffix):
            return [input_ids(tok(text, **options)) for text in texts]
        return [self._unframed(input_ids(tok(text))) for text in texts]

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts around a text by itself: (BOS …], [… EOS)."""
        tok = self.tokenizer
        empty, full = (input_ids(tok(text)) for text in ("", "a"))
        can_leave_out = _takes(tok, "add_special_tokens")
        if can_leave_out and (not empty or input_ids(tok("a", add_special_tokens=False)) != full):
            self._bare_options = {"add_special_tokens": False}
        if empty == full:
            # "a" is no text to this tokenizer, so it cannot show what is put around one.
            ends = [getattr(tok, name, None) for name in ("bos_token_id", "eos_token_id")]
            return empty if empty == ends[:1] else [], empty if empty == ends[1:] else []
        size = 0
        while size < min(len(empty), len(full)) and empty[size] == full[size]:
            size += 1
        suffix = empty[size:]
        return empty[:size], suffix if not suffix or full[-len(suffix) :] == suffix else []

    def _unframed(self, ids: list[int]) -> list[int]:
        """Ids without the frame, for a tokenizer that cannot be told to leave it out."""
        if self.prefix and ids[: len(self.prefix)] == self.prefix:
            ids = ids[len(self.prefix) :]
        if self.suffix and ids[-len(self.suffix) :] == self.suffix:
            ids = ids[: -len(self.suffix)]
        return ids


def _takes(tokenizer: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(tokenizer).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += sum(len(segment.text) for segment in row.segments)
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
