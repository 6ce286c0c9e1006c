"""The network test of a fleet from end to end: agents, links, all-reduce, and what is kept of it.

Shared by ``pichak net`` and ``pichak fleet profile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pichak_coordinator.cluster import Cluster, ClusterNode, Lease
from pichak_coordinator.dispatch import Dispatcher
from pichak_coordinator.links import LinkMatrix, Pairs
from pichak_coordinator.net_collective import BUS, Backend, Collective, all_reduce
from pichak_coordinator.net_desk import Desk
from pichak_coordinator.net_jobs import NetNode, named
from pichak_coordinator.net_run import NetRun
from pichak_coordinator.netfinding import NetFinding
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target
from pichak_core.measure import Depth
from pichak_core.measurement import Reason, Unmeasured

#: What is all-reduced where nobody says how large the gradient is.
DEFAULT_GRADIENT_BYTES = 64 * 2**20

#: A profile tests every link of so many nodes (five rounds of about 9 s), and a ring of more.
PROFILE_ALL_UP_TO = 6


@dataclass(frozen=True)
class NetRequest:
    """What is asked of a network test. `collective`: all-reduce too."""

    depth: Depth = "quick"
    pairs: Pairs = "auto"
    collective: bool = True
    backend: Backend | None = None
    gradient_bytes: int = DEFAULT_GRADIENT_BYTES

    def settings(self) -> dict[str, Any]:
        """What is kept with the run."""
        return dict(self.__dict__)


@dataclass
class NetReport:
    """What came of it. `skipped`: links that were not chosen; `interrupted`: Ctrl-C ended it."""

    nodes: list[NetNode]
    matrix: LinkMatrix
    findings: list[NetFinding] = field(default_factory=list)
    not_repeated: list[NetFinding] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    collective: Collective | None = None
    gradient_bytes: int = DEFAULT_GRADIENT_BYTES
    interrupted: bool = False

    @property
    def measured(self) -> bool:
        """Whether anything is known of any link."""
        return bool(self.matrix.reach)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "nodes": [
                {
                    "name": node.name,
                    "node": node.identity,
                    "host": node.node.host,
                    "address": node.node.address,
                    "error": node.error or None,
                }
                for node in self.nodes
            ],
            "reach": [reach.as_dict() for reach in self.matrix.reach.values()],
            "links": self.matrix.as_dicts(),
            "findings": [each.as_dict() for each in self.findings],
            "not_repeated": [each.as_dict() for each in self.not_repeated],
            "gaps": list(self.gaps),
            "collective": self.collective.as_dict(self.matrix, self.gradient_bytes)
            if self.collective
            else None,
        }


def run_network(
    request: NetRequest,
    cluster: Cluster,
    dispatcher: Dispatcher,
    store: Store,
    run_id: str,
    nodes: Sequence[tuple[ClusterNode, str]],
    say: Callable[[str], None],
) -> NetReport:
    """Test the network between `nodes`, (Ray node, identity) each with an agent that answered.

    Ctrl-C ends it with what was measured.
    """
    desk = Desk(dispatcher, store, run_id, say)
    run = NetRun(desk, named(nodes), request.depth, request.pairs)
    report = NetReport(run.nodes, run.matrix, gradient_bytes=request.gradient_bytes)
    try:
        run.run()
        if request.collective:
            report.collective = _collective(request, cluster, desk, run)
    except KeyboardInterrupt:
        report.interrupted = True
        say("interrupted: cancelling the jobs, keeping what was measured")
        for ended in dispatcher.cancel_all():
            desk.record(ended)
    report.matrix, report.findings = run.matrix, run.findings
    report.not_repeated, report.gaps = run.not_repeated, [*_one_machine(run.nodes), *run.gaps]
    if report.collective is not None:
        report.gaps += report.collective.gaps
    _keep_findings(store, run_id, run.nodes, run.findings)
    return report


def start_agents(
    dispatcher: Dispatcher, store: Store, run_id: str, nodes: Sequence[ClusterNode]
) -> tuple[list[tuple[ClusterNode, str]], list[str]]:
    """Agents on the nodes, recorded in the run: (node, identity) of each that answered, and a
    sentence for each that did not."""
    hellos = dispatcher.start_agents(nodes)
    answered: list[tuple[ClusterNode, dict[str, Any]]] = []
    gaps: list[str] = []
    for node in nodes:
        hello = hellos[node.node_id]
        place = {"address": node.address, "host": node.host}
        if isinstance(hello, str):
            gaps.append(f"{node.host or node.address}: {hello}")
            store.record_node(run_id, place, error=hello)
        elif hello.get("simulated"):
            gaps.append(f"{node.host}: simulated, so it has no network that could be measured")
        else:
            answered.append((node, {**hello, **place, "node_id": node.node_id}))
    names = store.record_nodes(run_id, [hello for _, hello in answered])
    return [(node, name) for (node, _), name in zip(answered, names, strict=True)], gaps


def _one_machine(nodes: Sequence[NetNode]) -> list[str]:
    """A sentence for each address that several nodes have: no wire lies between them."""
    by_address: dict[str, list[str]] = {}
    for node in nodes:
        by_address.setdefault(node.node.address, []).append(node.name)
    return [
        f"{', '.join(names)} share the address {address}: the links between them are a machine's "
        "loopback and not a network"
        for address, names in by_address.items()
        if len(names) > 1
    ]


def network_of_profile(
    wanted: bool | None,
    only: Sequence[str],
    cluster: Cluster,
    dispatcher: Dispatcher,
    store: Store,
    run_id: str,
    targets: Sequence[Target],
    say: Callable[[str], None],
) -> NetReport | None:
    """The network test at the end of a profile, over the nodes whose agents answered; None where
    there is none.

    Without a wish (`wanted` None) it is run when there are two machines or more, with addresses of
    their own, and no choice of measurements left it out; then all links of up to
    `PROFILE_ALL_UP_TO` nodes are tested, and a ring of more.
    """
    nodes = {
        t.node.node_id: (t.node, t.identity)
        for t in targets
        if t.hello and not t.hello.get("simulated")
    }
    addresses = {node.address for node, _ in nodes.values()}
    if wanted is None:
        wanted = len(addresses) == len(nodes) and (not only or "network" in only)
    if not wanted or len(nodes) < 2:
        return None
    pairs: Pairs = "all" if len(nodes) <= PROFILE_ALL_UP_TO else "ring"
    request = NetRequest(pairs=pairs)
    return run_network(request, cluster, dispatcher, store, run_id, list(nodes.values()), say)


def _collective(request: NetRequest, cluster: Cluster, desk: Desk, run: NetRun) -> Collective:
    cut_off = {
        node
        for each in run.findings
        if each.finding.code in ("node_unreachable", "address_behind_nat")
        for node in each.nodes
    }
    able = [node for node in run.nodes if not node.error and node.name not in cut_off]
    left_out = [
        f"{node.name}: left out of the all-reduce" for node in run.nodes if node not in able
    ]
    for pair in [pair for pair, reach in run.matrix.reach.items() if not reach.open]:
        # Of two that do not reach each other one can take part.
        able = [n for n in able if n.name != pair[1] or not any(m.name == pair[0] for m in able)]
    left_out = [
        f"{node.name}: left out of the all-reduce ({node.error or 'not every node reaches it'})"
        for node in run.nodes
        if node not in able
    ]
    gpus = bool(able) and all(node.node.gpus for node in able)
    backend = request.backend or ("nccl" if gpus else "gloo")
    leases: Mapping[str, Lease] | None = None
    held: list[Lease | None] = []
    try:
        if backend == "nccl" and len(able) > 1:
            held = cluster.lease_gpus([node.node.node_id for node in able])
            busy = [n.name for n, lease in zip(able, held, strict=True) if lease is None]
            if busy:
                why = f"Ray has leased the GPUs of {', '.join(busy)} to somebody else"
                names = tuple(node.name for node in able)
                return Collective(names, Unmeasured(BUS, Reason.BUSY, why), (), backend, left_out)
            leases = {n.name: lease for n, lease in zip(able, held, strict=True) if lease}
        made = all_reduce(
            desk,
            able,
            gradient_bytes=request.gradient_bytes,
            depth=request.depth,
            backend=backend,
            leases=leases,
        )
    finally:
        for lease in held:
            if lease is not None:
                lease.release()
    made.gaps[:0] = left_out
    return made


def _keep_findings(
    store: Store, run_id: str, nodes: Sequence[NetNode], findings: Sequence[NetFinding]
) -> None:
    identity = {node.name: node.identity for node in nodes}
    for each in findings:
        for name in each.nodes:
            store.record_findings(run_id, identity[name], "", [each.finding])
