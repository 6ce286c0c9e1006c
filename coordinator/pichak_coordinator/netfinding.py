"""A finding about a network: which nodes it is about, and which link, if it is one's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pichak_coordinator.records import Finding


@dataclass(frozen=True)
class NetFinding:
    """`nodes` are those it is about, a link's two in their order; `link` is (source, target) or
    (client, server), None where no single link is meant."""

    nodes: tuple[str, ...]
    finding: Finding
    link: tuple[str, str] | None = None

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        """What makes two findings the same one, seen twice."""
        return self.nodes, *self.finding.key

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "nodes": list(self.nodes),
            "link": list(self.link) if self.link else None,
            **self.finding.as_dict(),
        }
