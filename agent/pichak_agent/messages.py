"""What travels between coordinator, agent and child: versioned, msgpack, strict.

Everything that arrives is checked field by field with limits on its size; nothing of it is
unpickled or evaluated. The bytes that a child writes are the bytes that the store keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgpack

#: Rises when a field changes its meaning. Two sides of different schema refuse each other.
SCHEMA = 1
MAX_BYTES = 16 * 1024 * 1024
_MAX_TEXT = 64 * 1024
_MAX_ITEMS = 200_000
_MAX_DEPTH = 24

#: What a job can be; `child.py` holds one function for each.
KINDS = ("fingerprint", "task", "ramp")

STATUSES = ("ok", "error", "timeout", "killed", "cancelled", "busy", "refused")


class MessageError(ValueError):
    """Bytes that are not the message they should be; says which field and why."""


@dataclass(frozen=True)
class Job:
    """One piece of work for one node.

    `job_id` names the work and `attempt` the try (1, 2, …): together they name one outcome.
    `params` is what its kind takes. `deadline_seconds` counts from the start of the child;
    `memory_cap_bytes` of 0 means no cap. `lock` is what it measures ("cpu", a GPU's UUID): two jobs
    with the same lock never run at once on a machine; "" takes none.
    """

    job_id: str
    attempt: int
    kind: str
    params: Mapping[str, Any]
    deadline_seconds: float
    memory_cap_bytes: int = 0
    lock: str = "cpu"
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_name("job_id", self.job_id)
        if not 1 <= self.attempt <= 1000:
            raise MessageError(f"attempt: {self.attempt} is not within 1..1000")
        if not 0 < self.deadline_seconds <= 7 * 86400:
            raise MessageError(f"deadline_seconds: {self.deadline_seconds} is not within a week")


@dataclass(frozen=True)
class Outcome:
    """How one attempt at a job ended; there is exactly one for each.

    `status` is one of `STATUSES`; `error` is one sentence when it is not "ok" and `traceback` the
    long form. `result` is what the kind returns, possibly partial when the status is not "ok".
    `log_tail` is the end of what the child printed. `started_unix` is the node's own clock.
    """

    job_id: str
    attempt: int
    kind: str
    status: str
    result: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    traceback: str = ""
    log_tail: str = ""
    node: str = ""
    started_unix: float = 0.0
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_name("job_id", self.job_id)
        if self.status not in STATUSES:
            raise MessageError(f"status: {self.status!r} is none of {', '.join(STATUSES)}")

    @property
    def ok(self) -> bool:
        return self.status == "ok"


Message = TypeVar("Message", Job, Outcome)


def encode(message: Job | Outcome) -> bytes:
    """msgpack bytes; `MessageError` when it is larger than `MAX_BYTES` or holds a strange type."""
    record = {f.name: getattr(message, f.name) for f in fields(message)}
    record = {k: dict(v) if isinstance(v, Mapping) else v for k, v in record.items()}
    record["message"] = type(message).__name__
    try:
        packed: bytes = msgpack.packb(record, use_bin_type=True, unicode_errors="replace")
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"cannot be sent: {error}") from error
    if len(packed) > MAX_BYTES:
        raise MessageError(f"{len(packed):,} bytes are more than the limit of {MAX_BYTES:,}")
    return packed


def decode(data: bytes, kind: type[Message]) -> Message:
    """The message in `data`, checked; `MessageError` says which field is wrong."""
    if len(data) > MAX_BYTES:
        raise MessageError(f"{len(data):,} bytes are more than the limit of {MAX_BYTES:,}")
    try:
        record = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_BYTES,
            max_bin_len=MAX_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise MessageError(f"not msgpack: {error or type(error).__name__}") from error
    if not isinstance(record, dict) or record.pop("message", None) != kind.__name__:
        raise MessageError(f"not a {kind.__name__}")
    if record.get("schema") != SCHEMA:
        raise MessageError(
            f"schema {record.get('schema')!r} where this side speaks {SCHEMA}: "
            "install the same pichak-fleet version on every machine"
        )
    known = {f.name: f for f in fields(kind)}
    unknown = [name for name in record if name not in known]
    if unknown:
        raise MessageError(f"unknown field {unknown[0]!r}")
    for name, value in record.items():
        _check_type(name, value, str(known[name].type))
    try:
        return kind(**record)
    except TypeError as error:
        raise MessageError(f"not a {kind.__name__}: {error}") from error


def _check_type(name: str, value: Any, declared: str) -> None:
    wanted: tuple[type, ...] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
    }.get(declared, (dict,))
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise MessageError(f"{name}: {type(value).__name__} where {declared} was expected")
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        raise MessageError(f"{name}: {len(value):,} characters are more than {_MAX_TEXT:,}")
    if isinstance(value, dict):
        _check_depth(name, value, 0)
        if declared == "Mapping[str, str]" and not all(isinstance(v, str) for v in value.values()):
            raise MessageError(f"{name}: its values are not all text")


def _check_depth(name: str, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise MessageError(f"{name}: nested deeper than {_MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise MessageError(f"{name}: a key is {type(key).__name__}, not text")
            _check_depth(name, item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_depth(name, item, depth + 1)


def _check_name(name: str, value: str) -> None:
    if not 1 <= len(value) <= 128 or not all(c.isalnum() or c in "-_." for c in value):
        raise MessageError(f"{name}: {value[:40]!r} is not 1..128 letters, digits, '-', '_' or '.'")
