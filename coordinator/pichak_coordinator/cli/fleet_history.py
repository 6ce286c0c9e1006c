"""``pichak fleet history``: the stored runs, or one metric of a node over time."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from pichak_coordinator.cli.common import EXIT_NOTHING, UserError, json_option, out, print_json
from pichak_coordinator.cli.options import open_store, store_option
from pichak_coordinator.cli.tables import chosen_format, fits, format_option, print_records
from pichak_coordinator.records import NodeRecord, Point, Row, Run
from pichak_coordinator.run_end import end_of
from pichak_coordinator.text import printable
from pichak_core.plan import format_number

_BEHIND_HOST = re.compile(r"( (cpu|cuda:[0-9]+))?( \(simulated\))?$")
_BAR = 24
#: What stands beside a bar: time, device, value, spread and a note.
#: Below this width a point is a folded line, not a row.
_LEAST_TABLE = 70
_BESIDE_BAR = 68


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet history                             the runs\n"
    "  pichak fleet history gpu-box                     what was ever read of a node\n"
    "  pichak fleet history gpu-box disk.read_mb_s      one metric over time\n"
)
@click.argument("node", default="")
@click.argument("metric", default="")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@click.option("--watch", is_flag=True, help="List the probes of `pichak fleet watch` too.")
@store_option
@format_option
@json_option
def history(
    *,
    node: str,
    metric: str,
    limit: int,
    watch: bool,
    store_path: Path | None,
    form: str,
    as_json: bool,
) -> int:
    """Show stored runs; with a NODE its metrics, with a METRIC of it the values.

    NODE is an identity, a host, an address, or the name that a table shows.
    """
    form = chosen_format(form, as_json)
    with open_store(store_path, read_only=True) as store:
        if not node:
            return _runs(store, limit, watch, form)
        identity = _identity(store, node)
        if not metric:
            names = sorted(store.metric_names(identity))
            if form == "json":
                print_json({"schema": 1, "node": identity, "metrics": names})
            elif form != "table":
                print_records([{"metric": name} for name in names], form)
            elif names:
                click.echo("\n".join(printable(name) for name in names))
            else:
                click.echo(f"pichak: nothing was read of {node} yet", err=True)
            return 0 if names else EXIT_NOTHING
        points = store.history(identity, metric)[-limit:]
        if not points:
            known = ", ".join(sorted(store.metric_names(identity))[:8])
            raise UserError(f"{node} has no reading of {metric!r}; it has {known}, …")
    if form == "json":
        print_json({"schema": 1, "node": identity, "metric": metric, "points": _plain(points)})
    elif form == "table":
        _print_points(points)
    else:
        shown = _plain(points, readable=form == "md")
        print_records(shown, form, right=("value", "spread", "samples"))
    return 0


def _runs(store: Any, limit: int, watch: bool, form: str) -> int:
    every = store.runs()
    runs = [run for run in every if watch or run.command != "fleet watch"]
    ends = {run.run: end_of(store, run) for run in runs[:limit]}
    listed = [
        {
            "run": run.run,
            "started": _clock(run.started_unix),
            "seconds": _seconds(run, rows := store.rows_of(run.run, curves=False)),
            "rows": len(rows),
            "failed": sum(row.failed for row in rows),
            "state": ends[run.run].state,
            "name": run.settings.get("name", ""),
            "model": run.settings.get("model", ""),
            "data": run.settings.get("data", ""),
            "simulated": any(row.node.simulated for row in rows),
        }
        for run in runs[:limit]
    ]
    if form == "json":
        print_json({"schema": 1, "runs": listed})
    elif listed:
        extra = ("seconds", "data", "model")
        if form != "csv":  # to a person, what came to its end as it should says nothing of it
            listed = [{**r, "state": r["state"].replace("ended", "")} for r in listed]
        print_records(listed, form, right=("seconds", "rows", "failed"), dispensable=extra)
        newest = next((end.sentence for end in ends.values() if end.sentence), "")
        if newest:
            click.echo(f"pichak: {printable(newest)}", err=True)
    if not listed and every:
        count = "1 run" if len(every) == 1 else f"{len(every):,} runs"
        click.echo(f"pichak: {count} of `pichak fleet watch` only: --watch lists them", err=True)
    elif not listed:
        click.echo("pichak: no run is stored; `pichak fleet profile` makes one", err=True)
    return 0 if listed else EXIT_NOTHING


def _identity(store: Any, name: str) -> str:
    nodes = store.nodes()
    named = _bare(name, {n.host for n in nodes})
    matches = [
        n.node
        for n in nodes
        if named in (n.node, n.host, n.address, NodeRecord(n.node, n.host).label)
    ]
    if not matches:
        raise UserError(f"no node {name!r} in {store.path}; `pichak fleet nodes` lists them")
    if len(matches) > 1:
        raise UserError(f"{name!r} is {len(matches)} nodes; name one of {', '.join(matches)}")
    return str(matches[0])


def _bare(name: str, hosts: Collection[str]) -> str:
    """A host without what tables put behind it: its device, and that it is simulated."""
    if name in hosts:
        return name
    return _BEHIND_HOST.sub("", name) or name


def _plain(points: list[Point], *, readable: bool = False) -> list[dict[str, Any]]:
    """A record for each; its time as a date where it is to be `readable`."""
    return [
        {
            "run": p.run,
            "device": p.device,
            **({"time": _clock(p.received_unix)} if readable else {"time_unix": p.received_unix}),
            "value": p.text if p.value is None else p.value,
            "unit": p.unit,
            "spread": p.spread,
            "samples": p.samples,
            "suspect": p.suspect,
            "unmeasured": p.unmeasured,
            "source": p.source,
            "simulated": p.simulated,
        }
        for p in points
    ]


def _print_points(points: list[Point]) -> None:
    from rich.table import Table
    from rich.text import Text

    numbers = [p.value for p in points if p.value is not None]
    top = max((abs(n) for n in numbers), default=0.0)
    console = out()
    bar_width = max(0, min(_BAR, console.width - _BESIDE_BAR))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("time", "device", "value", "± spread", "", "note"):
        whole = name not in ("note", "device")
        right = name in ("value", "± spread")
        table.add_column(name, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    lines = []
    for p in points:
        shown = p.text if p.value is None else f"{format_number(p.value)} {p.unit}"
        bar = "" if p.value is None or not top else "█" * round(bar_width * abs(p.value) / top)
        spread = "" if p.spread is None else format_number(p.spread)
        note = p.unmeasured or (f"SUSPECT: {p.suspect}" if p.suspect else "")
        note = f"simulated; {note}".removesuffix("; ") if p.simulated else note
        parts = [_clock(p.received_unix), shown or "-", spread and f"±\u00a0{spread}"]
        lines.append([*parts, p.device, note])
        cells = (parts[0], p.device, shown or "-", spread, bar, note)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    if console.width >= _LEAST_TABLE and fits(table, console, folding=True):
        console.print(table)
        return
    for line in lines:  # folded: a column that is cut off would hide what it says
        console.print(Text(printable("  ".join(part for part in line if part))))


def _seconds(run: Run, rows: Sequence[Row]) -> float | None:
    """None for a run that was cut off, and where no time passed because it was simulated."""
    if run.finished_unix is None or run.simulated(rows):
        return None
    return round(run.finished_unix - run.started_unix, 1)


def _clock(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
