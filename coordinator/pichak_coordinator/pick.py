"""Which node to train on, and why. Pure.

The best measured speed in scored tokens, or the least cost where prices are known. A confirmed
fault is never picked silently, a tie within the noise goes to the lower risk, and where nothing was
measured nothing is picked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pichak_coordinator.economics import cost_per_million
from pichak_coordinator.prices import PriceBook, Prices, book_of, with_default_currency
from pichak_coordinator.records import Row
from pichak_coordinator.speed import UNKNOWN_NOISE, Speed, processed_speed, scored_speed
from pichak_core.measurement import Measurement
from pichak_core.plan import Value, format_number

By = Literal["speed", "cost"]

#: Two speeds closer than this many standard errors of their difference are a tie.
TIE_SIGMAS = 2.0


@dataclass(frozen=True)
class Pick:
    """The answer. `node` is None when there is nothing to pick from; `sentence` says why.

    `by` is what decided, `tied` the labels of those that were as good within the noise, and
    `passed_over` those that were better but have a confirmed fault.
    """

    sentence: str
    node: str | None = None
    device: str | None = None
    host: str = ""
    by: By = "speed"
    tokens_per_second: float | None = None
    scored: bool = True
    cost_per_million: float | None = None
    currency: str = "USD"
    tied: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form: ``comparison.pick`` of SPEC 8."""
        return {
            "node": self.node,
            "device": self.device,
            "host": self.host,
            "by": self.by,
            "tokens_per_second": self.tokens_per_second,
            "scored": self.scored,
            "cost_per_million_scored_tokens": self.cost_per_million,
            "currency": self.currency,
            "tied": list(self.tied),
            "passed_over": list(self.passed_over),
            "why": self.sentence,
        }


@dataclass(frozen=True)
class _Candidate:
    row: Row
    speed: Speed
    price: float | None

    @property
    def label(self) -> str:
        return self.row.node.label

    @property
    def faults(self) -> list[str]:
        return [f.code for f in self.row.findings if f.fault]

    @property
    def cost(self) -> float | None:
        """Money per million tokens."""
        if self.price is None:
            return None
        return cost_per_million(self.price, self.speed.tokens_per_second)

    def merit(self, by: By) -> float:
        """More is better: tokens a second, or tokens a dollar."""
        rate = self.speed.tokens_per_second
        return rate / self.price if by == "cost" and self.price else rate

    @property
    def risk(self) -> tuple[int, ...]:
        """Less is better: faults, warnings and suspicions, an error, suspect readings."""
        found = [(f.severity, f.state) for f in self.row.findings]
        suspect = sum(
            isinstance(r, Measurement) and bool(r.suspect) for r in self.row.fingerprint.values()
        )
        return (
            found.count(("fail", "confirmed")),
            found.count(("warn", "confirmed")),
            found.count(("fail", "suspected")),
            found.count(("warn", "suspected")),
            int(bool(self.row.error)),
            suspect,
        )


def price_of(row: Row, book: PriceBook, devices: int = 1) -> float | None:
    """The price an hour of this row, whose node has `devices` rows; None where none is given."""
    price = book.price(row, devices)
    return float(price) if isinstance(price, Value) else None


