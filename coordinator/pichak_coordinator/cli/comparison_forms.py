"""A stored run as CSV or Markdown: all that its table on a terminal says, the plans where asked."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.changes import Change, changes
from pichak_coordinator.cli.comparison_view import certainty
from pichak_coordinator.cli.run_view import Shown, comparison_of, ending
from pichak_coordinator.compare import Comparison, Line
from pichak_coordinator.records import Row
from pichak_coordinator.text import csv_cell, markdown_cell, printable

if TYPE_CHECKING:
    from pichak_coordinator.store import Store

Key = tuple[str, str]
_BETWEEN = " | "
_REPORT_WIDTH = 100


def print_run_as(
    store: Store, run: str, rows: Sequence[Row], shown: Shown, form: str, *, plans: bool
) -> None:
    """``csv`` or ``md`` on stdout; every device, whatever `shown` says of a large fleet."""
    table = comparison_of(rows, shown)
    if ended := ending(store, run).sentence:
        table = replace(table, notes=(ended, *table.notes))
    moved: dict[Key, list[Change]] = {}
    for change in changes(rows, store.previous_rows(run)):
        moved.setdefault(change.node.key, []).append(change)
    click.echo((_csv if form == "csv" else _markdown)(table, moved, plans), nl=False)


def _csv(table: Comparison, moved: Mapping[Key, Sequence[Change]], plans: bool) -> str:
    """A line for each device: the table's cells, then what stands under the table; its notes, which
    are of no device, in the first line."""
    names = list(dict.fromkeys(name for line in table.lines for name in line.row.plan or ()))
    named = [f"plan.{name}{part}" for name in names for part in ("", ".unit", ".source")]
    text = io.StringIO()
    writer = csv.writer(text)
    below = ("simulated", "pick", "notes", "all_findings", "changed", "printed_last")
    heads = [column.key for column in table.columns]
    writer.writerow([*heads, *below, *((*named, "plan.notes") if plans else ())])
    for number, line in enumerate(table.lines):
        row = line.row
        found = [f"{certainty(f)}: {f.sentence}" for f in row.findings]
        cells: list[Any] = [line.cells[name] for name in heads]
        cells += [
            "yes" if row.node.simulated else "",
            table.pick.sentence if _picked(table, line) else "",
            "" if number else _BETWEEN.join(table.notes),
            _BETWEEN.join(found),
            _BETWEEN.join(change.sentence for change in moved.get(row.key, ())),
            _BETWEEN.join(_printed(row)),
        ]
        if plans:
            cells += _plan_cells(row, names)
        writer.writerow([csv_cell(c) if isinstance(c, str) else c for c in cells])
    return text.getvalue()


def _plan_cells(row: Row, names: Sequence[str]) -> list[Any]:
    cells: list[Any] = []
    for name in names:
        value = row.plan[name] if row.plan is not None and name in row.plan else None
        cells += ["", "", ""] if value is None else [value.value, value.unit, value.source]
    return [*cells, _BETWEEN.join(row.plan.notes) if row.plan is not None else ""]


def _printed(row: Row) -> list[str]:
    """What each of its jobs that failed printed last."""
    return [f"{kind} printed: {' / '.join(lines)}" for kind, lines in row.printed.items() if lines]


def _picked(table: Comparison, line: Line) -> bool:
    return line.row.key == (table.pick.node, table.pick.device)


def _markdown(table: Comparison, moved: Mapping[Key, Sequence[Change]], plans: bool) -> str:
    parts = [table.to_markdown()]
    rows = [line.row for line in table.lines]
    found = [
        (f.order, f"{markdown_cell(row.node.label)}, {certainty(f)}: {markdown_cell(f.sentence)}")
        for row in rows
        for f in row.findings
    ]
    parts += _listed("Findings", [text for _, text in sorted(found, key=lambda entry: entry[0])])
    for title, some in (
        ("Failed", [row for row in rows if row.failed]),
        ("Not finished", [row for row in rows if row.unfinished]),
    ):
        sentences = ["; ".join([f"{r.node.label}: {r.error}", *_printed(r)]) for r in some]
        parts += _listed(title, [markdown_cell(sentence) for sentence in sentences])
    told = [
        f"{markdown_cell(row.node.label)}: {markdown_cell(change.sentence)}"
        for row in rows
        for change in moved.get(row.key, ())
    ]
    parts += _listed("Changed since the last run", told)
    if plans:
        for row in rows:
            parts.append(f"\n## {markdown_cell(row.node.label)}\n\n")
            parts.append(_plan_text(row))
    return "".join(parts)


def _listed(title: str, sentences: Sequence[str]) -> list[str]:
    if not sentences:
        return []
    return [f"\n## {title}\n\n", *(f"- {sentence}\n" for sentence in sentences)]


def _plan_text(row: Row) -> str:
    if row.plan is None:
        return f"No plan was derived{f': {markdown_cell(row.error)}' if row.error else '.'}\n"
    text = printable(row.plan.report(_REPORT_WIDTH), keep_newlines=True)
    # Indented text is code, whatever it holds.
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
