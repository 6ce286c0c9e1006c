"""The watch: probes a cluster's nodes on their schedule and tells what changes, until it is ended.

The schedule is `watch_agenda`'s, a probe `watch_probe`'s, its meaning `watch_court`'s; this is the
loop around them. Whatever it must remember is in the store before it acts on it, so that it may be
ended at any point, also by ``kill -9``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_coordinator import schedule
from pichak_coordinator.cluster import Cluster, ClusterNode
from pichak_coordinator.dispatch import Dispatcher
from pichak_coordinator.records import WHOLE, Finding, NodeRecord
from pichak_coordinator.schedule import Charge, Entry, Policy, Probe
from pichak_coordinator.store_prune import KEEP_DAYS
from pichak_coordinator.watch_agenda import DECIDE_SECONDS, Agenda
from pichak_coordinator.watch_court import Court, Sentence
from pichak_coordinator.watch_events import NOTIFIED, Event, event
from pichak_coordinator.watch_members import LOOK_SECONDS, Member, Members
from pichak_coordinator.watch_peers import Ident
from pichak_coordinator.watch_probe import Prober, Probing, Requests
from pichak_coordinator.watch_store import WatchStore
from pichak_coordinator.watch_view import NodeView, Seen, WatchView, open_findings, sure_faults

_THREADS = 32
#: A cluster that starts together with its watch may need so long until everybody is there.
_ABSENT_SECONDS = 120.0


@dataclass
class Tally:
    """What a watch did, and what it left open: `open_faults`, confirmed and not cleared, of the
    cluster's nodes, and `silent`, how many of these gave nothing when they were last asked; whether
    this watch probed them or found them not due."""

    probes: int = 0
    measured: int = 0
    failed: int = 0
    busy: int = 0
    seconds: float = 0.0
    waiting_for_budget: int = 0
    interrupted: bool = False
    open_faults: dict[Ident, int] = field(default_factory=dict)
    silent: int = 0


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
        self._store, self._clock = store, clock
        self._say, self._tell, self._notify = say, tell, notify
        self._pool = ThreadPoolExecutor(_THREADS)
        self._members = Members(cluster, dispatcher, store, self._pool, say)
        self._prober = Prober(
            requests, cluster, dispatcher, store, self._pool, self._on_over, device
        )
        self._agenda = Agenda(policy, store, say, keep_days)
        self._court = Court(store)
        self._rounds: dict[str, Probing] = {}
        self._looked_at_members = float("-inf")
        self._absent: dict[str, dict[str, Any]] = {}
        self._seen, self._view, self._shown, self._began = Seen(), show, float("-inf"), clock()
        self.tally = Tally()

    def run(self, *, once: bool = False, until: Callable[[], bool] = lambda: False) -> Tally:
        """Watch until `until` says so, or for one round with `once`: whoever is due now, and the
        second looks that follow. Ctrl-C ends it; what was measured is kept."""
        self._agenda.open(self._clock(), once=once)
        self._absent = self._store.members()
        try:
            with self._prober.courier.open():
                try:
                    self._loop(once, until)
                except KeyboardInterrupt:
                    self.tally.interrupted = True
                    self._say("interrupted: cancelling the probes, keeping what was measured")
                    self._prober.interrupt()
                    self._keep_interrupted()
            self._count_open()
        finally:
            self._agenda.close_run()
            self._members.settle()
            self._pool.shutdown(wait=False, cancel_futures=True)
        return self.tally

    def _loop(self, once: bool, until: Callable[[], bool]) -> None:
        first_round = once
        while True:
            now = self._clock()
            self._look_at_members(now, first_round)
            self._agenda.look(now)
            if self._view is not None and not 0 <= now - self._shown < DECIDE_SECONDS:
                self._shown = now
                self._view(self.view(now))
            if once and first_round and self._members.settled:
                first_round = False
            if self._absent and not once and now - self._began >= _ABSENT_SECONDS:
                self._tell_absent()
            stopping = until()
            if not stopping and not first_round and self._agenda.due(now):
                self._decide(now)
            idle = not self._prober.running
            if idle and (stopping or (once and not first_round and self._nothing_now(now))):
                self.tally.waiting_for_budget = self._agenda.decision.waiting_for_budget
                if once:
                    self._tell_absent()
                return
            self._prober.step()

    def _nothing_now(self, now: float) -> bool:
        """For one round: nothing can be begun, after everything that was begun has ended."""
        self._decide(now)
        if not self._prober.running:
            for node, sentence in self._court.judge_round(self._members.current):
                probing = self._rounds[node]
                entry = replace(self._agenda.entries[node], again=probing.depth)
                self._keep(probing, entry, sentence)
            self._decide(now)
        return not self._prober.running

    def _decide(self, now: float) -> None:
        members = self._members.current
        running = {probing.member.identity for probing in self._prober.running.values()}
        for probe in self._agenda.decide(now, members, running):
            self._begin(members[probe.node], probe, now)

    def _begin(self, member: Member, probe: Probe, now: float) -> None:
        name, run = self._agenda.begin(probe, now)
        self._say(f"{_record(member).label}: {probe.depth} probe ({probe.reason})")
        self._prober.begin(Probing(name, run, member, probe.depth, now))

    def _count_open(self) -> None:
        members = self._members.current
        found = self._open_findings()
        self.tally.open_faults = {key: n for key, some in found.items() if (n := sure_faults(some))}
        failing = sum(e.failing for node, e in self._agenda.entries.items() if node in members)
        self.tally.silent = failing + len(self._members.silent)

    def _open_findings(self) -> dict[Ident, tuple[Finding, ...]]:
        members = self._members.current
        return open_findings(
            {key: self._court.memory(key) for key in self._seen.rows if key[0] in members},
            {name: member.found for name, member in members.items()},
        )

    def view(self, now: float) -> WatchView:
        """What the watch is like at this moment."""
        members = self._members.current
        rows = {key: row for key, row in self._seen.rows.items() if key[0] in members}
        here = [_view(m.node, m.identity, True, m.hello) for m in members.values()]
        here += [
            _view(node, self._store.node_at(node.address, node.host) or "", False, {})
            for node in self._members.silent
        ]
        return WatchView(
            turned_unix=now,
            began_unix=self._began,
            nodes=self._seen.nodes(here, now),
            rows=rows,
            findings=self._open_findings(),
            entries={node: e for node, e in self._agenda.entries.items() if node in members},
            measured_unix=dict(self._seen.measured_unix),
            running=len(self._prober.running),
            waiting_for_budget=self._agenda.decision.waiting_for_budget,
            budget_seconds=self._agenda.policy.budget_seconds,
            charged_seconds=schedule.charged(self._agenda.charges.values(), now),
            probe_seconds=self.tally.seconds,
            probes=dict(self._seen.probes),
            jobs=dict(self._prober.ended),
        )

    # -- nodes ------------------------------------------------------------------------------------

    def _look_at_members(self, now: float, eager: bool) -> None:
        pause = 0.0 if eager or not self._members.settled else LOOK_SECONDS
        if 0 <= now - self._looked_at_members < pause:
            return
        self._looked_at_members = now
        moves = self._members.look(now)
        for member in moves.left:
            self._seen.left(_view(member.node, member.identity, False, member.hello), now)
            self._tell_all([event("left", _record(member), "is no longer in the cluster")])
        for node, why in moves.silent:
            identity = self._store.node_at(node.address, node.host) or ""
            self._absent.pop(identity, None)
            record = NodeRecord(identity, node.host, node.address, WHOLE, simulated=node.simulated)
            self._tell_all([event("probe_failed", record, why)])
        if not moves.joined:
            return
        joined = [member.identity for member in moves.joined]
        self._agenda.joined(
            [(member.identity, member.devices) for member in moves.joined], now, at_once=eager
        )
        for member in moves.joined:
            self._welcome(member)
        for row in self._store.latest_rows(joined):
            self._seen.row(row)
            self._court.remember(row)
        self._seen.measured_unix |= self._store.last_measured(joined)

    def _welcome(self, member: Member) -> None:
        events: list[Event] = []
        if self._absent.pop(member.identity, None) is None:
            events.append(event("joined", _record(member), "is in the cluster"))
        for finding in member.found:
            text = f"{finding.severity} {finding.code}: {finding.sentence}"
            events.append(
                event("confirmed", _record(member), text, finding=finding.as_dict(), change=None)
            )
        self._tell_all(events)

    def _tell_absent(self) -> None:
        """Who was in the cluster when the last watch looked, and is not any more."""
        gone, self._absent = self._absent, {}
        self._tell_all(
            [
                event(
                    "left",
                    NodeRecord(
                        node, told["host"], device=WHOLE, simulated=told.get("simulated") is True
                    ),
                    "is no longer in the cluster: it left while no watch looked",
                )
                for node, told in gone.items()
            ]
        )

    # -- ends -------------------------------------------------------------------------------------

    def _on_over(self, probing: Probing) -> None:
        now = self._clock()
        node = probing.member.identity
        before = entry = self._agenda.entries[node]
        sentence = Sentence()
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
            sentence = self._court.judge(probing.run, rows, self._members.current)
            for row in rows:
                self._seen.row(row)
            entry = self._judged(probing, entry, sentence, now)
            if before.failing and not probing.failures:
                sentence.events.insert(0, event("probe_works", record, "could be probed again"))
        elif probing.busy:
            self.tally.busy += 1
            if not entry.retries:
                sentence.events.append(event("busy", record, probing.busy[0]))
            entry = schedule.ended(self._agenda.policy, entry, probing.depth, now, "busy")
        else:
            self.tally.failed += 1
            if not entry.failing:
                why = "; ".join(dict.fromkeys(probing.failures)) or "it gave no reading"
                text = f"the {probing.depth} probe failed: {why}"
                sentence.events.append(event("probe_failed", record, text))
            entry = schedule.ended(self._agenda.policy, entry, probing.depth, now, "failed")
        self._rounds[node] = probing
        self._court.probed(node, probing.run, rows)
        self._keep(probing, entry, sentence)

    def _judged(self, probing: Probing, entry: Entry, sentence: Sentence, now: float) -> Entry:
        return schedule.ended(
            self._agenda.policy,
            entry,
            probing.depth,
            now,
            "restless" if sentence.restless else "quiet",
            noise=sentence.noise,
            look_again=sentence.fresh,
        )

    def _keep(self, probing: Probing, entry: Entry, sentence: Sentence) -> None:
        """All that a probe came to, in the store at once, and then told."""
        charge = Charge(probing.started, probing.seconds)
        told = self._store.end_probe(
            *(probing.name, charge, entry, sentence.memories),
            [self._marked(e) for e in sentence.events],
        )
        self._agenda.ended(probing.name, charge, entry)
        self._court.keep(sentence.memories)
        self._show(told)

    def _keep_interrupted(self) -> None:
        now = self._clock()
        for probing in self._prober.running.values():
            charge = Charge(probing.started, probing.seconds)
            node = probing.member.identity
            self._agenda.interrupted(probing.name, charge, node, probing.depth, now)

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


def _view(node: ClusterNode, identity: str, reachable: bool, hello: Mapping[str, Any]) -> NodeView:
    simulated = node.simulated or hello.get("simulated") is True
    return NodeView(identity, node.host, node.address, reachable, simulated)


def _record(member: Member) -> NodeRecord:
    """The node as a whole."""
    return NodeRecord(
        member.identity,
        member.node.host or member.node.address,
        member.node.address,
        WHOLE,
        simulated=member.hello.get("simulated") is True,
    )
