"""Messages that are not what they should be: made from sound ones, by a seeded generator."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from pichak_agent.messages import MAX_BYTES, MAX_TEXT, Outcome, encode
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan, Value

#: One in so many is as large as the limit, or larger: each is 16 MiB.
RARE = 4000

STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**64 - 1, -(2**63), float("nan"), float("inf"), 1e308, "", "\x00",
    "\x1b[2J", "\u202e", "=cmd|'/c calc'!A1", "../../etc/passwd", "x" * 300, b"", b"bytes", [], {},
    [[]], {"": None}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), [1, "a", None], {"value": 1},
)  # fmt: skip


def sound(number: int) -> bytes:
    """A whole outcome, with a part of each kind."""
    fingerprint = Fingerprint()
    for reading in (
        Measurement("gpu.h2d_pinned_mb_s", 12800.0, "MB/s", "median of 9 copies", samples=9,
                    spread=40.0, seconds=1.5, conditions={"gpu.clock_sm_mhz": 1755},
                    detail={"samples": [12790.0, 12800.0, 12810.0]}),
        Measurement("gpu.name", "NVIDIA L4", "", "the driver"),
        Unmeasured("disk.read_mb_s", Reason.NO_PERMISSION, "the folder cannot be written"),
    ):  # fmt: skip
        fingerprint.add(reading)
    plan = Plan("builtin:gpt-1m").set("micro_batch", Value(24, "real steps", 3.0, "rows"))
    finding = {"code": "gpu_ecc", "severity": "warn", "sentence": "it counts errors",
               "evidence": {"count": 3}}  # fmt: skip
    result = {
        "fingerprint": fingerprint.to_dict(), "plan": plan.to_dict(), "findings": [finding],
        "ramp": {"micro_batch": 24, "tried": [{"batch": 1, "verdict": "ok"}]}, "device": "cuda:0",
    }  # fmt: skip
    return encode(
        Outcome(f"job-{number}", 1 + number % 3, "ramp", "ok", result, node="n-1",
                started_unix=1.79e9, seconds=2.5, versions={"pichak": "0.1.0"})
    )  # fmt: skip


def mutated(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(what was done, the bytes) of `count` messages."""
    draw = random.Random(seed)
    for number in range(count):
        data = sound(draw.randrange(count))
        if number % RARE == RARE - 1:
            how: Callable[[random.Random, bytes], bytes] = draw.choice(_RARE)
        else:
            how = draw.choice(_ALL)
        yield how.__name__.strip("_"), how(draw, data)


def _replayed(draw: random.Random, _data: bytes) -> bytes:
    return sound(draw.randrange(50))


def _random(draw: random.Random, _data: bytes) -> bytes:
    return draw.randbytes(draw.randrange(200))


def _truncated(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def _lengthened(draw: random.Random, data: bytes) -> bytes:
    return data + draw.randbytes(1 + draw.randrange(20))


def _bits_flipped(draw: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(1 + draw.randrange(8)):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def _spliced(draw: random.Random, data: bytes) -> bytes:
    at, length = draw.randrange(len(data)), draw.randrange(1, 40)
    other = draw.randrange(len(data))
    return data[:at] + data[other : other + length] + data[at + length :]


def _length_lies(draw: random.Random, data: bytes) -> bytes:
    """A header that announces up to four billion elements or bytes."""
    head = draw.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
    at = draw.randrange(len(data))
    return data[:at] + head + b"\xff\xff\xff" + bytes([draw.randrange(256)]) + data[at:]


def _nested(draw: random.Random, _data: bytes) -> bytes:
    levels = draw.choice((20, 24, 25, 26, 100, 600, 2000, 100_000))
    value = draw.choice((b"\x91", b"\x81\xa1a")) * levels + b"\xc0"
    return b"\x81\xa6result" + value if draw.random() < 0.5 else value


def _other_version(draw: random.Random, data: bytes) -> bytes:
    record = msgpack.unpackb(data)
    record["schema"] = draw.choice((0, 2, 99, -1, "1", None, 1.5, True, 2**64 - 1))
    if draw.random() < 0.3:
        record["new_field"] = 1
    return _packed(record)


def _another_message(draw: random.Random, data: bytes) -> bytes:
    record = msgpack.unpackb(data)
    record["message"] = draw.choice(("Job", "outcome", "", None, 7, ["Outcome"]))
    return _packed(record)


def _field_gone(draw: random.Random, data: bytes) -> bytes:
    record = msgpack.unpackb(data)
    del record[draw.choice(sorted(record))]
    return _packed(record)


def _leaf_replaced(draw: random.Random, data: bytes) -> bytes:
    """One to three values, anywhere in the tree, by something strange."""
    record = msgpack.unpackb(data)
    for _ in range(1 + draw.randrange(3)):
        holder, key = _place(draw, record)
        holder[key] = copy.deepcopy(draw.choice(STRANGE))
    return _packed(record)


def _key_replaced(draw: random.Random, data: bytes) -> bytes:
    record = msgpack.unpackb(data)
    holder, key = _place(draw, record)
    if isinstance(holder, dict):
        holder[draw.choice((0, None, True, b"k", 1.5, "k" * 300, "\x1b[31m"))] = holder.pop(key)
    return _packed(record)


def _long_text(draw: random.Random, data: bytes) -> bytes:
    record = msgpack.unpackb(data)
    record[draw.choice(("error", "node", "kind", "log_tail", "job_id"))] = "x" * (MAX_TEXT + 1)
    return _packed(record)


def _too_large(_draw: random.Random, _data: bytes) -> bytes:
    return b"\xdb" + (MAX_BYTES + 1).to_bytes(4, "big") + b"x" * (MAX_BYTES + 1)


def _as_large_as_allowed(_draw: random.Random, _data: bytes) -> bytes:
    """Just below the limit, of the elements that take the most memory for their bytes."""
    inner = b"\xdd" + (200_000).to_bytes(4, "big") + b"\x80" * 200_000
    count = (MAX_BYTES - 100) // len(inner)
    return b"\x81\xa6result\xdd" + count.to_bytes(4, "big") + inner * count


def _too_many_readings(_draw: random.Random, data: bytes) -> bytes:
    record = msgpack.unpackb(data)
    record["result"]["fingerprint"] = {f"m{i}": {"unmeasured": "lost"} for i in range(10_001)}
    return _packed(record)


def _place(draw: random.Random, record: Any) -> tuple[Any, Any]:
    """A random position in the tree: its holder, and the key or index."""
    holder: Any = record
    while True:
        key = draw.choice(sorted(holder, key=str)) if isinstance(holder, dict) else 0
        below = holder[key]
        if not isinstance(below, (dict, list)) or not below or draw.random() < 0.2:
            return holder, key
        holder = below


def _packed(record: Any) -> bytes:
    made: bytes = msgpack.packb(record, use_bin_type=True)
    return made


_ALL = (
    _replayed, _random, _truncated, _lengthened, _bits_flipped, _spliced, _length_lies, _nested,
    _other_version, _another_message, _field_gone, _leaf_replaced, _leaf_replaced, _leaf_replaced,
    _key_replaced, _long_text,
)  # fmt: skip
_RARE = (_too_large, _as_large_as_allowed, _too_many_readings)
