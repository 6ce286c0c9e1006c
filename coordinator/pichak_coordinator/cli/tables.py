"""``--format``, and small tables of records in each of its forms."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import Command, UserError, out
from pichak_coordinator.text import csv_cell, markdown_cell, printable
from pichak_core.plan import format_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FORMATS = ("table", "json", "csv", "md")

Record = Mapping[str, Any]


def format_option(command: Command) -> Command:
    """``--format``: a table for a person, or JSON, CSV or Markdown on stdout alone."""
    return click.option(
        "--format", "form", type=click.Choice(FORMATS), default="table", show_default=True
    )(command)


def chosen_format(form: str, as_json: bool) -> str:
    """The form, of which ``--json`` is one; `UserError` where both ask for different ones."""
    if as_json and form not in ("table", "json"):
        raise UserError(f"--json and --format {form}: choose one of them")
    return "json" if as_json else form


def print_records(
    records: Sequence[Record],
    form: str,
    *,
    right: Sequence[str] = (),
    dispensable: Sequence[str] = (),
) -> None:
    """Records of the same keys as a table, CSV (raw values) or Markdown.

    `right` names the columns that stand on the right, `dispensable` what a narrow terminal can do
    without, the first first. What a node sent is shown as it is, never obeyed.
    """
    names = list(records[0]) if records else []
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(names)
        for record in records:
            cells = ("" if v is None else v for v in record.values())
            writer.writerow([csv_cell(c) if isinstance(c, str) else c for c in cells])
        click.echo(text.getvalue(), nl=False)
    elif form == "md":
        rows = [[cell_of(v) for v in record.values()] for record in records]
        ruler = ["---:" if name in right else "---" for name in names]
        for heads in ([markdown_cell(_title(name)) for name in names], ruler):
            click.echo(f"| {' | '.join(heads)} |")
        for row in rows:
            click.echo(f"| {' | '.join(map(markdown_cell, row))} |")
    else:
        _print_table(records, names, right, dispensable, out())


def cell_of(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    return format_number(value) if isinstance(value, (int, float)) else str(value)


def _title(name: str) -> str:
    return name.replace("_", " ")


def fits(table: Table, console: Console, *, folding: bool = False) -> bool:
    """Whether all of a table has room; with `folding`, whether its words have. Asked with room to
    spare: a table that must shrink says that it fits."""
    size = console.measure(table, options=console.options.update(width=10_000))
    return (size.minimum if folding else size.maximum) <= console.width


def print_grid(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Sequence[str] = (),
    dispensable: Sequence[str] = (),
    ruled: bool = False,
) -> None:
    """A table, or a block for each row on a terminal that is too narrow for one: a number that is
    cut in its digits, or goes on in the next line, looks like another one.

    The columns of `words` stand on the left, those of `dispensable` go first where there is no room
    for all. Cells are shown as they are, never obeyed.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = list(range(len(headings)))
    for gone in (None, *dispensable):
        shown = [n for n in shown if headings[n] != gone]
        table = Table(
            box=box.SIMPLE_HEAD if ruled else None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            show_edge=False,
        )
        for n in shown:
            justify: Any = "left" if headings[n] in words else "right"
            table.add_column(Text(printable(headings[n])), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(printable(row[n])) for n in shown))
        if fits(table, console):
            console.print(table)
            return
    for row in rows:
        for n in shown:
            named = f"{headings[n]}: " if headings[n] and (n or headings[n] not in words) else ""
            text = Text(f"{'  ' if n else ''}{printable(named + row[n])}", overflow="fold")
            if row[n] not in ("", "–", "."):
                console.print(text, style="" if n else "bold")


def _print_table(
    records: Sequence[Record],
    names: Sequence[str],
    right: Sequence[str],
    dispensable: Sequence[str],
    console: Console,
) -> None:
    """A table, or a block for each record on a terminal that is too narrow for one."""
    from rich.table import Table
    from rich.text import Text

    rows = [[printable(cell_of(v)) for v in record.values()] for record in records]
    filled = [n for n, _ in enumerate(names) if any(row[n] not in ("", "–") for row in rows)]
    shown = list(filled)
    for gone in ("", *dispensable):
        shown = [n for n in shown if names[n] != gone]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for n in shown:
            justify: Any = "right" if names[n] in right else "left"
            table.add_column(Text(_title(names[n])), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[n]) for n in shown))
        if fits(table, console):
            console.print(table)
            return
    for row in rows:
        console.print(Text(row[filled[0]], style="bold", overflow="fold"))
        for n in filled[1:]:
            if row[n] not in ("", "–"):
                console.print(Text(f"  {_title(names[n])}: {row[n]}", overflow="fold"))
