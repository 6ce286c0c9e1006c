"""A watch under a fake clock: the real schedule, judge and memory over probes that somebody else
makes up. Nothing is sent, waited for or stored.

What a whole fleet does in a month is gone through in seconds, so that a schedule's figures (what is
found, how soon, at what cost, who is accused wrongly) can be had before it runs anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pichak_coordinator import schedule
from pichak_coordinator.records import WHOLE, NodeRecord, Row
from pichak_coordinator.schedule import HOUR, Charge, Depth, Entry, Policy
from pichak_coordinator.watch_events import Event, event, judge_probe
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_peers import Ident, Peers, ident
from pichak_core.measurement import Fingerprint

DAY = 24 * HOUR
#: How often the schedule is looked at.
LOOK_SECONDS = 600.0
_AGAIN_SECONDS = 60.0

#: A probe's rows, one a device; none where the node gave nothing. (node, depth, time)
Measure = Callable[[str, Depth, float], Sequence[Row]]
#: What a probe came to: its rows as they were read, when, and the events that were told of it.
Kept = Callable[[str, Depth, float, Sequence[Row], Sequence[Event]], None]
#: One event, and when it was told.
Tell = Callable[[float, Event], None]


def _nobody(*_: object) -> None:
    pass


def _waits_until(entry: Entry) -> float:
    return entry.waits_until


@dataclass
class SimulatedWatch:
    """One watch of `nodes`; `run` fills the rest.

    `cost_seconds` is what a probe of one device is taken to last at each depth; a node has one
    where `devices` does not say otherwise, and they are probed one after the other. `tell` hears
    each event at once, `keep` each probe when it was judged, `say` the time as it goes on.
    """

    policy: Policy
    nodes: Sequence[str]
    measure: Measure
    cost_seconds: Mapping[Depth, float]
    tell: Tell = _nobody
    keep: Kept = _nobody
    say: Callable[[float], None] = _nobody
    devices: Mapping[str, int] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    memories: dict[Ident, Memory] = field(default_factory=dict)
    latest: dict[Ident, Row] = field(default_factory=dict)
    starts: list[tuple[float, str, Depth]] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    _peers: Peers = field(default_factory=Peers)

    def run(self, begin: float, end: float) -> None:
        """From `begin` to `end`, in the clock's seconds."""
        self.entries = {
            name: schedule.first(self.policy, name, begin, devices=self.devices.get(name, 1))
            for name in self.nodes
        }
        now = begin
        while now < end:
            at = now
            while self._round(at):
                at += _AGAIN_SECONDS
            steps = math.ceil((at - begin) / LOOK_SECONDS)
            now = max(now + LOOK_SECONDS, begin + steps * LOOK_SECONDS)
            self.say(min(now, end))

    def seconds(self, node: str, depth: Depth) -> float:
        """What a probe of this node is taken to last."""
        return self.cost_seconds[depth] * self.devices.get(node, 1)

    def _round(self, now: float) -> bool:
        """Begin and end what is due; whether second looks are due now."""
        probed: dict[str, tuple[Depth, float]] = {}
        later = sorted(self.entries.values(), key=_waits_until, reverse=True)
        due: dict[str, Entry] = {}
        while True:
            self.charges = [c for c in self.charges if c.started > now - HOUR]
            while later and later[-1].waits_until <= now:
                entry = later.pop()
                due[entry.node] = entry
            # Those of this round that wait to be judged take nobody's place.
            room = replace(self.policy, most_at_once=self.policy.most_at_once + len(probed))
            made = schedule.decide(room, list(due.values()), self.charges, probed, now)
            if not made.probes:
                break
            for probe in made.probes:
                self.entries[probe.node] = schedule.begun(
                    self.policy, self.entries[probe.node], probe.depth, now
                )
                self.charges.append(Charge(now, self.seconds(probe.node, probe.depth)))
                self.starts.append((now, probe.node, probe.depth))
                probed[probe.node] = (probe.depth, now)
                del due[probe.node]
            now += max(self.seconds(probe.node, probe.depth) for probe in made.probes)
        self._judge(probed, now)
        return bool(probed) and any(e.again for e in self.entries.values())

    def _judge(self, probed: Mapping[str, tuple[Depth, float]], now: float) -> None:
        read: dict[str, Sequence[Row]] = {}
        for node, (depth, at) in probed.items():
            read[node] = self.measure(node, depth, at)
            if not read[node]:
                self._failed(node, depth, now)
        rows = [row for some in read.values() for row in some]
        judged = judge_probe(rows, self._peers, self.memories, {})
        number = 0
        for node, some in read.items():
            mine = judged[number : number + len(some)]
            number += len(some)
            if not mine:
                continue
            depth, at = probed[node]
            for each in mine:
                self.memories[ident(each.row.node)] = each.memory
                for told in each.events:
                    self.tell(now, told)
                self._remember(each.row)
            noises = [each.noise for each in mine if each.noise is not None]
            self.entries[node] = schedule.ended(
                self.policy,
                self.entries[node],
                depth,
                now,
                "restless" if any(each.restless for each in mine) else "quiet",
                noise=max(noises, default=None),
                look_again=any(each.fresh for each in mine),
            )
            self.keep(node, depth, at, some, [told for each in mine for told in each.events])

    def _failed(self, node: str, depth: Depth, now: float) -> None:
        entry = self.entries[node]
        if not entry.failing:
            text = f"the {depth} probe failed: it gave no reading"
            self.tell(now, event("probe_failed", NodeRecord(node, node, device=WHOLE), text))
        self.entries[node] = schedule.ended(self.policy, entry, depth, now, "failed")

    def _remember(self, row: Row) -> None:
        """The latest of each reading, the device that was read last at the end."""
        key = ident(row.node)
        old = self.latest.pop(key, None)
        found = Fingerprint({**old.fingerprint, **row.fingerprint}) if old else row.fingerprint
        self.latest[key] = replace(row, fingerprint=found)
        self._peers.put(self.latest[key])
