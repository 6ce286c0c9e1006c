"""What a report holds, taken from the store: plain records that the template only has to lay out.

Text stays as the nodes sent it, made printable; the template escapes it. Nothing is written.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pichak_coordinator.changes import Change, changes, comparable
from pichak_coordinator.compare import Column, Comparison, Line, show
from pichak_coordinator.records import Finding, Row, Run
from pichak_coordinator.report.charts import Chart, disk_chart, ramp_chart, transfer_chart
from pichak_coordinator.report.history import chosen_metrics, history_chart, series_of
from pichak_coordinator.report.link_chart import link_chart
from pichak_coordinator.report.links import directions
from pichak_coordinator.run_end import RunEnd, end_of
from pichak_coordinator.store_read import Reader
from pichak_coordinator.text import printable
from pichak_core.measurement import Measurement
from pichak_core.plan import Plan, Value, format_number

#: Columns that stand first: what is wrong is not at the far end of a wide table.
_FIRST = ("host", "findings", "device_name")
#: Devices that get a section of their own where nothing else is asked for.
SECTIONS = 40


@dataclass(frozen=True)
class Cell:
    """One cell: what is shown, and what it sorts by ("" for what is absent, which sorts last)."""

    text: str
    key: str = ""
    number: bool = False
    css: str = ""


@dataclass(frozen=True)
class TableRow:
    """One line of the comparison; `anchor` is "" where the device has no section."""

    anchor: str
    cells: tuple[Cell, ...]
    css: str
    worst: str


@dataclass(frozen=True)
class Told:
    """A finding as the page has it: on whom (label and anchor), how sure, its evidence in pairs."""

    whom: tuple[tuple[str, str], ...]
    finding: Finding
    evidence: tuple[tuple[str, str], ...]
    low: bool
    sure: bool


@dataclass(frozen=True)
class Number:
    """One number of a plan, with where it is from."""

    name: str
    shown: str
    interval: str
    source: str
    seconds: str
    constant: bool


@dataclass(frozen=True)
class Section:
    """All of one device."""

    anchor: str
    label: str
    device: str
    address: str
    identity: str
    problems: tuple[str, ...]
    error: str
    unfinished: bool
    simulated: bool
    tags: tuple[tuple[str, str], ...]
    findings: tuple[Told, ...]
    numbers: tuple[Number, ...]
    notes: tuple[str, ...]
    plan_gap: str
    charts: tuple[Chart, ...]
    readings: tuple[tuple[str, str, str], ...]
    gaps: tuple[tuple[str, str], ...]
    conditions: tuple[tuple[str, str, str], ...]
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Content:
    """The whole page. `shared`: how many findings are on it in the words of another one."""

    title: str
    made: str
    store: str
    run: str
    run_facts: tuple[tuple[str, str], ...]
    summary: tuple[tuple[str, str], ...]
    simulated: str
    pick: str
    notes: tuple[str, ...]
    headings: tuple[tuple[str, str], ...]
    table: tuple[TableRow, ...]
    findings: tuple[Told, ...]
    shared: int
    sections: tuple[Section, ...]
    left_out: str
    links: Chart


def content(
    store: Reader,
    run: Run,
    comparison: Comparison,
    *,
    title: str,
    now: float,
    sections: int | None = SECTIONS,
) -> Content:
    """The page of one stored run. `comparison` is over its rows; `sections` limits the devices that
    get a section of their own, the worst first (None: all of them)."""
    lines = comparison.lines
    columns = sorted(
        comparison.columns, key=lambda c: _FIRST.index(c.key) if c.key in _FIRST else 9
    )
    rows = [line.row for line in lines]
    before = store.previous_rows(run.run)
    moved: dict[tuple[str, str], list[Change]] = {}
    for change in changes(rows, before):
        moved.setdefault(change.node.key, []).append(change)
    worst = _worst_first(rows, moved)
    if sections is not None and len(rows) > sections:
        # Where not all have room, those of which there is something to show go first.
        worst = sorted(worst, key=lambda row: not row.measured)[:sections]
    numbers = {row.key: number for number, row in enumerate(rows)}
    anchors = {row.key: _anchor(numbers[row.key], row) for row in worst}
    told = _once([_told(row, f, anchors.get(row.key, "")) for row in rows for f in row.findings])
    told.sort(key=lambda t: (t.finding.state != "confirmed", *t.finding.order))
    made = [
        _section(store, row, anchors[row.key], moved.get(row.key, []), before.get(row.key))
        for row in worst
    ]
    machines = {row.node.node: row.node.alias or row.node.host or row.node.node for row in rows}
    machines = {node: machines[node] for node in dict.fromkeys(row.node.node for row in rows)}
    return Content(
        title=printable(title),
        made=_clock(now),
        store=printable(str(store.path)),
        run=run.run,
        run_facts=tuple(_run_facts(run, rows, end_of(store, run))),
        summary=tuple(_summary(rows, machines)),
        simulated=_simulated(rows),
        pick=printable(comparison.pick.sentence),
        notes=tuple(printable(note) for note in comparison.notes),
        headings=tuple((c.title, c.unit) for c in columns),
        table=tuple(_table_row(line, columns, anchors.get(line.row.key, "")) for line in lines),
        findings=tuple(told),
        shared=sum(len(each.whom) - 1 for each in told),
        sections=tuple(made),
        left_out=_left_out(len(rows), len(made)),
        links=link_chart(directions(store, list(machines)), machines),
    )


def _worst_first(rows: Sequence[Row], moved: Mapping[tuple[str, str], list[Change]]) -> list[Row]:
    """Faults, failures, warnings, changes; then in the table's order."""

    def badness(row: Row) -> tuple[Any, ...]:
        orders = [f.order[:2] for f in row.findings if f.severity != "info"]
        return (min(orders, default=(9, True)), not row.error, row.key not in moved)

    return sorted(rows, key=badness)


