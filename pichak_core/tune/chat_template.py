"""A tokenizer's chat template over the turns of a row, with the scored stretches found in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pichak_core.tune.row_chat import folded
from pichak_core.tune.row_text import Row, Segment, Turn


class _Refused(Exception):  # noqa: N818
    """The template raised, or what it made does not hold the answers."""


class ChatTemplate:
    """Renders conversations as text; `apply` is the tokenizer's own ``apply_chat_template``."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self._apply = apply

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """The tokenizer's template, None when it has none."""
        apply = getattr(tokenizer, "apply_chat_template", None)
        if not callable(apply) or not getattr(tokenizer, "chat_template", True):
            return None
        return cls(apply)

    def segments(self, row: Row, defects: list[str]) -> Sequence[Segment]:
        """The row as rendered text, its assistant turns scored.

        Where the template refuses the row as it is (a system turn, two turns of one role, a tool's
        turn), it is tried with these folded into the user's, and then the turns are joined plainly:
        the length stays an estimate, and `defects` says which it was.
        """
        try:
            return self._render(row.turns, row.tools)
        except _Refused:
            pass
        try:
            rendered = self._render(folded(row.turns), ())
        except _Refused:
            defects.append("template_refused")
            return row.segments
        defects.append("template_folded")
        return rendered

    def _render(self, turns: Sequence[Turn], tools: Sequence[Any]) -> list[Segment]:
        whole = self._text(turns, tools)
        segments: list[Segment] = []
        at = 0
        for number, turn in enumerate(turns):
            if not turn.scored:
                continue
            start, end = self._span(turns, number, tools, whole, at)
            segments += [Segment(whole[at:start]), Segment(whole[start:end], True)]
            at = end
        return [*segments, Segment(whole[at:])]

    def _span(
        self, turns: Sequence[Turn], number: int, tools: Sequence[Any], whole: str, at: int
    ) -> tuple[int, int]:
        """Where turn `number` stands in `whole`: what the template adds once the prompt is there.

        The turn's own end mark is in it, as in training. A template that rewrites earlier turns
        (drops their reasoning) is searched for the turn's text instead.
        """
        last = number == len(turns) - 1
        try:
            before = self._text(turns[:number], tools, prompt=True) if number else ""
            through = whole if last else self._text(turns[: number + 1], tools)
        except _Refused:
            before = through = ""
        start, end = len(before), len(through)
        if at <= start < end and whole.startswith(before) and whole.startswith(through) and start:
            return start, end
        content = str(turn_content(turns[number])).strip()
        start = whole.find(content, at)
        if start < 0:
            raise _Refused
        return start, start + len(content)

    def _text(self, turns: Sequence[Turn], tools: Sequence[Any], prompt: bool = False) -> str:
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        if prompt:
            options["add_generation_prompt"] = True
        messages = [turn.as_message() for turn in turns]
        try:
            made = self._apply(messages, tokenize=False, **options)
        except Exception as error:  # a template is its author's program and may raise anything
            raise _Refused from error
        if not isinstance(made, str):
            raise _Refused
        return made


def turn_content(turn: Turn) -> Any:
    """What a template prints of a turn: its content, or its whole text where it has none."""
    return (turn.message or {}).get("content") or turn.text
