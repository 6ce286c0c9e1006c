"""What a running watch shows of itself: kept as it goes, and handed out as one picture at a time.

The watch's thread writes here, and makes a `WatchView` now and then; whoever reads that, in
whichever thread, sees one moment of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pichak_coordinator.records import Finding, Row
from pichak_coordinator.schedule import Entry
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_peers import Ident, ident

#: How long a node that left is shown as unreachable. Then it is forgotten: machines are given back.
GONE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class NodeView:
    """A node of the cluster, or one that left it lately. `node` is "" where its agent never
    answered; `reachable`: its agent answers."""

    node: str
    host: str
    address: str
    reachable: bool
    simulated: bool = False


@dataclass(frozen=True)
class WatchView:
    """A watch at one moment; times are Unix seconds of its clock.

    `rows` hold the newest reading of each metric, measured or not; `measured_unix` when each node's
    depths last gave one. `budget_seconds` is the hour's, None without a limit, `charged_seconds`
    what the last hour holds of it. `probes` and `jobs` count ends since the watch began: of probes
    by depth and end (measured, busy, failed), of jobs by kind and final state.
    """

    turned_unix: float
    began_unix: float
    nodes: tuple[NodeView, ...] = ()
    rows: Mapping[Ident, Row] = field(default_factory=dict)
    findings: Mapping[Ident, tuple[Finding, ...]] = field(default_factory=dict)
    entries: Mapping[str, Entry] = field(default_factory=dict)
    measured_unix: Mapping[tuple[str, str], float] = field(default_factory=dict)
    running: int = 0
    waiting_for_budget: int = 0
    budget_seconds: float | None = None
    charged_seconds: float = 0.0
    probe_seconds: float = 0.0
    probes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    jobs: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Seen:
    """What a watch saw so far, as far as a view needs it and the watch itself does not."""

    def __init__(self) -> None:
        self.rows: dict[Ident, Row] = {}
        self.measured_unix: dict[tuple[str, str], float] = {}
        self.probes: Counter[tuple[str, str]] = Counter()
        self.jobs: Counter[tuple[str, str]] = Counter()
        self._gone: dict[str, tuple[float, NodeView]] = {}

    def row(self, row: Row) -> None:
        """A device's newest row: what it says replaces what was read before, and what it does not
        read stays."""
        old = self.rows.pop(ident(row.node), None)
        if old is not None:
            row = replace(
                row,
                fingerprint=type(row.fingerprint)({**old.fingerprint, **row.fingerprint}),
                plan=row.plan or old.plan,
                ramp=row.ramp or old.ramp,
            )
        self.rows[ident(row.node)] = row

    def probe(self, node: str, depth: str, end: str, now: float) -> None:
        """A probe ended: measured, busy or failed."""
        self.probes[depth, end] += 1
        if end == "measured":
            self.measured_unix[node, depth] = now

    def left(self, node: NodeView, now: float) -> None:
        """A node is no longer in the cluster."""
        self._gone[node.node] = (now, replace(node, reachable=False))

    def nodes(self, present: Iterable[NodeView], now: float) -> tuple[NodeView, ...]:
        """Those that are there, and those that left lately."""
        found = list(present)
        here = {node.node for node in found}
        self._gone = {
            name: (since, node)
            for name, (since, node) in self._gone.items()
            if name not in here and since > now - GONE_SECONDS
        }
        return (*found, *(node for _, node in self._gone.values()))


def open_findings(
    memories: Mapping[Ident, Memory], of_nodes: Mapping[str, Iterable[Finding]]
) -> dict[Ident, tuple[Finding, ...]]:
    """(node, device) -> what is open; what concerns a whole node is under device ""."""
    made = {key: memory.findings for key, memory in memories.items() if memory.findings}
    return made | {(node, ""): tuple(some) for node, some in of_nodes.items() if some}


def sure_faults(findings: Iterable[Finding]) -> int:
    """How many of them are confirmed, and more than for information."""
    return sum(f.state == "confirmed" and f.severity != "info" for f in findings)
