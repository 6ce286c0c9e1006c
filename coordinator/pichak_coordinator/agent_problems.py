"""What a node's agent tells of itself when it is greeted, and again at a run's end: outcomes kept
elsewhere, files put aside as damaged, outcomes dropped. Pure.

It comes from the node, so only its form is believed: short plain text, a bounded number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.text import printable

_MOST, _MOST_TEXT = 50, 500
#: Of the notes of a whole fleet.
_MOST_NOTES = 20


def plain_problems(told: Any) -> tuple[str, ...]:
    """The sentences of a list that an agent sent, each once; what is no text is left out."""
    listed = told if isinstance(told, (list, tuple)) else ()
    some = (" ".join(printable(each[:_MOST_TEXT]).split()) for each in listed if _is_text(each))
    return tuple(dict.fromkeys(filter(None, some)))[:_MOST]


def with_problems(hello: Mapping[str, Any], more: Any) -> dict[str, Any]:
    """The hello with what its agent told later besides."""
    told = [*plain_problems(hello.get("problems")), *plain_problems(more)]
    return {**hello, "problems": list(plain_problems(told))}


def problem_notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each problem of each node, whatever number of devices it has."""
    nodes: dict[str, NodeRecord] = {row.node.node: row.node for row in rows}
    notes = [
        f"the agent on {replace(node, device='cpu').label} tells: {problem}"
        for node in nodes.values()
        for problem in node.problems
    ]
    left = len(notes) - _MOST_NOTES
    return notes if left <= 0 else [*notes[:_MOST_NOTES], f"agents tell {left} more; --json does"]


def _is_text(each: Any) -> bool:
    return isinstance(each, str) and bool(each.strip())
