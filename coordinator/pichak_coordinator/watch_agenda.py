"""A watch's schedule as it runs: what `schedule` decides is in the store before it is acted on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from pichak_coordinator import schedule
from pichak_coordinator.schedule import Charge, Decision, Depth, Entry, Policy, Probe
from pichak_coordinator.store_prune import prune
from pichak_coordinator.watch_store import COMMAND, WatchStore

#: Probes that begin within so many seconds of one another are one run of the history.
_RUN_SECONDS = 60.0
#: How often the schedule is looked at, and how often that is noted, while nothing happens.
DECIDE_SECONDS = 1.0
_NOTE_SECONDS = 30.0
_PRUNE_SECONDS = 86400.0


@dataclass
class _Run:
    run: str
    depth: str
    begun: float
    nodes: set[str] = field(default_factory=set)


class Agenda:
    """Who is due when, and what the hour was charged. With `once` a node is probed a second time
    only to look again, and what the hour still holds is taken at once."""

    def __init__(
        self,
        policy: Policy,
        store: WatchStore,
        say: Callable[[str], None],
        keep_days: float,
    ) -> None:
        self.policy, self._store, self._say = policy, store, say
        self._keep_days, self._pruned = keep_days, float("-inf")
        self.entries: dict[str, Entry] = {}
        self.charges: dict[str, Charge] = {}
        self.decision = Decision((), float("inf"))
        self._known: dict[str, Entry] = {}
        self._once = False
        self._begun: set[str] = set()
        self._run: _Run | None = None
        self._looked: float | None = None
        self._noted = self._decided = self._told_budget = float("-inf")

    def open(self, now: float, *, once: bool) -> None:
        """Take up what the store holds."""
        self._once = once
        if once:
            self.policy = replace(self.policy, spread=False)
        self.charges = self._store.charges(now)
        self._looked = self._store.last_look()
        self._known = self._store.entries()

    def look(self, now: float) -> None:
        """Note the time; after a sleep, a stop or a jump of the clock take the schedule up anew."""
        if self._looked is not None and not self._once and schedule.jumped(self._looked, now):
            self._say("the clock jumped or the watch was stopped: what was missed is spread out")
            again = schedule.resumed(self.policy, self.entries.values(), now)
            self.entries = {entry.node: entry for entry in again}
            self._store.look(now, again)
            self._noted = now
            self.look_soon()
        elif now - self._noted >= _NOTE_SECONDS or self._looked is None:
            self._store.look(now)
            self._noted = now
        self._looked = now
        if now - self._pruned >= _PRUNE_SECONDS:
            self._pruned = now
            prune(self._store, self._keep_days, now, command=COMMAND)

    def look_soon(self) -> None:
        """Something happened: the next `due` is not put off."""
        self._decided = float("-inf")

    def due(self, now: float) -> bool:
        """Whether it is time to decide."""
        return now - self._decided >= DECIDE_SECONDS

    def decide(
        self, now: float, here: Collection[str], running: Collection[str]
    ) -> tuple[Probe, ...]:
        """What to begin now, of the nodes that are `here` and not `running`."""
        self._decided = now
        self.charges = {
            name: charge
            for name, charge in self.charges.items()
            if charge.started > now - schedule.HOUR
        }
        entries = [
            entry
            for node, entry in self.entries.items()
            if node in here and (entry.again or not (self._once and node in self._begun))
        ]
        self.decision = schedule.decide(
            self.policy, entries, list(self.charges.values()), set(running), now
        )
        waiting = self.decision.waiting_for_budget
        if waiting and now - self._told_budget >= schedule.HOUR:
            self._told_budget = now
            self._say(f"{waiting} probes wait for the hour's budget")
        return self.decision.probes

    def begin(self, probe: Probe, now: float) -> tuple[str, str]:
        """Charge it at its longest, before it begins; its name and its run's."""
        run = self._run_for(probe.node, probe.depth, now)
        name = f"{run}-{probe.depth}-{secrets.token_hex(4)}"
        entry = schedule.begun(self.policy, self.entries[probe.node], probe.depth, now)
        charge = Charge(now, probe.longest_seconds)
        self._store.begin_probe(name, charge, entry)
        self.charges[name], self.entries[probe.node] = charge, entry
        self._begun.add(probe.node)
        return name, run

    def ended(self, name: str, charge: Charge, entry: Entry) -> None:
        """A probe's end, which is in the store."""
        self.charges[name], self.entries[entry.node] = charge, entry
        self.look_soon()

    def interrupted(self, name: str, charge: Charge, node: str, depth: Depth, now: float) -> None:
        """Charge a probe that was cancelled; its node is due again when a watch resumes."""
        entry = self.entries[node]
        entry = replace(entry, due={**entry.due, depth: now})
        self._store.begin_probe(name, charge, entry)

    def joined(self, nodes: Sequence[tuple[str, int]], now: float, *, at_once: bool) -> None:
        """Give these nodes, each with its number of devices, their place; `at_once` the first."""
        new: list[Entry] = []
        for node, devices in nodes:
            entry = self.entries.get(node) or self._known.get(node)
            if entry is None:
                entry = schedule.first(self.policy, node, now, devices=devices)
            elif node not in self.entries:
                entry = replace(entry, devices=devices)
                # Its last watch may have ended long ago. For one round that is as it should be:
                # who is due is probed in it, and what was spread out would never be.
                if self._once:
                    entry = schedule.fitted(self.policy, entry, now)
                else:
                    entry = schedule.resumed(self.policy, [entry], now)[0]
            else:
                entry = schedule.fitted(self.policy, entry, now)
            if at_once:
                entry = schedule.everything_due([entry], now)[0]
            self.entries[node] = entry
            new.append(entry)
        if new:
            self._store.look(now, new)

    def _run_for(self, node: str, depth: Depth, now: float) -> str:
        run = self._run
        fits = run is not None and run.depth == depth and node not in run.nodes
        if run is None or not fits or not 0 <= now - run.begun < _RUN_SECONDS:
            self.close_run()
            run = _Run(self._store.begin_run(COMMAND, {"depth": depth}), depth, now)
            self._run = run
        run.nodes.add(node)
        return run.run

    def close_run(self) -> None:
        """The run that is open, if any, has ended."""
        if self._run is not None:
            self._store.finish_run(self._run.run)
            self._run = None
