"""Settings as text: YAML and Python with each source as a comment, and JSON, which has none."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from pichak_core.plan import Scalar
from pichak_core.tune.trainers import Line, Setting

_WIDTH = 100


def as_dict(lines: Sequence[Line]) -> dict[str, Any]:
    """The settings as plain containers; a section is a dictionary, a dot in its name nests it."""
    made: dict[str, Any] = {}
    for line in lines:
        if isinstance(line, Setting) and not line.text_only:
            where = made
            for part in line.section.split(".") if line.section else ():
                where = where.setdefault(part, {})
            where[line.key] = _plain(line.value)
    return made


def as_json(header: Sequence[str], lines: Sequence[Line]) -> str:
    """JSON: a file that takes no comments, so the header and the sources stay with the plan."""
    del header
    return json.dumps(as_dict(lines), indent=2, allow_nan=False) + "\n"


def as_yaml(header: Sequence[str], lines: Sequence[Line]) -> str:
    """YAML that 1.1 and 1.2 parsers read alike, a section as a nested mapping."""
    text = [*_comments(header), ""]
    for section, members in _by_section(lines):
        named = bool(section) and _has_settings(members)
        indent = "  " if named else ""
        if named:
            text.append(f"{section}:")
        for member in members:
            text += _comment(_told(member), indent)
            if isinstance(member, Setting):
                text.append(f"{indent}{member.key}: {_yaml_value(member.value)}")
    return "\n".join(text) + "\n"


def as_python(header: Sequence[str], lines: Sequence[Line]) -> str:
    """One dictionary literal for each section, named after it."""
    text = _comments(header)
    for section, members in _by_section(lines):
        named = bool(section) and _has_settings(members)
        indent = "    " if named else ""
        text += ["", f"{section} = {{"] if named else [""]
        for member in members:
            text += _comment(_told(member), indent)
            if isinstance(member, Setting):
                text.append(f"{indent}{json.dumps(member.key)}: {_plain(member.value)!r},")
        if named:
            text.append("}")
    return "\n".join(text) + "\n"


def one_line(text: str) -> str:
    """Text that cannot end the comment it stands in: one line of printable characters."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in flat)


def _told(line: Line) -> str:
    return line.source if isinstance(line, Setting) else line.text


def _has_settings(lines: Sequence[Line]) -> bool:
    return any(isinstance(line, Setting) for line in lines)


def _by_section(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    sections: dict[str, list[Line]] = {}
    for line in lines:
        sections.setdefault(line.section, []).append(line)
    return list(sections.items())


def _comments(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in _comment(text, "")]


def _comment(text: str, indent: str) -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(
        one_line(text),
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=lead,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(value: Scalar | tuple[str, ...]) -> Scalar | list[str]:
    return list(value) if isinstance(value, tuple) else value


def _yaml_value(value: Scalar | tuple[str, ...]) -> str:
    if isinstance(value, float):
        # YAML 1.1 reads 5e-05 as a string; with a point in it, as a number.
        digits, exponent, power = repr(value).partition("e")
        return f"{digits if '.' in digits else digits + '.0'}{exponent}{power}"
    return json.dumps(value)