def _left_out(rows: int, made: int) -> str:
    if made == rows:
        return ""
    return (
        f"Sections of {made} of {rows:,} devices are on this page: those with findings, failures "
        "or changes first, then in the table's order; --sections all has every one."
    )


def _run_facts(run: Run, rows: Sequence[Row], end: RunEnd) -> list[tuple[str, str]]:
    facts = [("begun", _clock(run.started_unix))]
    if end.sentence:
        facts.append(("ended", printable(end.sentence)))
    elif run.finished_unix is not None and not run.simulated(rows):
        facts.append(("took", f"{run.finished_unix - run.started_unix:,.0f} s"))
    command = "fleet simulate" if run.settings.get("simulated") else run.command
    facts.append(("command", f"pichak {command}"))
    for name in ("name", "model", "data", "method", "depth"):
        value = run.settings.get(name)
        if value:
            facts.append((name, printable(str(value))))
    return facts


def _summary(rows: Sequence[Row], machines: Mapping[str, str]) -> list[tuple[str, str]]:
    found = [f for row in rows for f in row.findings]
    sure = [f for f in found if f.state == "confirmed"]
    facts = [
        ("machines", f"{len(machines):,}"),
        ("devices", f"{len(rows):,}"),
        ("measured", f"{sum(row.measured and not row.node.simulated for row in rows):,}"),
        ("failed", f"{sum(row.failed for row in rows):,}"),
    ]
    unfinished = sum(row.unfinished for row in rows)
    facts += [("not finished", f"{unfinished:,}")] if unfinished else []
    simulated = sum(row.measured and row.node.simulated for row in rows)
    facts += [("simulated", f"{simulated:,}")] if simulated else []
    for severity in ("fail", "warn"):
        count = sum(f.severity == severity for f in sure)
        facts.append((f"confirmed {severity}", f"{count:,}"))
    suspected = sum(f.state != "confirmed" and f.severity != "info" for f in found)
    facts.append(("suspected", f"{suspected:,}"))
    info = sum(f.severity == "info" for f in found)
    return [*facts, ("info", f"{info:,}")] if info else facts


def _simulated(rows: Sequence[Row]) -> str:
    count = sum(row.node.simulated for row in rows)
    if not count:
        return ""
    whom = "All results" if count == len(rows) else f"{count} of {len(rows)} results"
    return f"{whom} on this page are simulated: no machine was measured for them."


def _table_row(line: Line, columns: Sequence[Column], anchor: str) -> TableRow:
    row = line.row
    cells = []
    for column in columns:
        value = line.cells[column.key]
        text = printable(show(value))
        if value is None:
            cells.append(Cell("–", "", column.better != "text", "absent"))
        elif isinstance(value, str):
            cells.append(Cell(text, text.casefold(), False, column.key))
        else:
            cells.append(Cell(text, repr(float(value)), True))
    worst = min((f.order for f in row.findings), default=None)
    severity = ("fail", "warn", "info")[worst[0]] if worst else ""
    return TableRow(anchor, tuple(cells), "failed" if row.failed else "", severity)


def _told(row: Row, finding: Finding, anchor: str) -> Told:
    evidence = tuple((printable(k), printable(_plain(v))) for k, v in finding.evidence.items())
    shown = replace(finding, sentence=printable(finding.sentence), metric=printable(finding.metric))
    low, sure = finding.confidence == "low", finding.state == "confirmed"
    return Told(((printable(row.node.label), anchor),), shown, evidence, low, sure)


