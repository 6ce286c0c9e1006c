"""A network test over a fleet: listeners on every node, who reaches whom, the links in rounds, and
a second look at what seems wrong.

Every wait has its end, and a node that goes away costs its own links. Outcomes are in the store
before they count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pichak_coordinator import net_jobs
from pichak_coordinator.link_verdicts import confirmed, judge_links, to_look_at_again
from pichak_coordinator.links import LinkMatrix, Pair, Pairs, Reach, into_rounds, schedule
from pichak_coordinator.net_desk import Desk, Finished
from pichak_coordinator.net_jobs import NetNode
from pichak_coordinator.netfinding import NetFinding
from pichak_core.measure import Depth
from pichak_core.measure._net_link import PLANS
from pichak_core.measurement import Fingerprint, Reason

LISTEN_SECONDS = 60.0
#: Over the time that the links of a round measure.
_ROUND_SLACK_SECONDS = 45.0
_STOP_SECONDS = 10.0


@dataclass
class NetRun:
    """One network test of `nodes`; `desk` sends its jobs and keeps what comes back.

    After `run`: `matrix`, the `findings` of which those that a second probe saw again are
    confirmed, `not_repeated` that it did not, and `gaps`, a sentence each.
    """

    desk: Desk
    nodes: list[NetNode]
    depth: Depth = "quick"
    pairs: Pairs = "auto"
    matrix: LinkMatrix = field(default_factory=lambda: LinkMatrix(()))
    findings: list[NetFinding] = field(default_factory=list)
    not_repeated: list[NetFinding] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    _listening: dict[str, NetNode] = field(default_factory=dict)

    def run(self) -> None:
        """Test the links; what was measured stays when it is interrupted."""
        self.matrix = LinkMatrix(tuple(node.name for node in self.nodes))
        try:
            self._listen()
            self._reach(self.nodes)
            rounds = schedule([node.name for node in self._alive()], self.pairs)
            for pair in (pair for pairs in rounds for pair in pairs):
                self.matrix = self.matrix.with_gap(*pair, Reason.FAILED, _NOT_YET)
            self._test(rounds)
            self._look_again()
        finally:
            self._stop_listeners()

    def _alive(self) -> list[NetNode]:
        return [node for node in self.nodes if not node.error]

    def _named(self, name: str) -> NetNode:
        return next(node for node in self.nodes if node.name == name)

    # -- listeners --------------------------------------------------------------------------------

    def _listen(self) -> None:
        self.desk.say(f"{len(self.nodes)} nodes: starting a listener on each")
        rounds = len(schedule([n.name for n in self.nodes], self.pairs)) + 20
        seconds = rounds * (PLANS[self.depth].seconds + _ROUND_SLACK_SECONDS) + 600.0
        for node in self._alive():
            job = net_jobs.listen_job(self.desk.job_id("listen"), node, seconds)
            self.desk.submit(node, job)
            self._listening[job.job_id] = node
            self.desk.on_other[job.job_id] = self._on_listener
        end = self.desk.clock() + LISTEN_SECONDS
        while any(not node.port for node in self._alive()) and self.desk.clock() < end:
            self.desk.poll({})
            for job_id, text in self.desk.dispatcher.progress().items():
                if job_id in self._listening:
                    node = self._listening[job_id]
                    node.port = node.port or net_jobs.port_in(text)
        for node in self._alive():
            if not node.port:
                self._lose(node, f"its listener did not start within {LISTEN_SECONDS:g} s")

    def _lose(self, node: NetNode, why: str) -> None:
        if not node.error:
            node.error = why
            self.gaps.append(f"{node.name}: {why}")
            self.desk.say(f"{node.name}: {why}")

    def _on_listener(self, finished: Finished) -> None:
        node = self._listening[finished.job.job_id]
        self._lose(node, finished.error or "its listener ended too early")

    def _stop_listeners(self) -> None:
        """Their outcomes say how many strangers knocked; one that is slow to end is left to its own
        idle limit."""
        flying = {job_id: n for job_id, n in self._listening.items() if not n.error}
        for ended in self.desk.dispatcher.cancel_all(_STOP_SECONDS):
            node = flying.get(ended.job.job_id)
            finished = self.desk.record(ended)
            if node is None:
                continue
            # It was told to end: that is how it ends well.
            self.desk.store.set_job_state(ended.job.job_id, "done", attempt=ended.job.attempt)
            listener = finished.result.get("listener")
            strangers = listener.get("refused") if isinstance(listener, Mapping) else None
            if isinstance(strangers, int) and strangers > 0:
                self.gaps.append(
                    f"{node.name}: {strangers} connections that did not prove that they belong to "
                    "this test were closed unserved"
                )

    # -- reach ------------------------------------------------------------------------------------

    def _reach(self, clients: Sequence[NetNode]) -> None:
        self.desk.say("who can open a connection to whom")
        jobs: dict[str, NetNode] = {}
        for client in clients:
            peers = [node for node in self._alive() if node is not client]
            if client.error or not peers:
                continue
            job = net_jobs.reach_job(self.desk.job_id("reach"), peers)
            self.desk.submit(client, job)
            jobs[job.job_id] = client
        for job_id, finished in self.desk.settle(jobs, net_jobs.REACH_SECONDS).items():
            client = jobs[job_id]
            self.matrix = self.matrix.with_reach(self._answers(client, finished))
            if finished.lost:
                self._lose(client, finished.error)
            elif finished.error:
                self.gaps.append(f"{client.name}: reach: {finished.error}")

    def _answers(self, client: NetNode, finished: Finished) -> list[Reach]:
        by_metric_name = {node.metric_name: node.name for node in self.nodes}
        found = []
        for peer, answer in net_jobs.reach_answers(finished.result).items():
            if peer not in by_metric_name:
                continue
            try:
                found.append(Reach.from_job(client.name, by_metric_name[peer], answer))
            except ValueError as error:
                self.gaps.append(f"{client.name}: an answer was refused: {error}")
        return found

    # -- links ------------------------------------------------------------------------------------

    def _test(self, rounds: Sequence[Sequence[Pair]]) -> None:
        """Measure the links of these rounds, each from a side that can open it."""
        for number, pairs in enumerate(rounds, 1):
            jobs: dict[str, NetNode] = {}
            ways: dict[str, Pair] = {}
            for pair in pairs:
                way, why, reason = self._way(pair)
                if way is None:
                    self.matrix = self.matrix.with_gap(*pair, reason, why)
                    continue
                client, server = self._named(way[0]), self._named(way[1])
                job = net_jobs.link_job(self.desk.job_id("link"), client, server, self.depth)
                self.desk.submit(client, job)
                jobs[job.job_id], ways[job.job_id] = client, way
            if not jobs:
                continue
            self.desk.say(f"round {number} of {len(rounds)}: {len(jobs)} links")
            limit = _ROUND_SLACK_SECONDS + PLANS[self.depth].seconds * (1 + len(jobs))
            for job_id, finished in self.desk.settle(jobs, limit).items():
                self._take(ways[job_id], finished)

    def _way(self, pair: Pair) -> tuple[Pair | None, str, Reason]:
        """From which side a link can be opened, or why from neither."""
        for name in pair:
            lost = self._named(name).error
            if lost:
                return None, f"{name}: {lost}", Reason.LOST
        for client, server in (pair, pair[::-1]):
            reach = self.matrix.reach.get((client, server))
            if reach is not None and reach.open:
                return (client, server), "", Reason.FAILED
        reach = self.matrix.reach.get(pair)
        why = reach.why if reach is not None else "it was not tried"
        return None, f"no connection can be opened from either side: {why}", Reason.FAILED

    def _take(self, way: Pair, finished: Finished) -> None:
        client, server = way
        record = finished.result.get("fingerprint")
        try:
            readings = Fingerprint.from_dict(record) if isinstance(record, Mapping) else None
        except (ValueError, TypeError) as error:
            readings, finished.error = None, f"its readings were refused: {error}"
        if finished.lost:
            self._lose(self._named(client), finished.error)
        if finished.error:
            self.gaps.append(f"{client} → {server}: {finished.error}")
        elif finished.result.get("error"):
            self.gaps.append(f"{client} → {server}: {str(finished.result['error'])[:300]}")
        why = finished.error or "it was not measured"
        self.matrix = self.matrix.with_gap(client, server, Reason.FAILED, why)
        if readings:
            self.matrix = self.matrix.with_link(client, server, readings)

    def _look_again(self) -> None:
        first = self.findings = judge_links(self.matrix)
        if not first:
            return
        pairs = to_look_at_again(first, self.matrix)
        self.desk.say(f"{len(first)} suspicions; a second look at {len(pairs)} links")
        involved = {node for each in first for node in each.nodes}
        accused = {n for each in first if each.link is None for n in each.nodes}
        if any(each.finding.metric.endswith(_REACHES) for each in first):
            self._reach(self.nodes)
        else:
            self._reach([node for node in self.nodes if node.name in involved])
        before = self.matrix
        stale = [p for p in before.links if p in pairs or not accused.isdisjoint(p)]
        self.matrix = before.without(stale)
        try:
            self._test(into_rounds(pairs))
            again = judge_links(self.matrix)
        finally:
            self.matrix = _joined(self.matrix, before)
        self.findings = confirmed(first, again, judge_links(self.matrix))
        sure = {each.key for each in self.findings}
        for each in first:
            if each.key not in sure:
                groups = each.finding.code == _NOT_RETRIED
                (self.findings if groups else self.not_repeated).append(each)


_NOT_YET = "the test ended before it was its turn"
#: Says how the fleet lies and accuses nobody; it is not looked at again.
_NOT_RETRIED = "network_groups"
#: What metrics about opening connections end with.
_REACHES = ("reach", "reach_in", "reach_out", "address")


def _joined(newer: LinkMatrix, older: LinkMatrix) -> LinkMatrix:
    """Both probes' links, the newer reading of each."""
    return LinkMatrix(
        older.nodes,
        {**older.reach, **newer.reach},
        {**older.rtt, **newer.rtt},
        {**older.rate, **newer.rate},
        {**older.loss, **newer.loss},
    )
