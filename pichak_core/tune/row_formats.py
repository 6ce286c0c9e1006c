"""What a row means as training text: which parts of it there are, and which the loss scores.

`normalise` takes one decoded row of any common layout and never raises: what is odd is named in
`Row.defects`, and a row without text has no segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pichak_core.tune.row_chat import (
    CHAT_KEYS,
    chat_format,
    is_turn_list,
    pair_turns,
    plain_segments,
    turns_of,
)
from pichak_core.tune.row_text import Row, Segment, Turn, from_json_text, text_of

#: Names of the part that is given, in the order in which they are looked for.
PROMPT_KEYS = (
    "prompt",
    "question",
    "query",
    "problem",
    "instruction",
    "input",
    "human",
    "user",
    "text",
    "source",
    "article",
    "document",
)
#: Names of what belongs to the prompt beside its first part.
EXTRA_KEYS = ("input", "context")
#: Names of the part that is learned.
COMPLETION_KEYS = (
    "completion",
    "answer",
    "response",
    "output",
    "target",
    "solution",
    "reply",
    "assistant",
    "summary",
    "highlights",
    "answers",
    "label",
    "code",
)
TEXT_KEYS = ("text", "content", "body", "code", "page_content")
_SYSTEM_KEYS = ("system", "system_prompt")

#: Names of metadata as often as of a part: beside a text, or alone, they are no answer to a prompt.
_WEAK_COMPLETIONS = frozenset({"target", "summary", "highlights", "label", "code"})
_WEAK_PROMPTS = frozenset({"user", "human", "source", "article", "document", "text"})


class _Known(NamedTuple):
    """The known names among a row's fields, each kind in the order of preference."""

    chat: tuple[str, ...]
    prompt: tuple[str, ...]
    completion: tuple[str, ...]
    text: tuple[str, ...]
    system: tuple[str, ...]
    extra: tuple[str, ...]


@lru_cache(maxsize=1024)
def _known(names: tuple[str, ...]) -> _Known:
    kinds = (CHAT_KEYS, PROMPT_KEYS, COMPLETION_KEYS, TEXT_KEYS, _SYSTEM_KEYS, EXTRA_KEYS)
    return _Known(*(tuple(key for key in kind if key in names) for kind in kinds))


def normalise(value: Any) -> Row:
    """The row as text with its scored parts; `Row.segments` is empty where there is none."""
    defects: list[str] = []
    try:
        row = _row(value, defects)
    except RecursionError:
        return Row("unknown", defects=("too_deep",))
    if not any(segment.text for segment in row.segments):
        defects.append("unknown_format" if row.format == "unknown" else "empty_row")
        return Row(row.format, defects=tuple(defects))
    return row._replace(defects=tuple(defects)) if defects else row


def _row(value: Any, defects: list[str]) -> Row:
    if isinstance(value, str):
        return _text_row(value)
    if isinstance(value, list) and is_turn_list(value):
        return _chat_row(value, {}, defects)
    if not isinstance(value, dict):
        defects.append("not_an_object")
        return Row("unknown")
    fields = {str(key).strip().lower(): item for key, item in value.items()}
    if fields.get("chosen") is not None and fields.get("rejected") is not None:
        return _preference_row(fields, defects)
    for key in _known(tuple(fields)).chat:
        turns = from_json_text(fields[key], defects)
        if isinstance(turns, list) and (turns or len(fields) == 1):
            return _chat_row(turns, fields, defects)
    return _flat_row(fields, defects)


def _chat_row(entries: list[Any], fields: Mapping[str, Any], defects: list[str]) -> Row:
    turns = turns_of(entries, defects)
    system = _system(fields, defects)
    if system:
        turns = [system, *turns]
    answer = _first(fields, _known(tuple(fields)).completion)
    if answer and answer not in _WEAK_COMPLETIONS and not any(turn.scored for turn in turns):
        turns.append(Turn("assistant", text_of(fields[answer], defects), True))
    return _from_turns(chat_format(entries), turns, fields, defects)


def _from_turns(
    name: str, turns: Sequence[Turn], fields: Mapping[str, Any], defects: list[str]
) -> Row:
    tools = from_json_text(fields.get("tools") or fields.get("functions"), defects)
    if not isinstance(tools, list):
        tools = []
    segments = plain_segments(turns, tools)
    if not any(segment.scored and segment.text for segment in segments):
        defects.append("no_completion")
    return Row(name, segments, tuple(turns), tuple(tools))


