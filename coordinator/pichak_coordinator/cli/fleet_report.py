"""``pichak fleet report``: a stored run as one HTML page."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_NOTHING,
    UserError,
    json_option,
    print_json,
)
from pichak_coordinator.cli.files import FileName
from pichak_coordinator.cli.options import open_store, store_option
from pichak_coordinator.cli.price_options import (
    by_option,
    prices_of,
    prices_option,
    tell_unknown,
)

_STDOUT = "-"


class _Sections(click.ParamType):  # type: ignore[type-arg]
    """A number of devices, or ``all``."""

    name = "N|all"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value is None or str(value) == "all":
            return None
        if not str(value).isdigit():
            self.fail(f"{value!r} is neither a number of devices nor 'all'", param, ctx)
        return int(str(value))


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet report --html fleet.html         the newest run\n"
    "  pichak fleet report 20261130T0912 --html fleet.html --title 'Berlin, November'\n"
    "  pichak fleet report --html fleet.html --prices prices.toml --sections all\n"
    "  pichak fleet report --html - | ssh www 'cat > fleet.html'\n"
)
@click.argument("run", default="")
@click.option(
    "--html",
    "html",
    required=True,
    type=FileName(path_type=str),
    metavar="FILE",
    help="Where the page goes; - is standard output.",
)
@click.option("--title", default="", help="The page's title [default: Fleet report].")
@click.option("--sort", default="", help="Column to sort by [default: fastest first].")
@click.option(
    "--sections",
    type=_Sections(),
    default="40",
    show_default=True,
    metavar="N|all",
    help="Devices that get a section of their own, those with findings first.",
)
@click.option("--force", is_flag=True, help="Replace FILE also where it is no report.")
@prices_option
@by_option
@store_option
@json_option
def report(
    *,
    run: str,
    html: str,
    title: str,
    sort: str,
    sections: int | None,
    force: bool,
    prices: Path | None,
    by: str | None,
    store_path: Path | None,
    as_json: bool,
) -> int:
    """Write a RUN (an id, its beginning, or a name; default: the newest) as one HTML page.

    The page opens offline and loads nothing: the comparison to sort and filter, the findings with
    their evidence, the links, and of each device its plan with sources, ramp, disk, transfers,
    history and conditions. It is written whole or not at all, over an earlier report but over no
    other file. With --json, what was written is told on standard output.
    """
    from pichak_coordinator.cli.run_choice import chosen_run
    from pichak_coordinator.cli.run_view import Shown, comparison_of
    from pichak_coordinator.database import default_path
    from pichak_coordinator.report.content import content
    from pichak_coordinator.report.page import MissingExtraError, page
    from pichak_coordinator.report.writing import NotOursError, check_place, write_page
    from pichak_coordinator.stored_faults import rows_as_known

    if html == _STDOUT:
        if as_json:
            raise UserError("--html - and --json both want standard output; choose one of them")
        if sys.stdout is not None and sys.stdout.isatty():
            raise UserError("--html -: a page of some megabytes is for a file or a pipe (> FILE)")
    place = Path(html)
    book = prices_of(prices)
    try:
        if html != _STDOUT:
            check_place(place, force=force, store=store_path or default_path())
        with open_store(store_path, read_only=True) as store, store.snapshot():
            chosen = chosen_run(store.runs(), run)
            found = store.run(chosen)
            rows = rows_as_known(store, chosen)
            tell_unknown(book, rows)
            if found is None or not rows:
                raise UserError(f"the run {chosen} has no node; `pichak fleet history` lists runs")
            made = content(
                store,
                found,
                comparison_of(rows, Shown(sort, book, by)),
                title=title or "Fleet report",
                now=time.time(),
                sections=sections,
            )
        text = page(made)
        if html == _STDOUT:
            data = text.encode("utf-8")  # as the page itself says, whatever the terminal's is
            click.echo(data, nl=False)
            size = len(data)
        else:
            size = write_page(place, text)
    except (MissingExtraError, NotOursError) as error:
        raise UserError(str(error)) from error
    told = {
        "schema": 1,
        "run": chosen,
        "file": html,
        "bytes": size,
        "devices": len(rows),
        "sections": len(made.sections),
        "findings": len(made.findings),
    }
    if as_json:
        print_json(told)
    else:
        of = f"{len(made.sections)} of {len(rows)} devices with a section"
        click.echo(f"pichak: {html}: run {chosen}, {of}, {size / 1e6:.1f} MB", err=True)
    return EXIT_DONE if any(row.measured for row in rows) else EXIT_NOTHING
