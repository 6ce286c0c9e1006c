"""What each row of a history file may hold: checked before it goes into a store."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pichak_agent.messages import KINDS, STATUSES, check_name
from pichak_coordinator.jobs import State
from pichak_coordinator.records import Finding
from pichak_coordinator.watch_memory import KEPT, Before, Memory
from pichak_core.plan import Plan

#: The tables that hold history, in the order in which their rows refer to one another.
TABLES = (
    *("runs", "nodes", "run_nodes", "jobs", "outcomes", "plans", "findings"),
    *("watch_devices", "watch_events"),
)
#: How far the webhook is with an event that another machine's watch told: that is its own affair.
ELSEWHERE = "elsewhere"

_MAX_TEXT = 64 * 1024
_DEVICE = re.compile(r"(cpu|cuda:[0-9]{1,4})?")


def check_row(table: str, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """`ValueError` unless `row` is one that a store could have written."""
    strange = sorted(set(row) ^ (set(columns) - {"seq"}))
    if strange:
        raise ValueError(f"{table}: a column {strange[0][:40]!r} too much, or missing")
    for name, value in row.items():
        check = _CHECKS.get(f"{table}.{name}") or _CHECKS[name]
        check(f"{table}.{name}", value)
    if table == "findings":
        Finding.from_dict(
            {**row, "evidence": json.loads(row["evidence_json"])},
        )
    if table == "watch_events" and json.loads(row["body"]).get("id") != row["event"]:
        raise ValueError("watch_events: an event of another name than its row")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{name}: not a text of at most {_MAX_TEXT:,} characters")


def _name(name: str, value: Any) -> None:
    _text(name, value)
    check_name(name, value)


def _run(name: str, value: Any) -> None:
    if name != "jobs.run" or value is not None:
        _name(name, value)


def _time(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e11:
        raise ValueError(f"{name}: {str(value)[:40]} is no time")


def _end(name: str, value: Any) -> None:
    if value is not None:
        _time(name, value)


def _whole(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= 10**9:
        raise ValueError(f"{name}: {str(value)[:40]} is no whole number that it could be")


def _device(name: str, value: Any) -> None:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError(f"{name}: no device {str(value)[:40]!r}")


def _one_of(*allowed: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise ValueError(f"{name}: {str(value)[:40]!r} is none of {', '.join(allowed)}")

    return check


def _json(kind: type) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise ValueError(f"{name}: not a text")
        try:
            holds = json.loads(value)
        except RecursionError as error:
            raise ValueError(f"{name}: nested too deep") from error
        if not isinstance(holds, kind):
            raise ValueError(f"{name}: {type(holds).__name__} where {kind.__name__} was expected")
        if isinstance(holds, list) and not all(isinstance(item, str) for item in holds):
            raise ValueError(f"{name}: not a list of texts")

    return check


def _plan(name: str, value: Any) -> None:
    _json(dict)(name, value)
    try:
        Plan.from_json(value)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{name}: not a plan: {error}") from error


def _memory(name: str, value: Any) -> None:
    """What a watch remembers of a device."""
    _json(dict)(name, value)
    try:
        memory = Memory.from_dict(json.loads(value))
        sound = all(_is_before(before) for before in memory.before.values())
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{name}: not what a watch remembers: {error}") from error
    if not sound:
        raise ValueError(f"{name}: not what a watch remembers")


def _is_before(before: Before) -> bool:
    kinds = {_kind(value) for value in before.values}
    spreads = {_kind(value) for value in before.spreads}
    return (
        type(before.unit) is str
        and 0 < len(before.values) <= KEPT
        and len(before.spreads) <= KEPT
        and len(kinds) == 1
        and "" not in kinds
        and spreads <= {"number"}
        and (before.pending is None or _kind(before.pending) != "")
    )


def _kind(value: Any) -> str:
    if isinstance(value, (str, bool)):
        return "word"
    return "number" if type(value) in (int, float) and math.isfinite(value) else ""


def _event(name: str, value: Any) -> None:
    """What a watch told."""
    _json(dict)(name, value)
    told = json.loads(value)
    for part in ("id", "event", "node", "host", "device", "name", "text"):
        _text(f"{name}: {part}", told.get(part))
    _time(f"{name}: time", told.get("time"))
    if told.get("finding") is not None:
        Finding.from_dict(told["finding"])


def _state(name: str, value: Any) -> None:
    allowed = ("suspected", "confirmed") if name.startswith("findings") else get_args(State)
    _one_of(*allowed)(name, value)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "run": _run,
    "started_unix": _time,
    "finished_unix": _end,
    "command": _text,
    "settings_json": _json(dict),
    "node": _text,
    "machine": _text,
    "gpu_uuids_json": _json(list),
    "host": _text,
    "address": _text,
    "first_seen_unix": _time,
    "last_seen_unix": _time,
    "position": _whole,
    "hello_json": _json(dict),
    "error": _text,
    "job_id": _name,
    "device": _device,
    "kind": _one_of(*KINDS),
    "state": _state,
    "attempts": _whole,
    "params_json": _json(dict),
    "changed_unix": _time,
    "attempt": _whole,
    "status": _one_of(*STATUSES),
    "simulated": _whole,
    "received_unix": _time,
    "plan_json": _plan,
    "code": _text,
    "metric": _text,
    "severity": _one_of("fail", "warn", "info"),
    "confidence": _one_of("low", "normal"),
    "sentence": _text,
    "evidence_json": _json(dict),
    "watch_devices.device": _text,
    "memory_json": _memory,
    "event": _name,
    "created_unix": _time,
    "body": _event,
    "delivery": _one_of("", "pending", "sent", "given up", ELSEWHERE),
    "next_try_unix": _time,
}
