"""A picked team on a terminal, as CSV and as Markdown: its members in ring order, the prediction
with its sources, what holds it back, and who was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.tables import fits, print_records
from pichak_coordinator.team import Team
from pichak_coordinator.text import markdown_cell, printable
from pichak_core.measurement import Unmeasured
from pichak_core.plan import Value, format_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LISTED = 20
#: Columns of `member_records` that hold figures.
_RIGHT = ("rank", "rows_a_step", "own_part_s", "alone_tok_s", "to_the_next_mb_s")
_MEMBER, _FIGURE = ("rank", "node", "device"), ("name", "value", "unit", "source")
#: A gap below this is rounding.
_PROVED = 1e-9
#: The least that is shown as a number.
_SHOWN = 0.001


def print_team(team: Team, console: Console, run: str) -> None:
    """Print it; names and sentences of nodes are shown as they are, never obeyed."""
    for sentence in _head(team, run, _LISTED):
        _say(console, sentence, "bold" if sentence.startswith("Pick") else "")
    console.print()
    _members(team, console)
    console.print()
    for name, figure in _figures(team):
        _figure(console, name, figure)
    _say(console, f"Bottleneck: {team.bottleneck}.", "bold")
    if team.constants:
        listed = "; ".join(f"{name} = {value} ({value.source})" for name, value in team.constants)
        _say(console, f"NOT MEASURED ({len(team.constants)}): {listed}")
    for note in team.notes:
        _say(console, f"note: {note}", "yellow")
    for sentence in team.left_out[:_LISTED]:
        _say(console, f"left out: {sentence}")
    if len(team.left_out) > _LISTED:
        _say(console, f"left out: {len(team.left_out) - _LISTED} more (--json has them)")


def print_team_as(team: Team, form: str, run: str) -> None:
    """All that `print_team` shows, and whoever it only counts, as ``csv`` or ``md`` on stdout.

    A line of the CSV is a member, a figure with its source, or a sentence, as its ``kind`` says.
    """
    members = member_records(team)
    if form == "csv":
        shown = [("head", text) for text in _head(team, run, len(team.members))]
        shown += [("bottleneck", team.bottleneck)]
        shown += [("note", text) for text in team.notes]
        shown += [("left_out", text) for text in team.left_out]
        figures = _figure_records(team)
        records: list[dict[str, Any]] = [{"kind": "member", **record} for record in members]
        records += [{"kind": "figure", **figure} for figure in figures]
        records += [{"kind": "constant", **_record(*value)} for value in team.constants]
        records += [{"kind": kind, "text": text} for kind, text in shown]
        names = ("kind", *(members[0] if members else _MEMBER), *_FIGURE, "text")
        print_records([{name: r.get(name) for name in names} for r in records], form)
        return
    for sentence in _head(team, run, len(team.members)):
        click.echo(f"{markdown_cell(sentence)}\n")
    print_records(members, form, right=_RIGHT)
    click.echo()
    print_records(_figure_records(team), form, right=("value",))
    click.echo(f"\nBottleneck: {markdown_cell(team.bottleneck)}.\n")
    for name, value in team.constants:
        click.echo(markdown_cell(f"NOT MEASURED: {name} = {value} ({value.source})") + "\n")
    for kind, sentences in (("note", team.notes), ("left out", team.left_out)):
        for sentence in sentences:
            click.echo(f"- {kind}: {markdown_cell(sentence)}")


def _head(team: Team, run: str, most: int) -> list[str]:
    names = ", ".join(m.label for m in team.members[:most])
    more = f" and {len(team.members) - most} more" if len(team.members) > most else ""
    told = [f"Pick {names}{more}: {_claim(team)} ({run})."]
    if team.gap > _PROVED:
        much = f"up to {team.gap:.1%}" if team.gap >= _SHOWN else f"less than {_SHOWN:.1%}"
        told.append(f"Not proved to be the best: another of them could be better by {much}.")
    return told


def _claim(team: Team) -> str:
    """Among what it is the best."""
    best, count = "the cheapest" if team.by == "cost" else "the fastest", len(team.members)
    if count == 1:
        return f"{best} alone, at {format_number(team.rows_each)} rows a step"
    if team.compared == "own_parts":
        return f"{best} {count} by their own parts alone, as the all-reduce is not known"
    if team.compared == "measured_links":
        return f"{best} {count} of the sets whose links were measured"
    return f"{best} {count} together"


def _figures(team: Team) -> list[tuple[str, Value | Unmeasured]]:
    """Each with its source, which says so where members are simulated."""
    of_team = [
        ("pace", team.tokens_per_second),
        ("step", team.step_seconds),
        ("own part", team.compute_seconds),
        ("all-reduce", team.reduce_seconds),
        ("cost", team.cost_per_million),
        ("epoch", team.hours_per_epoch),
        ("epoch cost", team.cost_per_epoch),
    ]
    made = [(name, team.told(figure)) for name, figure in of_team]
    return [*made[:4], ("price", team.price_per_hour), *made[4:]]


def _figure_records(team: Team) -> list[dict[str, Any]]:
    made = [_record(*figure) for figure in _figures(team)]
    return [figure for figure in made if figure["source"]]


def _record(name: str, figure: Value | Unmeasured) -> dict[str, Any]:
    if isinstance(figure, Unmeasured):
        why = "" if _unasked(figure) else f"not known: {figure.detail}"
        return {"name": name, "value": None, "unit": "", "source": why}
    return {"name": name, "value": figure.value, "unit": figure.unit, "source": figure.source}


def _unasked(figure: Unmeasured) -> bool:
    """What nobody asked for is not missed."""
    return figure.detail.startswith(("no price", "the rows were not counted"))


def member_records(team: Team) -> list[dict[str, Any]]:
    """A record for each rank, in the ring's order."""
    after = {source: link for source, _, link in team.ring}
    made = []
    for rank, member in enumerate(team.members):
        node = member.row.node
        link = after.get(node.alias or node.host or node.node)
        made.append(
            {
                "rank": rank,
                "node": member.label,
                "device": node.device_name or node.device,
                "rows_a_step": team.rows_each,
                "own_part_s": member.step_seconds(team.rows_each),
                "alone_tok_s": member.tokens_per_second,
                "to_the_next_mb_s": None if link is None else link.mb_s,
                "link_source": None if link is None else link.source,
            }
        )
    return made


