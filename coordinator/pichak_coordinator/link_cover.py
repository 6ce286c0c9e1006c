"""How many of the links that a pick could use were measured, and what that makes of its answer.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pichak_coordinator.stored_links import StoredLinks
from pichak_core.plan import format_number

#: Among what a team is the best: every set; the sets that a ring of measured links joins; every
#: set, but by the members' own parts alone, as the all-reduce is not known.
Compared = Literal["every_set", "measured_links", "own_parts"]


@dataclass(frozen=True)
class Cover:
    """Of the pairs among `machines` machines that could be picked, `measured` have a link."""

    machines: int
    measured: int

    @classmethod
    def of(cls, nodes: Sequence[str], links: StoredLinks) -> Cover:
        """Of these identities, each once."""
        known = set(nodes)
        return cls(len(known), sum(1 for a, b in links.links if a in known and b in known))

    @property
    def pairs(self) -> int:
        return self.machines * (self.machines - 1) // 2

    @property
    def complete(self) -> bool:
        return self.measured >= self.pairs

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"machines": self.machines, "pairs": self.pairs, "measured": self.measured}

    @property
    def count(self) -> str:
        """In words."""
        pairs, measured = format_number(self.pairs), format_number(self.measured)
        have = "has" if self.measured == 1 else "have"
        return (
            f"of the {pairs} {'pair' if self.pairs == 1 else 'pairs'} among the {self.machines} "
            f"machines that could be picked, {measured} {have} a measured link"
        )

    def describe(self, *, assumed: bool) -> str:
        """What is known of the links, what was done about the others, and what to do."""
        if assumed:
            return f"{self.count}; for the others the rate of --assume-link-mbit is taken"
        return (
            f"{self.count}; sets that no ring of measured links joins were left out, though they "
            "may be faster: measure with `pichak net --pairs all` (--nodes A,B,… for some of "
            "them), or declare a rate with --assume-link-mbit"
        )
