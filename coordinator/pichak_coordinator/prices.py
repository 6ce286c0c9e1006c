"""What machines cost an hour: a price list from a TOML file or from a cluster's node labels.

A price is given, not measured, and its source says so. What has no price has none: it is never 0.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pichak_coordinator.records import Row
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import CONSTANT, Value, format_number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Dollars an hour for a whole node, by identity or by host name.
Prices = Mapping[str, float]

#: A Ray node label with the price of the whole node: ``ray start --labels KEY=2.50``.
PRICE_LABEL = "pichak.io/price-per-hour"
CURRENCY_LABEL = "pichak.io/currency"

DEFAULT_CURRENCY = "USD"
_TABLES = ("hosts", "nodes", "devices")
_MOST_BYTES = 1_000_000
_METRIC = "price_per_hour"
#: Prices an hour, in any currency. What is outside is a slip of the pen; its products fill lines.
LEAST_PRICE, MOST_PRICE = 1e-6, 1e9


class PriceError(ValueError):
    """A price list that cannot be used: what, where, and what to do."""


@dataclass(frozen=True)
class PriceBook:
    """Prices an hour. `hosts` and `nodes` are for a whole machine, by host name and by identity;
    `devices` are for one device, by its model. `origin` names where they are from."""

    hosts: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, float] = field(default_factory=dict)
    devices: Mapping[str, float] = field(default_factory=dict)
    currency: str = DEFAULT_CURRENCY
    origin: str = "given"

    def __bool__(self) -> bool:
        return bool(self.hosts or self.nodes or self.devices)

    @property
    def symbol(self) -> str:
        """How the currency is written: ``$``, else its code."""
        return "$" if self.currency == DEFAULT_CURRENCY else self.currency

    def money(self, amount: float) -> str:
        """An amount as a person reads it: ``$1.25``, ``EUR 1.25``."""
        space = "" if self.symbol == "$" else " "
        return f"{self.symbol}{space}{format_number(amount)}"

    def whole_node(self, row: Row) -> Value | None:
        """The price an hour of the row's whole machine; None where only devices are priced."""
        node = row.node
        for table, what, name in (
            (self.nodes, "node", node.node),
            (self.hosts, "host", node.host),
            (self.hosts, "host", node.alias),
        ):
            if name and name in table:
                return self._value(table[name], f"{self.origin}, {what} {name}")
        return self._labelled(row)

    def one_device(self, row: Row) -> Value | None:
        """The price an hour of the row's device by its model; None where there is none."""
        named = {name.casefold(): name for name in self.devices}
        for model in (row.node.model, row.node.device_name):
            name = named.get(model.casefold()) if model else None
            if name is not None:
                return self._value(self.devices[name], f"{self.origin}, each {name}")
        return None

    def price(self, row: Row, devices: int = 1) -> Value | Unmeasured:
        """The price an hour of a row: its device's share of the machine's price, which the
        machine's `devices` rows share alike, else the price of its model."""
        whole = self.whole_node(row)
        if whole is not None:
            if devices == 1:
                return whole
            share = f"{whole.source}: {self.money(float(whole))} shared by {devices} devices"
            return self._value(float(whole) / devices, share.removeprefix(f"{CONSTANT}: "))
        own = self.one_device(row)
        if own is not None:
            return own
        return Unmeasured(_METRIC, Reason.NOT_ASKED, "no price is given for it")

    def unknown(self, rows: Sequence[Row]) -> list[str]:
        """A sentence for each entry that none of the rows goes by: a typing error, or a machine
        that was not there."""
        known = {
            "hosts": {n for r in rows for n in (r.node.host, r.node.alias) if n},
            "nodes": {r.node.node for r in rows},
            "devices": {n.casefold() for r in rows for n in (r.node.model, r.node.device_name)},
        }
        told = []
        for table, entries in zip(_TABLES, (self.hosts, self.nodes, self.devices), strict=True):
            for name in entries:
                wanted = name.casefold() if table == "devices" else name
                if wanted not in known[table]:
                    told.append(
                        f"{self.origin}: no {table[:-1]} {name!r} in this run{_hint(name, rows)}"
                    )
        return told

    def _labelled(self, row: Row) -> Value | None:
        text = row.node.labels.get(PRICE_LABEL)
        if text is None:
            return None
        currency = row.node.labels.get(CURRENCY_LABEL, DEFAULT_CURRENCY)
        try:
            amount = float(text)
        except ValueError:
            amount = math.nan
        # A label is whatever the node's owner wrote: one that is no price is no price.
        if not LEAST_PRICE <= amount <= MOST_PRICE or currency != self.currency:
            return None
        return self._value(amount, f"the Ray node label {PRICE_LABEL}")

    def _value(self, amount: float, source: str) -> Value:
        text = source if source.startswith(CONSTANT) else f"{CONSTANT}: {source}"
        return Value(float(amount), text, unit=f"{self.symbol}/h")


