"""What a corpus was found to be, and how a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pichak_core.plan import format_number
from pichak_core.tune.row_text import DEFECTS


@dataclass(frozen=True)
class CorpusProfile:
    """A corpus in tokens (SPEC 4.1).

    `rows_total` is counted over the file (blank lines left out). `sampled` of them were drawn with
    `seed`, and `rows_seen` of those could be tokenised; every number below is of these.

    `token_p50` … `token_max` are row lengths, BOS included. `completion_p95` is of the scored
    tokens of rows that have such, None where none has. `seq_len` is chosen at `quantile`,
    which is `quantile_tokens` with a 90 % sampling interval of `quantile_low` to `quantile_high`
    (the longest row drawn where `sampled` is too small for an upper end; `seq_source` says so).

    `supervised_per_row` is the mean over the rows seen of what the loss scores within `seq_len`
    tokens: the completion's tokens there under ``completion_only``, ``min(length, seq_len) - 1``
    under ``all_tokens``; `supervised_low` to `supervised_high` is its 90 % sampling interval. The
    first token of a row (BOS, where there is one) is never counted: nothing predicts it.

    `rows_truncated` is the share of rows longer than `seq_len`; `rows_losing_scored` of them lose
    scored tokens (`scored_tokens_lost` of `scored_tokens` in all), and `rows_unscored` rows keep
    none. `over_last_bucket` rows are longer than the last bucket.

    `defects` maps a name to ``{"count", "first_line"}``: how often it was met (blank lines over
    the whole file, the rest in the rows drawn) and the first place. A place is a line, or the
    row's number where `place` is "row" (JSON arrays, parquet). `formats` counts the rows seen of
    each layout. `histogram` is (from, below, rows) over row lengths. `notes` say what is odd about
    the file as a whole.
    """

    rows_seen: int
    rows_total: int
    token_p50: int
    token_p95: int
    token_p99: int
    token_max: int
    completion_p95: int | None
    detected_format: str
    loss_policy: str
    seq_len: int
    seq_source: str
    supervised_per_row: float
    supervised_low: float
    supervised_high: float
    quantile: float
    quantile_tokens: int
    quantile_low: int
    quantile_high: int
    seed: int
    sampled: int
    rows_truncated: float
    rows_losing_scored: int
    scored_tokens: int
    scored_tokens_lost: int
    rows_unscored: int
    over_last_bucket: int
    file_kind: str = "JSON Lines"
    place: str = "line"
    tokenizer: str = ""
    seconds: float = 0.0
    defects: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    formats: Mapping[str, int] = field(default_factory=dict)
    histogram: tuple[tuple[int, int, int], ...] = ()
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One paragraph: what was read, how long it is, what the loss scores, what is odd."""
        n = format_number
        text = (
            f"{n(self.rows_seen)} of {n(self.rows_total)} rows read"
            f"{f' (uniform sample, seed {self.seed})' if self.sampled < self.rows_total else ''}, "
            f"tokens p50 {n(self.token_p50)} / p95 {n(self.token_p95)} / p99 {n(self.token_p99)} / "
            f"max {n(self.token_max)}; format {self.detected_format}, loss {self.loss_policy}, "
            f"{n(self.supervised_per_row)} scored tokens a row at {n(self.seq_len)}"
        )
        odd = self.defect_lines()
        return f"{text}; {'; '.join(odd)}" if odd else text

    def defect_lines(self) -> list[str]:
        """The notes, and a phrase for each defect: how often, what, and where first."""
        found = [
            f"{format_number(met['count'])} × {DEFECTS.get(name, name)}, "
            f"first at {self.place} {format_number(met['first_line'])}"
            for name, met in self.defects.items()
        ]
        return [*self.notes, *found]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        record = asdict(self)
        record["histogram"] = [list(bar) for bar in self.histogram]
        record["notes"] = list(self.notes)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CorpusProfile:
        """The inverse of `as_dict`; `ValueError` names what is missing or unknown."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise ValueError(f"not a corpus profile: it has no field {unknown[0]!r}")
        values = dict(record)
        values["histogram"] = tuple(tuple(map(int, bar)) for bar in record.get("histogram", ()))
        values["notes"] = tuple(map(str, record.get("notes", ())))
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"not a corpus profile: {error}") from error
