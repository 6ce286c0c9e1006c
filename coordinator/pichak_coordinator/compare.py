"""Rows side by side: which columns, which figures, in which order. Pure.

A cell is a plain value or None. None sorts last in both directions and shows as a dash: what was
not measured is neither the best nor the worst. A value that is suspect is shown nowhere.
"""

from __future__ import annotations

import csv
import functools
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pichak_coordinator.agent_problems import problem_notes
from pichak_coordinator.collector import paused
from pichak_coordinator.economics import Economics, economics, number
from pichak_coordinator.judged import unjudged
from pichak_coordinator.pick import By, Pick, pick
from pichak_coordinator.prices import (
    NO_PRICES,
    PriceBook,
    Prices,
    book_of,
    with_default_currency,
)
from pichak_coordinator.records import Row, json_safe
from pichak_coordinator.speed import plan_number, processed_speed, scored_speed
from pichak_coordinator.text import csv_cell, markdown_cell, shortened
from pichak_core.plan import format_number

Cell = str | int | float | None


@dataclass(frozen=True)
class Column:
    """One column: `key` names it in JSON and for sorting, `title` and `unit` for a person.

    `better` is the direction in which it sorts when none is asked for: the best first.
    """

    key: str
    title: str
    unit: str
    better: Literal["high", "low", "text"]
    value: Callable[[Row, Context], Cell]

    @property
    def heading(self) -> str:
        return f"{self.title} {self.unit}".strip()


@dataclass(frozen=True)
class Context:
    """What a cell needs besides its row: prices, and how many rows share a node's price."""

    prices: PriceBook
    devices: Mapping[str, int]
    _known: dict[int, Economics] = field(default_factory=dict)

    def economics(self, row: Row) -> Economics:
        """What training on this row costs; worked out once, for several cells show it."""
        found = self._known.get(id(row))
        if found is None:
            found = economics(row, self.prices, self.devices[row.node.node])
            self._known[id(row)] = found
        return found


@dataclass(frozen=True)
class Line:
    """One row of the table: the row it shows, a cell for every column, and the sources of what it
    costs."""

    row: Row
    cells: Mapping[str, Cell]
    economics: Economics


@dataclass(frozen=True)
class Comparison:
    """The table, its visible columns, and which line it would pick. `notes` say what a person
    should know of it: of which models there are too few to judge one by the others, and what agents
    tell of themselves."""

    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    pick: Pick
    prices: PriceBook = NO_PRICES
    notes: tuple[str, ...] = ()

    def sorted_by(self, key: str, *, descending: bool | None = None) -> Comparison:
        """The same table in another order; lines without a value stay last, equal ones in place.

        `key` is a column's key or title; `descending` is by default what puts the best first.
        `ValueError` for an unknown one.
        """
        column = column_named(key)
        key = column.key
        falling = column.better == "high" if descending is None else descending
        present = [line for line in self.lines if line.cells[key] is not None]
        absent = [line for line in self.lines if line.cells[key] is None]
        # Python's sort keeps equal items in place, also when reversed.
        present.sort(key=lambda line: _order(line.cells[key]), reverse=falling)
        return replace(self, lines=(*present, *absent))

    def as_dict(self) -> dict[str, Any]:
        """``{"rows": [...], "pick": {...}, "notes": [...]}``: every column, also those without a
        value."""
        rows = [
            {
                "node": line.row.node.node,
                "device": line.row.node.device,
                "simulated": line.row.node.simulated,
                "problems": list(line.row.node.problems),
                **line.cells,
                "economics": line.economics.as_dict(),
                "findings": [f.as_dict() for f in line.row.findings],
            }
            for line in self.lines
        ]
        made = {"rows": rows, "pick": self.pick.as_dict(), "notes": list(self.notes)}
        record: dict[str, Any] = json_safe(made)
        return record

    def to_markdown(self) -> str:
        """A Markdown table, and under it the pick's sentence and the notes."""
        head = [markdown_cell(column.heading) for column in self.columns]
        ruler = ["---" if column.better == "text" else "---:" for column in self.columns]
        body = [
            [markdown_cell(show(line.cells[column.key])) for column in self.columns]
            for line in self.lines
        ]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ruler, *body])
        under = [markdown_cell(text) for text in (self.pick.sentence, *self.notes)]
        return "\n\n".join([table, *under]) + "\n"

    def to_csv(self) -> str:
        """Comma-separated values (RFC 4180): raw numbers, an empty cell for what is absent."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([column.key for column in self.columns])
        for line in self.lines:
            cells = [line.cells[column.key] for column in self.columns]
            writer.writerow([csv_cell(c) if isinstance(c, str) else c for c in cells])
        return text.getvalue()


@paused()
def compare(
    rows: Sequence[Row],
    *,
    prices: PriceBook | Prices | None = None,
    sort: str | None = None,
    descending: bool | None = None,
    by: By | None = None,
) -> Comparison:
    """The table of `rows`: by speed, the fastest first, unless `sort` names a column.

    `prices` are a price list, or dollars an hour for a whole node by identity or host name; a
    node's GPUs share its price. `by` is what the pick under the table goes by. A column without a
    single value is hidden. `ValueError` for an unknown `sort`.
    """
    known = with_default_currency(book_of(prices), rows)
    context = Context(known, Counter(row.node.node for row in rows))
    lines = tuple(
        Line(
            row,
            {column.key: column.value(row, context) for column in COLUMNS},
            context.economics(row),
        )
        for row in rows
    )
    visible = tuple(
        replace(c, unit=c.unit.replace("$", known.symbol))
        for c in COLUMNS
        if any(line.cells[c.key] is not None for line in lines)
    )
    picked = pick(rows, prices=known, by=by)
    made = Comparison(lines, visible, picked, known, (*unjudged(rows), *problem_notes(rows)))
    if sort is not None:
        return made.sorted_by(sort, descending=descending)
    # Sorts are stable: the last one decides, the earlier ones break its ties.
    for key in ("host", "tokens_per_second", "scored_tokens_per_second"):
        made = made.sorted_by(key)
    return made


def column_named(name: str) -> Column:
    """The column with this key or title; `ValueError` lists them all."""
    for column in COLUMNS:
        if name.casefold() in (column.key, column.title.casefold()):
            return column
    raise ValueError(f"no column {name!r}; there are: {', '.join(c.key for c in COLUMNS)}")


def show(cell: Cell) -> str:
    """A cell as a person reads it; a dash for what is absent."""
    return "–" if cell is None else format_number(cell)


def _order(cell: Cell) -> tuple[str, float]:
    """Text by its lower case, numbers by size; one column holds one kind of them."""
    return (cell.casefold(), 0.0) if isinstance(cell, str) else ("", float(cell or 0))


def _number(metric: str) -> Callable[[Row, Context], Cell]:
    return lambda row, _context: row.fingerprint.number(metric)


@functools.lru_cache(maxsize=4096)
def _is_link(metric: str) -> bool:
    return metric.startswith("network.") and metric.endswith("_mb_s")


def _slowest_link(row: Row, _context: Context) -> Cell:
    """The lowest of the node's network rates: synchronous training goes at its pace."""
    rates = [row.fingerprint.number(metric) for metric in filter(_is_link, row.fingerprint)]
    return min((rate for rate in rates if rate is not None), default=None)


