"""One stored run as a person or a program reads it; shared by ``profile`` and ``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pichak_coordinator.changes import changes
from pichak_coordinator.cli.common import UserError
from pichak_coordinator.compare import Comparison, compare
from pichak_coordinator.records import Row
from pichak_coordinator.store import Store

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1


def comparison_of(rows: Sequence[Row], sort: str) -> Comparison:
    """The table, sorted; `UserError` names the columns when `sort` is none of them."""
    try:
        return compare(rows, sort=sort or None)
    except ValueError as error:
        raise UserError(f"--sort {sort}: {error}") from error


def run_as_dict(store: Store, run: str, rows: Sequence[Row], sort: str) -> dict[str, Any]:
    """What ``--json`` prints (SPEC 8)."""
    return {
        "schema": SCHEMA,
        "run": run,
        "nodes": [row.as_dict() for row in rows],
        "comparison": comparison_of(rows, sort).as_dict(),
        "changes": [c.as_dict() for c in changes(rows, store.previous_rows(run))],
    }


def print_run(
    store: Store, run: str, rows: Sequence[Row], sort: str, console: Console, *, plans: bool
) -> None:
    """Plans (when asked for), the table with its pick, and what changed since the last run."""
    from pichak_coordinator.cli.comparison_view import (
        render_changes,
        render_comparison,
        render_rows,
    )

    if plans:
        render_rows(rows, console)
        console.print()
    render_comparison(comparison_of(rows, sort), console)
    before = store.previous_rows(run)
    if before:
        console.print()
        render_changes(changes(rows, before), console)
