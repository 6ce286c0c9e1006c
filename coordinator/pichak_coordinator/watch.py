"""The watch: probes a cluster's nodes on their schedule and tells what changes, until it is ended.

The schedule is `schedule`'s, a probe `watch_probe`'s, its meaning `watch_events`'; this is the loop
around them. Whatever it must remember is in the store before it acts on it, so that it may be ended
at any point, also by ``kill -9``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_coordinator import schedule
from pichak_coordinator.cluster import Cluster, ClusterNode
from pichak_coordinator.dispatch import Dispatcher
from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.schedule import Charge, Decision, Entry, Policy
from pichak_coordinator.store_prune import KEEP_DAYS, prune
from pichak_coordinator.watch_events import NOTIFIED, Event, Ident, event, ident, judge_probe
from pichak_coordinator.watch_members import LOOK_SECONDS, Member, Members
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_probe import Prober, Probing, Requests
from pichak_coordinator.watch_store import COMMAND, WatchStore
from pichak_coordinator.watch_view import NodeView, Seen, WatchView, open_findings
from pichak_core.measurement import Fingerprint, Measurement

#: Probes that begin within so many seconds of one another are one run of the history.
_RUN_SECONDS = 60.0
#: How often the schedule is looked at, and how often that is noted, while nothing happens.
_DECIDE_SECONDS = 1.0
_NOTE_SECONDS = 30.0
_PRUNE_SECONDS = 86400.0
_THREADS = 32


@dataclass
class _Run:
    run: str
    depth: str
    begun: float
    nodes: set[str] = field(default_factory=set)


@dataclass
class Tally:
    """What a watch did. `open_faults`: confirmed and not cleared, of the nodes that it probed."""

    probes: int = 0
    measured: int = 0
    failed: int = 0
    busy: int = 0
    seconds: float = 0.0
    waiting_for_budget: int = 0
    interrupted: bool = False
    open_faults: dict[Ident, int] = field(default_factory=dict)


class Watch:
    """`tell` gets each event once it is in the store, `say` what is only of the moment, `show` a
    view of everything about once a second."""

    def __init__(
        self,
        policy: Policy,
        requests: Requests,
        cluster: Cluster,
        dispatcher: Dispatcher,
        store: WatchStore,
        *,
        say: Callable[[str], None],
        tell: Callable[[Mapping[str, Any]], None],
        notify: bool = False,
        device: str = "auto",
        show: Callable[[WatchView], None] | None = None,
        keep_days: float = KEEP_DAYS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy, self._store, self._clock = policy, store, clock
        self._say, self._tell, self._notify = say, tell, notify
        self._keep_days, self._pruned = keep_days, float("-inf")
        self._pool = ThreadPoolExecutor(_THREADS)
        self._members = Members(cluster, dispatcher, store, self._pool, say)
        self._prober = Prober(
            requests, cluster, dispatcher, store, self._pool, self._on_over, device
        )
        self._entries: dict[str, Entry] = {}
        self._charges: dict[str, Charge] = {}
        self._latest: dict[Ident, Row] = {}
        self._memories: dict[Ident, Memory] = {}
        self._once = False
        self._begun: set[str] = set()
        self._run: _Run | None = None
        self._round: dict[str, tuple[Probing, list[Row]]] = {}
        self._looked: float | None = None
        self._noted = self._looked_at_members = float("-inf")
        self._decided = self._told_budget = float("-inf")
        self._decision = Decision((), float("inf"))
        self._seen, self._view, self._shown, self._began = Seen(), show, float("-inf"), clock()
        self.tally = Tally()

    def run(self, *, once: bool = False, until: Callable[[], bool] = lambda: False) -> Tally:
        """Watch until `until` says so, or for one round with `once`: whoever is due now, and the
        second looks that follow. Ctrl-C ends it; what was measured is kept."""
        now, self._once = self._clock(), once
        if once:  # a single round takes what the hour still holds
            self._policy = replace(self._policy, spread=False)
        self._charges = self._store.charges(now)
        self._looked = self._store.last_look()
        known = self._store.entries()
        try:
            with self._prober.courier.open():
                try:
                    self._loop(known, once, until)
                except KeyboardInterrupt:
                    self.tally.interrupted = True
                    self._say("interrupted: cancelling the probes, keeping what was measured")
                    self._prober.interrupt()
                    self._keep_interrupted()
        finally:
            self._close_run()
            self._members.settle()
            self._pool.shutdown(wait=False, cancel_futures=True)
        return self.tally

    def _loop(self, known: dict[str, Entry], once: bool, until: Callable[[], bool]) -> None:
        first_round = once
        while True:
            now = self._clock()
            self._look_at_members(now, known, first_round)
            self._look(now)
            if self._view is not None and not 0 <= now - self._shown < _DECIDE_SECONDS:
                self._shown = now
                self._view(self.view(now))
            if once and first_round and self._members.settled:
                first_round = False
            stopping = until()
            if not stopping and not first_round and now - self._decided >= _DECIDE_SECONDS:
                self._decide(now)
            idle = not self._prober.running
            if idle and (stopping or (once and not first_round and self._nothing_now(now))):
                self.tally.waiting_for_budget = self._decision.waiting_for_budget
                return
            self._prober.step()

    def _nothing_now(self, now: float) -> bool:
        """For one round: nothing can be begun, after everything that was begun has ended."""
        self._decide(now)
        if not self._prober.running:
            self._judge_together()
            self._decide(now)
        return not self._prober.running

    def _judge_together(self) -> None:
        """Judge the round's rows once more, now that all of its peers are known: the first nodes of
        a new fleet had none. What that shows is suspected, and looked at again."""
        members = self._members.current
        peers = [row for (node, _), row in self._latest.items() if node in members]
        for node, (probing, rows) in self._round.items():
            memories = {ident(row.node): self._memory(ident(row.node)) for row in rows}
            events: list[Event] = []
            for each in judge_probe(rows, peers, memories, {}):
                key = ident(each.row.node)
                known = {finding.key for finding in memories[key].findings}
                fresh = [
                    f
                    for f in each.memory.findings
                    if f.key not in known and f.state == "suspected" and f.severity != "info"
                ]
                if fresh:
                    findings = (*memories[key].findings, *fresh)
                    memories[key] = replace(memories[key], findings=findings)
                    self._store.record_findings(probing.run, *each.row.key, fresh)
                    told = [f.as_dict() for f in fresh]
                    events += [e for e in each.events if e.get("finding") in told]
            if events:
                entry = replace(self._entries[node], again=probing.depth)
                self._keep(probing, entry, memories, events)
        self._round.clear()

    # -- time -------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Note the time; after a sleep, a stop or a jump of the clock take the schedule up anew."""
        if self._looked is not None and schedule.jumped(self._looked, now):
            self._say("the clock jumped or the watch was stopped: what was missed is spread out")
            again = schedule.resumed(self._policy, self._entries.values(), now)
            self._entries = {entry.node: entry for entry in again}
            self._store.look(now, again)
            self._noted = now
            self._decided = float("-inf")
        elif now - self._noted >= _NOTE_SECONDS or self._looked is None:
            self._store.look(now)
            self._noted = now
        self._looked = now
        if now - self._pruned >= _PRUNE_SECONDS:
            self._pruned = now
            prune(self._store, self._keep_days, now, command=COMMAND)

    def _decide(self, now: float) -> None:
        self._decided = now
        self._charges = {
            name: charge
            for name, charge in self._charges.items()
            if charge.started > now - schedule.HOUR
        }
        members = self._members.current
        running = {probing.member.identity for probing in self._prober.running.values()}
        entries = [
            entry
            for node, entry in self._entries.items()
            if node in members and (entry.again or not (self._once and node in self._begun))
        ]
        decision = schedule.decide(
            self._policy, entries, list(self._charges.values()), running, now
        )
        if decision.waiting_for_budget and now - self._told_budget >= schedule.HOUR:
            self._told_budget = now
            self._say(f"{decision.waiting_for_budget} probes wait for the hour's budget")
        self._decision = decision
        for probe in decision.probes:
            self._begin(members[probe.node], probe, now)

    def _begin(self, member: Member, probe: schedule.Probe, now: float) -> None:
        run = self._run_for(probe.node, probe.depth, now)
        name = f"{run}-{probe.depth}-{secrets.token_hex(4)}"
        entry = schedule.begun(self._policy, self._entries[probe.node], probe.depth, now)
        charge = Charge(now, probe.longest_seconds)
        self._store.begin_probe(name, charge, entry)
        self._charges[name], self._entries[probe.node] = charge, entry
        self._begun.add(probe.node)
        self._say(f"{_record(member).label}: {probe.depth} probe ({probe.reason})")
        self._prober.begin(Probing(name, run, member, probe.depth, now))

    def _run_for(self, node: str, depth: str, now: float) -> str:
        run = self._run
        fits = run is not None and run.depth == depth and node not in run.nodes
        if run is None or not fits or not 0 <= now - run.begun < _RUN_SECONDS:
            self._close_run()
            run = _Run(self._store.begin_run(COMMAND, {"depth": depth}), depth, now)
            self._run = run
        run.nodes.add(node)
        return run.run

    def _close_run(self) -> None:
        if self._run is not None:
            self._store.finish_run(self._run.run)
            self._run = None

    def view(self, now: float) -> WatchView:
        """What the watch is like at this moment."""
        members = self._members.current
        rows = {key: row for key, row in self._seen.rows.items() if key[0] in members}
        here = [NodeView(*_place(m.node, m.identity), True) for m in members.values()]
        here += [
            NodeView(*_place(node, self._store.node_at(node.address, node.host) or ""), False)
            for node in self._members.silent
        ]
        return WatchView(
            turned_unix=now,
            began_unix=self._began,
            nodes=self._seen.nodes(here, now),
            rows=rows,
            findings=open_findings(
                {key: self._memory(key) for key in rows},
                {name: member.found for name, member in members.items()},
            ),
            entries={node: e for node, e in self._entries.items() if node in members},
            measured_unix=dict(self._seen.measured_unix),
            running=len(self._prober.running),
            waiting_for_budget=self._decision.waiting_for_budget,
            budget_seconds=self._policy.budget_seconds,
            charged_seconds=schedule.charged(self._charges.values(), now),
            probe_seconds=self.tally.seconds,
            probes=dict(self._seen.probes),
            jobs=dict(self._prober.ended),
        )

    # -- nodes ------------------------------------------------------------------------------------

    def _look_at_members(self, now: float, known: dict[str, Entry], eager: bool) -> None:
        pause = 0.0 if eager or not self._members.settled else LOOK_SECONDS
        if 0 <= now - self._looked_at_members < pause:
            return
        self._looked_at_members = now
        moves = self._members.look(now)
        for member in moves.left:
            self._seen.left(NodeView(*_place(member.node, member.identity), False), now)
            self._tell_all([event("left", _record(member), "is no longer in the cluster")])
        for node, why in moves.silent:
            identity = self._store.node_at(node.address, node.host) or ""
            record = NodeRecord(identity, node.host, node.address, simulated=node.simulated)
            self._tell_all([event("probe_failed", record, why)])
        new: list[Entry] = []
        for member in moves.joined:
            entry = self._entries.get(member.identity) or known.get(member.identity)
            if entry is None:
                entry = schedule.first(self._policy, member.identity, now, devices=member.devices)
            elif member.identity not in self._entries:
                entry = replace(entry, devices=member.devices)
                # Its last watch may have ended long ago.
                entry = schedule.resumed(self._policy, [entry], now)[0]
            else:
                entry = schedule.fitted(self._policy, entry, now)
            if eager:
                entry = schedule.everything_due([entry], now)[0]
            self._entries[member.identity] = entry
            new.append(entry)
            self._welcome(member)
        if new:
            self._store.look(now, new)
            for row in self._store.latest_rows([member.identity for member in moves.joined]):
                self._remember(row)
            joined = [member.identity for member in moves.joined]
            self._seen.measured_unix |= self._store.last_measured(joined)

    def _welcome(self, member: Member) -> None:
        events: list[Event] = [event("joined", _record(member), "is in the cluster")]
        for finding in member.found:
            text = f"{finding.severity} {finding.code}: {finding.sentence}"
            events.append(
                event("confirmed", _record(member), text, finding=finding.as_dict(), change=None)
            )
        self._tell_all(events)

    # -- ends -------------------------------------------------------------------------------------

    def _on_over(self, probing: Probing) -> None:
        now = self._clock()
        node = probing.member.identity
        entry, events, memories = self._entries[node], list[Event](), dict[Ident, Memory]()
        self.tally.probes += 1
        self.tally.seconds += probing.seconds
        if probing.moved:
            self._members.forget(probing.member.node.node_id)
        rows = [row for row in self._store.rows_of(probing.run, [node]) if row.measured]
        record = _record(probing.member)
        end = "measured" if rows else "busy" if probing.busy else "failed"
        self._seen.probe(node, probing.depth, end, now)
        if rows:
            self.tally.measured += 1
            self.tally.failed += bool(probing.failures)
            entry, events, memories = self._judge(probing, rows, entry, now)
            if self._entries[node].failing and not probing.failures:
                events.insert(0, event("probe_works", record, "could be probed again"))
        elif probing.busy:
            self.tally.busy += 1
            if not entry.retries:
                events.append(event("busy", record, probing.busy[0]))
            entry = schedule.ended(self._policy, entry, probing.depth, now, "busy")
        else:
            self.tally.failed += 1
            if not entry.failing:
                why = "; ".join(dict.fromkeys(probing.failures)) or "it gave no reading"
                text = f"the {probing.depth} probe failed: {why}"
                events.append(event("probe_failed", record, text))
            entry = schedule.ended(self._policy, entry, probing.depth, now, "failed")
        self._round[node] = (probing, rows)
        self._keep(probing, entry, memories, events)

    def _keep(
        self,
        probing: Probing,
        entry: Entry,
        memories: Mapping[Ident, Memory],
        events: Sequence[Event],
    ) -> None:
        """All that a probe came to, in the store at once, and then told."""
        charge = Charge(probing.started, probing.seconds)
        self._charges[probing.name], self._entries[entry.node] = charge, entry
        told = self._store.end_probe(
            probing.name, charge, entry, memories, [self._marked(e) for e in events]
        )
        self._memories.update(memories)
        self._decided = float("-inf")
        self._show(told)

    def _judge(
        self, probing: Probing, rows: Sequence[Row], entry: Entry, now: float
    ) -> tuple[Entry, list[Event], dict[Ident, Memory]]:
        members = self._members.current
        memories = {ident(row.node): self._memory(ident(row.node)) for row in rows}
        peers = [row for (node, _), row in self._latest.items() if node in members]
        history = self._store.earlier_values(probing.run, rows)
        judged = judge_probe(rows, peers, memories, history)
        for each in judged:
            key = ident(each.row.node)
            fresh = [f for f in each.memory.findings if f not in each.row.findings]
            self._store.record_findings(probing.run, *each.row.key, fresh)
            self._remember(each.row)
            self.tally.open_faults[key] = sum(
                f.state == "confirmed" and f.severity != "info" for f in each.memory.findings
            )
        noises = [each.noise for each in judged if each.noise is not None]
        entry = schedule.ended(
            self._policy,
            entry,
            probing.depth,
            now,
            "restless" if any(each.restless for each in judged) else "quiet",
            noise=max(noises, default=None),
            look_again=any(each.fresh for each in judged),
        )
        events = [told for each in judged for told in each.events]
        return entry, events, {ident(each.row.node): each.memory for each in judged}

    def _keep_interrupted(self) -> None:
        """Charge what the cancelled probes took; their nodes are due again when a watch resumes."""
        now = self._clock()
        for probing in self._prober.running.values():
            entry = self._entries[probing.member.identity]
            entry = replace(entry, due={**entry.due, probing.depth: now})
            charge = Charge(probing.started, probing.seconds)
            self._store.begin_probe(probing.name, charge, entry)

    def _memory(self, key: Ident) -> Memory:
        if key not in self._memories:
            self._memories[key] = self._store.memory(*key)
        return self._memories[key]

    def _remember(self, row: Row) -> None:
        """The latest of each reading: what one probe could not read keeps its last good value."""
        self._seen.row(row)
        old = self._latest.pop(ident(row.node), None)  # the newest is at the end
        if old is not None:
            fingerprint = Fingerprint(old.fingerprint)
            for reading in row.fingerprint.values():
                if isinstance(reading, Measurement) or reading.name not in fingerprint:
                    fingerprint.add(reading)
            row = replace(
                row,
                fingerprint=fingerprint,
                plan=row.plan or old.plan,
                ramp=row.ramp or old.ramp,
            )
        self._latest[ident(row.node)] = row

    # -- events -----------------------------------------------------------------------------------

    def _marked(self, told: Event) -> tuple[Event, bool]:
        wanted = self._notify and told["event"] in NOTIFIED
        if wanted and told["event"] in ("confirmed", "cleared"):
            wanted = told["finding"]["severity"] != "info"
        return told, wanted

    def _tell_all(self, events: Sequence[Event]) -> None:
        self._show(self._store.tell([self._marked(e) for e in events]))

    def _show(self, told: Sequence[Mapping[str, Any]]) -> None:
        for record in told:
            self._tell(record)


def _place(node: ClusterNode, identity: str) -> tuple[str, str, str]:
    return identity, node.host, node.address


def _record(member: Member) -> NodeRecord:
    return NodeRecord(
        member.identity,
        member.node.host or member.node.address,
        member.node.address,
        simulated=member.hello.get("simulated") is True,
    )
