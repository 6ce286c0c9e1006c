"""The parts of a normalised row, and text out of whatever a field holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pichak_core.tune.surrogates import spells_surrogates, without_surrogates


class Segment(NamedTuple):
    """A stretch of a row's text; `scored` when the loss counts its tokens."""

    text: str
    scored: bool = False


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    `role` is system, user, assistant or tool. `text` holds its tool calls too, as JSON; `message`
    is the turn as a chat template takes it.
    """

    role: str
    text: str
    scored: bool = False
    message: Mapping[str, Any] | None = None

    def as_message(self) -> dict[str, Any]:
        """The turn as a chat template takes it."""
        return dict(self.message) if self.message else {"role": self.role, "content": self.text}


class Row(NamedTuple):
    """A row of any layout as text.

    `format` is its layout. `segments` joined are its text without a chat template; empty when the
    row cannot be used. `turns` and `tools` are set for conversations. `alternative` is the same
    row with the rejected answer of a preference pair.
    """

    format: str
    segments: tuple[Segment, ...] = ()
    turns: tuple[Turn, ...] = ()
    tools: tuple[Any, ...] = ()
    alternative: Row | None = None
    defects: tuple[str, ...] = ()


#: What a defect's name says to a person.
DEFECTS: dict[str, str] = {
    "bom": "a byte order mark (read past)",
    "crlf": "a line ends in CR LF (CR removed)",
    "invalid_utf8": "invalid UTF-8 (replaced by U+FFFD where it could be read)",
    "lone_surrogate": "half of a surrogate pair (replaced by U+FFFD)",
    "only_nuls": "a line of NUL bytes, as a crash can leave it (left out)",
    "invalid_json": "not valid JSON (left out)",
    "too_large": "a row over 64 MiB (left out)",
    "too_deep": "nested too deeply (left out)",
    "not_an_object": "neither an object nor text (left out)",
    "unknown_format": "no field of a known name (left out)",
    "empty_row": "no text (left out)",
    "guessed_field": "no field of a known name: the only text field was taken",
    "null_field": "null or NaN where text should be (taken as empty)",
    "odd_field": "not text (taken as its JSON)",
    "bad_entry": "an entry of a conversation that is no turn (skipped)",
    "unknown_role": "a turn of an unknown role (taken as the user's)",
    "non_text_part": "a part that is not text, such as an image (not counted in the length)",
    "no_completion": "a row without a completion",
    "scored_cut": "no scored token is left at the chosen length",
    "no_template": "a conversation, and the tokenizer has no chat template (turns joined plainly, "
    "the template's own tokens not counted)",
    "template_folded": "the chat template took it only with system and doubled turns folded",
    "template_refused": "the chat template refused it (turns joined plainly)",
}


def text_of(value: Any, defects: list[str]) -> str:
    """The text in a field: a string, a list of parts joined, or JSON for what is neither."""
    if isinstance(value, str):
        return value
    if value is None:
        defects.append("null_field")
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        # NaN is how tables write "nothing here", and no text of anybody's.
        defects.append("null_field")
        return ""
    if isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, list):
        return "".join(_part(part, defects) for part in value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        inner = _inner_text(value)
        if inner is not None:
            return inner
    defects.append("odd_field")
    return as_json(value)


def _part(part: Any, defects: list[str]) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        inner = _inner_text(part)
        if inner is not None:
            return inner
        defects.append("non_text_part")
        return ""
    if part is None:
        defects.append("null_field")
        return ""
    defects.append("odd_field")
    return as_json(part)


def _inner_text(part: Mapping[str, Any]) -> str | None:
    """The text of ``{"type": "text", "text": ...}`` and its like; None when it holds none."""
    for key in ("text", "content", "value"):
        inner = part.get(key)
        if isinstance(inner, str):
            return inner
        if isinstance(inner, list) and inner and all(isinstance(item, str) for item in inner):
            return str(inner[0])
    return None


def as_json(value: Any) -> str:
    """Compact JSON of anything; what JSON cannot hold becomes its text."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError):
        return str(value)


def from_json_text(value: Any, defects: list[str]) -> Any:
    """A list of objects that was stored as its JSON text (tables do that), else the value."""
    if not isinstance(value, str) or value[:1] != "[" or value.rstrip()[-1:] != "]":
        return value
    try:
        made = json.loads(value)
        replaced = False
        if spells_surrogates(value):
            made, replaced = without_surrogates(made)
    except (ValueError, RecursionError):
        return value
    if not any(isinstance(item, dict) for item in made):
        return value
    if replaced:
        defects.append("lone_surrogate")
    return made
