"""``pichak disk``: read rates by queue depth, with the cache bypassed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_NOTHING,
    NothingMeasuredError,
    UserError,
    err,
    examples,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.tables import print_grid

if TYPE_CHECKING:
    from pichak_core.measure import Depth
    from pichak_core.measure.disk import DiskResult

_BAR_WIDTH = 24
#: The last two are a bar and a mark.
_HEADINGS = ("in flight", "MB/s", "±", "early", "late", "p50 ms", "p99 ms", " ", "")


@click.command(
    epilog=examples(
        "pichak disk /mnt/data/model-*.safetensors",
        "pichak disk /mnt/data --depth full",
        "pichak disk --json > disk.json",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@click.option(
    "--depth",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="How long to measure: about 6 s, or 25 s.",
)
@click.option(
    "--block-mb",
    type=click.FloatRange(0, 1024, min_open=True),
    default=8.0,
    show_default=True,
    help="Size of one read, in MiB.",
)
@click.option(
    "--chunk-mb",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="Size of the file written in a directory, in MiB.  [default: 256; 1024 with full]",
)
@json_option
@click.pass_context
def disk(
    ctx: click.Context,
    paths: tuple[Path, ...],
    depth: Depth,
    block_mb: float,
    chunk_mb: float | None,
    as_json: bool,
) -> None:
    """Measure how fast a disk reads at 1 to 32 reads in flight, past the system's cache.

    PATH are files to read (model shards are ideal), or one directory in which a file is written,
    read and removed; without one, the current directory. Rates are in MB/s of 10^6 bytes.
    """
    from pichak_core.measure.disk import BUDGET_SECONDS, OWN_FILE_MIB, disk_queue_depth, readings

    console = err()
    status: Any = console.status("starting") if console.is_terminal else nullcontext()
    try:
        with status as shown:
            result = disk_queue_depth(
                paths or (Path.cwd(),),
                block_mb=block_mb,
                chunk_mb=OWN_FILE_MIB[depth] if chunk_mb is None else chunk_mb,
                budget_seconds=BUDGET_SECONDS[depth],
                on_progress=(lambda _: None) if shown is None else shown.update,
            )
    except ValueError as error:
        raise UserError(str(error)) from error
    except PermissionError as error:
        raise UserError(
            f"{error.filename}: permission denied; name files that you may read, or a directory "
            "that you may write in"
        ) from error
    except OSError as error:
        raise NothingMeasuredError(f"the disk could not be measured: {error}") from error
    if as_json:
        fingerprint = {reading.name: reading.as_dict() for reading in readings(result)}
        print_json({"schema": 1, "disk": result.as_dict(), "fingerprint": fingerprint})
    else:
        show(result)
    if not result.bypassed or result.best is None:
        ctx.exit(EXIT_NOTHING)


def show(result: DiskResult) -> None:
    """The page: rates by depth with a bar each, the verdict, and the facts beside it."""
    from rich.markup import escape

    from pichak_core.plan import format_number

    console = out()
    if result.rates:
        top = max(rate.mb_s for rate in result.rates)
        rows = []
        for rate in result.rates:
            cells = (rate.mb_s, rate.spread, rate.early_mb_s, rate.late_mb_s)
            rows.append(
                [
                    str(rate.depth),
                    *("-" if cell is None else format_number(cell) for cell in cells),
                    format_number(rate.p50_ms),
                    format_number(rate.p99_ms),
                    bar(rate.mb_s / top),
                    "<- best" if rate is result.best and result.ranks else "",
                ]
            )
        print_grid(console, _HEADINGS, rows, words=("", " "), dispensable=(" ",))
        console.print()
    console.print(f"Verdict: {escape(result.verdict)}.")
    for fact in result.facts():
        console.print(f"  {escape(fact)}")


def bar(share: float) -> str:
    """A bar of a share between 0 and 1; anything above zero is visible."""
    filled = max(1, round(share * _BAR_WIDTH)) if share > 0 else 0
    return "#" * filled
