"""What was measured as figures for plotly.js: plain containers, no drawing here. Pure.

A colour is written as ``$name``: the page puts in what its theme (light, dark, print) has for it.
Text of a node goes through `label`. Each chart comes with a sentence that holds its main figures,
for who cannot see it, or with the reason why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pichak_coordinator.records import Row
from pichak_coordinator.text import printable, shortened
from pichak_core.measure._peaks import link_mb_s
from pichak_core.measurement import Measurement, Reading, Unmeasured
from pichak_core.plan import format_number

Figure = dict[str, Any]

GIB = 2**30
_LINK = re.compile(r"PCIe (\d+)\.0 x(\d+)")


@dataclass(frozen=True)
class Chart:
    """`figure` is None where there is nothing to draw; `sentence` then says why."""

    title: str
    sentence: str
    figure: Figure | None = None
    notes: tuple[str, ...] = ()


def label(text: str, length: int = 60) -> str:
    """A node's text inside a figure, where plotly would read tags and entities."""
    safe = shortened(printable(text), length)
    return safe.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def ramp_chart(row: Row) -> Chart:
    """Peak memory of each size that was tried, against the capacity and what headroom leaves."""
    title = "Micro-batch ramp"
    ramp = row.ramp
    tried = _rungs(ramp)
    if ramp is None or not tried:
        why = row.error or "no ramp was asked for, or none came back"
        return Chart(title, f"Not measured: {why}")
    capacity, budget = _number(ramp.get("capacity_bytes")), _number(ramp.get("budget_bytes"))
    ok = [r for r in tried if r.get("verdict") == "ok" and _number(r.get("peak_bytes")) is not None]
    bad = [r for r in tried if r not in ok]
    kept, most = _number(ramp.get("micro_batch")), _number(ramp.get("micro_batch_max"))
    # A refused size has no peak of its own: it is drawn where the memory ends.
    roof = (
        capacity or max((_number(r.get("peak_bytes")) or 0.0 for r in tried), default=0.0)
    ) / GIB

    def trace(name: str, some: Sequence[Mapping[str, Any]], marker: Figure) -> Figure:
        return {
            "type": "scatter",
            "mode": "lines+markers" if name == "ran" else "markers",
            "name": name,
            "x": [r.get("batch") for r in some],
            "y": [
                roof if (peak := _number(r.get("peak_bytes"))) is None else peak / GIB for r in some
            ],
            "text": [label(_rung_text(r), 200) for r in some],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": marker,
            "line": {"color": "$series1", "width": 2},
        }

    ok.sort(key=lambda r: float(r["batch"]))
    data = [trace("ran", ok, {"color": "$series1", "size": 8})]
    if bad:
        refused: Figure = {"color": "$bad", "symbol": "x", "size": 11}
        data.append(trace("did not pass", bad, refused))
    chosen = [r for r in ok if r.get("batch") == kept]
    if chosen:
        ring = {"color": "rgba(0,0,0,0)", "size": 17, "line": {"color": "$good", "width": 3}}
        data.append({**trace("kept", chosen, ring), "mode": "markers"})
    lines = [
        _level(value / GIB, name, color)
        for value, name, color in (
            (capacity, "capacity", "$bad"),
            (budget, "capacity less headroom", "$muted"),
        )
        if value is not None
    ]
    layout = _layout(
        "rows in a micro-batch", "peak GiB", [s for s, _ in lines], [a for _, a in lines]
    )
    layout["xaxis"]["type"] = "log"
    batches = sorted({int(r["batch"]) for r in tried if _number(r.get("batch")) is not None})
    layout["xaxis"] |= {"tickvals": batches, "ticktext": _thinned(batches, kept)}
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart(title, _ramp_sentence(ramp, kept, most, bad), {"data": data, "layout": layout})


def _thinned(batches: Sequence[int], kept: float | None) -> list[str]:
    """A text for each tick: the kept size has one, and who would run into another has none."""
    shown = [int(kept)] if kept in batches and kept is not None else []
    for batch in batches:
        if all(max(batch, other) > 1.35 * min(batch, other) for other in shown):
            shown.append(batch)
    return [str(batch) if batch in shown else "" for batch in batches]


