"""A picked team on a terminal: its members in ring order, the prediction with its sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pichak_coordinator.team import Team
from pichak_coordinator.text import printable
from pichak_core.measurement import Unmeasured
from pichak_core.plan import Value, format_number

if TYPE_CHECKING:
    from rich.console import Console

_LISTED = 20
#: Columns of `member_records` that hold figures.
RIGHT = ("rank", "rows_a_step", "own_part_s", "alone_tok_s", "to_the_next_mb_s")
#: A gap below this is rounding.
_PROVED = 1e-9


def print_team(team: Team, console: Console, run: str) -> None:
    """Print it; names and sentences of nodes are shown as they are, never obeyed."""
    names = ", ".join(m.label for m in team.members[:_LISTED])
    more = f" and {len(team.members) - _LISTED} more" if len(team.members) > _LISTED else ""
    how = "the least cost" if team.by == "cost" else "the fastest"
    _say(console, f"Pick {names}{more}: {how} {len(team.members)} together ({run}).", "bold")
    if team.gap > _PROVED:
        _say(
            console, f"Not proved to be the best: another set could be up to {team.gap:.1%} better."
        )
    console.print()
    _members(team, console)
    console.print()
    for name, figure in (
        ("pace", team.tokens_per_second),
        ("step", team.step_seconds),
        ("own part", team.compute_seconds),
        ("all-reduce", team.reduce_seconds),
        ("price", team.price_per_hour),
        ("cost", team.cost_per_million),
        ("epoch", team.hours_per_epoch),
        ("epoch cost", team.cost_per_epoch),
    ):
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
                "link_measured": None if link is None else link.measured,
            }
        )
    return made


def _members(team: Team, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    after = {source: link for source, _, link in team.ring}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading, side in (
        ("rank", "right"),
        ("node", "left"),
        ("device", "left"),
        ("rows\na step", "right"),
        ("own part\ns", "right"),
        ("alone\ntok/s", "right"),
        ("to the next\nMB/s", "right"),
    ):
        table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    for rank, member in enumerate(team.members[:_LISTED]):
        node = member.row.node
        link = after.get(node.alias or node.host or node.node)
        mark = "" if link is None or link.measured else " assumed"
        table.add_row(
            str(rank),
            Text(printable(member.label)),
            Text(printable(node.device_name or node.device)),
            str(team.rows_each),
            format_number(member.step_seconds(team.rows_each)),
            format_number(member.tokens_per_second),
            "–" if link is None else f"{format_number(link.mb_s)}{mark}",
        )
    console.print(table)


def _figure(console: Console, name: str, figure: Value | Unmeasured) -> None:
    if isinstance(figure, Unmeasured):
        # What nobody asked for is not missed.
        if not figure.detail.startswith(("no price", "the rows were not counted")):
            _say(console, f"{name + ':':<12}not known: {figure.detail}")
        return
    _say(console, f"{name + ':':<12}{figure}, {figure.source}")


def _say(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(text), style=style, overflow="fold"), soft_wrap=False)
