"""Every layout of a row against the text and the scored parts that a person reads in it."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pichak_core.tune.row_chat import folded
from pichak_core.tune.row_formats import normalise
from pichak_core.tune.row_text import DEFECTS, Turn

#: Marks the scored parts in the expected text.
S = "*"


def marked(row: object) -> str:
    """The row's text with each scored part between stars."""
    return "".join(
        f"{S}{segment.text}{S}" if segment.scored else segment.text
        for segment in normalise(row).segments
        if segment.text
    )


@pytest.mark.parametrize(
    ("row", "name", "text"),
    [
        ({"prompt": "p", "completion": "c"}, "prompt_completion", "p*c*"),
        ({"question": "p", "answer": "c"}, "prompt_completion", "p*c*"),
        ({"Question": "p", "Answer": "c"}, "prompt_completion", "p*c*"),
        ({"query": "p", "response": "c"}, "prompt_completion", "p*c*"),
        ({"problem": "p", "solution": "c"}, "prompt_completion", "p*c*"),
        ({"input": "p", "output": "c"}, "prompt_completion", "p*c*"),
        ({"source": "p", "target": "c"}, "prompt_completion", "p*c*"),
        ({"article": "p", "highlights": "c"}, "prompt_completion", "p*c*"),
        ({"text": "p", "answer": "c"}, "prompt_completion", "p*c*"),
        ({"text": "p", "source": "web", "answer": "c"}, "prompt_completion", "p*c*"),
        ({"question": "p", "label": True}, "prompt_completion", "p*True*"),
        ({"question": "p", "answer": 42}, "prompt_completion", "p*42*"),
        ({"question": "p", "context": "x", "answer": "c"}, "prompt_completion", "p\nx*c*"),
        (
            {"question": "p", "answers": {"text": ["c", "d"], "answer_start": [1, 2]}},
            "prompt_completion",
            "p*c*",
        ),
        ({"question": "p", "answers": ["c", "d"]}, "prompt_completion", "p*c*"),
        ({"system": "s", "prompt": "p", "response": "c"}, "prompt_completion", "s\np*c*"),
        ({"instruction": "i", "input": "x", "output": "c"}, "instruction", "i\nx*c*"),
        ({"instruction": "i", "input": "", "output": "c"}, "instruction", "i*c*"),
        ({"instruction": "i", "context": "x", "response": "c"}, "instruction", "i\nx*c*"),
        ({"instruction": "i", "output": "c", "text": "all of it"}, "instruction", "i*c*"),
        (
            {"instruction": "i", "input": "", "output": "c", "history": [["q", "a"]]},
            "instruction",
            "q*a*i*c*",
        ),
        ({"text": "t"}, "plain_text", "t"),
        ({"text": "t", "label": 3, "source": "web"}, "plain_text", "t"),
        ({"content": "t", "id": 7}, "plain_text", "t"),
        ({"code": "t"}, "plain_text", "t"),
        ("t", "plain_text", "t"),
        ({"prompt": "p"}, "prompt_only", "p"),
        ({"completion": "c"}, "prompt_completion", "*c*"),
        (
            {"prompt": [{"role": "user", "content": "p"}], "completion": "c"},
            "prompt_completion",
            "p*c*",
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": "p"},
                    {"role": "assistant", "content": "q"},
                    {"role": "user", "content": "r"},
                ],
                "completion": [{"role": "assistant", "content": "c"}],
            },
            "prompt_completion",
            "pqr*c*",
        ),
    ],
)
def test_flat_layouts(row, name, text):
    assert marked(row) == text
    assert normalise(row).format == name


