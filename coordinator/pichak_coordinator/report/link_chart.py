"""The matrix of links as a heat map. A cell without a number has a sign, never a colour of the
scale: what could not be reached or was not measured is not a slow link. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pichak_coordinator.report.charts import Chart, Figure, label
from pichak_coordinator.report.links import Direction, Directions
from pichak_core.plan import format_number

TITLE = "Links between machines"
#: Of more machines a matrix cannot be read; the slowest directions are listed instead.
MOST_IN_MATRIX = 64
_MOST_WITH_FIGURES = 14
_LISTED = 20
_SIGNS = {"unreachable": "✕", "suspect": "?", "not measured": "–", "not asked": "·"}
_MEANS = {
    "unreachable": "✕ no connection can be opened in this direction",
    "suspect": "? measured, and suspect: not shown",
    "not measured": "– not measured",
    "not asked": "· not asked for",
}


def link_chart(found: Directions, names: Mapping[str, str]) -> Chart:
    """`names`: identity -> what a person calls the machine; the order is that of the axes."""
    nodes = [node for node in names if node in set(found.nodes)]
    if not found.ways or len(nodes) < 2:
        return Chart(
            TITLE,
            "Not measured: no network test of these machines is stored; `pichak net` makes one.",
        )
    from_ = ", ".join(f"{run} ({_day(at)})" for run, at in found.runs.items())
    sentence = f"{_summary(found, nodes)} From {from_}."
    notes = [
        text
        for state, text in _MEANS.items()
        if any(_state(found, a, b) == state for a in nodes for b in nodes if a != b)
    ]
    gaps = tuple(_gaps(found, nodes, names))
    if len(nodes) > MOST_IN_MATRIX:
        slow = _slowest(found, names)
        few = f"{len(nodes)} machines do not fit a matrix; the slowest directions:"
        return Chart(TITLE, sentence, None, (few, *slow, *gaps))
    return Chart(TITLE, sentence, _figure(found, nodes, names), (*notes, *gaps))


def _figure(found: Directions, nodes: Sequence[str], names: Mapping[str, str]) -> Figure:
    axis = [label(names[node], 24) for node in nodes]
    # Plotly joins equal names into one row.
    axis = [f"{text} ({i})" if axis.count(text) > 1 else text for i, text in enumerate(axis, 1)]
    z: list[list[float | None]] = []
    signs: list[Figure] = []
    hover: list[list[str]] = []
    for i, source in enumerate(nodes):
        z.append([])
        hover.append([])
        for j, target in enumerate(nodes):
            state = "self" if source == target else _state(found, source, target)
            way = found.ways.get((source, target))
            z[i].append(way.mb_s if way and state == "measured" else None)
            hover[i].append(label(_told(names[source], names[target], state, way), 300))
            if state in _SIGNS:
                color = "$bad" if state == "unreachable" else "$muted"
                signs.append(
                    {
                        "x": j,
                        "y": i,
                        "text": _SIGNS[state],
                        "showarrow": False,
                        "font": {"color": color, "size": 15},
                    }
                )
    with_figures = len(nodes) <= _MOST_WITH_FIGURES
    rates = [rate for line in z for rate in line if rate is not None]
    top = max(rates, default=1.0)
    data = [
        {
            "type": "heatmap",
            "x": axis,
            "y": axis,
            "z": z,
            "text": [[_short(v) for v in line] for line in z] if with_figures else None,
            "texttemplate": "%{text}" if with_figures else "",
            "customdata": hover,
            "hovertemplate": "%{customdata}<extra></extra>",
            "hoverongaps": False,
            "colorscale": "$heat",
            # A scale from the lowest to the highest would make a chasm of mere noise.
            "zmin": min([top / 2, *rates]),
            "zmax": top,
            "colorbar": {"title": {"text": "MB/s"}, "thickness": 12},
            "xgap": 1,
            "ygap": 1,
        }
    ]
    layout: Figure = {
        "xaxis": {"title": {"text": "to"}, "side": "top", "tickangle": -45, "automargin": True},
        "yaxis": {"title": {"text": "from"}, "autorange": "reversed", "automargin": True},
        "annotations": signs,
        "height": 220 + 26 * len(nodes),
    }
    return {"data": data, "layout": layout}


def _state(found: Directions, source: str, target: str) -> str:
    way = found.ways.get((source, target))
    if way is None:
        return "not asked"
    return "unreachable" if way.closed else way.state


def _told(source: str, target: str, state: str, way: Direction | None) -> str:
    """The sentence of one cell."""
    place = f"{source} → {target}"
    if state == "self":
        return source
    if way is None:
        return f"{place}: not asked for"
    if state == "unreachable":
        text = f"{place}: no connection can be opened ({way.closed})"
        if way.mb_s is not None:
            rate = format_number(way.mb_s)
            text += f"; {rate} MB/s over one that the other side opened"
        return text
    trip = "" if way.rtt_ms is None else f", round trip {format_number(way.rtt_ms)} ms"
    mark = ", simulated" if way.simulated else ""
    if way.mb_s is None:
        return f"{place}: {way.state}: {way.why}{trip}{mark}"
    return f"{place}: {format_number(way.mb_s)} MB/s{trip}{mark}"


def _summary(found: Directions, nodes: Sequence[str]) -> str:
    rates = [way.mb_s for way in found.ways.values() if way.mb_s is not None]
    every = len(nodes) * (len(nodes) - 1)
    made_up = sum(way.simulated for way in found.ways.values() if way.mb_s is not None)
    how = "measured" if not made_up else "simulated"
    how += f" or measured ({made_up:,} simulated)" if 0 < made_up < len(rates) else ""
    text = f"{len(rates):,} of {every:,} directions between {len(nodes)} machines {how}"
    if rates:
        text += f", {format_number(min(rates))} to {format_number(max(rates))} MB/s"
    shut = sum(bool(way.closed) for way in found.ways.values())
    text += f"; {shut} cannot be opened" if shut else ""
    return f"{text}."


def _slowest(found: Directions, names: Mapping[str, str]) -> list[str]:
    rated = [(way.mb_s, pair, way) for pair, way in found.ways.items() if way.mb_s is not None]
    rated.sort(key=lambda entry: entry[:2])
    return [
        _told(names[source], names[target], "measured", way)
        for _, (source, target), way in rated[:_LISTED]
    ]


def _gaps(found: Directions, nodes: Sequence[str], names: Mapping[str, str]) -> list[str]:
    told: list[str] = []
    for source in nodes:
        for target in nodes:
            way = found.ways.get((source, target))
            if way is not None and (way.closed or way.state != "measured"):
                told.append(_told(names[source], names[target], _state(found, source, target), way))
    if len(told) > _LISTED:
        return [*told[:_LISTED], f"… and {len(told) - _LISTED} more"]
    return told


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _day(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
