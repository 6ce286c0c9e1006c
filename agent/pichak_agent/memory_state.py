"""What the telemetry shows of GPU memory by the system's own counters: the newest figures that are
still of now, and why there are none. Nothing where the system has no such counters and needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pichak_agent.counter_keeper import LONGEST_INTERVAL_SECONDS, CounterKeeper
from pichak_agent.readings import Reading
from pichak_core.devices.host import Host
from pichak_core.devices.windows_child import WHAT

_FRESH_SECONDS = 2 * LONGEST_INTERVAL_SECONDS


def memory_state(
    ring: Sequence[Reading], keeper: CounterKeeper | None, other_gap: str = ""
) -> dict[str, Any]:
    """JSON-ready: ``memory_counters`` (whether they answer), ``cards`` and ``own_memory``. A part
    that this system does not have is left out; `other_gap` says why it has no counters where it
    would need them."""
    made: dict[str, Any] = {}
    if keeper is not None:
        made["memory_counters"] = {
            "source": WHAT,
            "gap": keeper.gap,
            "interval_seconds": round(keeper.interval_seconds, 3),
            "incidents": [list(each) for each in keeper.incidents],
        }
    elif other_gap:
        made["memory_counters"] = {"source": WHAT, "gap": other_gap}
    recent = _recent(ring)
    if keeper is not None and not keeper.gap:
        made["cards"] = next(
            ([card.as_dict() for card in reading.cards] for reading in recent if reading.cards), []
        )
    memory = _own_memory(recent)
    return {**made, "own_memory": memory} if memory else made


def wsl2_gap(host: Host) -> str:
    """Why a driver that pages is not counted here, "" where it does not page."""
    try:
        if host.kind().kind != "wsl2":
            return ""
    except (OSError, NotImplementedError):
        return ""
    return (
        f"not measured: {WHAT} are not shown inside WSL2, whose driver pages all the same; a spill "
        "shows there in a job that holds more than the card has, and in its pace"
    )


def _recent(ring: Sequence[Reading]) -> list[Reading]:
    """The newest first."""
    if not ring:
        return []
    after = ring[-1].steady_seconds - _FRESH_SECONDS
    found = []
    for reading in reversed(ring):
        if reading.steady_seconds < after:
            break
        found.append(reading)
    return found


def _own_memory(recent: Sequence[Reading]) -> list[dict[str, Any]]:
    """Of each job that runs now, its newest figures on each card."""
    if not recent:
        return []
    running = {(use.job, use.uuid, use.process) for use in recent[0].own}
    found: dict[Any, dict[str, Any]] = {}
    for reading in recent:
        for use in reading.own:
            key = (use.job, use.uuid, use.process)
            told = use.memory_as_dict() if key in running and key not in found else {}
            if told:
                found[key] = told
    return list(found.values())
