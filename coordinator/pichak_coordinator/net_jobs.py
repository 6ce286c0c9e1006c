"""The jobs of a network test, and what is kept of them: addresses yes, secrets no. Pure but for the
secrets' randomness."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pichak_agent.messages import Job
from pichak_coordinator.cluster import ClusterNode
from pichak_core.measure import Depth
from pichak_core.measure._net_link import PLANS
from pichak_core.measure._net_wire import SESSION_BYTES, token_of

#: Two tests on one machine would disturb each other.
MACHINE_LOCK = "machine"
_SECRETS = frozenset({"key", "session", "token", "peers", "name"})
_PORT = re.compile(r" on port (\d{1,5})$")
#: Seconds over what a job measures: starting its process, connecting, buffers that run empty.
SLACK_SECONDS = 60.0
REACH_SECONDS = 60.0
LISTENER_IDLE_SECONDS = 180.0


@dataclass(eq=False)
class NetNode:
    """A node in a network test. `name` is what it alone is called; `port` is where its listener is,
    once it listens. `error` says why it takes no part (any more)."""

    node: ClusterNode
    identity: str
    name: str
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    port: int = 0
    error: str = ""

    @property
    def metric_name(self) -> str:
        """Its name as a part of a metric's."""
        return metric_name(self.name)

    def door(self) -> dict[str, Any]:
        """What a client needs for one session with its listener; made anew for each."""
        session = secrets.token_bytes(SESSION_BYTES)
        return {
            "peer": self.metric_name,
            "address": self.node.address,
            "port": self.port,
            "session": session.hex(),
            "token": token_of(self.key, session).hex(),
        }


def named(nodes: Sequence[tuple[ClusterNode, str]]) -> list[NetNode]:
    """(node, identity) with names that differ."""
    names = names_of([(node.host, node.address) for node, _ in nodes])
    return [
        NetNode(node, identity, name) for (node, identity), name in zip(nodes, names, strict=True)
    ]


def names_of(places: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each (host, address) of a test: host names, else addresses, else numbered ones."""
    hosts = Counter(host or address for host, address in places)
    addresses = Counter(address for _, address in places)
    made = []
    for number, (host, address) in enumerate(places, 1):
        name = host or address
        if hosts[name] == 1:
            made.append(name)
        elif addresses[address] == 1:
            made.append(address)
        else:
            made.append(f"{name}-{number}")
    return made


def metric_name(name: str) -> str:
    """A node's name as a part of a metric's."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def listen_job(job_id: str, node: NetNode, seconds: float) -> Job:
    """Listen until it is cancelled, and no longer than `seconds`."""
    params = {
        "address": node.node.address,
        "key": node.key.hex(),
        "seconds": seconds,
        "idle_seconds": LISTENER_IDLE_SECONDS,
    }
    return Job(job_id, 1, "net_listen", params, seconds + SLACK_SECONDS, lock="")


def reach_job(job_id: str, peers: Sequence[NetNode]) -> Job:
    """Open a connection to each peer."""
    params = {"peers": [peer.door() for peer in peers]}
    return Job(job_id, 1, "net_reach", params, REACH_SECONDS, lock="")


def link_job(job_id: str, client: NetNode, server: NetNode, depth: Depth) -> Job:
    """Measure the link from `client` to `server`."""
    params = {**server.door(), "own": client.metric_name, "depth": depth}
    limit = PLANS[depth].seconds + SLACK_SECONDS
    return Job(job_id, 1, "net_link", params, limit, lock=MACHINE_LOCK)


def without_secrets(job: Job) -> Job:
    """The job as the store may keep it."""
    kept = {name: value for name, value in job.params.items() if name not in _SECRETS}
    return replace(job, params=kept)


def port_in(progress: str) -> int:
    """The port that a progress line tells; 0 when it tells none."""
    match = _PORT.search(progress)
    return int(match.group(1)) if match and int(match.group(1)) < 65536 else 0


def reach_answers(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Peer -> answer of a reach job's result; empty when it has none."""
    answers = result.get("reach")
    return answers if isinstance(answers, Mapping) else {}
