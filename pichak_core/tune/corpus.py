"""Row length, loss policy and scored tokens of a corpus, from its real rows (SPEC 4.1)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pichak_core.tune.corpus_profile import CorpusProfile
from pichak_core.tune.corpus_tally import Tally
from pichak_core.tune.encoding import Encoder
from pichak_core.tune.length_choice import BUCKETS, choose_length
from pichak_core.tune.row_lengths import RowLengths, histogram, mean_interval
from pichak_core.tune.row_lengths import quantile as quantile_of
from pichak_core.tune.row_stream import CorpusError
from pichak_core.tune.rows import RawRow, RowFile, open_rows
from pichak_core.tune.sampling import draw_rows
from pichak_core.tune.tokenizers import tokenizer_name

DEFAULT_SAMPLE = 512

_PACKED = frozenset({".gz", ".zst"})
_TABLES = frozenset({".csv", ".tsv"})
_JSON = frozenset({".json", ".jsonl", ".ndjson"})

#: Called with (what is being done, done so far, in all).
OnProgress = Callable[[str, int, int], None]


def profile_corpus(
    path: str | Path,
    tokenizer: Any,
    *,
    sample: int | None = DEFAULT_SAMPLE,
    quantile: float = 0.95,
    buckets: Sequence[int] = BUCKETS,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> CorpusProfile:
    """Read and tokenise rows of the corpus at `path`, drawn uniformly over the whole file.

    `tokenizer` is anything called as ``tok(text) -> {"input_ids": [...]}``, or a name that
    `load_tokenizer` knows ("bytes", a tokenizer.json, a folder). `sample` is the number of rows to
    draw, None for all of them. `seq_len` is the `quantile` of their length rounded up to the next
    of `buckets`, and further up while more than `MAX_EMPTIED_SHARE` of the rows would keep no
    scored token. The text of the file is never held, only a sample's.

    Raises `OSError` when the file cannot be opened, `CorpusError` (a ValueError) when it is not a
    corpus or no row of it can be used, `ValueError` for arguments out of range.
    """
    _check(sample, quantile, buckets)
    started = time.perf_counter()
    encoder = Encoder(tokenizer)
    file = open_rows(path)
    counted = file.count(_as_bytes(on_progress))
    if not counted.rows:
        raise CorpusError(f"{path} holds no rows; give a file with one row a line")
    tally, lengths, formats = Tally(), RowLengths(), Counter[str]()
    if counted.blank:
        tally.add(("empty_row",) * counted.blank, counted.first_blank)
    drawn = _draw(file, counted.rows, sample, seed)
    asked = counted.rows if sample is None else min(sample, counted.rows)
    for token_row in encoder.rows(tally.rows_of(drawn)):
        place = tally.waiting.popleft()
        if token_row.defects:
            tally.add(token_row.defects, place)
        if token_row.length:
            lengths.add(token_row, place)
            formats[token_row.format] += 1
        else:
            tally.add(("empty_row",), place)
        if on_progress and len(lengths) % 256 == 0:
            on_progress("tokenising rows", len(lengths), asked)
    if not len(lengths):
        raise _nothing_usable(path, file, tally)

    policy = "completion_only" if 2 * lengths.with_completion() >= len(lengths) else "all_tokens"
    choice = choose_length(
        lengths,
        policy,
        quantile=quantile,
        buckets=buckets,
        rows_total=counted.rows,
        rows_drawn=tally.drawn,
        seed=seed,
    )
    cut = choice.cut
    if cut.emptied:
        tally.add(("scored_cut",) * cut.emptied, lengths.places[cut.first_emptied])
    mean = low = high = cut.scored / len(lengths)
    if tally.drawn < counted.rows:
        low, high = mean_interval(cut.scored, cut.scored_squared, len(lengths))
    rising = sorted(lengths.lengths)
    completions = sorted(filter(None, lengths.completions))
    return CorpusProfile(
        rows_seen=len(lengths),
        rows_total=counted.rows,
        token_p50=quantile_of(rising, 0.50),
        token_p95=quantile_of(rising, 0.95),
        token_p99=quantile_of(rising, 0.99),
        token_max=rising[-1],
        completion_p95=quantile_of(completions, 0.95) if completions else None,
        detected_format=formats.most_common(1)[0][0],
        loss_policy=policy,
        seq_len=cut.seq_len,
        seq_source=choice.source,
        supervised_per_row=mean,
        supervised_low=low,
        supervised_high=high,
        quantile=quantile,
        quantile_tokens=choice.wanted,
        quantile_low=choice.low,
        quantile_high=choice.high,
        seed=seed,
        sampled=tally.drawn,
        rows_truncated=cut.truncated / len(lengths),
        rows_losing_scored=cut.losing,
        scored_tokens=cut.scored_before,
        scored_tokens_lost=cut.scored_before - cut.scored,
        rows_unscored=cut.unscored,
        over_last_bucket=choice.over_last,
        file_kind=file.kind,
        place=_place_of(file),
        tokenizer=tokenizer_name(encoder.tokenizer),
        seconds=time.perf_counter() - started,
        defects=tally.as_dict(),
        formats=dict(formats.most_common()),
        histogram=histogram(rising),
        notes=_notes(file),
    )


def _check(sample: int | None, quantile: float, buckets: Sequence[int]) -> None:
    if sample is not None and sample < 1:
        raise ValueError(f"sample {sample} is no number of rows; give 1 or more, or None for all")
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile {quantile} is not a share; give more than 0 and at most 1")
    if not buckets or min(buckets) < 1:
        raise ValueError(f"buckets {list(buckets)} are no row lengths; give at least one above 0")


def _draw(file: RowFile, rows_total: int, sample: int | None, seed: int) -> Iterator[RawRow]:
    if sample is None or sample >= rows_total:
        yield from file
        return
    for _, row in file.fetch(draw_rows(rows_total, sample, seed)):
        yield row


def _as_bytes(on_progress: OnProgress | None) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    return lambda done, size: on_progress("counting rows (bytes)", done, size)


def _place_of(file: RowFile) -> str:
    """What a place in the file counts."""
    return "line" if file.kind in ("JSON Lines", "plain text") else "row"


def _notes(file: RowFile) -> tuple[str, ...]:
    """What the file's name promises and its content does not keep."""
    named = [suffix.lower() for suffix in file.path.suffixes if suffix.lower() not in _PACKED]
    suffix = named[-1] if named else ""
    if file.kind != "plain text":
        return ()
    if suffix in _TABLES:
        return (
            f"a {suffix} table is read as plain text: every line is a row of text, the header too; "
            "convert it to JSON Lines for rows of its columns",
        )
    if suffix in _JSON:
        return (
            f"named {suffix}, but its first lines are not JSON: read as plain text, a row a line",
        )
    return ()


def _nothing_usable(path: str | Path, file: RowFile, tally: Tally) -> CorpusError:
    none = f"none of the {tally.drawn:,} rows" if tally.drawn > 1 else "the only row"
    can = "can" if tally.drawn > 1 else "cannot"
    return CorpusError(
        f"{path}: {none} read as {file.kind} {can} be used "
        f"({tally.describe(3, _place_of(file))}); give rows like "
        '{"prompt": "...", "completion": "..."}, {"messages": [...]} or {"text": "..."}'
    )


__all__ = ["BUCKETS", "CorpusError", "CorpusProfile", "profile_corpus"]
