"""What a simulation came to, as a person reads it."""

from __future__ import annotations

import csv
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from pichak_coordinator.cli.common import out
from pichak_coordinator.cli.tables import print_grid
from pichak_coordinator.simulation import Result, Simulation
from pichak_coordinator.text import csv_cell, markdown_cell, printable
from pichak_core.plan import format_number

_LISTED = 10
_HEADINGS = ("fault", "put in", "found", "median hours", "longest hours")


def show_simulation(made: Simulation, record: Mapping[str, Any], form: str) -> None:
    """Print it: the table of faults alone as csv and md, with everything around it as a table."""
    results = made.results()
    lines = _lines(results)
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(_HEADINGS)
        writer.writerows([csv_cell(line[0]), *line[1:]] for line in lines)
        click.echo(text.getvalue(), nl=False)
    elif form == "md":
        rows = [_HEADINGS, ("---", *["---:"] * 4), *_shown(lines)]
        for number, row in enumerate(rows):
            cells = row if number < 2 else [markdown_cell(cell) for cell in row]
            click.echo(f"| {' | '.join(cells)} |")
        click.echo(f"\n{markdown_cell(_head(record))}")
    else:
        _page(record, results, lines)


def _lines(results: Sequence[Result]) -> list[tuple[Any, ...]]:
    """(kind, put in, found, median hours, longest hours); None where nothing was found."""
    kinds: dict[str, list[Result]] = {}
    for result in results:
        kinds.setdefault(result.fault.kind, []).append(result)
    made: list[tuple[Any, ...]] = []
    for kind, some in sorted(kinds.items()):
        hours = [r.hours for r in some if r.hours is not None]
        middle = statistics.median(hours) if hours else None
        made.append((kind, len(some), len(hours), middle, max(hours, default=None)))
    return made


def _shown(lines: Sequence[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    return [tuple("–" if cell is None else format_number(cell) for cell in line) for line in lines]


def _days(count: float, form: str) -> str:
    text = format(count, form)
    return f"{text} day" if text == "1" else f"{text} days"


def _head(record: Mapping[str, Any]) -> str:
    begin = time.strftime("%Y-%m-%d", time.gmtime(record["begin_unix"]))
    return (
        f"Simulated, no machine was measured: {record['nodes']:,} hosts with "
        f"{record['devices']:,} devices, {_days(record['days'], 'g')} from {begin}, seed "
        f"{record['seed']}. {record['faults_found']} of {record['faults_put_in']} faults were "
        "found."
    )


def _page(
    record: Mapping[str, Any], results: Sequence[Result], lines: Sequence[tuple[Any, ...]]
) -> None:
    from rich.text import Text

    console = out()

    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style, overflow="fold"), soft_wrap=False)

    say(_head(record), "bold")
    if lines:
        headings = ("fault", "put in", "found", "median h", "longest h")
        print_grid(console, headings, _shown(lines), words=("fault",), ruled=True)
    missed = [result for result in results if result.hours is None]
    end = record["begin_unix"] + 86400 * record["days"]
    for result in missed[:_LISTED]:
        left = (end - result.fault.begin_unix) / 86400
        what = f"{result.fault.kind}{f' ({result.fault.metric})' if result.fault.metric else ''}"
        say(
            f"not found: {result.fault.host}: {what}, begun {_days(left, '.1f')} before the end",
            "yellow",
        )
    if len(missed) > _LISTED:
        say(f"not found: {len(missed) - _LISTED} more (--json has them)", "yellow")
    probes = record["probes_of_healthy_hosts"]
    wrong = record["false_accusations_of_healthy_hosts"]
    share = f" ({100 * wrong / probes:.2g} %)" if probes and wrong else ""
    say(f"False accusations of healthy hosts: {wrong} in {probes:,} probes{share}.")
    others = len(record["false_accusations"]) - wrong
    if others:
        say(f"Of ill hosts, in what was not ill: {others}.")
    for each in record["false_accusations"][:_LISTED]:
        say(f"  {each['host']}, {each['event']}: {each['text']}", "yellow")
    cost = record["cost_seconds"]
    seconds = record["probe_seconds_a_host_a_day"]
    say(
        f"Probes: {record['probes']:,} in {record['probe_seconds']:,.0f} probe-seconds, "
        f"{seconds:.0f} s a host a day ({seconds / 864:.2g} % of its time), where a light one is "
        "taken to cost "
        f"{cost['light']:g} s a device and a full one {cost['full']:g} s (constants)."
    )
    say(f"took {record['took_seconds']:g} s", "dim")
    if record["store"]:
        say(
            f"Its history is in {record['store']}: pichak fleet compare (or history, pick, report) "
            f"--store {record['store']}"
        )