def _rungs(ramp: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    tried = ramp.get("tried") if ramp else None
    if not isinstance(tried, (list, tuple)):
        return []
    return [r for r in tried if isinstance(r, Mapping) and _number(r.get("batch"))]


def _rung_text(rung: Mapping[str, Any]) -> str:
    peak, seconds = _number(rung.get("peak_bytes")), _number(rung.get("seconds"))
    text = f"{rung.get('batch')} rows: {rung.get('verdict')}"
    text += f", peak {format_number(peak / GIB)} GiB" if peak is not None else ", no peak"
    text += f", {format_number(seconds)} s a step" if seconds is not None else ""
    why = str(rung.get("why") or "")
    return f"{text} ({why})" if why else text


def _ramp_sentence(
    ramp: Mapping[str, Any],
    kept: float | None,
    most: float | None,
    bad: Sequence[Mapping[str, Any]],
) -> str:
    peak, capacity = _number(ramp.get("peak_bytes")), _number(ramp.get("capacity_bytes"))
    text = "No size was kept" if kept is None else f"Kept {kept:,.0f} rows"
    if kept is not None and peak is not None:
        text += f": peak {format_number(peak / GIB)} GiB"
        text += f" of {format_number(capacity / GIB)} GiB" if capacity else ""
    if most is not None and most != kept:
        text += f"; the largest that fits is {most:,.0f}"
    for rung in bad[:3]:
        text += f"; {rung.get('batch')} rows: {rung.get('verdict')}"
    return f"{text}."


def disk_chart(row: Row) -> Chart:
    """Read rate by queue depth."""
    title = "Disk: read rate by queue depth"
    reading = row.fingerprint.get("disk.read_mb_s")
    if not isinstance(reading, Measurement):
        return Chart(title, _why_not(reading))
    entries = reading.detail.get("rates")
    rates = [
        r
        for r in (entries if isinstance(entries, (list, tuple)) else ())
        if isinstance(r, Mapping) and _number(r.get("depth")) and _number(r.get("mb_s")) is not None
    ]
    best = row.fingerprint.number("disk.read_best_depth")
    at = f" at depth {best:,.0f}" if best else ""
    sentence = f"{reading.describe()}{at}."
    if not rates:
        return Chart(title, f"{sentence} The rates of single depths were not kept.")
    color = "$bad" if reading.suspect else "$series2"
    spreads = [_number(r.get("spread")) or 0.0 for r in rates]
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "read",
            "x": [r["depth"] for r in rates],
            "y": [r["mb_s"] for r in rates],
            "error_y": {"type": "data", "array": spreads, "color": "$muted", "thickness": 1},
            "marker": {"color": color, "size": 8},
            "line": {"color": color, "width": 2},
            "hovertemplate": "depth %{x}: %{y:,.0f} MB/s<extra></extra>",
        }
    ]
    chosen = [r for r in rates if r["depth"] == best]
    if chosen and not reading.suspect:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "best",
                "x": [chosen[0]["depth"]],
                "y": [chosen[0]["mb_s"]],
                "marker": {
                    "color": "rgba(0,0,0,0)",
                    "size": 17,
                    "line": {"color": "$good", "width": 3},
                },
                "hoverinfo": "skip",
            }
        )
    layout = _layout("reads in flight", "MB/s")
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": [r["depth"] for r in rates],
        "ticktext": [f"{r['depth']:g}" for r in rates],
    }
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart(title, sentence, {"data": data, "layout": layout})


_TRANSFERS = (
    ("gpu.h2d_pinned_mb_s", "host → GPU, pinned"),
    ("gpu.d2h_pinned_mb_s", "GPU → host, pinned"),
    ("gpu.h2d_pageable_mb_s", "host → GPU, pageable"),
    ("gpu.d2h_pageable_mb_s", "GPU → host, pageable"),
    ("gpu.h2d_both_mb_s", "host → GPU, both at once"),
    ("gpu.d2h_both_mb_s", "GPU → host, both at once"),
)


