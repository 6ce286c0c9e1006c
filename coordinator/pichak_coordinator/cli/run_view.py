"""One stored run as a person or a program reads it; shared by ``profile`` and ``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.changes import changes, comparable
from pichak_coordinator.cli.common import UserError
from pichak_coordinator.compare import Comparison, column_named, compare
from pichak_coordinator.pick import By
from pichak_coordinator.prices import NO_PRICES, PriceBook
from pichak_coordinator.records import Row
from pichak_coordinator.run_end import RunEnd, end_of
from pichak_coordinator.store import Store
from pichak_coordinator.text import printable

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_PRICED = ("price_per_hour", "cost_per_million_scored_tokens", "cost_per_epoch")


@dataclass(frozen=True)
class Shown:
    """How a run is shown: the column it is sorted by, prices, what the pick goes by ("speed",
    "cost", or None: by cost where there are prices), and whether every device of a large fleet is
    (`every`), or a summary, the worst and the first."""

    sort: str = ""
    prices: PriceBook = NO_PRICES
    by: str | None = None
    every: bool = False


def comparison_of(rows: Sequence[Row], shown: Shown | str) -> Comparison:
    """The table, sorted; `UserError` names the columns when `sort` is none of them.

    A text instead of `shown` is the column to sort by.
    """
    shown = Shown(shown) if isinstance(shown, str) else shown
    if shown.sort:
        try:
            column_named(shown.sort)
        except ValueError as error:
            raise UserError(f"--sort {shown.sort}: {error}") from error
    by: By | None = "cost" if shown.by == "cost" else "speed" if shown.by else None
    sort = shown.sort if _sortable(rows, shown) else None
    try:
        return compare(rows, prices=shown.prices, sort=sort, by=by)
    except ValueError as error:
        raise UserError(f"--by {shown.by}: {error}") from error


def _sortable(rows: Sequence[Row], shown: Shown) -> bool:
    """Whether any row has a value to sort by; says so on stderr where none has."""
    if not rows or not shown.sort:
        return bool(shown.sort)
    column = column_named(shown.sort)
    found = compare(rows, prices=shown.prices).lines
    if any(line.cells[column.key] is not None for line in found):
        return True
    priced = column.key in _PRICED and not shown.prices
    hint = " (a price list does: --prices FILE)" if priced else ""
    click.echo(
        f"pichak: --sort {shown.sort}: nothing gives any device a value there{hint}; the fastest "
        "come first instead",
        err=True,
    )
    return False


def ending(store: Store, run: str) -> RunEnd:
    """How a run of the store ended."""
    found = store.run(run)
    return end_of(store, found) if found is not None else RunEnd()


def run_as_dict(store: Store, run: str, rows: Sequence[Row], shown: Shown | str) -> dict[str, Any]:
    """What ``--json`` prints (SPEC 8)."""
    return {
        "schema": SCHEMA,
        "run": run,
        "ended": ending(store, run).state,
        "nodes": [row.as_dict() for row in rows],
        "comparison": comparison_of(rows, shown).as_dict(),
        "changes": [c.as_dict() for c in changes(rows, store.previous_rows(run))],
    }


def print_run(
    store: Store,
    run: str,
    rows: Sequence[Row],
    shown: Shown | str,
    console: Console,
    *,
    plans: bool,
) -> None:
    """Plans (when asked for), the table with its pick, and what changed since the last run."""
    from pichak_coordinator.cli.comparison_view import (
        MOST_LINES,
        render_changes,
        render_comparison,
        render_rows,
    )

    shown = Shown(shown) if isinstance(shown, str) else shown
    table = comparison_of(rows, shown)
    if plans:
        few = shown.every or len(rows) <= MOST_LINES
        picked = [row for row in rows if row.key == (table.pick.node, table.pick.device)]
        render_rows(rows if few else picked, console)
        if not few:
            console.print("The plan of the one picked; --plans --all prints every one.")
        console.print()
    render_comparison(table, console, every=shown.every)
    if ended := ending(store, run).sentence:
        console.print(printable(ended), style="bold yellow", markup=False, soft_wrap=True)
    before = store.previous_rows(run)
    if before:
        console.print()
        compared = sum(comparable(row, before.get(row.key)) for row in rows)
        found = changes(rows, before)
        render_changes(found, console, devices=len(rows), compared=compared, every=shown.every)
