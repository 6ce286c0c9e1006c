"""What training costs on a row, from its price and its measured speed. Pure.

cost of a million scored tokens = price an hour ÷ (scored tokens/s × 3600) × 10⁶
hours of an epoch               = rows of the file ÷ rows/s ÷ 3600
cost of an epoch                = hours of an epoch × price an hour
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pichak_coordinator.prices import PriceBook
from pichak_coordinator.records import Row
from pichak_coordinator.speed import plan_number, rows_per_second, scored_speed
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import Value, format_number

Figure = Value | Unmeasured


@dataclass(frozen=True)
class Economics:
    """A row's price and what follows from it, each with its source or the reason why it is not
    known. A cost rests on a price, which nobody measured: its source says so."""

    price_per_hour: Figure
    cost_per_million_scored_tokens: Figure
    hours_per_epoch: Figure
    cost_per_epoch: Figure

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {name: figure.as_dict() for name, figure in self.__dict__.items()}


def economics(row: Row, book: PriceBook, devices: int = 1) -> Economics:
    """Of one row, whose machine has `devices` rows that share its price."""
    price = book.price(row, devices)
    hours = _hours(row)
    return Economics(price, _per_million(row, price, book), hours, _epoch(price, hours, book))


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """Price ÷ (tokens/s × 3600 s/h) × 10⁶."""
    return price_per_hour / (tokens_per_second * 3600) * 1e6


def number(figure: Figure) -> float | None:
    """A figure as a cell of a table: None where it is not known."""
    return float(figure) if isinstance(figure, Value) else None


def _per_million(row: Row, price: Figure, book: PriceBook) -> Figure:
    name, speed = "cost_per_million_scored_tokens", scored_speed(row)
    if isinstance(price, Unmeasured):
        return Unmeasured(name, price.reason, price.detail)
    if speed is None:
        return Unmeasured(name, Reason.FAILED, "its speed in scored tokens was not measured")
    rate = f"{format_number(speed.tokens_per_second)} scored tokens/s (measured)"
    return Value(
        cost_per_million(float(price), speed.tokens_per_second),
        f"{format_number(float(price))} {price.unit} ÷ {rate}; the price: {price.source}",
        unit=f"{book.symbol}/M scored",
    )


def _hours(row: Row) -> Figure:
    name = "hours_per_epoch"
    total, rate = plan_number(row.plan, "rows_total"), rows_per_second(row)
    if not rate:
        return Unmeasured(name, Reason.FAILED, "its step time was not measured")
    if not total:
        return Unmeasured(name, Reason.NOT_ASKED, "the rows were not counted (--data)")
    rows = f"{format_number(int(total))} rows ÷ {format_number(rate)} rows/s"
    return Value(total / rate / 3600, f"{rows}, counted and measured", unit="h")


def _epoch(price: Figure, hours: Figure, book: PriceBook) -> Figure:
    if isinstance(price, Unmeasured):
        return Unmeasured("cost_per_epoch", price.reason, price.detail)
    if isinstance(hours, Unmeasured):
        return Unmeasured("cost_per_epoch", hours.reason, hours.detail)
    return Value(
        float(price) * float(hours),
        f"{format_number(float(price))} {price.unit} × {format_number(float(hours))} h "
        f"({hours.source}); the price: {price.source}",
        unit=f"{book.symbol}/epoch",
    )
