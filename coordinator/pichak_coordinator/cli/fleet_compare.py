"""``pichak fleet compare``: the table of a stored run."""

from __future__ import annotations

from pathlib import Path

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_NOTHING,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.options import open_store, store_option
from pichak_coordinator.cli.price_options import (
    by_option,
    prices_of,
    prices_option,
    tell_unknown,
)
from pichak_coordinator.cli.tables import chosen_format, format_option


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet compare                          the newest run\n"
    "  pichak fleet compare --sort disk --plans\n"
    "  pichak fleet compare --prices prices.toml --sort cost\n"
    "  pichak fleet compare 20261130T0912 --format md > fleet.md\n"
)
@click.argument("run", default="")
@click.option("--sort", default="", help="Column to sort by [default: fastest first].")
@format_option
@click.option("--all", "every", is_flag=True, help="Every device, also of a large fleet.")
@click.option("--plans", is_flag=True, help="Print each plan with its sources, too.")
@prices_option
@by_option
@store_option
@json_option
def compare(
    *,
    run: str,
    sort: str,
    form: str,
    every: bool,
    plans: bool,
    prices: Path | None,
    by: str | None,
    store_path: Path | None,
    as_json: bool,
) -> int:
    """Show the comparison of a RUN (an id, its beginning, or a name; default: the newest)."""
    from pichak_coordinator.cli.comparison_forms import print_run_as
    from pichak_coordinator.cli.run_choice import chosen_run
    from pichak_coordinator.cli.run_view import Shown, print_run, run_as_dict
    from pichak_coordinator.stored_faults import rows_as_known

    book = prices_of(prices)
    form = chosen_format(form, as_json)
    with open_store(store_path, read_only=True) as store:
        chosen = chosen_run(store.runs(), run)
        rows = rows_as_known(store, chosen, curves=False)
        tell_unknown(book, rows)
        shown = Shown(sort, book, by, every)
        if form == "json":
            print_json(run_as_dict(store, chosen, rows, shown))
        elif form != "table":
            print_run_as(store, chosen, rows, shown, form, plans=plans)
        else:
            print_run(store, chosen, rows, shown, out(), plans=plans)
    return EXIT_DONE if any(row.measured for row in rows) else EXIT_NOTHING
