"""Output in an encoding that has not every character: what is plain stands for what is not."""

from __future__ import annotations

import codecs
import sys

#: One character each, so that columns stay columns.
_PLAIN = {
    "–": "-", "—": "-", "−": "-", "·": ".", "…": ".", "µ": "u", "±": "~", "×": "x", "÷": "/",
    "→": ">", "←": "<", "↔": "-", "≥": ">", "≤": "<", "≈": "~", "█": "#", "▌": "#", "°": "o",
    "“": '"', "”": '"', "’": "'", "─": "-", "│": "|", "✓": "+", "✗": "x", "•": "*",
}  # fmt: skip
_NAME = "pichak-plain"


def plain_where_needed() -> None:
    """Let stdout and stderr write what their encoding lacks (PYTHONIOENCODING, a code page) as its
    plain counterpart, and what has none as an escape, instead of failing."""
    codecs.register_error(_NAME, _plain)
    for stream in (sys.stdout, sys.stderr):
        if not is_unicode(stream) and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_NAME)


def is_unicode(stream: object) -> bool:
    """Whether it takes every character."""
    name = getattr(stream, "encoding", None) or "utf-8"
    return codecs.lookup(name).name.startswith("utf")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    shown = (_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in part)
    return "".join(shown), error.end
