"""``pichak fleet compare``: the table of a stored run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_NOTHING,
    UserError,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.options import open_store, store_option

if TYPE_CHECKING:
    from pichak_coordinator.records import Run


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet compare                          the newest run\n"
    "  pichak fleet compare --sort disk --plans\n"
    "  pichak fleet compare 20261130T0912 --format md > fleet.md\n"
)
@click.argument("run", default="")
@click.option("--sort", default="", help="Column to sort by [default: fastest first].")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "md"]),
    default="table",
    show_default=True,
)
@click.option("--plans", is_flag=True, help="Print each plan with its sources, too.")
@store_option
@json_option
def compare(
    run: str, sort: str, form: str, plans: bool, store_path: Path | None, as_json: bool
) -> int:
    """Show the comparison of a RUN (an id or its beginning; default: the newest)."""
    from pichak_coordinator.cli.run_view import comparison_of, print_run, run_as_dict

    if as_json and form not in ("table", "json"):
        raise UserError(f"--json and --format {form}: choose one of them")
    with open_store(store_path, read_only=True) as store:
        chosen = _choose(store.runs(), run)
        rows = store.rows_of(chosen)
        if as_json or form == "json":
            print_json(run_as_dict(store, chosen, rows, sort))
        elif form == "csv":
            click.echo(comparison_of(rows, sort).to_csv(), nl=False)
        elif form == "md":
            click.echo(comparison_of(rows, sort).to_markdown(), nl=False)
        else:
            print_run(store, chosen, rows, sort, out(), plans=plans)
    return EXIT_DONE if any(row.measured for row in rows) else EXIT_NOTHING


def _choose(runs: Sequence[Run], name: str) -> str:
    ids = [run.run for run in runs]
    if not ids:
        raise UserError("no run is stored yet; `pichak fleet profile` makes one")
    if not name:
        # A network test compares links, not machines.
        return next((run.run for run in runs if run.command != "net"), ids[0])
    matches = [run for run in ids if run == name or run.startswith(name)]
    if len(matches) != 1:
        found = f"{len(matches)} runs begin with" if matches else "there is no run"
        raise UserError(f"{found} {name!r}; `pichak fleet history` lists them")
    return matches[0]