#: No list was given: labels, where the cluster has them, are all there is.
NO_PRICES = PriceBook()


def book_of(prices: PriceBook | Prices | None) -> PriceBook:
    """A price list from plain prices of whole nodes, by identity or host name.

    `ValueError` for a price that is not a positive number.
    """
    if isinstance(prices, PriceBook):
        return prices
    checked = {
        name: _amount(price, f"the price of {name}") for name, price in (prices or {}).items()
    }
    return PriceBook(hosts=checked, nodes=checked)


def load_prices(path: Path) -> PriceBook:
    """The price list in a TOML file; `PriceError` says what is wrong with it and where.

    ``currency = "EUR"`` (default USD), and the tables ``[hosts]``, ``[nodes]`` and ``[devices]``
    of ``"name" = price an hour``.
    """
    record = _read(path)
    known = ("currency", *_TABLES)
    for name in record:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PriceError(
                f"{path}: {name!r} is none of currency, [hosts], [nodes] and [devices]{hint}"
            )
    currency = record.get("currency", DEFAULT_CURRENCY)
    if not isinstance(currency, str) or not (currency.isalpha() and len(currency) == 3):
        raise PriceError(f"{path}: currency is {currency!r}; write its code, such as 'EUR'")
    tables: dict[str, dict[str, float]] = {}
    for table in _TABLES:
        entries = record.get(table, {})
        if not isinstance(entries, dict):
            raise PriceError(
                f"{path}: {table} is {entries!r}; write a table, [{table}], with a line for each"
            )
        tables[table] = {
            name: _amount(price, f"{path}: [{table}] {name!r}") for name, price in entries.items()
        }
    book = PriceBook(**tables, currency=currency.upper(), origin=path.name)
    if not book:
        raise PriceError(f'{path}: it holds no price; write [hosts] and "NAME" = 2.50, in $/h')
    folded = [name.casefold() for name in book.devices]
    twice = next((name for name in book.devices if folded.count(name.casefold()) > 1), None)
    if twice is not None:
        raise PriceError(f"{path}: [devices] {twice!r} is there twice but for its capitals")
    return book


def with_default_currency(book: PriceBook, rows: Sequence[Row]) -> PriceBook:
    """The same list; an empty one takes the currency of the rows' labels, where they have one."""
    named = {r.node.labels.get(CURRENCY_LABEL, "") for r in rows if PRICE_LABEL in r.node.labels}
    if book or len(named) != 1 or "" in named:
        return book
    return replace(book, currency=named.pop().upper())


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise PriceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise PriceError(f"{path}: more than {_MOST_BYTES:,} bytes; is it a price list?")
    try:
        record: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PriceError(f"{path}: not UTF-8 text (byte {error.start:,})") from error
    except ValueError as error:  # also a number of more digits than Python reads
        raise PriceError(f'{path}: not TOML: {error}; a line reads "gpu-01" = 2.50') from error
    return record


def _amount(price: Any, where: str) -> float:
    if isinstance(price, dict):
        raise PriceError(f'{where} is a table; a name with a dot needs quotes: "a.example" = 2.50')
    if isinstance(price, bool) or not isinstance(price, (int, float)):
        raise PriceError(f"{where} is {price!r}, not a positive number an hour")
    if not price > 0 or price == math.inf:
        raise PriceError(
            f"{where} is {_shown(price)}, not a positive number an hour; leave out what has no "
            "price"
        )
    if not LEAST_PRICE <= price <= MOST_PRICE:
        raise PriceError(
            f"{where} is {_shown(price)}, which is no machine's price an hour: prices from "
            f"{LEAST_PRICE:g} to {MOST_PRICE:,.0f} are taken"
        )
    return float(price)


def _shown(price: int | float) -> str:
    if isinstance(price, int) and price.bit_length() > 64:  # Python may refuse to print it
        return f"a number of {price.bit_length():,} bits"
    return repr(price)


def _hint(name: str, rows: Sequence[Row]) -> str:
    names = {n for r in rows for n in (r.node.host, r.node.node, r.node.model) if n}
    close = difflib.get_close_matches(name, sorted(names), 1)
    return f" (there is {close[0]!r})" if close else ""
