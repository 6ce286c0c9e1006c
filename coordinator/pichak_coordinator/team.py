"""A team of devices and what is predicted of it: a step, its pace, its cost, what holds it back.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pichak_coordinator.economics import Figure, cost_per_million
from pichak_coordinator.link_cover import Compared, Cover
from pichak_coordinator.members import Member
from pichak_coordinator.prices import PriceBook
from pichak_coordinator.records import NodeRecord
from pichak_coordinator.ring_time import Link
from pichak_coordinator.set_search import By
from pichak_coordinator.speed import plan_number
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import CONSTANT, Value, format_number

_GIVEN = "the price is given, not measured"


@dataclass(frozen=True)
class Team:
    """The picked members in ring order (rank 0 first), and what is predicted of them.

    `gap`: by which share a better set of those `compared` could be better; 0 where none can.
    `constants` are the numbers that nobody measured; `cover`: the links that were measured of
    those that could be used, None for one device.
    """

    members: tuple[Member, ...]
    rows_each: int
    by: By
    compute_seconds: Value
    reduce_seconds: Figure
    step_seconds: Figure
    tokens_per_second: Figure
    price_per_hour: Figure
    cost_per_million: Figure
    hours_per_epoch: Figure
    cost_per_epoch: Figure
    bottleneck: str
    gap: float
    ring: tuple[tuple[str, str, Link], ...] = ()
    constants: tuple[tuple[str, Value], ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    currency: str = "USD"
    compared: Compared = "every_set"
    cover: Cover | None = None

    def told(self, figure: Figure) -> Figure:
        """A figure of the whole team, whose source says so where any member is simulated."""
        return _marked(figure, any(member.row.node.simulated for member in self.members))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        simulated = {_name(m.row.node) for m in self.members if m.row.node.simulated}
        return {
            "by": self.by,
            "members": [
                {
                    "rank": rank,
                    "node": m.row.node.node,
                    "device": m.row.node.device,
                    "host": m.row.node.host,
                    "label": m.label,
                    "simulated": m.row.node.simulated,
                    "rows": self.rows_each,
                    "step_seconds": _marked(
                        Value(m.step_seconds(self.rows_each), m.describe(self.rows_each), unit="s"),
                        m.row.node.simulated,
                    ).as_dict(),
                    "findings": [finding.as_dict() for finding in m.row.findings],
                }
                for rank, m in enumerate(self.members)
            ],
            "compute_seconds": self.told(self.compute_seconds).as_dict(),
            "reduce_seconds": self.told(self.reduce_seconds).as_dict(),
            "step_seconds": self.told(self.step_seconds).as_dict(),
            "tokens_per_second": self.told(self.tokens_per_second).as_dict(),
            "price_per_hour": self.price_per_hour.as_dict(),
            "cost_per_million_tokens": self.told(self.cost_per_million).as_dict(),
            "hours_per_epoch": self.told(self.hours_per_epoch).as_dict(),
            "cost_per_epoch": self.told(self.cost_per_epoch).as_dict(),
            "currency": self.currency,
            "bottleneck": self.bottleneck,
            "best_possible_gap": self.gap,
            "compared": self.compared,
            "link_pairs": None if self.cover is None else self.cover.as_dict(),
            "ring": [
                {
                    "from": a,
                    "to": b,
                    "mb_s": k.mb_s,
                    "rtt_ms": k.rtt_ms,
                    "source": _simulated_source(k.source) if {a, b} & simulated else k.source,
                }
                for a, b, k in self.ring
            ],
            "constants": {name: value.as_dict() for name, value in self.constants},
            "notes": list(self.notes),
            "left_out": list(self.left_out),
        }


def _name(node: NodeRecord) -> str:
    """As the ring calls it."""
    return node.alias or node.host or node.node


def _marked(figure: Figure, simulated: bool) -> Figure:
    if not simulated or isinstance(figure, Unmeasured):
        return figure
    return replace(figure, source=_simulated_source(figure.source))


def _simulated_source(source: str) -> str:
    """One that says that it is; a constant stays one."""
    if source.startswith(CONSTANT):
        return f"{source}; of what is simulated"
    return source if source.startswith("simulated") else f"simulated: {source}"


def together(compute: Value, reduce: Figure, tokens: Value, scored: bool) -> tuple[Figure, Figure]:
    """(seconds of a step, tokens a second)."""
    if isinstance(reduce, Unmeasured):
        most = float(tokens) / float(compute)
        why = f"{reduce.detail}; without it, at most {format_number(most)} tokens/s"
        return (
            Unmeasured("step_seconds", reduce.reason, why),
            Unmeasured("tokens_per_second", reduce.reason, why),
        )
    seconds = float(compute) + float(reduce)
    mark = "" if reduce.measured else f"{CONSTANT} in part: "
    step = Value(
        seconds,
        f"{mark}{format_number(float(compute))} s of the slowest member + "
        f"{format_number(float(reduce))} s of all-reduce; less where the two overlap",
        unit="s",
    )
    what = "scored tokens" if scored else "tokens"
    pace = Value(
        float(tokens) / seconds,
        f"{mark}predicted: {format_number(float(tokens))} {what} of a step ÷ "
        f"{format_number(seconds)} s",
        unit=f"{what}/s",
    )
    return step, pace


def cost(price: Figure, pace: Figure, book: PriceBook) -> Figure:
    """Money for a million tokens at this pace."""
    name = "cost_per_million_tokens"
    if isinstance(price, Unmeasured):
        return Unmeasured(name, price.reason, price.detail)
    if isinstance(pace, Unmeasured):
        return Unmeasured(name, pace.reason, pace.detail)
    text = f"{format_number(float(price))} {price.unit} ÷ {format_number(float(pace))} {pace.unit}"
    unit = f"{book.symbol}/M {pace.unit.removesuffix('/s')}"
    return Value(cost_per_million(float(price), float(pace)), f"{text}; {_GIVEN}", unit=unit)


def epoch(chosen: Sequence[Member], rows_each: int, step: Figure) -> Figure:
    """Hours of one pass over the data: its rows in steps of this team."""
    totals = [total for m in chosen if (total := plan_number(m.row.plan, "rows_total"))]
    if not totals:
        return Unmeasured("hours_per_epoch", Reason.NOT_ASKED, "the rows were not counted (--data)")
    if isinstance(step, Unmeasured):
        return Unmeasured("hours_per_epoch", step.reason, step.detail)
    rows = rows_each * len(chosen)
    text = (
        f"{format_number(int(totals[0]))} rows ÷ {format_number(rows)} rows a step × "
        f"{format_number(float(step))} s"
    )
    mark = "" if step.measured else f"{CONSTANT} in part: "
    return Value(totals[0] / rows * float(step) / 3600, f"{mark}{text}", unit="h")


def epoch_cost(price: Figure, hours: Figure, book: PriceBook) -> Figure:
    """Money for one pass over the data."""
    if isinstance(price, Unmeasured):
        return Unmeasured("cost_per_epoch", price.reason, price.detail)
    if isinstance(hours, Unmeasured):
        return Unmeasured("cost_per_epoch", hours.reason, hours.detail)
    text = f"{format_number(float(price))} {price.unit} × {format_number(float(hours))} h"
    return Value(float(price) * float(hours), f"{text}; {_GIVEN}", unit=f"{book.symbol}/epoch")


def bottleneck(
    chosen: Sequence[Member],
    rows: int,
    compute: Value,
    reduce: Figure,
    slowest: tuple[str, str, Link] | None,
) -> str:
    """What sets the pace, in a sentence."""
    times = sorted(((m.step_seconds(rows), m.label) for m in chosen), reverse=True)
    if isinstance(reduce, Value) and float(reduce) > float(compute):
        share = float(reduce) / (float(reduce) + float(compute))
        where = f", set by {slowest[0]} – {slowest[1]}" if slowest is not None else ""
        return f"the network: the all-reduce is {share:.0%} of the step{where}"
    text = f"{times[0][1]}: its own part takes {format_number(times[0][0])} s"
    if len(times) > 1:
        text += f", the next slowest's ({times[1][1]}) {format_number(times[1][0])} s"
    if isinstance(reduce, Value) and float(reduce) > 0:
        share = float(reduce) / (float(reduce) + float(compute))
        text += f"; the all-reduce is {share:.0%} of the step"
    return text


def cautions(chosen: Sequence[Member], machines: int, best: Member, pace: Figure) -> list[str]:
    """What to know of the picked before they are used; `best` is the fastest device of all."""
    told = []
    for member in chosen:
        if member.faults:
            told.append(
                f"beware: {member.label} has a confirmed fault, and was let in: "
                f"{', '.join(member.faults)}"
            )
        findings = member.row.findings
        doubts = sorted({f.code for f in findings if not f.fault and f.severity != "info"})
        if doubts:
            told.append(f"{member.label} is not above suspicion: {', '.join(doubts)}")
        if member.row.error:
            told.append(f"{member.label}: part of its profile failed: {member.row.error}")
    if machines < len(chosen):
        told.append(
            "several of the devices are on one machine: each was measured alone; that they "
            "share its processor, memory and bus, and the copies between them, is not modelled"
        )
    if isinstance(pace, Value) and len(chosen) > 1 and float(pace) < best.tokens_per_second:
        told.append(
            f"{best.label} alone is faster: {format_number(best.tokens_per_second)} tokens/s"
        )
    return told
