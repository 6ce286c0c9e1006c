"""Which n devices to train on together, at which pace, and what holds them back. Pure.

A synchronous step takes as long as the slowest member's own part (`members`) and then the ring
all-reduce of the gradient over the links between them (`ring_time`); where an all-reduce over just
these machines was measured, its time. Overlap of the two is not assumed: the step may be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pichak_coordinator.economics import Figure
from pichak_coordinator.eligible import barred, too_few, unmeasured, unpriced
from pichak_coordinator.link_cover import Compared, Cover
from pichak_coordinator.members import Member, gradient_of, members_of, rows_of_step
from pichak_coordinator.prices import PriceBook, with_default_currency
from pichak_coordinator.records import Row
from pichak_coordinator.ring_time import Link, ring_seconds, ring_steps
from pichak_coordinator.set_search import Answer, By, Device, Problem, search
from pichak_coordinator.stored_links import StoredLinks
from pichak_coordinator.team import Team, bottleneck, cautions, cost, epoch, epoch_cost, together
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import CONSTANT, Value, format_number

#: Prices whose sources a sentence names.
_NAMED = 8


class CannotPickError(ValueError):
    """There is no such set: what is missing, and what to do."""


@dataclass(frozen=True)
class Wish:
    """What is asked for. `gradient_bytes`, `batch_rows` and `assumed`, the link taken where none
    was measured, are the user's own numbers. `allow` names rows that may be picked with a confirmed
    fault ("all" for any), `without` rows that may not be picked: by host, label or identity."""

    count: int
    by: By = "speed"
    gradient_bytes: int | None = None
    batch_rows: int | None = None
    assumed: Link | None = None
    allow: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


def pick_many(rows: Sequence[Row], links: StoredLinks, prices: PriceBook, wish: Wish) -> Team:
    """The best `wish.count` devices of these rows; `CannotPickError` says why there are none."""
    book = with_default_currency(prices, rows)
    field_ = _Field.of(rows, links, book, wish)
    return field_.team()


@dataclass
class _Field:
    """Who may be picked, by machine, and what is known for all of them."""

    wish: Wish
    links: StoredLinks
    book: PriceBook
    machines: list[list[Member]]
    batch: Value
    gradient: Value | None
    left_out: list[str]
    notes: list[str] = field(default_factory=list)
    #: Among what the answer is the best, as `_search` finds.
    compared: Compared = "every_set"

    @classmethod
    def of(cls, rows: Sequence[Row], links: StoredLinks, book: PriceBook, wish: Wish) -> _Field:
        members, rest = members_of(rows)
        left_out = [unmeasured(row, any(m.scored for m in members)) for row in rest]
        sound: list[Member] = []
        for member in members:
            why = barred(member, wish) or unpriced(member, book, wish)
            if why:
                left_out.append(f"{member.label}: {why}")
            else:
                sound.append(member)
        if len(sound) < wish.count:
            raise CannotPickError(too_few(len(sound), len(rows), wish.count, left_out))
        batch = rows_of_step(sound, wish.batch_rows)
        if batch is None:
            raise CannotPickError(
                "no plan holds a target for the tokens of a step (profile with --data), so that "
                "nobody's share is known; give --batch-rows, the rows of one optimizer step"
            )
        by_machine: dict[str, list[Member]] = {}
        for member in sorted(sound, key=lambda m: (m.row.node.host, m.row.key)):
            by_machine.setdefault(member.row.node.node, []).append(member)
        gradient = gradient_of(sound, wish.gradient_bytes)
        return cls(wish, links, book, list(by_machine.values()), batch, gradient, left_out)

    @property
    def rows_each(self) -> int:
        return math.ceil(int(self.batch) / self.wish.count)

    def node(self, machine: int) -> str:
        return self.machines[machine][0].row.node.node

    def name(self, machine: int) -> str:
        node = self.machines[machine][0].row.node
        return node.alias or node.host or node.node

    @cached_property
    def cover(self) -> Cover:
        return Cover.of([self.node(machine) for machine in range(len(self.machines))], self.links)

    def between(self, one: int, other: int) -> Link | None:
        """The link that a ring would use: measured, else assumed where the user said so."""
        return self.links.between(self.node(one), self.node(other)) or self.wish.assumed

    def team(self) -> Team:
        count = self.wish.count
        answer = self._search()
        chosen = tuple(self.machines[m][d] for m, d in answer.devices)
        ring = self._ring(answer)
        reduce, slowest = self._reduce(answer, ring)
        compute = self._compute(chosen)
        rows = count * self.rows_each
        per_row = sum(m.tokens_per_row for m in chosen) / count
        tokens = Value(rows * per_row, "counted", unit="tokens")
        step, pace = together(compute, reduce, tokens, chosen[0].scored)
        price = self._price(chosen)
        hours = epoch(chosen, self.rows_each, step)
        best = max((m for some in self.machines for m in some), key=lambda m: m.tokens_per_second)
        self.notes += cautions(chosen, len(answer.ring), best, pace)
        return Team(
            chosen,
            self.rows_each,
            self.wish.by,
            compute,
            reduce,
            step,
            pace,
            price,
            cost(price, pace, self.book),
            hours,
            epoch_cost(price, hours, self.book),
            bottleneck(chosen, self.rows_each, compute, reduce, slowest),
            answer.gap,
            ring,
            tuple(self._constants(ring)),
            tuple(self.notes),
            tuple(self.left_out),
            self.book.currency,
            self.compared,
            self.cover if count > 1 else None,
        )

    # -- the search -------------------------------------------------------------------------------

    def _search(self) -> Answer:
        count, assumed = self.wish.count, self.wish.assumed is not None
        if count > 1 and self.gradient is None:
            self.compared = "own_parts"
            self.notes.append(
                "the all-reduce is not predicted: the plans do not say how large the gradient is "
                "(a profile of this version counts it); give --gradient-mib"
            )
        elif count > 1:
            found = search(self._problem(with_links=True))
            if not self.cover.complete:
                self.compared = "every_set" if assumed else "measured_links"
                self.notes.append(self.cover.describe(assumed=assumed))
            if found is not None:
                return found
            self.compared = "own_parts"
            self.notes = [
                f"the all-reduce is not predicted: no ring of measured links joins {count} of "
                f"these devices ({self.cover.count}), and what was not measured is not assumed; "
                "measure with `pichak net --pairs all`, or declare a rate with --assume-link-mbit"
            ]
        found = search(self._problem(with_links=False))
        if found is None:
            raise CannotPickError(f"there are no {count} devices to pick")
        return found

    def _problem(self, *, with_links: bool) -> Problem:
        wish, size = self.wish, len(self.machines)
        links: dict[tuple[int, int], float] = {}
        other: float | None = 0.0
        if with_links and self.gradient is not None:
            gradient = int(self.gradient)
            place = {self.node(machine): machine for machine in range(size)}
            for (a, b), link in self.links.links.items():
                if a in place and b in place:
                    pair = (min(place[a], place[b]), max(place[a], place[b]))
                    links[pair] = link.step_seconds(gradient, wish.count)
            assumed = wish.assumed
            other = assumed.step_seconds(gradient, wish.count) if assumed else None
        prices = [self.book.whole_node(some[0].row) for some in self.machines]
        return Problem(
            [
                [Device(m.step_seconds(self.rows_each), self._own_price(m)) for m in some]
                for some in self.machines
            ],
            links,
            wish.count,
            ring_steps(wish.count) if with_links else 0,
            wish.by,
            [float(price) if price is not None else 0.0 for price in prices],
            other,
        )

    def _own_price(self, member: Member) -> float:
        """What the device costs beside its machine."""
        if self.book.whole_node(member.row) is not None:
            return 0.0
        own = self.book.one_device(member.row)
        return float(own) if own is not None else 0.0

    # -- what is predicted ------------------------------------------------------------------------

    def _ring(self, answer: Answer) -> tuple[tuple[str, str, Link], ...]:
        """(from, to, link) around the ring; empty where one of them is not known."""
        order = answer.ring
        if len(order) < 2:
            return ()
        ways = list(zip(order, [*order[1:], order[0]], strict=True))
        if len(order) == 2:
            ways = ways[:1]
        found = [(self.name(a), self.name(b), self.between(a, b)) for a, b in ways]
        known = [(a, b, link) for a, b, link in found if link is not None]
        return tuple(known) if len(known) == len(ways) else ()

    def _reduce(
        self, answer: Answer, ring: Sequence[tuple[str, str, Link]]
    ) -> tuple[Figure, tuple[str, str, Link] | None]:
        """(seconds of the all-reduce, the link that sets them)."""
        count = self.wish.count
        if count == 1:
            return Value(0.0, "one device reduces nothing", unit="s"), None
        if self.gradient is None:
            return Unmeasured("reduce_seconds", Reason.NOT_ASKED, "gradient size unknown"), None
        gradient = int(self.gradient)
        size = f"{format_number(gradient / 2**20)} MiB"
        measured = self.links.reduced.get(frozenset(self.node(m) for m in answer.ring))
        timed = measured.seconds(gradient) if measured is not None else None
        if measured is not None and timed is not None and len(answer.ring) == count:
            source = f"all-reduce over these {count} machines, run {measured.run}: {timed[1]}"
            return Value(timed[0], f"{source}; {size}", unit="s"), None
        if len(answer.ring) == 1:
            why = "all on one machine, and copies inside it are not modelled"
            return Unmeasured("reduce_seconds", Reason.NOT_ASKED, why), None
        if not ring:
            return Unmeasured("reduce_seconds", Reason.NOT_ASKED, "links not measured"), None
        seconds = ring_seconds(gradient, count, [link for _, _, link in ring])
        slowest = max(ring, key=lambda way: way[2].step_seconds(gradient, count))
        a, b, link = slowest
        text = (
            f"a ring's 2 × ({count} − 1) steps of {size} ÷ {count} over its slowest link, {a} – "
            f"{b}: {link.describe()} ({link.source})"
        )
        sure = all(link.measured for _, _, link in ring)
        return Value(seconds, text if sure else f"{CONSTANT} in part: {text}", unit="s"), slowest

    def _compute(self, chosen: Sequence[Member]) -> Value:
        slowest = max(chosen, key=lambda m: m.step_seconds(self.rows_each))
        return Value(
            slowest.step_seconds(self.rows_each),
            f"the slowest member, {slowest.label}: {slowest.describe(self.rows_each)}",
            unit="s",
        )

    def _price(self, chosen: Sequence[Member]) -> Figure:
        total, sources = 0.0, []
        for node in dict.fromkeys(m.row.node.node for m in chosen):
            mine = [m for m in chosen if m.row.node.node == node]
            whole = self.book.whole_node(mine[0].row)
            parts = [whole] if whole is not None else [self.book.one_device(m.row) for m in mine]
            for part in parts:
                if part is None:
                    why = f"no price is given for {mine[0].label}"
                    return Unmeasured("price_per_hour", Reason.NOT_ASKED, why)
                total += float(part)
                sources.append(part.source.removeprefix(f"{CONSTANT}: "))
        named = list(dict.fromkeys(sources))
        more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        where = "; ".join(named[:_NAMED]) + more
        text = f"{CONSTANT}: the sum over machines, each whole, and devices: {where}"
        return Value(total, text, unit=f"{self.book.symbol}/h")

    def _constants(self, ring: Sequence[tuple[str, str, Link]]) -> list[tuple[str, Value]]:
        made = [("batch_rows", self.batch)]
        if self.gradient is not None and self.wish.count > 1:
            made.append(("gradient_bytes", self.gradient))
        assumed = [(a, b, k) for a, b, k in ring if not k.measured]
        for a, b, link in assumed:
            made.append((f"link {a} – {b}", Value(link.mb_s, link.source, unit="MB/s")))
        return [(name, value) for name, value in made if not value.measured]
