"""SPEC 2: a number and its source."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_core import CONSTANT, Plan, Value
from pichak_core.plan import format_number


@pytest.mark.parametrize("source", ["", "   ", "\n"])
def test_a_value_without_its_source_cannot_exist(source: str) -> None:
    with pytest.raises(ValueError, match="needs its source"):
        Value(4, source)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_a_measurement(value: float) -> None:
    with pytest.raises(ValueError, match="not a measurement"):
        Value(value, "a division by zero")


def test_a_value_behaves_like_the_number() -> None:
    value = Value(4, "a ramp")
    assert int(value) == 4
    assert float(value) == 4.0
    assert value == 4
    assert value == Value(4, "another sentence")
    assert value != 5
    assert hash(value) == hash(4)
    assert {value: "x"}[4] == "x"
    assert bool(Value(0, "counted")) is False
    assert list(range(10))[value] == 4
    with pytest.raises(TypeError):
        list(range(10))[Value(1.5, "timed")]


def test_a_value_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Value(4, "a ramp").value = 5  # type: ignore[misc]


def test_a_constant_is_not_measured_and_cannot_pass_for_it() -> None:
    assert not Value(0.12, CONSTANT).measured
    assert not Value(0.12, f"{CONSTANT}: taken off the bytes").measured
    assert Value(0.12, "timed").measured


def plan() -> Plan:
    made = Plan(model="builtin:gpt-1m", data="train.jsonl", device="cpu")
    made.set("micro_batch", 4, "a ramp: 8 was refused", 2.5)
    made.set("headroom", 0.12, CONSTANT)
    made.set(
        "noise_scale_tokens",
        Value(4400.0, "16 micro-batches", 3.0, "tokens", low=2000.0, high=math.inf),
    )
    return made.note("the noise scale is coarse")


def test_reading_a_plan() -> None:
    made = plan()
    assert made.micro_batch == 4
    assert made.why("micro_batch") == "a ramp: 8 was refused"
    assert "micro_batch" in made
    assert "learning_rate" not in made
    assert made.constants() == {"headroom": 0.12}
    assert made.as_dict() == {"micro_batch": 4, "headroom": 0.12, "noise_scale_tokens": 4400.0}
    assert made.seconds == 5.5
    with pytest.raises(AttributeError, match="learning_rate"):
        made.learning_rate  # noqa: B018
    with pytest.raises(KeyError, match="learning_rate"):
        made.why("learning_rate")


def test_replacing_a_number_replaces_its_cost() -> None:
    made = plan().set("micro_batch", 6, "a longer ramp", 4.0)
    assert made.seconds == 7.0
    assert made.micro_batch == 6


def test_a_note_is_kept_once() -> None:
    made = Plan().note("twice").note("twice")
    assert made.notes == ["twice"]


def test_json_round_trip_is_lossless_and_strict() -> None:
    made = plan()
    text = made.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    again = Plan.from_json(text)
    assert again == made
    assert again["noise_scale_tokens"].high == math.inf
    assert again.why("micro_batch") == made.why("micro_batch")
    assert type(again.micro_batch) is int


scalars = st.one_of(
    st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)


@given(
    values=st.dictionaries(
        st.text(min_size=1), st.tuples(scalars, st.text(min_size=1).filter(lambda s: s.strip()))
    ),
    notes=st.lists(st.text()),
)
def test_any_plan_survives_json(values: dict[str, tuple[object, str]], notes: list[str]) -> None:
    made = Plan(notes=notes)
    for name, (value, source) in values.items():
        made.set(name, Value(value, source))  # type: ignore[arg-type]
    again = Plan.from_json(made.to_json())
    assert again == made
    assert {k: v.source for k, v in again.values.items()} == {
        k: v.source for k, v in made.values.items()
    }


@pytest.mark.parametrize("text", ["[]", "{}", '{"values": {"a": {"value": 1}}}', '{"values": 3}'])
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        Plan.from_json(text)


def test_the_report_lists_constants_apart_and_fits_its_width() -> None:
    text = plan().report(width=60)
    measured, _, rest = text.partition("NOT MEASURED (1):")
    assert "headroom = 0.12" in rest
    assert "headroom" not in measured
    assert "a ramp: 8 was refused" in measured
    assert "2,000 or more" in measured
    assert "note: the noise scale is coarse" in rest
    assert "5.5 s" in rest
    assert max(len(line) for line in text.splitlines()) <= 60


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (0.00012345, "0.000123"),
        (12.3456, "12.35"),
        (98765.4, "98,765"),
        (999999999999999.0, "999,999,999,999,999"),
        (1e15, "1e+15"),
        (-1.23456e300, "-1.235e+300"),
        (True, "True"),
        ("completion_only", "completion_only"),
        (0.0, "0"),
    ],
)
def test_numbers_as_a_person_reads_them(value: object, text: str) -> None:
    assert format_number(value) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1, "rows", "1 row"),
        (2, "rows", "2 rows"),
        (1, "micro-batches", "1 micro-batch"),
        (1, "s", "1 s"),
        (1, "tokens/s", "1 tokens/s"),
        (1, "", "1"),
    ],
)
def test_one_of_something_is_singular(value: int, unit: str, text: str) -> None:
    assert str(Value(value, "counted", unit=unit)) == text


def test_a_source_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="needs its source"):
        Value(3, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf])
def test_a_cost_below_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Value(3, "a ramp", seconds)


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_an_interval_begins_below_its_end(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="begins above its end"):
        Value(3, "a ramp", low=low, high=high)
    assert Value(3, "a ramp", low=3.0, high=3.0).low == 3.0


def test_a_value_is_ordered_as_its_number() -> None:
    three, four = Value(3, "a ramp"), Value(4.0, "a clock")
    assert three < four and three < 3.5 and Value(2, "a ramp") < three and three <= 3
    assert four > three and four > 3 and Value(5, "a ramp") > four and four >= 4 and four >= three
    assert not three < 3 and not four <= three and not three > 3 and not three >= four
    assert sorted([four, three]) == [3, 4]
    assert max(four, 10, three) == 10
    assert Value("auto", "read") < "b"


def test_a_number_and_a_word_have_no_order() -> None:
    for other in ("4", None, [4], Value("auto", "read")):
        with pytest.raises(TypeError):
            Value(3, "a ramp") < other  # type: ignore[operator]  # noqa: B015
        assert Value(3, "a ramp").__lt__(other) is NotImplemented


def test_a_value_formats_as_its_number() -> None:
    value = Value(1234.5678, "a clock", unit="s")
    assert (f"{value:.2f}", f"{value:,.0f}") == ("1234.57", "1,235")
    assert f"{value}" == str(value) == "1,235 s"
    assert f"{Value(7, 'a ramp'):03d}" == "007"
    assert f"{Value('auto', 'read'):>6}" == "  auto"


def test_a_value_has_no_arithmetic() -> None:
    """A number computed from it has another source."""
    with pytest.raises(TypeError):
        Value(3, "a ramp") + 1  # type: ignore[operator]
