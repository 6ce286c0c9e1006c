"""The page of a network test: the matrix of links, what is wrong, the all-reduce, the gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pichak_coordinator.cli.tables import print_grid
from pichak_coordinator.links import LinkMatrix, Pair, number, unordered
from pichak_coordinator.net_collective import slowest_link
from pichak_coordinator.text import printable, shortened
from pichak_core.measurement import Measurement, Reading
from pichak_core.plan import format_number

if TYPE_CHECKING:
    from rich.console import Console

    from pichak_coordinator.fleet_network import NetReport
    from pichak_coordinator.netfinding import NetFinding

#: Up to this many nodes a matrix fits on a page; of more the slowest links are listed.
_MATRIX_NODES = 10
_LISTED = 20
_NAME = 18


def show_network(report: NetReport, console: Console) -> None:
    """Print it; names and sentences of nodes are shown as they are, never obeyed."""
    matrix = report.matrix
    if len(matrix.nodes) <= _MATRIX_NODES:
        _matrix(console, matrix)
    else:
        _list(console, matrix)
    _findings(console, report)
    _collective(console, report)
    skipped = len(matrix.skipped())
    if skipped and matrix.rtt:
        _say(console, f"Not asked for: {skipped} of {len(matrix.links)} links (--pairs all).")
    gaps = [*report.gaps]
    if gaps:
        _say(console, "Gaps:")
        for gap in dict.fromkeys(gaps):
            _say(console, f"  {gap}")


def _matrix(console: Console, matrix: LinkMatrix) -> None:
    for title, cell in (
        ("MB/s, from the row's node to the column's", _rate_cell),
        ("round trip in ms, median (95 % within)", _rtt_cell),
    ):
        _say(console, title)
        rows = [
            [_short(row), *(cell(matrix, row, to) if row != to else "." for to in matrix.nodes)]
            for row in matrix.nodes
        ]
        print_grid(console, ("", *map(_short, matrix.nodes)), rows, words=("",))
        _say(console, "")


def _rate_cell(matrix: LinkMatrix, source: str, target: str) -> str:
    return _cell(matrix.rate.get((source, target)))


def _rtt_cell(matrix: LinkMatrix, one: str, other: str) -> str:
    reading = matrix.rtt.get(unordered(one, other))
    if not isinstance(reading, Measurement):
        return _cell(reading)
    p95 = reading.detail.get("p95_ms")
    tail = f" ({_figure(p95)})" if isinstance(p95, (int, float)) else ""
    return f"{_cell(reading)}{tail}"


def _cell(reading: Reading | None) -> str:
    if reading is None:
        return ""
    value = number(reading)
    if value is None:
        return "suspect" if isinstance(reading, Measurement) else "-"
    return _figure(value)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _list(console: Console, matrix: LinkMatrix) -> None:
    rates: Mapping[Pair, float] = {
        way: rate for way, reading in matrix.rate.items() if (rate := number(reading)) is not None
    }
    _say(console, f"the slowest {min(_LISTED, len(rates))} of {len(rates)} measured directions")
    rows = [
        (source, target, _figure(rate), _rtt_cell(matrix, source, target))
        for (source, target), rate in sorted(rates.items(), key=lambda item: item[1])[:_LISTED]
    ]
    print_grid(console, ("from", "to", "MB/s", "round trip ms"), rows, words=("from", "to"))
    _say(console, "")


def _findings(console: Console, report: NetReport) -> None:
    if not report.findings:
        measured = sum(isinstance(r, Measurement) for r in report.matrix.rtt.values())
        if measured:
            few = len(report.matrix.nodes) < 3
            tail = " (two nodes are not compared with each other)" if few else ""
            _say(console, f"Nothing is wrong with the {_count(measured, 'measured link')}{tail}.")
    for each in report.findings:
        finding = each.finding
        sure = finding.state if finding.severity != "info" else "note"
        low = ", few nodes to compare with" if finding.confidence == "low" else ""
        mark = f"{finding.severity.upper()} {finding.code} ({sure}{low})"
        _say(console, f"{mark}: {finding.sentence}.")
    _once(console, report.not_repeated)


def _once(console: Console, seen: Sequence[NetFinding]) -> None:
    if seen:
        what = ", ".join(f"{each.finding.code} of {' → '.join(each.nodes)}" for each in seen)
        _say(console, f"Seen once and not again, so nobody is accused: {what}.")


def _collective(console: Console, report: NetReport) -> None:
    made = report.collective
    if made is None:
        return
    _say(console, "")
    names = f"{made.backend} all-reduce over {len(made.nodes)} nodes"
    if not isinstance(made.reading, Measurement):
        _say(console, f"{names}: not measured: {made.reading.describe()}")
        return
    _say(console, names)
    ranks = len(made.nodes)
    rows = []
    for point in made.points:
        spread = point.spread_seconds
        rows.append(
            (
                f"{point.size_bytes:,}",
                _figure(1e3 * point.seconds),
                "-" if spread is None else _figure(1e3 * spread),
                _figure(point.alg_mb_s()),
                _figure(point.bus_mb_s(ranks)),
                str(point.samples),
            )
        )
    print_grid(console, ("bytes", "ms", "±", "algorithm MB/s", "bus MB/s", "n"), rows)
    _say(console, made.reading.source)
    if made.reading.suspect:
        _say(console, f"SUSPECT: {made.reading.suspect}")
    predicted = made.gradient_seconds(report.gradient_bytes)
    if predicted is not None:
        _say(
            console,
            f"A step that reduces {report.gradient_bytes / 2**20:,.4g} MiB of gradients waits "
            f"{format_number(predicted[0])} s for it ({predicted[1]}), on top of the slowest "
            "node's own step; less where the two overlap.",
        )
    else:
        mib = report.gradient_bytes / 2**20
        _say(console, f"{mib:,.4g} MiB were not reached in time: --depth full tries for longer.")
    slowest = slowest_link(report.matrix, made.nodes)
    if slowest is not None:
        source, target, rate = slowest
        _say(
            console,
            f"Its slowest link is {source} → {target} at {_figure(rate)} MB/s: no ring is faster.",
        )


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, soft_wrap=True)


def _short(name: str) -> str:
    return shortened(printable(name), _NAME)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
