"""Conversations: the turns of a row, whatever its layout calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pichak_core.tune.row_text import Segment, Turn, as_json, from_json_text, text_of

CHAT_KEYS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")

_ROLE_KEYS = ("role", "from", "speaker", "author")
_TEXT_KEYS = ("content", "value", "text", "message")
_CALL_KEYS = ("tool_calls", "function_call")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_ASKED_KEYS = ("input", "human", "user", "question", "prompt", "instruction")
_ANSWER_KEYS = ("output", "assistant", "bot", "answer", "response")

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "customer": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "claude": "assistant",
    "agent": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}


def is_turn_list(value: Any) -> bool:
    """A list that holds at least one entry with a role or a question and its answer."""
    return isinstance(value, list) and any(
        isinstance(entry, Mapping)
        and (_key(entry, _ROLE_KEYS) is not None or _asked_and_answered(entry) is not None)
        for entry in value
    )


def chat_format(entries: Sequence[Any]) -> str:
    """ "conversations" for from/value entries, else "messages"."""
    said_from = any(isinstance(entry, Mapping) and "from" in entry for entry in entries)
    return "conversations" if said_from else "messages"


def turns_of(entries: Sequence[Any], defects: list[str]) -> list[Turn]:
    """Every turn in order, assistant turns scored; an entry that is no turn is a defect."""
    if entries and all(isinstance(entry, str) for entry in entries):
        return [
            Turn("assistant", text, True) if number % 2 else Turn("user", text)
            for number, text in enumerate(entries)
        ]
    turns: list[Turn] = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            defects.append("bad_entry")
            continue
        pair = _asked_and_answered(entry)
        if _key(entry, _ROLE_KEYS) is None and pair:
            turns += _pair_of_turns(entry, pair, defects)
        else:
            turns.append(_turn(entry, defects))
    return turns


def pair_turns(history: Any, defects: list[str]) -> list[Turn]:
    """Earlier (question, answer) pairs of a row as turns, the answers scored."""
    turns: list[Turn] = []
    for entry in history if isinstance(history, list) else []:
        if isinstance(entry, list) and len(entry) == 2:
            asked, answered = (text_of(side, defects) for side in entry)
            turns += [Turn("user", asked), Turn("assistant", answered, True)]
        else:
            defects.append("bad_entry")
    return turns


def plain_segments(turns: Sequence[Turn], tools: Sequence[Any] = ()) -> tuple[Segment, ...]:
    """The turns one after the other with nothing between them: no template is invented."""
    head = (Segment(as_json(list(tools))),) if tools else ()
    return (*head, *(Segment(turn.text, turn.scored) for turn in turns))


def folded(turns: Sequence[Turn]) -> list[Turn]:
    """The same text as user and assistant turns that alternate and begin with the user's.

    For chat templates that refuse a system turn, a tool's turn, or two turns of one role.
    """
    made: list[Turn] = []
    for turn in turns:
        role = "assistant" if turn.role == "assistant" else "user"
        last = made[-1] if made else None
        if last and last.role == role and last.scored == turn.scored:
            made[-1] = Turn(role, f"{last.text}\n{turn.text}".strip("\n"), turn.scored)
        else:
            made.append(Turn(role, turn.text, turn.scored))
    if made and made[0].role == "assistant":
        made.insert(0, Turn("user", ""))
    return made


def _turn(entry: Mapping[str, Any], defects: list[str]) -> Turn:
    role_key, text_key = _key(entry, _ROLE_KEYS), _key(entry, _TEXT_KEYS)
    said = str(entry[role_key]).strip().lower() if role_key else ""
    role = _ROLES.get(said)
    if role is None:
        defects.append("unknown_role")
        role = "user"
    calls = [(key, entry[key]) for key in _CALL_KEYS if entry.get(key)]
    content = entry[text_key] if text_key else None
    # A turn that only calls tools has null content by design.
    text = "" if content is None and calls else text_of(content, defects)
    reasoning = next((entry[k] for k in _REASONING_KEYS if isinstance(entry.get(k), str)), "")
    message: dict[str, Any] = {"role": role, "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if isinstance(entry.get("function_call"), Mapping) and not entry.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": entry["function_call"]}]
    for key in ("tool_calls", "name", "tool_call_id"):
        if entry.get(key):
            message[key] = entry[key]
    whole = reasoning + text + "".join(as_json(from_json_text(call, defects)) for _, call in calls)
    return Turn(role, whole, role == "assistant", message)


def _asked_and_answered(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    asked, answered = _key(entry, _ASKED_KEYS), _key(entry, _ANSWER_KEYS)
    return (asked, answered) if asked and answered else None


def _pair_of_turns(
    entry: Mapping[str, Any], keys: tuple[str, str], defects: list[str]
) -> list[Turn]:
    system = entry.get("system")
    head = [Turn("system", text_of(system, defects))] if system else []
    asked, answered = (text_of(entry[key], defects) for key in keys)
    return [*head, Turn("user", asked), Turn("assistant", answered, True)]


def _key(entry: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if key in entry), None)