def _once(told: Sequence[Told]) -> list[Told]:
    """What is said of several devices in the same words (a link has two ends) is said once."""
    made: dict[tuple[str, str, str, str], Told] = {}
    for each in told:
        finding = each.finding
        key = (finding.code, finding.metric, finding.sentence, finding.state)
        known = made.get(key)
        made[key] = each if known is None else replace(known, whom=(*known.whom, *each.whom))
    return list(made.values())


def _plain(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return format_number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return str(value)


def _section(
    store: Reader, row: Row, anchor: str, moved: Sequence[Change], before: Row | None
) -> Section:
    series = series_of(store, row, chosen_metrics(row, moved))
    readings, gaps = [], []
    for name, reading in row.fingerprint.items():
        if isinstance(reading, Measurement):
            text = printable(reading.describe())
            readings.append((printable(name), text, printable(reading.source)))
        else:
            gaps.append((printable(name), printable(reading.describe())))
    changed = [printable(change.sentence) for change in moved]
    if not changed and before is not None:
        changed = ["Nothing changed beyond the measured spread since the run before."]
        if not comparable(row, before):
            changed = ["Nothing to compare: this run or the one before has no results of it."]
    plan_gap = "" if row.plan else "No plan was derived."
    return Section(
        anchor=anchor,
        label=printable(replace(row.node, simulated=False).label),
        device=printable(row.node.device_name or row.node.device),
        address=printable(row.node.address),
        identity=printable(row.node.node),
        problems=tuple(printable(problem) for problem in row.node.problems),
        error=printable(row.error),
        unfinished=row.unfinished,
        simulated=row.node.simulated,
        tags=tuple(dict.fromkeys(_tag(f) for f in row.findings if f.severity != "info")),
        findings=tuple(_told(row, finding, anchor) for finding in row.findings),
        numbers=tuple(_numbers(row.plan)),
        notes=tuple(printable(note) for note in (row.plan.notes if row.plan else ())),
        plan_gap=printable(plan_gap),
        charts=(
            _clean(ramp_chart(row)),
            _clean(disk_chart(row)),
            _clean(transfer_chart(row)),
            _clean(history_chart(series)),
        ),
        readings=tuple(readings),
        gaps=tuple(gaps),
        conditions=tuple(_conditions(row)),
        changed=tuple(changed),
    )


def _tag(finding: Finding) -> tuple[str, str]:
    return finding.severity, f"{finding.code}{'' if finding.state == 'confirmed' else '?'}"


def _clean(chart: Chart) -> Chart:
    """Its sentences; the figure's own texts are `label`'s."""
    notes = tuple(printable(note) for note in chart.notes)
    return replace(chart, sentence=printable(chart.sentence), notes=notes)


def _numbers(plan: Plan | None) -> list[Number]:
    """Those that were measured first, then the constants."""
    if plan is None:
        return []
    made = []
    for name, value in sorted(plan.values.items(), key=lambda item: not item[1].measured):
        seconds = f"{value.seconds:.1f} s" if value.seconds >= 0.05 else ""
        made.append(
            Number(
                printable(name),
                printable(str(value)),
                _interval(value),
                printable(value.source),
                seconds,
                not value.measured,
            )
        )
    return made


def _interval(value: Value) -> str:
    if value.low is None and value.high is None:
        return ""
    low = "?" if value.low is None else format_number(value.low)
    if value.high is not None and math.isinf(value.high):
        return f"{low} or more"
    return f"{low} to {'?' if value.high is None else format_number(value.high)}"


def _conditions(row: Row) -> list[tuple[str, str, str]]:
    """(condition, value, what was measured under it); the same ones of several readings once."""
    held: dict[tuple[str, str], list[str]] = {}
    parts: list[tuple[str, Mapping[str, Any]]] = [
        (name, reading.conditions)
        for name, reading in row.fingerprint.items()
        if isinstance(reading, Measurement)
    ]
    ramp = (row.ramp or {}).get("conditions")
    if isinstance(ramp, Mapping):
        parts.append(("the ramp", ramp))
    for name, conditions in parts:
        for key, value in conditions.items():
            held.setdefault((printable(str(key)), printable(_plain(value))), []).append(name)
    return [
        (key, value, printable(", ".join(names) if len(names) < 4 else f"{len(names)} readings"))
        for (key, value), names in sorted(held.items())
    ]


def _anchor(number: int, row: Row) -> str:
    return f"d{number}-{re.sub(r'[^a-z0-9]+', '-', f'{row.node.node} {row.node.device}'.lower())}"


def _clock(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
