"""Options that several commands share, and the values that they take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import Command, UserError
from pichak_coordinator.cli.files import FileName

if TYPE_CHECKING:
    from pichak_coordinator.store import Store

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
#: What every random generator here takes as its seed.
MOST_SEED = 2**32 - 1
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


class FiniteRange(click.FloatRange):
    """A number within bounds; NaN, which is within any, is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class ByteSize(click.ParamType):  # type: ignore[type-arg]
    """A size such as ``600MiB``, ``2GB`` or plain bytes; MB is 10^6 bytes and MiB 2^20."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value))
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None or float(match.group(1)) <= 0:
            self.fail(
                f"{value!r} is not a size; write 600MiB, 2GB or a number of bytes", param, ctx
            )
        return int(float(match.group(1)) * unit)


class SampleSize(click.ParamType):  # type: ignore[type-arg]
    """A number of rows, or ``all``."""

    name = "N|all"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value is None or str(value) == "all":
            return None
        if not str(value).isdigit() or int(value) < 1:
            self.fail(f"{value!r} is neither a number of rows nor 'all'", param, ctx)
        return int(value)


def busy_options(command: Command) -> Command:
    """What to do on a GPU that somebody works on, for commands that a person waits for."""
    for decorate in (
        click.option(
            "--wait-if-busy",
            "wait_seconds",
            type=FiniteRange(0, 86400),
            metavar="SECONDS",
            default=0.0,
            help="Wait so long for a GPU on which somebody works [default: leave it alone].",
        ),
        click.option(
            "--even-if-busy", is_flag=True, help="Measure a GPU although somebody works on it."
        ),
    ):
        command = decorate(command)
    return command


def workload_options(command: Command) -> Command:
    """What is trained in the probes: ``fleet profile`` and ``plan`` share these."""
    decorators: list[Callable[[Command], Command]] = [
        click.option(
            "--data",
            type=click.Path(path_type=Path),
            help="Training rows (JSONL, JSON, text, Parquet; .gz and .zst too).",
        ),
        click.option(
            "--model",
            default="builtin:gpt-1m",
            show_default=True,
            help="builtin:NAME, hf:PATH_OR_ID, FILE.py:factory or package.module:factory.",
        ),
        click.option(
            "--method", type=click.Choice(["full", "lora"]), default="full", show_default=True
        ),
        click.option(
            "--lora-rank",
            type=click.IntRange(1, 1024),
            default=8,
            show_default=True,
            help="Rank of the adapters that the ramp trains (with --method lora).",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bf16", "fp32"]),
            default="auto",
            show_default=True,
        ),
        click.option("--gradient-checkpointing", is_flag=True),
        click.option(
            "--seq-len",
            type=click.IntRange(8, 1 << 20),
            help="Sequence length in tokens instead of the corpus's own.",
        ),
        click.option(
            "--seq-quantile",
            type=FiniteRange(0.01, 1.0),
            default=0.95,
            show_default=True,
            help="Share of rows that the sequence length holds whole.",
        ),
        click.option(
            "--sample",
            type=SampleSize(),
            metavar="N|all",
            default="512",
            show_default=True,
            help="Rows of the corpus to tokenise, or 'all'.",
        ),
        click.option(
            "--headroom",
            type=FiniteRange(0.0, 0.9),
            default=0.12,
            show_default=True,
            help="Share of the memory that the kept micro-batch leaves free.",
        ),
        click.option(
            "--limit",
            type=click.IntRange(1, 65536),
            help="Largest micro-batch to try [default: 512, or the rows of the data].",
        ),
        click.option(
            "--memory-cap",
            type=ByteSize(),
            help="Pretend that the device has no more than this, e.g. 600MiB (CPU and CUDA).",
        ),
        click.option(
            "--target-tokens",
            type=click.IntRange(1),
            help="Scored tokens per optimizer step instead of the measured noise scale.",
        ),
        click.option("--seed", type=click.IntRange(0, MOST_SEED), default=0, show_default=True),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def check_data(path: Path | None) -> Path | None:
    """The data file, readable and not empty; `UserError` says what is wrong with it."""
    if path is None:
        return None
    if not path.exists():
        raise UserError(f"--data {path}: there is no such file")
    if path.is_dir():
        raise UserError(f"--data {path}: a folder; name one file of training rows")
    if not path.is_file():
        raise UserError(
            f"--data {path}: a pipe or a device, and rows are read more than once: write them to a "
            "file first"
        )
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise UserError(f"--data {path}: the file is empty")
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read: {error.strerror}") from error
    return path


def check_model(model: str) -> str:
    """A model's name as far as it can be checked without loading it."""
    kind, _, name = model.partition(":")
    if kind == "builtin":
        from pichak_core.workload.transformer import SHAPES

        if name not in SHAPES:
            raise UserError(f"--model {model}: the built-in models are {', '.join(SHAPES)}")
    if kind in ("builtin", "hf"):
        return model
    target, _, factory = model.rpartition(":")
    if not target or not factory.isidentifier():
        raise UserError(
            f"--model {model}: write builtin:NAME, hf:PATH_OR_ID, FILE.py:factory or "
            "package.module:factory; builtin:gpt-1m needs nothing else"
        )
    if target.endswith(".py") and not Path(target).is_file():
        raise UserError(f"--model {model}: there is no file {target}")
    return model


def check_length(model: str, data: Path | None, seq_len: int | None) -> None:
    """A model without a row length of its own takes it from the data, or from the user."""
    if model.startswith(("builtin:", "hf:")) and data is None and seq_len is None:
        raise UserError(
            f"--model {model} needs rows of some length: give --data FILE, or --seq-len TOKENS to "
            "ramp without data"
        )


def store_option(command: Command) -> Command:
    """``--store``: where history is kept."""
    return click.option(
        "--store",
        "store_path",
        type=FileName(dir_okay=False, path_type=Path),
        help="The history's file [default: $PICHAK_HOME/fleet.db or ~/.local/share/pichak/].",
    )(command)


@contextmanager
def open_store(path: Path | None, *, read_only: bool = False) -> Iterator[Store]:
    """The history; `UserError` says why it cannot be used (any more) and what to do."""
    from pichak_coordinator.database import StoreError, translated
    from pichak_coordinator.store import Store

    try:
        with Store.open(path, read_only=read_only) as store, translated(store.path, files=False):
            yield store
    except StoreError as error:
        raise UserError(str(error)) from error
