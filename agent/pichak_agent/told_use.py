"""The file in which a process tells what it uses of its GPUs, for the agent that watches them.

JSON, written aside and renamed, so that nobody reads half of it. Read strictly: what is not exactly
such a file tells nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from pichak_agent.readings import TOLD, OwnUse, ProcessId
from pichak_core.devices import ProcessMemory

#: Figures that are older say nothing about now.
FRESH_SECONDS = 30.0
_MOST_BYTES = 64 * 1024
_MOST_GPUS = 64
_MOST_MEMORY = 2**50
_LONGEST_STEP_SECONDS = 7 * 86400.0
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}")
_MOST_PID, _LONGEST_START = 2**32, 64
_COUNTS = {
    "processes": 10_000,
    "held_bytes": _MOST_MEMORY,
    "allocated_bytes": _MOST_MEMORY,
    "reserved_bytes": _MOST_MEMORY,
}
_MEMORY = {field.name: field.name.startswith("card_") for field in fields(ProcessMemory)}


class _GarbageError(ValueError):
    """Not such a file."""


def write_use(
    path: Path,
    gpus: Sequence[OwnUse],
    *,
    steady_seconds: float,
    seconds_per_step: float | None = None,
    process: ProcessId | None = None,
) -> None:
    """Tell `gpus`, one for each GPU that `process` uses, as of `steady_seconds` (a clock that all
    processes of the machine share); `OSError` when it cannot be written."""
    made: dict[str, Any] = {
        "steady_seconds": steady_seconds,
        "gpus": [
            {
                name: value
                for name, value in asdict(use).items()
                if value is not None and name in ("uuid", "memory", *_COUNTS)
            }
            for use in gpus
        ],
    }
    if process is not None:
        made["process"] = list(process)
    if seconds_per_step is not None:
        made["seconds_per_step"] = seconds_per_step
    part = _part(path)
    part.write_text(json.dumps(made), encoding="utf-8")
    part.replace(path)


def read_use(path: Path, job: str, *, steady_seconds: float) -> tuple[OwnUse, ...]:
    """What the process of `job` told, one for each of its GPUs; without such a file a single one
    that says nothing. Figures older than `FRESH_SECONDS` are left out: which GPUs they were of
    stays."""
    nothing = (OwnUse(job=job),)
    try:
        if not path.is_file():
            return nothing
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return nothing
        at, step, process, gpus = _parse(json.loads(data))
    except (OSError, ValueError, RecursionError):
        return nothing
    if not -1.0 <= steady_seconds - at <= FRESH_SECONDS:
        old = tuple(OwnUse(use.uuid, job, process=process) for use in gpus)
        return old or (OwnUse(job=job, process=process),)
    return tuple(
        replace(use, job=job, seconds_per_step=step, process=process, told_steady=at)
        for use in gpus or nothing
    )


def remove_use(path: Path) -> None:
    """Remove the file, and what was being written when its process was killed."""
    for each in (path, _part(path)):
        with contextlib.suppress(OSError):
            each.unlink()


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _parse(told: Any) -> tuple[float, float | None, ProcessId | None, list[OwnUse]]:
    known = {"steady_seconds", "seconds_per_step", "process", "gpus"}
    _check(isinstance(told, dict) and set(told) <= known)
    at, gpus = told.get("steady_seconds"), told.get("gpus")
    _check(_is_number(at) and isinstance(gpus, list) and len(gpus) <= _MOST_GPUS)
    step = told.get("seconds_per_step")
    _check(step is None or (_is_number(step) and 0 < step <= _LONGEST_STEP_SECONDS))
    uses = [_use(each) for each in gpus]
    _check(len({use.uuid for use in uses}) == len(uses))
    process = _process(told["process"]) if "process" in told else None
    return float(at), None if step is None else float(step), process, uses


def _process(told: Any) -> ProcessId:
    _check(isinstance(told, list) and len(told) == 2)
    pid, started = told
    _check(_is_count(pid, _MOST_PID) and isinstance(started, str))
    _check(0 < len(started) <= _LONGEST_START)
    return ProcessId(pid, started)


def _use(told: Any) -> OwnUse:
    _check(isinstance(told, dict) and set(told) <= {"uuid", "memory", *_COUNTS})
    uuid, memory = told.get("uuid"), told.get("memory")
    _check(isinstance(uuid, str) and _UUID.fullmatch(uuid) is not None)
    counts = {name: told[name] for name in _COUNTS if name in told}
    _check(all(_is_count(value, _COUNTS[name]) for name, value in counts.items()))
    if memory is None:
        return OwnUse(uuid=uuid, **counts)
    return OwnUse(uuid=uuid, memory=_memory(memory), memory_source=TOLD, **counts)


def _memory(told: Any) -> ProcessMemory:
    _check(isinstance(told, dict) and set(told) <= set(_MEMORY))
    for name, optional in _MEMORY.items():
        value = told.get(name)
        _check(_is_count(value, _MOST_MEMORY) or (optional and value is None))
    return ProcessMemory(**told)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _check(good: bool) -> None:
    if not good:
        raise _GarbageError
