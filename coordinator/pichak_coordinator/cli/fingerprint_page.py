"""A fingerprint as a page that one would paste into a support ticket.

Who it is, what is wrong with it, every number with its source, what was true while it ran, and what
was not measured and why.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pichak_coordinator.cli.fingerprint_head import HEAD_METRICS, head_lines
from pichak_coordinator.cli.fingerprint_verdicts import is_verdict, verdict_lines
from pichak_coordinator.text import printable
from pichak_core.measurement import Measurement, Unmeasured
from pichak_core.plan import format_number

if TYPE_CHECKING:
    from rich.console import Console

    from pichak_core.measurement import Fingerprint

_NAME_WIDTH, _VALUE_WIDTH = 32, 20
_NARROWEST, _WIDEST = 60, 100
#: More names than this behind one reason are counted, where they are all of one kind.
_MANY_NAMES = 12


def render_fingerprint(fingerprint: Fingerprint, console: Console, title: str = "") -> None:
    """Print the page, between 60 and 100 columns wide."""
    for line in page_lines(fingerprint, console.width, title):
        heading = line[:1].isupper() and line.partition(" (")[0].isupper()
        console.print(line, markup=False, soft_wrap=True, style="bold" if heading else "")


def page_lines(fingerprint: Fingerprint, width: int = 100, title: str = "") -> list[str]:
    """The page as lines of at most `width` characters, except for words that are longer."""
    width = min(_WIDEST, max(_NARROWEST, width))
    sections = [
        head_lines(fingerprint, width, title),
        verdict_lines(fingerprint, width),
        *(
            [group.upper(), *(line for reading in members for line in _entry(reading, width))]
            for group, members in _groups(fingerprint).items()
        ),
        _conditions(fingerprint, width),
        _gaps(fingerprint, width),
    ]
    lines = [line for section in sections if section for line in ["", *section]]
    return [printable(line) for line in lines[1:]]


def _groups(fingerprint: Fingerprint) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for name, reading in fingerprint.items():
        shown = name in HEAD_METRICS or is_verdict(name)
        if isinstance(reading, Measurement) and not shown:
            groups.setdefault(name.partition(".")[0], []).append(reading)
    return groups


def _entry(reading: Measurement, width: int) -> Iterator[str]:
    value = _value(reading)
    source = reading.source + _parts(reading.detail)
    columns = f"  {reading.name:<{_NAME_WIDTH}} {value:<{_VALUE_WIDTH}}  {source}"
    tidy = len(reading.name) <= _NAME_WIDTH and len(value) <= _VALUE_WIDTH
    if tidy and len(columns) <= width:
        yield columns.rstrip()
    else:
        hanging = " " * (_NAME_WIDTH + 3)
        head = f"  {reading.name:<{_NAME_WIDTH}} {value}"
        yield from textwrap.wrap(head, width, subsequent_indent=hanging, drop_whitespace=True)
        yield from _indented(source, width)
    if reading.suspect:
        yield from _indented(f"SUSPECT: {reading.suspect}", width)


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False
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
    return ["WHILE IT RAN", *_wrapped(", ".join(ranges), width)]


def _range(values: list[float]) -> str:
    low, high = format_number(min(values)), format_number(max(values))
    return low if low == high else f"{low} to {high}"


def _gaps(fingerprint: Fingerprint, width: int) -> list[str]:
    """What was not measured, by reason; names that share their reason share its line."""
    gaps: dict[str, list[str]] = {}
    for reading in fingerprint.values():
        if isinstance(reading, Unmeasured):
            gaps.setdefault(reading.describe(), []).append(reading.name)
    if not gaps:
        return []
    count = sum(len(names) for names in gaps.values())
    lines = [f"NOT MEASURED ({count})"]
    for why in sorted(gaps, key=lambda why: why.partition(":")[0]):
        lines += _wrapped(why, width)
        lines += _indented(_names(gaps[why]), width)
    return lines


def _names(names: list[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    return ", ".join(
        f"{group}.*: {len(members)} of them ({', '.join(members[:3])} …)"
        if len(members) > _MANY_NAMES
        else ", ".join(members)
        for group, members in groups.items()
    )


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
