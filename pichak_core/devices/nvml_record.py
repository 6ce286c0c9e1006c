"""Every raw answer of NVML, kept in order, and a stand-in for pynvml that gives them again.

What a user's driver said can so be attached to a report, read on another machine and become a
test. Handles are named (``gpu0``, ``gpu0/mig1``). Process ids are replaced by their place in the
list unless they are impossible anyway; names of processes and serial numbers are never asked for.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from pichak_core.devices.nvml_codes import NOT_RECORDED, refusals
from pichak_core.devices.nvml_processes import LINUX_PID_LIMIT

#: One call: its function, its arguments, and one of ``result``, ``error`` with ``text``,
#: ``absent`` (these bindings have no such function) or ``constant``.
Event = dict[str, Any]


class Handle:
    """A device handle with a name that can be written down."""

    def __init__(self, name: str, raw: Any) -> None:
        self.name, self.raw = name, raw


class Recorder:
    """A pynvml whose every call is told to `tell`, with its arguments and what came back."""

    def __init__(self, nvml: Any, tell: Callable[[Event], None]) -> None:
        self._nvml, self._tell = nvml, tell
        self.NVMLError = nvml.NVMLError

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(self._nvml, name)
        try:
            found = getattr(self._nvml, name)
        except AttributeError:
            self._tell({"f": name, "absent": True})
            raise
        if not callable(found):
            self._tell({"f": name, "constant": found})
            return found
        return lambda *arguments: self._call(name, found, arguments)

    def _call(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        told = [_plain(argument) for argument in arguments]
        raw = [a.raw if isinstance(a, Handle) else a for a in arguments]
        event: Event = {"f": name, "a": told} if told else {"f": name}
        try:
            result = function(*raw)
        except self.NVMLError as error:
            self._tell({**event, "error": getattr(error, "value", None), "text": str(error)})
            raise
        except refusals(self._nvml, ValueError, TypeError, LookupError) as error:
            # The bindings' own: a driver that is older than they are, a name that is no UTF-8.
            self._tell({**event, "error": None, "text": f"{type(error).__name__}: {error}"})
            raise
        if "HandleBy" in name:
            result = Handle(_handle_name(told), result)
        self._tell({**event, "result": _plain(result, hide_ids="RunningProcesses" in name)})
        return result


def _handle_name(arguments: Sequence[Any]) -> str:
    if len(arguments) == 1:
        return f"gpu{arguments[0]}"
    return f"{arguments[0]['handle']}/mig{arguments[1]}"


def _plain(value: Any, *, hide_ids: bool = False) -> Any:
    """A raw result as JSON: bytes and structures keep what they are."""
    if isinstance(value, Handle):
        return {"handle": value.name}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple, ctypes.Array)):
        made = [_plain(entry) for entry in value]
        return _without_ids(made) if hide_ids else made
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        names = [entry[0] for entry in getattr(value, "_fields_", ())]
        return {"struct": {name: _plain(getattr(value, name)) for name in names}}
    if hasattr(value, "__dict__"):
        return {"struct": {name: _plain(entry) for name, entry in vars(value).items()}}
    return {"unreadable": type(value).__name__}


def _without_ids(rows: list[Any]) -> list[Any]:
    for place, row in enumerate(rows, 1):
        fields = row.get("struct", {}) if isinstance(row, dict) else {}
        pid = fields.get("pid")
        if isinstance(pid, int) and 0 < pid < LINUX_PID_LIMIT:
            fields["pid"] = place
    return rows


class RecordedError(Exception):
    """An NVML error as it was recorded; `value` is NVML's code."""

    def __init__(self, value: int | None, text: str) -> None:
        super().__init__(text)
        self.value = value


class Player:
    """Stands for pynvml and answers each call as it was answered when `events` were recorded.

    The same call (function and arguments) asked again gives its next recorded answer, and the last
    one for ever after. A call that was never recorded raises an error with the code
    `NOT_RECORDED`. `ValueError` when the events are not a recording's.
    """

    NVMLError = RecordedError

    def __init__(self, events: Iterable[Event]) -> None:
        self._answers: dict[tuple[str, str], list[Any]] = {}
        self._constants: dict[str, Any] = {}
        self._absent: set[str] = set()
        for event in events:
            name = str(event.get("f", ""))
            if not name.startswith("nvml"):
                raise ValueError(f"not a recorded call of NVML: {str(event)[:80]}")
            if "constant" in event:
                self._constants[name] = event["constant"]
            elif event.get("absent"):
                self._absent.add(name)
            elif "error" in event:
                error = RecordedError(event["error"], str(event.get("text", "")))
                self._answers.setdefault(_key(name, event.get("a", [])), []).append(error)
            elif "result" in event:
                result = _revived(event["result"])
                self._answers.setdefault(_key(name, event.get("a", [])), []).append(result)
            else:
                raise ValueError(f"the recorded call of {name} has neither result nor error")

    def __getattr__(self, name: str) -> Any:
        if name in self._constants:
            return self._constants[name]
        if name in self._absent or not name.startswith("nvml") or name == "nvmlMemory_v2":
            raise AttributeError(name)  # the last is the one constant among them
        return lambda *arguments: self._answer(name, [_plain(a) for a in arguments])

    def _answer(self, name: str, arguments: list[Any]) -> Any:
        answers = self._answers.get(_key(name, arguments))
        if not answers:
            raise RecordedError(NOT_RECORDED, f"the recording holds no answer of {name}")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, RecordedError):
            raise answer
        return answer


def _key(name: str, arguments: Sequence[Any]) -> tuple[str, str]:
    return name, repr([a.get("handle", a) if isinstance(a, dict) else a for a in arguments])


def _revived(value: Any) -> Any:
    """The inverse of `_plain`, for a reader of pynvml's results."""
    if isinstance(value, list):
        return [_revived(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "handle" in value:
        return Handle(str(value["handle"]), None)
    if "bytes" in value:
        return str(value["bytes"]).encode("latin-1")
    if "struct" in value:
        return SimpleNamespace(**{k: _revived(entry) for k, entry in value["struct"].items()})
    raise ValueError(f"a recorded result of an unknown kind: {str(value)[:80]}")
