"""A fingerprint as a page that one would paste into a support ticket."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pichak_core.measurement import Measurement, Unmeasured
from pichak_core.plan import format_number

if TYPE_CHECKING:
    from rich.console import Console

    from pichak_core.measurement import Fingerprint

_NAME_WIDTH, _VALUE_WIDTH = 30, 30


def render_fingerprint(fingerprint: Fingerprint, console: Console) -> None:
    """Print every reading: groups of name, value ± spread and source; then what was true while it
    ran; then what was not measured and why."""
    for line in page_lines(fingerprint, max(60, console.width)):
        console.print(line, markup=False, soft_wrap=True, style="bold" if line.isupper() else "")


def page_lines(fingerprint: Fingerprint, width: int = 120) -> list[str]:
    """The page as lines of at most `width` characters, except for words that are longer."""
    lines: list[str] = []
    for group, members in _groups(fingerprint).items():
        lines += ["", group.upper()]
        for reading in members:
            lines += _entry(reading, width)
    lines += _conditions(fingerprint, width)
    lines += _gaps(fingerprint, width)
    return lines[1:] if lines and not lines[0] else lines


def _groups(fingerprint: Fingerprint) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for name, reading in fingerprint.items():
        if isinstance(reading, Measurement):
            groups.setdefault(name.partition(".")[0], []).append(reading)
    return groups


def _entry(reading: Measurement, width: int) -> Iterator[str]:
    head = f"  {reading.name:<{_NAME_WIDTH}} {_value(reading):<{_VALUE_WIDTH}} "
    source = reading.source + _parts(reading.detail)
    room = width - _NAME_WIDTH - _VALUE_WIDTH - 4
    if len(head) <= width - room and room >= 40:
        wrapped = textwrap.wrap(source, room) or [""]
        yield (head + wrapped[0]).rstrip()
        rest = wrapped[1:]
        indent = " " * (_NAME_WIDTH + _VALUE_WIDTH + 4)
    else:
        yield head.rstrip()
        indent = " " * 6
        rest = textwrap.wrap(source, width - len(indent))
    yield from (indent + part for part in rest)
    if reading.suspect:
        yield from textwrap.wrap(
            f"SUSPECT: {reading.suspect}",
            width,
            initial_indent="      ",
            subsequent_indent="      ",
        )


def _value(reading: Measurement) -> str:
    text = f"{format_number(reading.value)} {reading.unit}".rstrip()
    if reading.samples > 1 and reading.spread is not None:
        text += f" ± {format_number(reading.spread)}, n = {reading.samples}"
    return text


def _parts(detail: Mapping[str, object]) -> str:
    """The raw parts that fit on a line: single numbers, not curves."""
    numbers = {k: v for k, v in detail.items() if isinstance(v, (int, float))}
    if not numbers:
        return ""
    return " [" + ", ".join(f"{k} {format_number(v)}" for k, v in numbers.items()) + "]"


def _conditions(fingerprint: Fingerprint, width: int) -> list[str]:
    """The range of each condition over all measurements that have it."""
    seen: dict[str, list[float]] = {}
    words: dict[str, str] = {}
    for reading in fingerprint.values():
        for name, value in (reading.conditions if isinstance(reading, Measurement) else {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                seen.setdefault(name, []).append(value)
            else:
                words[name] = str(value)
    if not seen and not words:
        return []
    ranges = [f"{name} {_range(values)}" for name, values in seen.items()]
    ranges += [f"{name} {text}" for name, text in words.items()]
    return ["", "WHILE IT RAN", *_wrapped(", ".join(ranges), width)]


def _range(values: list[float]) -> str:
    low, high = format_number(min(values)), format_number(max(values))
    return low if low == high else f"{low} to {high}"


def _gaps(fingerprint: Fingerprint, width: int) -> list[str]:
    """What was not measured; names that share their reason share its line."""
    gaps: dict[str, list[str]] = {}
    for reading in fingerprint.values():
        if isinstance(reading, Unmeasured):
            gaps.setdefault(reading.describe(), []).append(reading.name)
    if not gaps:
        return []
    count = sum(len(names) for names in gaps.values())
    lines = ["", f"NOT MEASURED ({count})"]
    for why, names in gaps.items():
        lines += _wrapped(", ".join(names), width)
        lines += textwrap.wrap(why, width, initial_indent="      ", subsequent_indent="      ")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