def _preference_row(fields: Mapping[str, Any], defects: list[str]) -> Row:
    """Scored is the chosen answer; the rejected one is kept for its length."""
    chosen, rejected = (from_json_text(fields[key], defects) for key in ("chosen", "rejected"))
    if is_turn_list(chosen) and is_turn_list(rejected):
        prompt = from_json_text(fields.get("prompt"), defects)
        given = turns_of(prompt, defects) if isinstance(prompt, list) else []
        sides = [turns_of(side, defects) for side in (chosen, rejected)]
        if not given:
            shared = _common_turns(*sides)
            given, sides = sides[0][:shared], [side[shared:] for side in sides]
            if not given and isinstance(prompt, str) and prompt:
                given = [Turn("user", prompt)]
        head = [Turn(turn.role, turn.text, False, turn.message) for turn in given]
        row, other = (_from_turns("preference", [*head, *side], fields, []) for side in sides)
        if not any(segment.scored for segment in row.segments):
            defects.append("no_completion")
        return Row("preference", row.segments, row.turns, row.tools, other)
    texts = [text_of(fields[key], defects) for key in ("chosen", "rejected")]
    prompt_text = _prompt_text(fields, defects)
    if not prompt_text:
        shared = _common_words(*texts)
        prompt_text, texts = texts[0][:shared], [text[shared:] for text in texts]
    chosen_row, rejected_row = (_pair("preference", prompt_text, text) for text in texts)
    if not texts[0]:
        defects.append("no_completion")
    return Row("preference", chosen_row.segments, alternative=rejected_row)


def _flat_row(fields: Mapping[str, Any], defects: list[str]) -> Row:
    known = _known(tuple(fields))
    completion_key = _first(fields, known.completion)
    prompt_key = _first(fields, known.prompt)
    unasked = prompt_key is None or (prompt_key in _WEAK_PROMPTS and bool(known.text))
    if unasked and completion_key in _WEAK_COMPLETIONS:
        completion_key = None
    if completion_key is None and known.text:
        return _text_row(text_of(fields[_first(fields, known.text) or ""], defects))
    if prompt_key is None and completion_key is None:
        return _guessed_row(fields, defects)
    prompt = from_json_text(fields[prompt_key], defects) if prompt_key else ""
    if isinstance(prompt, list) and is_turn_list(prompt):
        return _turns_then_answer(prompt, completion_key, fields, defects)
    earlier = pair_turns(fields["history"], defects) if "history" in fields else []
    prompt_text = _prompt_text(fields, defects)
    if completion_key is None:
        defects.append("no_completion")
        return Row("prompt_only", (*plain_segments(earlier), Segment(prompt_text)))
    answer = fields[completion_key]
    if completion_key == "answers" and isinstance(answer, list) and answer:
        answer = answer[0]  # alternatives, where a list elsewhere is the parts of one text
    answer_text = text_of(answer, defects)
    if not answer_text:
        defects.append("no_completion")
    name = "instruction" if prompt_key == "instruction" else "prompt_completion"
    pair = _pair(name, prompt_text, answer_text)
    return Row(name, (*plain_segments(earlier), *pair.segments)) if earlier else pair


def _turns_then_answer(
    prompt: list[Any], completion_key: str | None, fields: Mapping[str, Any], defects: list[str]
) -> Row:
    """A prompt given as turns, none of them scored, and what follows it."""
    given = [Turn(t.role, t.text, False, t.message) for t in turns_of(prompt, defects)]
    if completion_key is None:
        return _from_turns("prompt_only", given, fields, defects)
    answers = from_json_text(fields[completion_key], defects)
    if is_turn_list(answers):
        learned = turns_of(answers, defects)
    else:
        learned = [Turn("assistant", text_of(answers, defects), True)]
    return _from_turns("prompt_completion", [*given, *learned], fields, defects)


def _guessed_row(fields: Mapping[str, Any], defects: list[str]) -> Row:
    """A row whose fields have no known name: its text, when only one of them is text."""
    texts = [item for item in fields.values() if isinstance(item, str) and item.strip()]
    if len(texts) != 1:
        return Row("unknown")
    defects.append("guessed_field")
    return _text_row(texts[0])


def _prompt_text(fields: Mapping[str, Any], defects: list[str]) -> str:
    """System prompt, prompt, and what belongs to it, a line each (no template is invented)."""
    known = _known(tuple(fields))
    key = _first(fields, known.prompt)
    parts = [fields[name] for name in known.system[:1] if fields[name]]
    if key:
        parts.append(fields[key])
        parts += [fields[name] for name in known.extra if name != key and fields[name]]
    if len(parts) == 1:
        return text_of(parts[0], defects)
    return "\n".join(text for part in parts if (text := text_of(part, defects)))


def _system(fields: Mapping[str, Any], defects: list[str]) -> Turn | None:
    key = _first(fields, _known(tuple(fields)).system)
    return Turn("system", text_of(fields[key], defects)) if key and fields[key] else None


def _text_row(text: str) -> Row:
    return Row("plain_text", (Segment(text),))


def _pair(name: str, prompt: str, completion: str) -> Row:
    return Row(name, (Segment(prompt), Segment(completion, True)))


def _first(fields: Mapping[str, Any], present: Sequence[str]) -> str | None:
    """The first of the fields present that holds something, else the first of them."""
    for key in present:
        if fields[key] not in (None, ""):
            return key
    return present[0] if present else None


def _common_turns(first: Sequence[Turn], second: Sequence[Turn]) -> int:
    shared = 0
    for one, other in zip(first, second, strict=False):
        if (one.role, one.text) != (other.role, other.text):
            break
        shared += 1
    # Equal answers are answers still: the prompt ends before the last assistant turn.
    if shared and shared == min(len(first), len(second)):
        shared -= 1
    return shared


def _common_words(first: str, second: str) -> int:
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    while shared and not first[shared - 1].isspace():
        shared -= 1
    return shared
