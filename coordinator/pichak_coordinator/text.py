"""Text that came from a node, made safe to show: on a terminal, in Markdown, in a spreadsheet.

A host name, a GPU name or an error message is whatever the other machine chose to send.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

#: Overrides of the reading direction: they make a line show something else than it says.
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})


def printable(text: str, *, keep_newlines: bool = False) -> str:
    """`text` with what a terminal would obey written out instead.

    Control characters (escape sequences among them), lone surrogates, line separators and
    direction overrides become ``\\x1b`` or ``\\u202e``; a tab becomes a space, and so does a line
    break unless `keep_newlines`. Letters of any script, and their joiners, stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(c, keep_newlines) for c in text)


def _shown(char: str, keep_newlines: bool) -> str:
    if char == "\n" and keep_newlines:
        return char
    if char in "\t\n\r":
        return " "
    if char not in _BIDI and unicodedata.category(char) not in _HIDDEN:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def json_text(record: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """`record` as JSON in which letters of any script stay as they are (unless `ascii_only`), and
    what a terminal would obey is escaped; `ValueError` for NaN or an infinity, which are not JSON.
    """
    text = json.dumps(record, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    if text.isascii() and "\x7f" not in text:
        return text  # json escapes the other control characters itself
    return "".join(_escaped(c) if c > "~" else c for c in text)


def _escaped(char: str) -> str:
    if char in _BIDI or unicodedata.category(char) in _HIDDEN:
        return f"\\u{ord(char):04x}"
    return char


def markdown_cell(text: str) -> str:
    """`text` as one cell of a Markdown table: nothing in it is markup, HTML, a link or a column."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for char in "\\|`*_[]~$!#":
        safe = safe.replace(char, f"\\{char}")
    return safe


def csv_cell(text: str) -> str:
    """`text` as one cell of a spreadsheet: what would start a formula gets an apostrophe before."""
    safe = printable(text)
    return f"'{safe}" if safe.lstrip().startswith(("=", "+", "-", "@")) else safe


def last_lines(text: str, most: int = 40, width: int = 300) -> tuple[str, ...]:
    """The end of what a program printed, safe to show: at most `most` lines that are not empty,
    each cut to `width`. Of a line that was written over (``\\r``) its last form is kept."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return tuple(shortened(printable(line), width) for line in lines if line)[-most:]


def shortened(text: str, length: int) -> str:
    """`text` in at most `length` characters, an ellipsis where it was cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
