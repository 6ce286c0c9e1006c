"""The terms of a schedule: what the user asked for, what is known of a node, what is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from pichak_coordinator.timetable import Cron, QuietHours

Depth = Literal["light", "full"]
DEPTHS: tuple[Depth, ...] = ("light", "full")
#: How a probe ended: nothing to tell; something suspected, or told; no idle device; no result.
End = Literal["quiet", "restless", "busy", "failed"]

HOUR = 3600.0
#: The stretch of time that holds its own share of the hour's budget.
SHARE_SECONDS = 600.0


@dataclass(frozen=True)
class Policy:
    """What the user asked for. A depth without an interval and without cron is never probed.

    `budget_seconds`: probe-seconds an hour over the fleet, None without a limit; `spread`: whether
    each `SHARE_SECONDS` hold their share of it only. `longest_seconds`: what one probe of one
    device may take at each depth. `most_at_once`: nodes probed side by side.
    """

    every_seconds: Mapping[Depth, float] = field(
        default_factory=lambda: {"light": 600.0, "full": 24 * HOUR}
    )
    cron: Mapping[Depth, Cron] = field(default_factory=dict)
    quiet: QuietHours | None = None
    budget_seconds: float | None = None
    spread: bool = True
    longest_seconds: Mapping[Depth, float] = field(
        default_factory=lambda: {"light": 60.0, "full": 300.0}
    )
    most_at_once: int = 8
    seed: int = 0

    @cached_property
    def depths(self) -> tuple[Depth, ...]:
        """Those that are probed, the shallow one first."""
        return tuple(d for d in DEPTHS if d in self.every_seconds or d in self.cron)

    def interval_seconds(self, depth: Depth, pace: float) -> float:
        """A node's interval at this depth; with cron, how long a busy node's retry may wait."""
        return self.every_seconds.get(depth, HOUR) * pace


@dataclass(frozen=True)
class Entry:
    """What is known of one node's schedule; times are Unix seconds.

    `again` is the depth of a second look that is due at once. `devices` is how many it is probed
    on, one after the other. `since` holds when each depth was last begun, `retries` the probes in a
    row that found no idle device or gave nothing, `failing` whether the last of them gave nothing.
    """

    node: str
    due: Mapping[Depth, float]
    pace: float = 1.0
    devices: int = 1
    again: Depth | None = None
    probes: int = 0
    retries: int = 0
    failing: bool = False
    since: Mapping[Depth, float] = field(default_factory=dict)

    @cached_property
    def waits_until(self) -> float:
        """When it is due at the earliest depth; a second look is due at once."""
        return -math.inf if self.again is not None else min(self.due.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        record = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**record, "due": dict(self.due), "since": dict(self.since)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Entry:
        """The inverse of `as_dict`."""
        return cls(**record)


@dataclass(frozen=True)
class Charge:
    """Probe-seconds of one probe: the most it may take while it runs, then what it took."""

    started: float
    seconds: float


@dataclass(frozen=True)
class Probe:
    """A decision: begin this now. `longest_seconds` is charged until it has ended."""

    node: str
    depth: Depth
    reason: Literal["due", "second look"]
    longest_seconds: float


@dataclass(frozen=True)
class Decision:
    """What to begin now, and when to look again at the latest (Unix seconds; infinity: not before
    something changes). `waiting_for_budget`: probes that are due and do not fit the hour, or their
    share of it."""

    probes: tuple[Probe, ...]
    look_again: float
    waiting_for_budget: int = 0
