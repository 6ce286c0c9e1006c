"""A device's readings over time, with what changed marked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pichak_coordinator.changes import SIGMAS, Change
from pichak_coordinator.records import NodeRecord, Point, Row
from pichak_coordinator.report.charts import Chart, Figure, label
from pichak_coordinator.store_read import Reader
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number

#: What is drawn where the device has it; what a finding or a change is about goes first.
METRICS = (
    "gpu.h2d_pinned_mb_s",
    "gpu.matmul_bf16_tflop_s",
    "gpu.kernel_launch_us",
    "cpu.matmul_fp32_gflop_s",
    "host.memory_copy_mb_s",
    "disk.read_mb_s",
    "cpu.all_core_deflate_mb_s",
)
MOST_METRICS = 5
MOST_POINTS = 200
_COLORS = ("$series1", "$series2", "$series3", "$series4", "$series5")


@dataclass(frozen=True)
class Series:
    """One metric of one device, the oldest first; `changes` holds an entry for each point that is
    off the one before it by more than noise."""

    metric: str
    points: tuple[Point, ...]
    changes: tuple[tuple[int, Change], ...]
    left_out: int = 0


def series_of(store: Reader, row: Row, metrics: Iterable[str]) -> list[Series]:
    """The history of the first `MOST_METRICS` of these that have one; what was tried less than
    twice has none."""
    made: list[Series] = []
    found = store.histories(row.node.node, metrics, device=row.node.device)
    for metric, every in found.items():
        if len(made) == MOST_METRICS:
            break
        points = tuple(every[-MOST_POINTS:])
        if len(points) > 1:
            marked = tuple(_changes(row.node, points))
            made.append(Series(metric, points, marked, len(every) - len(points)))
    return made


def chosen_metrics(row: Row, changed: Sequence[Change]) -> list[str]:
    """What may be drawn of a device, the accused first; also of one that gave nothing this time."""
    named = [f.metric for f in row.findings if f.metric]
    named += [change.metric for change in changed]
    named += METRICS
    return [name for name in dict.fromkeys(named) if _numeric(row, name)]


def _numeric(row: Row, name: str) -> bool:
    reading = row.fingerprint.get(name)
    return not (isinstance(reading, Measurement) and isinstance(reading.value, (bool, str)))


def _changes(node: NodeRecord, points: Sequence[Point]) -> Iterable[tuple[int, Change]]:
    """By the rule of `changes`: more than 3 combined spreads, or 5 % where no spread is known."""
    last: Point | None = None
    for number, point in enumerate(points):
        if point.suspect or point.value is None:
            continue
        if last is not None and last.value is not None and last.unit == point.unit:
            spread = None
            if last.spread is not None and point.spread is not None:
                spread = math.hypot(last.spread, point.spread)
            moved = point.value - last.value
            share = moved / abs(last.value) if last.value else None
            exceeds = None if spread is None else abs(moved) > SIGMAS * spread
            change = Change(
                *(node, point.metric, last.value, point.value, point.unit, share, spread, exceeds)
            )
            if moved and change.notable:
                yield number, change
        last = point


def history_chart(found: Sequence[Series]) -> Chart:
    """Every metric as a share of its own first reading, so that several fit one chart."""
    title = "History"
    data: list[Figure] = []
    told: list[str] = []
    gaps: list[str] = []
    for series, color in zip(found, _COLORS, strict=False):
        base = next((p.value for p in series.points if p.value and not p.suspect), None)
        if base is None:
            gaps.append(f"{series.metric}: {_gap(series.points)}")
            continue
        data += _traces(series, base, color)
        missing = [p for p in series.points if p.value is None or p.suspect]
        if missing:
            gaps.append(f"{series.metric}: {_gap(missing)}")
        if series.left_out:
            gaps.append(f"{series.metric}: {series.left_out:,} older readings are not drawn")
        for number, change in series.changes[-3:]:
            told.append(f"{_day(series.points[number].received_unix)} {change.sentence}")
    if not data:
        return Chart(title, "; ".join(gaps) or "Not measured more than once.")
    layout: Figure = {
        "xaxis": {"type": "date"},
        "yaxis": {"title": {"text": "% of the first"}, "ticksuffix": " %"},
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
    }
    count = sum(len(series.changes) for series in found)
    most = max(len(series.points) for series in found)
    sentence = f"Up to {most} readings of each; "
    sentence += (
        "nothing changed by more than noise from one to the next."
        if not count
        else f"{count} change{'s' * (count > 1)} by more than noise, marked with a diamond."
    )
    return Chart(title, sentence, {"data": data, "layout": layout}, (*told, *gaps))


def _traces(series: Series, base: float, color: str) -> list[Figure]:
    shown = [None if p.value is None or p.suspect else 100 * p.value / base for p in series.points]
    times = [_iso(p.received_unix) for p in series.points]
    texts = [label(_point_text(p), 160) for p in series.points]
    line: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if len(shown) <= 60 else "lines",
        "name": label(series.metric),
        "x": times,
        "y": shown,
        "text": texts,
        "hovertemplate": "%{x}<br>%{text}<extra></extra>",
        "line": {"color": color, "width": 2},
        "marker": {"color": color, "size": 6},
        "connectgaps": False,
    }
    at = [number for number, _ in series.changes]
    marks: Figure = {
        "type": "scatter",
        "mode": "markers",
        "name": label(f"{series.metric}, changed"),
        "x": [times[i] for i in at],
        "y": [shown[i] for i in at],
        "text": [label(change.sentence, 200) for _, change in series.changes],
        "hovertemplate": "%{x}<br>%{text}<extra></extra>",
        "marker": {
            "color": color,
            "symbol": "diamond",
            "size": 13,
            "line": {"color": "$text", "width": 1.5},
        },
        "showlegend": False,
    }
    return [line, marks] if at else [line]


def _point_text(point: Point) -> str:
    shown = point.text if point.value is None else f"{format_number(point.value)} {point.unit}"
    spread = "" if point.spread is None else f" ± {format_number(point.spread)}"
    tail = " (simulated)" if point.simulated else ""
    return f"{point.metric}: {shown}{spread}{tail}"


def _gap(points: Sequence[Point]) -> str:
    reasons: Mapping[str, None] = dict.fromkeys(
        p.unmeasured or (f"suspect: {p.suspect}" if p.suspect else "no number") for p in points
    )
    several = f"{len(points)} readings are" if len(points) > 1 else "one reading is"
    return f"{several} missing ({'; '.join(reasons)})"


def _iso(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))


def _day(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix))
