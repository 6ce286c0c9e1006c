"""A comparison, the plans behind it and what changed, on a terminal of any width.

Everything that a node sent is shown through `printable` and as `Text`: neither markup nor an escape
sequence of its own reaches the terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pichak_coordinator.changes import Change, by_node
from pichak_coordinator.cli.failed_rows import failed_lines, names, reason
from pichak_coordinator.cli.tables import fits
from pichak_coordinator.compare import Column, Comparison, Line, show
from pichak_coordinator.records import Finding, Row
from pichak_coordinator.stored_faults import SEEN_BY_WATCH
from pichak_coordinator.text import printable, shortened
from pichak_core.plan import Plan, Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: What a narrow terminal can do without, the first first.
_DISPENSABLE = (
    "op_dispatch_us",
    "memory_copy_mb_s",
    "tokens_per_second",
    "d2h_mb_s",
    "matmul_cpu_gflop_s",
    "launch_us",
    "h2d_mb_s",
    "network_mb_s",
    "device_name",
    "matmul_bf16_tflop_s",
    "disk_read_mb_s",
    "price_per_hour",
    "hours_per_epoch",
)
_TEXT_WIDTH = 28
_REPORT_WIDTH = 100
_MOST_FINDINGS = 20
#: Of more devices a person is shown a summary, the worst and the first; `every` shows all.
MOST_LINES = 40
_BLOCK = 20
_REASONS, _MOST_REASON = 3, 120

_SEVERITY_STYLE = {"fail": "bold red", "warn": "yellow", "info": "dim"}


def render_comparison(comparison: Comparison, console: Console, *, every: bool = False) -> None:
    """The table, the pick, why rows failed, notes, then the findings, the worst first. Of more
    than `MOST_LINES` devices, without `every`: a summary, those with the most against them, and the
    first of the table."""
    lines = comparison.lines
    left_out: list[Column] = []
    for title, some in _blocks(comparison, every):
        if title:
            _say(console, title, "bold")
        columns = [c for c in comparison.columns if c.key != "error"]
        columns, left_out = _fitting(columns, some, console)
        if columns:
            console.print(_table(columns, some))
        else:
            _cards(comparison, some, console)
    _say(console, comparison.pick.sentence, "bold")
    if left_out:
        columns_out = ", ".join(c.heading for c in left_out)
        _say(console, f"not shown for want of room: {columns_out} (--json has them)", "dim")
    large = len(lines) > MOST_LINES and not every
    failed = [line.row for line in lines if line.row.error]
    if large:
        failed = [row for row in failed if row.measured]  # the others are in one line of the head
    for text, style in failed_lines(failed, every=every):
        _say(console, text, style)
    if comparison.notes:
        _say(console, "\n".join(comparison.notes[:_MOST_FINDINGS]), "dim")
    _findings([line.row for line in lines], console, of_measured=large)


def _blocks(comparison: Comparison, every: bool) -> list[tuple[str, Sequence[Line]]]:
    """(title, lines) of each table to print."""
    lines = comparison.lines
    if not lines:
        return []
    if every or len(lines) <= MOST_LINES:
        return [("", lines)]
    bad = [line for line in lines if line.row.measured and (line.row.error or _severe(line.row))]
    # Stable: of two that are as bad, the one that stands first in the table.
    bad.sort(key=lambda line: (not line.row.error, _worst(line.row)))
    head = "\n".join([summary(lines), *_lost(lines)])
    blocks: list[tuple[str, Sequence[Line]]] = []
    if bad:
        cut = f", the worst {_BLOCK}" if len(bad) > _BLOCK else ", the worst first"
        title = f"With findings or failures: {len(bad):,} of {len(lines):,}{cut}"
        blocks.append((f"{head}\n{title}", bad[:_BLOCK]))
    first = f"The first {_BLOCK} of {len(lines):,} (--all shows every one)"
    blocks.append((first if bad else f"{head}\n{first}", lines[:_BLOCK]))
    return blocks


def _lost(lines: Sequence[Line]) -> list[str]:
    """One line for those of which there is nothing to show: how many, and why."""
    lost = [line.row for line in lines if not line.row.measured]
    if not lost:
        return []
    reasons = Counter(shortened(reason(row), _MOST_REASON) for row in lost)
    told = [f"{count:,}: {why}" for why, count in reasons.most_common(_REASONS)]
    rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_REASONS))
    told += [f"{rest:,}: something else"] if rest else []
    told = list(reasons) if len(reasons) == 1 else told
    why = "; ".join(told)
    return [f"Nothing came from {len(lost):,} of {len(lines):,}: {names(lost)} ({why})"]


def _worst(row: Row) -> tuple[int, bool]:
    return min((finding.order[:2] for finding in _severe(row)), default=(9, True))


def _severe(row: Row) -> list[Finding]:
    return [finding for finding in row.findings if finding.severity != "info"]


def summary(lines: Sequence[Line]) -> str:
    """One line over a large fleet: how many devices, what was measured, what was found."""
    rows = [line.row for line in lines]
    found = [(f.severity, f.state) for row in rows for f in row.findings]
    machines = len({row.node.node for row in rows})
    parts = [
        f"{machines:,} machines, {len(rows):,} devices",
        f"{sum(row.measured and not row.node.simulated for row in rows):,} measured",
        f"{sum(row.failed for row in rows):,} failed",
    ]
    unfinished = sum(row.unfinished for row in rows)
    parts += [f"{unfinished:,} not finished"] if unfinished else []
    simulated = sum(row.measured and row.node.simulated for row in rows)
    if simulated:
        parts.insert(1, f"{simulated:,} simulated")
    for severity in ("fail", "warn"):
        for state in ("confirmed", "suspected"):
            count = found.count((severity, state))
            parts += [f"{count:,} {state} {severity}"] if count else []
    return "; ".join(parts)


def render_rows(rows: Sequence[Row], console: Console) -> None:
    """Each device's plan with its sources; what all plans share is shown once, before them. Why
    one failed stands under the table that follows."""
    plans = [row.plan for row in rows if row.plan is not None]
    shared = shared_part(plans)
    width = min(console.width, _REPORT_WIDTH)
    if shared.values or shared.notes:
        _title(console, f"The task, the same on all {len(plans)}", width)
        _say(console, shared.report(width))
        console.print()
    for row in rows:
        name = row.node.device_name
        _title(console, f"{row.node.label}: {name}" if name else row.node.label, width)
        if row.error:
            word, style = ("not finished", "yellow") if row.unfinished else ("failed", "red")
            _say(console, f"{word}: the table's end says why", style)
        if row.plan is not None:
            own = own_part(row.plan, shared)
            bare = not own.values and not own.notes
            _say(console, "nothing of its own was derived" if bare else own.report(width))
        elif not row.error:
            _say(console, "no plan was derived")
        console.print()


def render_changes(
    found: Sequence[Change],
    console: Console,
    *,
    devices: int,
    compared: int,
    every: bool = False,
) -> None:
    """What is not what it was in the last run of each node; one line a value. Without `every` only
    the devices of a block. `compared` of all `devices` have results of both runs."""
    why = "this run or the one before has no results of"
    if not found and not compared:
        what = "it" if devices == 1 else "them"
        _say(console, f"There was nothing to compare with the last run: {why} {what}.", "yellow")
        return
    if not found:
        _say(console, "Nothing changed beyond the measured spread since the last run.")
    else:
        _show_changes(found, console, every)
    if missing := devices - compared:
        what = "it" if missing == 1 else "them"
        text = f"{missing:,} of {devices:,} devices could not be compared: {why} {what}."
        _say(console, text, "yellow")


def _show_changes(found: Sequence[Change], console: Console, every: bool) -> None:
    _say(console, "Changed since the last run:", "bold")
    grouped = by_node(found)
    most = len(grouped) if every or len(grouped) <= MOST_LINES else _BLOCK
    for label, some in list(grouped.items())[:most]:
        _say(console, f"  {label}")
        for change in some:
            style = "yellow" if change.exceeds or change.share is None else ""
            _say(console, f"    {change.sentence}", style)
    if len(grouped) > most:
        _say(console, f"  {len(grouped) - most:,} more devices changed (--all has them)", "dim")


def shared_part(plans: Sequence[Plan]) -> Plan:
    """What is word for word the same in every plan that has it, and is in more than one: the
    numbers of the task, each saying where it was measured."""
    if len(plans) < 2:
        return Plan()
    first = plans[0]
    same = Plan(
        model=first.model if all(p.model == first.model for p in plans) else "",
        data=first.data if all(p.data == first.data for p in plans) else "",
    )
    for name in dict.fromkeys(name for plan in plans for name in plan):
        held = [plan[name] for plan in plans if name in plan]
        if len(held) > 1 and all(_identical(held[0], other) for other in held):
            same.set(name, held[0])
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        if all(note in plan.notes for plan in plans):
            same.note(note)
    return same


def own_part(plan: Plan, shared: Plan) -> Plan:
    """What of `plan` is not in `shared`."""
    own = Plan(
        model="" if shared.model else plan.model,
        data="" if shared.data else plan.data,
        device=plan.device,
    )
    for name, value in plan.values.items():
        if name not in shared:
            own.set(name, value)
    for note in plan.notes:
        if note not in shared.notes:
            own.note(note)
    return own


def _identical(one: Value, other: Value) -> bool:
    return one.as_dict() == other.as_dict()


def _fitting(
    columns: list[Column], lines: Sequence[Line], console: Console
) -> tuple[list[Column], list[Column]]:
    """The columns that fit, and those left out; no column at all when even the least do not."""
    left_out: list[Column] = []
    for key in ("", *_DISPENSABLE):
        gone = [c for c in columns if c.key == key and len(columns) > 2]
        if key == "tokens_per_second" and not _has(columns, "scored_tokens_per_second"):
            gone = []
        columns = [c for c in columns if c not in gone]
        left_out += gone
        if fits(_table(columns, lines), console):
            return columns, left_out
    return [], []


def _has(columns: Sequence[Column], key: str) -> bool:
    return any(column.key == key for column in columns)


def _table(columns: Sequence[Column], lines: Sequence[Line]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        words = column.better == "text"
        table.add_column(
            Text(f"{column.title}\n{column.unit}" if column.unit else column.title),
            justify="left" if words else "right",
            max_width=_TEXT_WIDTH if words else None,
            overflow="fold",
            no_wrap=not words,
        )
    for line in lines:
        cells = [
            Text(printable(show(line.cells[column.key])), style=_style(column, line))
            for column in columns
        ]
        table.add_row(*cells, style="red" if line.row.error else None)
    return table


def _style(column: Column, line: Line) -> str:
    if column.key != "findings" or not line.row.findings:
        return ""
    return _SEVERITY_STYLE[min(line.row.findings, key=lambda f: f.order).severity]


def _cards(comparison: Comparison, lines: Sequence[Line], console: Console) -> None:
    """One block a row, for terminals on which no table fits."""
    columns = [c for c in comparison.columns if c.key not in ("host", "error")]
    for line in lines:
        _say(console, line.row.node.label, "bold")
        for column in columns:
            if line.cells[column.key] is not None:
                shown = f"{show(line.cells[column.key])} {column.unit}".rstrip()
                _say(console, f"  {column.title}: {shown}", _style(column, line))
    console.print()


def _findings(rows: Sequence[Row], console: Console, *, of_measured: bool) -> None:
    """Warnings and failures in full; a large fleet's mild ones are only counted, and with
    `of_measured` those of devices that gave nothing."""
    found = [(f.order, row.node.label, f) for row in rows for f in row.findings]
    found.sort(key=lambda entry: entry[0])
    silent = {row.node.label for row in rows if of_measured and not row.measured}
    worth = [e for e in found if e[2].severity != "info" and e[1] not in silent]
    for _, label, finding in worth[:_MOST_FINDINGS]:
        style = _SEVERITY_STYLE[finding.severity]
        _say(console, f"{label}, {certainty(finding)}: {finding.sentence}", style)
    rest = len(found) - min(len(worth), _MOST_FINDINGS)
    if rest:
        _say(console, f"{rest} more finding{'s' * (rest > 1)} (--json has them)", "dim")


def certainty(finding: Finding) -> str:
    """How bad it is and how sure."""
    low = ", low confidence" if finding.confidence == "low" else ""
    held = ", held open by the watch" if finding.evidence.get("seen_by") == SEEN_BY_WATCH else ""
    return f"{finding.severity}, {finding.state}{low}{held}"


def _title(console: Console, text: str, width: int) -> None:
    safe = printable(text)
    _say(console, f"== {safe} {'=' * max(2, width - len(safe) - 4)}"[:width], "bold")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(_safe(text, style), soft_wrap=False)


def _safe(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text, keep_newlines=True), style=style, overflow="fold")