def say(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def from_(who: str, value: object) -> dict:
    return {"from": who, "value": value}


@pytest.mark.parametrize(
    ("row", "name", "text", "defects"),
    [
        ({"messages": [say("user", "a"), say("assistant", "b")]}, "messages", "a*b*", ()),
        (
            {"messages": [say(*t) for t in [("user", "a"), ("assistant", "b")] * 3]},
            "messages",
            "a*b*a*b*a*b*",
            (),
        ),
        ([say("user", "a"), say("assistant", "b")], "messages", "a*b*", ()),
        (
            {"messages": json.dumps([say("user", "a"), say("assistant", "b")])},
            "messages",
            "a*b*",
            (),
        ),
        (  # field case 68
            {
                "messages": [
                    say("user", [{"type": "text", "text": "hi"}, {"type": "image"}]),
                    say("assistant", "ok"),
                ]
            },
            "messages",
            "hi*ok*",
            ("non_text_part",),
        ),
        (  # field case 69
            {
                "system": "s",
                "conversations": [
                    from_("human", "a"),
                    from_("assistant", "b"),
                    None,
                    from_("human", "c"),
                    from_("gpt", "d"),
                ],
            },
            "conversations",
            "sa*b*c*d*",
            ("bad_entry",),
        ),
        (  # field case 69: every role that was seen
            {
                "conversations": [
                    from_("system", "s"),
                    from_("user", "u"),
                    from_("chatgpt", "c"),
                    from_("function_call", "f"),
                    from_("observation", "o"),
                    from_("GPT ", "g"),
                    from_("narrator", "n"),
                ]
            },
            "conversations",
            "su*c**f*o*g*n",
            ("unknown_role",),
        ),
        (  # field case 71
            {
                "messages": [
                    say(
                        "assistant",
                        None,
                        tool_calls=[{"function": {"name": "f", "arguments": "{}"}}],
                    ),
                    say("tool", "1"),
                ]
            },
            "messages",
            '*[{"function":{"name":"f","arguments":"{}"}}]*1',
            (),
        ),
        (
            {"messages": [say("user", None), say("assistant", "b")]},
            "messages",
            "*b*",
            ("null_field",),
        ),
        (
            {"messages": [say("user", "a"), say("assistant", "b")], "tools": [{"name": "f"}]},
            "messages",
            '[{"name":"f"}]a*b*',
            (),
        ),
        ({"messages": [say("user", "a")]}, "messages", "a", ("no_completion",)),
        (  # field case 64, in JSON inside JSON
            {"messages": '[{"role": "assistant", "content": "\\ud83d"}]'},
            "messages",
            "*\ufffd*",
            ("lone_surrogate",),
        ),
        ({"messages": [say("user", "a")], "completion": "b"}, "messages", "a*b*", ()),
        ({"conversation": [{"human": "a", "assistant": "b"}]}, "messages", "a*b*", ()),
        ({"dialog": ["a", "b", "c"]}, "messages", "a*b*c", ()),
    ],
)
def test_conversations(row, name, text, defects):
    made = normalise(row)
    assert (marked(row), made.format, made.defects) == (text, name, defects)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p ", "chosen": "good", "rejected": "bad one"},
        {"chosen": "p good", "rejected": "p bad one"},
        {
            "prompt": "p ",
            "chosen": [say("user", "p "), say("assistant", "good")],
            "rejected": [say("user", "p "), say("assistant", "bad one")],
        },
        {
            "prompt": [say("user", "p ")],
            "chosen": [say("assistant", "good")],
            "rejected": [say("assistant", "bad one")],
        },
        {
            "prompt": "p ",
            "chosen": [say("assistant", "good")],
            "rejected": [say("assistant", "bad one")],
        },
    ],
)
def test_preference_pairs_score_the_chosen_answer_and_keep_the_other_for_its_length(row):
    made = normalise(row)
    assert made.format == "preference"
    assert marked(row) == "p *good*"
    assert "".join(s.text for s in made.alternative.segments) == "p bad one"


@pytest.mark.parametrize(
    ("row", "defects"),
    [
        ({"prompt": None, "completion": "c"}, ("null_field",)),
        ({"prompt": "p", "completion": None}, ("null_field", "no_completion")),
        ({"prompt": "p", "completion": {"a": 1}}, ("odd_field",)),
        ({"prompt": "p", "completion": ["c", {"a": 1}]}, ("non_text_part",)),
        ({"prompt": "p"}, ("no_completion",)),
        ({"sentence": "t", "id": 3}, ("guessed_field",)),
        ({"a": "t", "b": "u"}, ("unknown_format",)),
        ({}, ("unknown_format",)),
        ({"text": ""}, ("empty_row",)),
        ({"prompt": "", "completion": ""}, ("no_completion", "empty_row")),
        ({"messages": []}, ("no_completion", "empty_row")),
        (None, ("not_an_object", "unknown_format")),
        (3, ("not_an_object", "unknown_format")),
        ([1, 2], ("not_an_object", "unknown_format")),
        ({"text": datetime(2026, 1, 2)}, ("odd_field",)),
    ],
)
def test_odd_rows_are_named(row, defects):
    assert normalise(row).defects == defects
    assert set(defects) <= set(DEFECTS)


def test_a_field_of_parts_is_never_printed_as_a_python_list():
    assert marked({"prompt": ["a", "b"], "completion": {"k": [1]}}) == 'ab*{"k":[1]}*'


@pytest.mark.parametrize("json_text", ['[{"name": "x"}]', '[{"role": "user", "content": "x"}]'])
def test_an_answer_that_is_json_text_stays_text(json_text):
    assert marked({"prompt": "p", "completion": json_text}) == f"p*{json_text}*"
    row = {"prompt": "p", "chosen": json_text, "rejected": "r"}
    assert marked(row) == f"p*{json_text}*"


def test_folding_keeps_text_and_scores_and_alternates():
    turns = [
        Turn("system", "s"),
        Turn("user", "a"),
        Turn("user", "b"),
        Turn("assistant", "c", True),
        Turn("tool", "t"),
        Turn("assistant", "d", True),
    ]
    made = folded(turns)
    assert [(t.role, t.text, t.scored) for t in made] == [
        ("user", "s\na\nb", False),
        ("assistant", "c", True),
        ("user", "t", False),
        ("assistant", "d", True),
    ]
    assert folded([Turn("assistant", "c", True)])[0].role == "user"


NAMES = ["prompt", "completion", "messages", "conversations", "chosen", "rejected", "text", "role"]
NAMES += ["content", "from", "value", "tool_calls", "system", "tools", "history", "type", "user"]
WORDS = st.sampled_from([*NAMES, "\ud800", "[{", ""])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=15,
)


@given(ANYTHING)
@settings(max_examples=300)
def test_no_row_raises_and_none_is_dropped_unnamed(value):
    row = normalise(value)
    assert row.segments or row.defects
    assert set(row.defects) <= set(DEFECTS)
    assert all(isinstance(segment.text, str) for segment in row.segments)


def test_nesting_without_end_is_named():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert normalise({"prompt": "p", "completion": deep}).defects == ("too_deep",)


@pytest.mark.parametrize("nothing", [float("nan"), float("inf"), None])
def test_nan_is_an_empty_field_and_counted(nothing: float | None) -> None:
    row = normalise({"prompt": nothing, "completion": "yes"})
    assert row.defects == ("null_field",)
    assert [segment.text for segment in row.segments] == ["", "yes"]
