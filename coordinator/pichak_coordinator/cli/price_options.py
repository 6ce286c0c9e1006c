"""``--prices`` and ``--by``, shared by ``fleet profile``, ``compare`` and ``pick``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pichak_coordinator.cli.common import UserError

if TYPE_CHECKING:
    from pichak_coordinator.prices import PriceBook
    from pichak_coordinator.records import Row

Command = TypeVar("Command", bound=Callable[..., Any])


def prices_option(command: Command) -> Command:
    """``--prices``: a TOML file; without it the price labels of Ray nodes, where there are any."""
    return click.option(
        "--prices",
        type=click.Path(path_type=Path),
        metavar="FILE.toml",
        help="What machines cost an hour: [hosts], [nodes] (by identity) and [devices] (by model, "
        'for one) of "NAME" = 2.50, and currency [default: Ray\'s node labels '
        "pichak.io/price-per-hour].",
    )(command)


def by_option(command: Command) -> Command:
    """``--by``: what decides."""
    return click.option(
        "--by",
        type=click.Choice(["speed", "cost"]),
        help="What the pick goes by: tokens a second, or money per token.",
    )(command)


def prices_of(path: Path | None) -> PriceBook:
    """The price list of a file; `UserError` says what is wrong with it."""
    from pichak_coordinator.prices import NO_PRICES, PriceError, load_prices

    if path is None:
        return NO_PRICES
    try:
        return load_prices(path)
    except PriceError as error:
        raise UserError(f"--prices {error}") from error


def tell_unknown(book: PriceBook, rows: Sequence[Row]) -> None:
    """Say on stderr which entries of the list nobody goes by."""
    from pichak_coordinator.text import printable

    for sentence in book.unknown(rows):
        click.echo(f"pichak: {printable(sentence)}", err=True)
