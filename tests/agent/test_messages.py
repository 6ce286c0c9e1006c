from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pichak_agent.messages import (
    MAX_BYTES,
    MAX_TEXT,
    Job,
    MessageError,
    Outcome,
    clip_text,
    decode,
    encode,
    file_param,
    pack_map,
    unpack_map,
)

JOB = Job("j-1.a_b", 1, "ramp", {"device": "cpu", "list": [1, 2.5, None, True, "é"]}, 60.0)
OUTCOME = Outcome("j", 2, "ramp", "ok", {"a": {"b": [1]}}, versions={"python": "3.11"})

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
objects = st.dictionaries(st.text(max_size=8), plain, max_size=5)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(params=objects, deadline=st.floats(0.001, 7 * 86400), attempt=st.integers(1, 1000))
def test_a_job_comes_back_as_it_was(params: Any, deadline: float, attempt: int) -> None:
    job = Job("id", attempt, "task", params, deadline)
    assert decode(encode(job), Job) == job


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(result=objects, error=st.text(max_size=50), seconds=st.floats(0, 1e9))
def test_an_outcome_comes_back_as_it_was(result: Any, error: str, seconds: float) -> None:
    outcome = Outcome("id", 3, "ramp", "error", result, error=error, seconds=seconds)
    assert decode(encode(outcome), Outcome) == outcome


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_no_bytes_crash_decode(data: bytes) -> None:
    for kind in (Job, Outcome):
        with pytest.raises(MessageError):
            decode(data, kind)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_damage_crashes_decode(data: st.DataObject) -> None:
    """Real messages with bytes changed, cut out or put in: a whole message, or refused."""
    whole = encode(data.draw(st.sampled_from([JOB, OUTCOME])))
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(0, 4))
    damaged = whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + cut :]
    for kind in (Job, Outcome):
        try:
            message = decode(damaged, kind)
        except MessageError:
            continue
        assert decode(encode(message), kind) == message


any_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_field_of_a_wrong_type_gets_through(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([JOB, OUTCOME]))
    record = msgpack.unpackb(encode(message))
    name = data.draw(st.sampled_from([f.name for f in fields(message)]))
    value = data.draw(any_value)
    record[name] = value
    try:
        made = decode(msgpack.packb(record), type(message))
    except MessageError:
        return
    got = getattr(made, name)
    assert type(got) is type(value)
    assert decode(encode(made), type(message)) == made


def record(**changes: Any) -> bytes:
    made = msgpack.unpackb(encode(OUTCOME))
    made.update(changes)
    return bytes(msgpack.packb({k: v for k, v in made.items() if v is not ...}))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (record(message="Job"), "not a Outcome"),
        (record(schema=2), "install the same pichak-fleet version"),
        (record(schema=True), "schema"),
        (record(extra=1), "unknown field 'extra'"),
        (record(kind=...), "kind"),
        (record(attempt=True), "attempt: bool where int"),
        (record(attempt=0), "attempt"),
        (record(seconds=math.nan), "seconds: nan"),
        (record(status="fine"), "status"),
        (record(job_id="../x"), "job_id"),
        (record(job_id="é"), "job_id"),
        (record(job_id=""), "job_id"),
        (record(result=[1]), "result: list"),
        (record(result={"a": b"bytes"}), "not msgpack"),
        (record(result={"a": msgpack.ExtType(5, b"")}), "ExtType cannot be sent"),
        (record(versions={"a": 1}), "versions"),
        (record(error="x" * (MAX_TEXT + 1)), "error"),
        (record() + b"\0", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"[1]", "not msgpack"),
        (msgpack.packb([1]), "not an object but list"),
        (b"\x00" * (MAX_BYTES + 1), "more than the limit"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, said: str) -> None:
    with pytest.raises(MessageError, match=said):
        decode(data, Outcome)


def test_depth_is_limited_both_ways() -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {"a": nested(levels - 1)} if levels else {}

    for levels in range(15, 30):
        try:
            data = encode(replace(OUTCOME, result=nested(levels)))
        except MessageError:
            assert levels > 20
        else:
            assert decode(data, Outcome).result == nested(levels)
    with pytest.raises(MessageError, match="nested deeper"):
        encode(replace(OUTCOME, result=nested(40)))
    with pytest.raises(MessageError, match="nested deeper"):
        decode(record(result=nested(40)), Outcome)
    ring: dict[str, Any] = {}
    ring["self"] = ring
    with pytest.raises(MessageError, match="nested deeper"):
        encode(replace(OUTCOME, result=ring))


@pytest.mark.parametrize(
    "strange",
    [object(), {1}, b"bytes", {"a": {1: 2}}, 2**70, float, Path("/")],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_travel_is_refused_where_it_is_made(strange: Any) -> None:
    with pytest.raises(MessageError):
        encode(replace(OUTCOME, result={"value": strange}))
    with pytest.raises(MessageError):
        pack_map({"value": strange})


def test_lone_surrogates_are_replaced() -> None:  # field case 64
    assert decode(encode(replace(OUTCOME, error="\ud83d cut")), Outcome).error == "? cut"


def test_an_outcome_over_the_limit_is_refused() -> None:
    with pytest.raises(MessageError, match="more than the limit"):
        encode(replace(OUTCOME, result={str(i): "x" * 60_000 for i in range(300)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"deadline_seconds": 0.0},
        {"deadline_seconds": math.inf},
        {"deadline_seconds": math.nan},
        {"memory_cap_bytes": -1},
        {"lock": "../../etc/cron"},
        {"lock": "a/b"},
        {"lock": ".."},
        {"job_id": "."},
        {"job_id": "x" * 129},
        {"attempt": 1001},
    ],
)
def test_a_job_that_makes_no_sense_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        replace(JOB, **changes)


def test_clip_text_keeps_the_asked_end_and_says_what_it_cut() -> None:
    assert clip_text("short", 10) == "short"
    start = clip_text("a" * 500 + "z" * 500, 100)
    assert len(start) == 100
    assert start.startswith("aaaa")
    assert "900 characters cut" in start
    end = clip_text("a" * 500 + "z" * 500, 100, keep="end")
    assert len(end) == 100
    assert end.endswith("zzzz")


def test_file_param_names_content_and_place(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"abc")
    # The SHA-256 of "abc", FIPS 180-2 appendix B.1.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_param(path) == {"file": {"sha256": digest, "name": "train.py", "path": str(path)}}


def test_unpack_map_takes_what_pack_map_made() -> None:
    assert unpack_map(pack_map({"a": (1, 2)})) == {"a": [1, 2]}
