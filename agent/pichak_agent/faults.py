"""Faults for a trace of readings that is simulated or was recorded: what is wrong from when on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pichak_agent.readings import GpuReading, OwnUse, Reading

#: Changes a reading that is `seconds` into the trace.
Fault = Callable[[float, Reading], Reading]


def gpu_fault(starts: float, index: int = 0, *, ends: float = float("inf"), **values: Any) -> Fault:
    """From `starts` on a GPU's figures are these: moving ones at once, facts with the next full
    reading. None takes a figure away; a function is called with the seconds and the old value."""

    def changed(at: float, reading: Reading) -> Reading:
        if not starts <= at < ends:
            return reading
        return replace(
            reading,
            gpus=tuple(
                _with(gpu, at, values) if gpu.index == index else gpu for gpu in reading.gpus
            ),
        )

    return changed


def host_fault(starts: float, *, ends: float = float("inf"), **values: Any) -> Fault:
    """From `starts` on the host's figures are these; a function is called with the seconds since
    `starts` and the old value."""

    def changed(at: float, reading: Reading) -> Reading:
        if not starts <= at < ends:
            return reading
        made = {
            name: value(at - starts, getattr(reading.host, name)) if callable(value) else value
            for name, value in values.items()
        }
        return replace(reading, host=replace(reading.host, **made))

    return changed


def own_fault(starts: float, change: Callable[[float, OwnUse], OwnUse | None]) -> Fault:
    """From `starts` on this agent's jobs say this of themselves."""

    def changed(at: float, reading: Reading) -> Reading:
        if at < starts:
            return reading
        made = [change(at - starts, use) for use in reading.own]
        return replace(reading, own=tuple(use for use in made if use is not None))

    return changed


def _with(gpu: GpuReading, at: float, values: Mapping[str, Any]) -> GpuReading:
    live, facts = dict(gpu.live), dict(gpu.facts)
    for name, value in values.items():
        part = live if name in live or name not in facts else facts
        made = value(at, part.get(name)) if callable(value) else value
        if made is None:
            live.pop(name, None)
            facts.pop(name, None)
        else:
            part[name] = made
    return replace(gpu, live=live, facts=facts)