_HEADS = (
    ("rank", "rank"),
    ("node", "node"),
    ("device", "device"),
    ("rows", "rows\na step"),
    ("own part, s", "own part\ns"),
    ("alone, tok/s", "alone\ntok/s"),
    ("to the next, MB/s", "to the next\nMB/s"),
)
_WORDS = ("node", "device")


def _members(team: Team, console: Console) -> None:
    """A table, without the devices' names where they have no room, or a block for each member."""
    from rich.text import Text

    rows = _shown_members(team)
    for left_out in ((), ("device",)):
        table = _table([n for n, (name, _) in enumerate(_HEADS) if name not in left_out], rows)
        if fits(table, console):
            console.print(table)
            return
    for row in rows:
        console.print(Text(f"rank {row[0]}: {row[1]}", style="bold", overflow="fold"))
        for (name, _), cell in list(zip(_HEADS, row, strict=True))[2:]:
            console.print(Text(f"  {name}: {cell}", overflow="fold"))


def _shown_members(team: Team) -> list[list[str]]:
    after = {source: link for source, _, link in team.ring}
    rows = []
    for rank, member in enumerate(team.members[:_LISTED]):
        node = member.row.node
        link = after.get(node.alias or node.host or node.node)
        mark = "" if link is None or link.measured else " assumed"
        rows.append(
            [
                str(rank),
                printable(member.label),
                printable(node.device_name or node.device),
                str(team.rows_each),
                format_number(member.step_seconds(team.rows_each)),
                format_number(member.tokens_per_second),
                "–" if link is None else f"{format_number(link.mb_s)}{mark}",
            ]
        )
    return rows


def _table(columns: Sequence[int], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for n in columns:
        name, heading = _HEADS[n]
        table.add_column(heading, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[n]) for n in columns))
    return table


def _figure(console: Console, name: str, figure: Value | Unmeasured) -> None:
    if isinstance(figure, Unmeasured):
        if not _unasked(figure):
            _say(console, f"{name + ':':<12}not known: {figure.detail}")
        return
    _say(console, f"{name + ':':<12}{figure}, {figure.source}")


def _say(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(text), style=style, overflow="fold"), soft_wrap=False)