def transfer_chart(row: Row) -> Chart:
    """Copies between host and GPU as bars, against what the link carries."""
    title = "Copies between host and GPU"
    known = [(n, text, row.fingerprint[n]) for n, text in _TRANSFERS if n in row.fingerprint]
    if row.node.device.startswith("cpu"):
        return Chart(title, "Not measured: this row has no GPU.")
    if not known:
        return Chart(title, "Not measured: the result holds no transfers.")
    bars: list[tuple[str, float, float]] = []
    gaps: list[str] = []
    for _, text, reading in known:
        if not isinstance(reading, Measurement):
            gaps.append(f"{text}: not measured ({reading.describe()})")
        elif reading.suspect:
            gaps.append(f"{text}: suspect, not shown ({reading.suspect})")
        elif not isinstance(reading.value, (bool, str)):
            bars.append((text, float(reading.value), reading.spread or 0.0))
    link = row.fingerprint.text("gpu.link_under_load") or ""
    ceiling = _ceiling(link)
    share = row.fingerprint.number("gpu.link_share_percent")
    if not bars:
        return Chart(title, "; ".join(gaps) + ".")
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [text for text, _, _ in reversed(bars)],
            "x": [rate for _, rate, _ in reversed(bars)],
            "error_x": {
                "type": "data",
                "array": [spread for _, _, spread in reversed(bars)],
                "color": "$muted",
                "thickness": 1,
            },
            "marker": {"color": "$series1"},
            "hovertemplate": "%{y}: %{x:,.0f} MB/s<extra></extra>",
        }
    ]
    shapes, notes = [], []
    if ceiling is not None:
        shapes = [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": ceiling,
                "x1": ceiling,
                "y0": 0,
                "y1": 1,
                "line": {"color": "$bad", "width": 2, "dash": "dash"},
            }
        ]
        notes = [
            {
                "xref": "x",
                "yref": "paper",
                "x": ceiling,
                "y": 1.02,
                "text": label(f"{_LINK.search(link)[0]}"),  # type: ignore[index]
                "showarrow": False,
                "xanchor": "right",
                "yanchor": "bottom",
                "font": {"color": "$bad", "size": 12},
            }
        ]
    layout = _layout("MB/s", "", shapes, notes)
    layout["xaxis"]["rangemode"] = "tozero"
    layout["yaxis"] |= {"automargin": True, "ticklabelposition": "outside", "ticks": ""}
    layout["bargap"] = 0.35
    fastest = max(bars, key=lambda bar: bar[1])
    text = f"Fastest: {fastest[0]} at {format_number(fastest[1])} MB/s"
    if ceiling is not None:
        text += f"; the link ({link}) carries {format_number(ceiling)} MB/s"
    else:
        why = row.fingerprint.get("gpu.link_under_load")
        text += f"; the link's ceiling is not known ({_why_not(why).lower()})"
    text += "" if share is None else f"; best copy over ceiling: {format_number(share)} %"
    return Chart(title, f"{text}.", {"data": data, "layout": layout}, tuple(gaps))


def _ceiling(link: str) -> float | None:
    """MB/s of a link as it ran under load, before headers; None where that is not known."""
    found = _LINK.search(link)
    return link_mb_s(int(found[1]), int(found[2])) if found else None


def _level(value: float, name: str, color: str) -> tuple[Figure, Figure]:
    """A line across the chart at `value`, and its name."""
    shape = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": color, "width": 1.5, "dash": "dash"},
    }
    note = {
        "xref": "paper",
        "x": 0.01,
        "y": value,
        "text": name,
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom" if name == "capacity" else "top",
        "font": {"color": color, "size": 12},
    }
    return shape, note


def _layout(
    x: str,
    y: str,
    shapes: Sequence[Figure] = (),
    notes: Sequence[Figure] = (),
) -> Figure:
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "shapes": list(shapes),
        "annotations": list(notes),
        "showlegend": False,
    }


def _why_not(reading: Reading | None) -> str:
    if isinstance(reading, Unmeasured):
        return f"Not measured: {reading.describe()}."
    if isinstance(reading, Measurement) and reading.suspect:
        return f"Suspect: {reading.suspect}."
    return "Not measured: the result holds no such reading."


def _number(value: Any) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
