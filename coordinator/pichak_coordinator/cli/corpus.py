"""``pichak corpus``: a training file in tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import UserError, err, examples, json_option, out, print_json
from pichak_coordinator.cli.options import MOST_SEED, FiniteRange, SampleSize
from pichak_core.plan import format_number

if TYPE_CHECKING:
    from pichak_core.tune.corpus_profile import CorpusProfile

_LABEL_WIDTH = 16
_LEAST_BAR = 8


@click.command(
    epilog=examples(
        "pichak corpus train.jsonl",
        "pichak corpus train.jsonl.gz ./model/tokenizer.json --quantile 0.99",
        "pichak corpus train.parquet ./my-model --sample all --json > corpus.json",
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("tokenizer", default="bytes")
@click.option(
    "--quantile",
    type=FiniteRange(0, 1, min_open=True),
    default=0.95,
    show_default=True,
    help="Share of the rows that the row length has to hold.",
)
@click.option(
    "--sample",
    type=SampleSize(),
    metavar="N|all",
    default="512",
    show_default=True,
    help="Rows to read, drawn uniformly over the whole file.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, MOST_SEED),
    default=0,
    show_default=True,
    help="Which rows are drawn.",
)
@json_option
def corpus(
    file: Path, tokenizer: str, quantile: float, sample: int | None, seed: int, as_json: bool
) -> None:
    """Profile a training file in tokens: row length, what the loss scores, what is odd in it.

    FILE is JSON Lines, a JSON array, plain text (each also .gz or .zst) or parquet. TOKENIZER is
    "bytes" (the default), a tokenizer.json, a folder saved by transformers, or an id in the
    Hugging Face cache; nothing is downloaded.
    """
    from pichak_core.tune.corpus import CorpusError, profile_corpus

    try:
        with _progress() as on_progress:
            profile = profile_corpus(
                file,
                tokenizer,
                sample=sample,
                quantile=quantile,
                seed=seed,
                on_progress=on_progress,
            )
    except CorpusError as error:
        raise UserError(str(error)) from error
    except FileNotFoundError as error:
        raise UserError(f"no file {error.filename}: check the path") from error
    except IsADirectoryError as error:
        raise UserError(f"{file} is a folder: name one file in it") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error})") from error
    if as_json:
        print_json({"schema": 1, "file": str(file), **profile.as_dict()})
        return
    console = out()
    for line in report(profile, file.name, console.width, bar=_bar_character(console.encoding)):
        console.print(line, markup=False, soft_wrap=True)


def report(profile: CorpusProfile, name: str, width: int, *, bar: str = "█") -> Iterator[str]:
    """The report's lines, at most `width` characters wide (40 at least)."""
    width = max(40, width)
    n = format_number
    drawn = (
        "all read"
        if profile.sampled >= profile.rows_total
        else f"{n(profile.sampled)} drawn uniformly, seed {profile.seed}"
    )
    if profile.rows_seen < profile.sampled:
        drawn += f", {n(profile.rows_seen)} usable"
    rows = "1 row" if profile.rows_total == 1 else f"{n(profile.rows_total)} rows"
    yield from textwrap.wrap(
        f"{name}: {profile.file_kind}, {rows} ({drawn}), in tokens of {profile.tokenizer}",
        width,
    )
    yield ""
    yield from _bars(profile, width, bar)
    yield ""
    yield from _entry(
        "tokens a row",
        f"p50 {n(profile.token_p50)}, p95 {n(profile.token_p95)}, p99 {n(profile.token_p99)}, "
        f"max {n(profile.token_max)}",
        width,
    )
    formats = ", ".join(f"{layout} {n(count)}" for layout, count in profile.formats.items())
    yield from _entry("format", formats, width)
    completion = (
        f"; completions p95 {n(profile.completion_p95)} tokens" if profile.completion_p95 else ""
    )
    yield from _entry("loss", profile.loss_policy + completion, width)
    yield from _entry("seq_len", f"{n(profile.seq_len)}: {profile.seq_source}", width)
    interval = (
        f" (90 % interval {n(profile.supervised_low)} to {n(profile.supervised_high)})"
        if profile.sampled < profile.rows_total
        else ""
    )
    yield from _entry(
        "scored tokens", f"{n(profile.supervised_per_row)} a row at that length{interval}", width
    )
    for number, line in enumerate(profile.defect_lines()):
        yield from _entry("odd rows" if not number else "", line, width)


def _bars(profile: CorpusProfile, width: int, bar: str) -> Iterator[str]:
    """A bar for each bin of row length, its rows, and the share of rows up to its end."""
    labels = [
        f"{low:,}–{below - 1:,}" if bar == "█" else f"{low:,}-{below - 1:,}"
        for low, below, _ in profile.histogram
    ]
    label_width = max(map(len, labels), default=0)
    most = max((rows for _, _, rows in profile.histogram), default=1)
    count_width = len(f"{most:,}")
    room = max(_LEAST_BAR, min(60, width - label_width - count_width - 10))
    passed = 0
    for label, (_, _, rows) in zip(labels, profile.histogram, strict=True):
        passed += rows
        length = -(-rows * room // most)
        yield (
            f"{label:>{label_width}} {bar * length:<{room}} {rows:>{count_width},} "
            f"{100 * passed / profile.rows_seen:>5.1f} %"
        )


def _entry(label: str, text: str, width: int) -> list[str]:
    indent = " " * _LABEL_WIDTH
    return textwrap.wrap(
        text, width, initial_indent=f"{label:<{_LABEL_WIDTH}}", subsequent_indent=indent
    )


def _bar_character(encoding: str | None) -> str:
    try:
        "█–×".encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "#"
    return "█"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on stderr while it takes long; nothing where stderr is no terminal."""
    console = err()
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = display.add_task(what, total=total)
            display.update(tasks[what], completed=done)

        yield advance