def pick(
    rows: Sequence[Row], *, prices: PriceBook | Prices | None = None, by: By | None = None
) -> Pick:
    """One device to train on; several devices of a node are not added up, for nobody measured that.

    `by` is "cost" where at least one measured row has a price, else "speed"; rows without a price
    cannot win by cost, which is said. Speeds are in scored tokens where any row has them: a row
    without is then no candidate, for the two cannot be compared. `ValueError` for "cost" without
    any price, and for a price that is not positive.
    """
    known = with_default_currency(book_of(prices), rows)
    devices = Counter(row.node.node for row in rows)
    use_scored = any(scored_speed(row) for row in rows)
    candidates = [
        _Candidate(row, speed, price_of(row, known, devices[row.node.node]))
        for row in rows
        if (speed := scored_speed(row) if use_scored else processed_speed(row))
    ]
    if not candidates:
        return Pick(_nothing(rows), by=by or "speed")
    priced = [c for c in candidates if c.price is not None]
    if by == "cost" and not priced:
        raise ValueError("no measured node has a price, so none is the cheapest; give its price")
    way: By = by or ("cost" if priced else "speed")
    field = priced if way == "cost" else candidates
    sound = [c for c in field if not c.faults] or field
    best = max(c.merit(way) for c in sound)
    leader = next(c for c in sound if c.merit(way) == best)
    tied = [c for c in sound if c is leader or _as_good(c, leader, way)]
    # `min` takes the first of equals: order by merit, then by name, so that input order is nothing.
    tied.sort(key=lambda c: (-c.merit(way), c.row.key))
    chosen = min(tied, key=lambda c: c.risk)
    better = [c for c in field if c.faults and not chosen.faults and c.merit(way) > best]
    unpriced = len(candidates) - len(field)
    return Pick(
        _sentence(chosen, tied, better, sound, way, unpriced, known),
        chosen.row.node.node,
        chosen.row.node.device,
        chosen.row.node.host,
        way,
        chosen.speed.tokens_per_second,
        chosen.speed.scored,
        chosen.cost if chosen.speed.scored else None,
        known.currency,
        tuple(c.label for c in tied if c is not chosen),
        tuple(c.label for c in better),
    )


def _as_good(one: _Candidate, leader: _Candidate, by: By) -> bool:
    """Within `TIE_SIGMAS` standard errors of the difference of the two step times."""
    noise = math.hypot(*(_noise(c) for c in (one, leader)))
    return one.merit(by) >= leader.merit(by) * (1 - TIE_SIGMAS * noise)


def _noise(candidate: _Candidate) -> float:
    noise = candidate.speed.noise
    return UNKNOWN_NOISE / math.sqrt(2) if noise is None else noise


def _nothing(rows: Sequence[Row]) -> str:
    if not rows:
        return "Nothing to pick from: no node answered."
    failed = sum(row.failed for row in rows)
    why = f" ({failed} of {len(rows)} failed)" if failed else ""
    return f"Nothing to pick from: no node's training speed was measured{why}."


def _sentence(
    chosen: _Candidate,
    tied: Sequence[_Candidate],
    better: Sequence[_Candidate],
    sound: Sequence[_Candidate],
    by: By,
    unpriced: int,
    book: PriceBook,
) -> str:
    speed = f"{format_number(chosen.speed.tokens_per_second)} {chosen.speed.unit}"
    cost = ""
    if by == "cost" and chosen.cost is not None:
        tokens = "scored tokens" if chosen.speed.scored else "tokens"
        cost = f"{book.money(chosen.cost)} per million {tokens}"
    others = [c for c in tied if c is not chosen]
    measure = f"{cost} at {speed}" if cost else speed
    if others:
        names = _listed([c.label for c in others])
        text = f"Pick {chosen.label}: {measure}, as good as {names} within the noise"
        riskier = [c for c in others if c.risk > chosen.risk]
        text += ", and with less against it" if len(riskier) == len(others) else ""
    elif len(sound) > 1:
        second = max((c for c in sound if c is not chosen), key=lambda c: c.merit(by))
        lead = chosen.merit(by) / second.merit(by) - 1
        ahead = f"{lead:.0%} more for the money than" if cost else f"{lead:.0%} faster than"
        text = f"Pick {chosen.label}: {measure}, {ahead} {second.label}"
    else:
        text = f"Pick {chosen.label}: {measure}, the only one " + (
            "with a price and a measured speed" if unpriced else "whose training speed was measured"
        )
        text += "" if not better else " and that has no confirmed fault"
    if better:
        told = _listed([f"{c.label} ({', '.join(c.faults)})" for c in better])
        text += f"; passed over for a confirmed fault: {told}"
    if chosen.faults:
        text += f"; beware, it has a confirmed fault itself: {', '.join(chosen.faults)}"
    if unpriced and by == "cost":
        text += f"; {unpriced} without a price left out"
    return f"{text}."


def _listed(names: Sequence[str]) -> str:
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