def _device(row: Row, _context: Context) -> Cell:
    return row.node.device_name or row.node.model or row.node.device


def _batch(row: Row, _context: Context) -> Cell:
    batch = plan_number(row.plan, "micro_batch")
    return None if batch is None else int(batch)


def _scored(row: Row, _context: Context) -> Cell:
    speed = scored_speed(row)
    return speed.tokens_per_second if speed else None


def _processed(row: Row, _context: Context) -> Cell:
    speed = processed_speed(row)
    return speed.tokens_per_second if speed else None


def _money(name: str) -> Callable[[Row, Context], Cell]:
    return lambda row, context: number(getattr(context.economics(row), name))


def _findings(row: Row, _context: Context) -> Cell:
    """The worst one's code, how sure it is, and how many more there are."""
    if not row.findings:
        return None
    worst = min(row.findings, key=lambda f: f.order)
    more = f" +{len(row.findings) - 1}" if len(row.findings) > 1 else ""
    return f"{worst.severity}: {worst.code}{'' if worst.state == 'confirmed' else '?'}{more}"


def _error(row: Row, _context: Context) -> Cell:
    return shortened(row.error, 300) or None


#: Every column there is, in the order in which they are shown.
COLUMNS: tuple[Column, ...] = (
    Column("host", "node", "", "text", lambda row, _: row.node.label),
    Column("device_name", "device", "", "text", _device),
    Column("micro_batch", "micro-batch", "", "high", _batch),
    Column("scored_tokens_per_second", "scored", "tok/s", "high", _scored),
    Column("tokens_per_second", "all", "tok/s", "high", _processed),
    Column("price_per_hour", "price", "$/h", "low", _money("price_per_hour")),
    Column(
        "cost_per_million_scored_tokens",
        "cost",
        "$/M scored",
        "low",
        _money("cost_per_million_scored_tokens"),
    ),
    Column("hours_per_epoch", "epoch", "h", "low", _money("hours_per_epoch")),
    Column("cost_per_epoch", "epoch cost", "$", "low", _money("cost_per_epoch")),
    Column("launch_us", "launch", "µs", "low", _number("gpu.kernel_launch_us")),
    Column("op_dispatch_us", "CPU op", "µs", "low", _number("cpu.op_dispatch_us")),
    Column("matmul_bf16_tflop_s", "bf16", "TFLOP/s", "high", _number("gpu.matmul_bf16_tflop_s")),
    Column("matmul_cpu_gflop_s", "CPU fp32", "GFLOP/s", "high", _number("cpu.matmul_fp32_gflop_s")),
    Column("h2d_mb_s", "H2D", "MB/s", "high", _number("gpu.h2d_pinned_mb_s")),
    Column("d2h_mb_s", "D2H", "MB/s", "high", _number("gpu.d2h_pinned_mb_s")),
    Column("memory_copy_mb_s", "RAM copy", "MB/s", "high", _number("host.memory_copy_mb_s")),
    Column("disk_read_mb_s", "disk", "MB/s", "high", _number("disk.read_mb_s")),
    Column("network_mb_s", "network", "MB/s", "high", _slowest_link),
    Column("findings", "findings", "", "text", _findings),
    Column("error", "error", "", "text", _error),
)
