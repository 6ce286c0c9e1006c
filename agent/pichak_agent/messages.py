"""What travels between coordinator, agent and child: versioned, msgpack, strict.

Everything that arrives is checked field by field with limits on its size; nothing of it is
unpickled or evaluated. What `encode` accepts `decode` accepts too, so that nothing is refused only
after it was measured. An outcome's bytes are made once, by the runner, and never made again: the
spool, Ray and the store carry the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import msgpack

#: Rises when a field changes its meaning. Two sides of different schema refuse each other.
SCHEMA = 1
#: Real outcomes have 5 to 50 kB. Nested as badly as can be, a message takes some 80 times its bytes
#: of memory to be read: 0.3 GB of this many.
MAX_BYTES = 4 * 1024 * 1024
#: Characters of one text field.
MAX_TEXT = 64 * 1024
_MAX_ITEMS = 200_000
_MAX_DEPTH = 24
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")

#: What a job can be; `child_jobs.py` holds one function for each.
KINDS = ("fingerprint", "task", "ramp", "net_listen", "net_reach", "net_link", "collective")

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

    Two forms of `params` are the agent's: ``"visible_devices"`` (text or None) becomes or removes
    the child's CUDA_VISIBLE_DEVICES, and a value ``{"file": {"sha256", "name", "path"}}`` becomes
    the path of a file with that content on the node.
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
        check_name("job_id", self.job_id)
        _check_attempt(self.attempt)
        if not 0 < self.deadline_seconds <= 7 * 86400:
            raise MessageError(f"deadline_seconds: {self.deadline_seconds} is not within a week")
        if self.memory_cap_bytes < 0:
            raise MessageError(f"memory_cap_bytes: {self.memory_cap_bytes} is negative")
        if self.lock:
            check_name("lock", self.lock)


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
        check_name("job_id", self.job_id)
        _check_attempt(self.attempt)
        if self.status not in STATUSES:
            raise MessageError(f"status: {self.status!r} is none of {', '.join(STATUSES)}")

    @property
    def ok(self) -> bool:
        return self.status == "ok"


Message = TypeVar("Message", Job, Outcome)


def encode(message: Job | Outcome) -> bytes:
    """msgpack bytes; `MessageError` when it is too large or holds what `decode` would refuse.

    Lone surrogates in a text become "?".
    """
    record = {f.name: getattr(message, f.name) for f in fields(message)}
    record = {k: _plain(k, v, 1) if isinstance(v, Mapping) else v for k, v in record.items()}
    _check_fields(record, type(message))
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
    record = unpack_map(data)
    if record.pop("message", None) != kind.__name__:
        raise MessageError(f"not a {kind.__name__}")
    if record.get("schema") != SCHEMA:
        raise MessageError(
            f"schema {str(record.get('schema'))[:40]} where this side speaks {SCHEMA}: "
            "install the same pichak-fleet version on every machine"
        )
    _check_fields(record, kind)
    try:
        return kind(**record)
    except TypeError as error:
        raise MessageError(f"not a {kind.__name__}: {error}") from error


def pack_map(record: Mapping[str, Any]) -> bytes:
    """msgpack bytes of a plain object (text keys, JSON's types); `MessageError` otherwise."""
    try:
        packed: bytes = msgpack.packb(
            _plain("object", record, 0), use_bin_type=True, unicode_errors="replace"
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"cannot be sent: {error}") from error
    if len(packed) > MAX_BYTES:
        raise MessageError(f"{len(packed):,} bytes are more than the limit of {MAX_BYTES:,}")
    return packed


def unpack_map(data: bytes) -> dict[str, Any]:
    """The plain object in `data`; `MessageError` when it is not one or too large."""
    if len(data) > MAX_BYTES:
        raise MessageError(f"{len(data):,} bytes are more than the limit of {MAX_BYTES:,}")
    try:
        record = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_BYTES,
            max_bin_len=0,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise MessageError(f"not msgpack: {error or type(error).__name__}") from error
    if not isinstance(record, dict):
        raise MessageError(f"not an object but {type(record).__name__}")
    _check_plain(record)
    return record


def file_param(path: Path) -> dict[str, Any]:
    """The job parameter that stands for a local file; `OSError` when it cannot be read."""
    return {
        "file": {
            "sha256": file_sha256(path),
            "name": path.name,
            "path": str(path.resolve()),
        }
    }


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal; `OSError` when it cannot be read."""
    made = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            made.update(chunk)
    return made.hexdigest()


def clip_text(text: str, limit: int = MAX_TEXT, *, keep: str = "start") -> str:
    """`text` cut to `limit` characters so that it can be sent, its cut end marked."""
    if len(text) <= limit:
        return text
    mark = f"[… {len(text) - limit:,} characters cut …]"
    room = max(0, limit - len(mark))
    return text[:room] + mark if keep == "start" else mark + text[len(text) - room :]


def check_name(name: str, value: str) -> None:
    """`MessageError` unless `value` may be part of a file's name on any system."""
    known = _NAME_CHARACTERS.issuperset(value) and value.strip(".")
    if not known or len(value) > 128:
        raise MessageError(
            f"{name}: {value[:40]!r} is not a name of 1..128 ASCII letters, digits, '-', '_', '.'"
        )


_DECLARED: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


def _declared(kind: type[Job] | type[Outcome]) -> dict[str, tuple[str, tuple[type, ...], bool]]:
    """Field -> how it is declared, the types that it may have, and whether it maps to texts."""
    named = {f.name: str(f.type) for f in fields(kind)}
    return {
        name: (text, _DECLARED.get(text, (dict,)), text.endswith("str]"))
        for name, text in named.items()
    }


_FIELDS = {kind.__name__: _declared(kind) for kind in (Job, Outcome)}


def _check_fields(record: Mapping[str, Any], kind: type[Job] | type[Outcome]) -> None:
    known = _FIELDS[kind.__name__]
    for name, value in record.items():
        if name not in known:
            raise MessageError(f"unknown field {name[:40]!r}")
        declared, wanted, texts = known[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise MessageError(f"{name}: {type(value).__name__} where {declared} was expected")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise MessageError(f"{name}: {len(value):,} characters are more than {MAX_TEXT:,}")
        if isinstance(value, float) and not math.isfinite(value):
            raise MessageError(f"{name}: {value!r} is not a number")
        held = value.values() if texts and isinstance(value, dict) else ()
        if not all(isinstance(text, str) for text in held):
            raise MessageError(f"{name}: its values are not all text")


_SCALARS = frozenset((type(None), bool, int, float, str))


def _check_plain(record: dict[str, Any]) -> None:
    """`MessageError` unless what msgpack made holds JSON's own types only, with keys of text.

    Level by level and without a copy: an outcome holds thousands of values, and this is most of
    what reading one costs. msgpack's ExtType is a tuple, and so is refused. `unpack_map` lets no
    key pass but text and the empty bytes.
    """
    level: list[Any] = [record]
    for depth in range(_MAX_DEPTH + 1):
        below: list[Any] = []
        for holder in level:
            items = holder
            if type(holder) is dict:
                if b"" in holder:
                    raise MessageError("object: a key is bytes, not text")
                items = holder.values()
            for item in items:
                kind = type(item)
                if kind in _SCALARS:
                    continue
                if kind is not dict and kind is not list:
                    raise MessageError(f"object: {kind.__name__} cannot be sent; use plain values")
                if item or depth == _MAX_DEPTH:  # nothing lies below an empty one
                    below.append(item)
        if not below:
            return
        level = below
    raise MessageError(f"object: nested deeper than {_MAX_DEPTH}")


def _plain(name: str, value: Any, depth: int) -> Any:
    """`value` as JSON's own types, or `MessageError` naming `name`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _MAX_DEPTH:
        raise MessageError(f"{name}: nested deeper than {_MAX_DEPTH}")
    if isinstance(value, Mapping):
        made: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise MessageError(f"{name}: a key is {type(key).__name__}, not text")
            made[key] = _plain(name, item, depth + 1)
        return made
    if isinstance(value, (list, tuple)):
        if len(value) > _MAX_ITEMS:
            raise MessageError(f"{name}: a list of {len(value):,} is longer than {_MAX_ITEMS:,}")
        return [_plain(name, item, depth + 1) for item in value]
    raise MessageError(f"{name}: {type(value).__name__} cannot be sent; use plain values")


def _check_attempt(attempt: int) -> None:
    if not 1 <= attempt <= 1000:
        raise MessageError(f"attempt: {attempt} is not within 1..1000")
