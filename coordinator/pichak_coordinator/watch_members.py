"""The nodes of a watched cluster as they come and go, each known by its stable identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pichak_coordinator.agent_findings import from_agent
from pichak_coordinator.cluster import Cluster, ClusterNode
from pichak_coordinator.dispatch import Dispatcher
from pichak_coordinator.identity import gpu_uuids, machine_key, node_identities
from pichak_coordinator.records import Finding
from pichak_coordinator.remains import Remains
from pichak_coordinator.watch_store import COMMAND, WatchStore

LOOK_SECONDS = 10.0
_AGENT_SECONDS = 60.0
#: The first wait before an agent that could not be started is tried again; doubled each time.
_RETRY_SECONDS = 60.0
_LONGEST_RETRY_SECONDS = 3600.0
#: How long jobs that an earlier coordinator left may take to bring their outcome home.
_SETTLE_SECONDS = 60.0


@dataclass
class Member:
    """A node with an agent that answered. `found`: what its arrival said (GPUs that changed)."""

    node: ClusterNode
    hello: Mapping[str, Any]
    identity: str
    found: list[Finding] = field(default_factory=list)

    @property
    def devices(self) -> int:
        """On how many devices it is probed."""
        return max(1, self.node.gpus)


@dataclass
class Moves:
    """What one look saw. `silent`: nodes whose agent cannot be had, with the sentence why."""

    joined: list[Member] = field(default_factory=list)
    left: list[Member] = field(default_factory=list)
    silent: list[tuple[ClusterNode, str]] = field(default_factory=list)


@dataclass
class _Asked:
    node: ClusterNode
    future: Future[dict[str, dict[str, Any] | str]] | None = None
    tries: int = 0
    not_before: float = 0.0


class Members:
    """Looks at the cluster now and then; agents are started in threads, so that one that hangs
    keeps nobody waiting."""

    def __init__(
        self,
        cluster: Cluster,
        dispatcher: Dispatcher,
        store: WatchStore,
        pool: ThreadPoolExecutor,
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._dispatcher, self._store = cluster, dispatcher, store
        self._pool = pool
        self._remains = Remains(dispatcher, store, say)
        self._settle_at: float | None = None
        self._by_ray_id: dict[str, Member] = {}
        self._asked: dict[str, _Asked] = {}

    @property
    def current(self) -> dict[str, Member]:
        """Identity -> member."""
        return {member.identity: member for member in self._by_ray_id.values()}

    @property
    def silent(self) -> list[ClusterNode]:
        """Nodes of the cluster whose agent could not be had."""
        return [asked.node for asked in self._asked.values() if asked.tries]

    @property
    def settled(self) -> bool:
        """No agent is being started."""
        return not any(asked.future for asked in self._asked.values())

    def look(self, now: float) -> Moves:
        """Who is there now that was not, and the reverse. Never waits."""
        alive = {
            node.node_id: node for node in self._cluster.nodes() if node.alive and not node.left_out
        }
        moves = Moves()
        for ray_id in [i for i in self._by_ray_id if i not in alive]:
            moves.left.append(self._by_ray_id.pop(ray_id))
        for ray_id in [i for i in self._asked if i not in alive]:
            del self._asked[ray_id]
        answered: list[tuple[ClusterNode, dict[str, Any]]] = []
        for ray_id, node in alive.items():
            if ray_id in self._by_ray_id:
                continue
            asked = self._asked.setdefault(ray_id, _Asked(node))
            if asked.future is None and now >= asked.not_before:
                asked.future = self._pool.submit(
                    self._dispatcher.start_agents, [node], _AGENT_SECONDS
                )
            elif asked.future is not None and asked.future.done():
                answer = asked.future.result()[ray_id]
                asked.future = None
                if not isinstance(answer, str):
                    place = {"address": node.address, "host": node.host, "node_id": ray_id}
                    answered.append((node, {**answer, **place}))
                    continue
                wait = min(_LONGEST_RETRY_SECONDS, _RETRY_SECONDS * 2.0 ** min(asked.tries, 10))
                asked.not_before, asked.tries = now + wait, asked.tries + 1
                if asked.tries == 1:
                    moves.silent.append((node, answer))
        moves.joined = self._take(answered, now)
        if self._settle_at is not None and now >= self._settle_at:
            self.settle()
        return moves

    def forget(self, ray_id: str) -> None:
        """It is not who it was (its GPUs changed): it joins anew at the next look."""
        self._by_ray_id.pop(ray_id, None)

    def _take(self, answered: list[tuple[ClusterNode, dict[str, Any]]], now: float) -> list[Member]:
        if not answered:
            return []
        machines = {machine_key(hello) for _, hello in answered}
        # Agents of one machine are told apart among themselves; who has a name keeps it.
        old = [m for m in self._by_ray_id.values() if machine_key(m.hello) in machines]
        given = {member.identity: member.hello for member in old}
        new = node_identities([hello for _, hello in answered], given)
        run = self._store.begin_run(COMMAND, {"depth": "none"})
        hellos = [*(dict(member.hello) for member in old), *(hello for _, hello in answered)]
        self._store.record_nodes(run, hellos, [*given, *new])
        self._store.finish_run(run)
        found = self._store.findings(run)
        joined: list[Member] = []
        for (node, hello), name in zip(answered, new, strict=True):
            # What its agent saw comes with its probes.
            said = [f for f in found.get((name, ""), []) if not from_agent(f)]
            member = Member(node, hello, name, said)
            self._by_ray_id[node.node_id] = member
            self._asked.pop(node.node_id, None)
            joined.append(member)
        self._remains.collect(node.node_id for node, _ in answered)
        if self._settle_at is None:
            # The first to answer: what is open now was left by a watch or a profile that is gone.
            self._remains.end_open_jobs({m.identity: m.node.node_id for m in joined})
            self._settle_at = now + _SETTLE_SECONDS
        return joined

    def settle(self) -> None:
        """Give jobs of coordinators that went away their final state."""
        self._settle_at = float("inf")
        self._remains.settle(self._by_ray_id)


def same_node(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two hellos are of the same machine with the same GPUs."""
    return machine_key(one) == machine_key(other) and gpu_uuids(one) == gpu_uuids(other)
