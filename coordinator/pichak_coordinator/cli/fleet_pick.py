"""``pichak fleet pick``: which N machines to train on together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    NothingMeasuredError,
    UserError,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.options import FiniteRange, open_store, store_option
from pichak_coordinator.cli.price_options import (
    by_option,
    prices_of,
    prices_option,
    tell_unknown,
)
from pichak_coordinator.cli.tables import chosen_format, format_option

if TYPE_CHECKING:
    from pichak_coordinator.pick_many import Wish

#: The largest step that is worth a thought, in rows.
_MOST_ROWS = 10**9


class _Counting(click.Command):
    """To click a negative N is an option that there is not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            for word in args:
                if re.fullmatch(r"-[0-9][0-9.]*", word):
                    raise UserError(
                        f"N is {word}: give how many devices to pick, 1 or more"
                    ) from error
            raise


@click.command(
    cls=_Counting,
    epilog="\b\nExamples:\n"
    "  pichak fleet pick 4                           of the newest run, the fastest four\n"
    "  pichak fleet pick 8 --prices prices.toml --by cost\n"
    "  pichak fleet pick 2 20261130T0912 --gradient-mib 540 --json\n"
    "  pichak fleet pick 4 --assume-link-mbit 10000  where links were not measured\n",
)
@click.argument("count", type=click.IntRange(1, 100_000), metavar="N")
@click.argument("run", default="")
@by_option
@prices_option
@click.option(
    "--gradient-mib",
    type=FiniteRange(1e-6, 1e9),
    help="Size of the gradient [default: as counted by the profile].",
)
@click.option(
    "--batch-rows",
    type=click.IntRange(1, _MOST_ROWS),
    help="Rows of one optimizer step, over all [default: the plans' target].",
)
@click.option(
    "--assume-link-mbit",
    type=FiniteRange(1e-3, 1e9),
    help="Rate of links that were not measured: a constant, and listed as such.",
)
@click.option(
    "--assume-rtt-ms",
    type=FiniteRange(0.0, 1e5),
    default=0.0,
    show_default=True,
    help="Round trip of those links.",
)
@click.option(
    "--allow-fault",
    "allow",
    multiple=True,
    metavar="NAME|all",
    help="Let a node with a confirmed fault in; may be repeated.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="NAME",
    help="Leave a node out, a suspected one for instance; may be repeated.",
)
@store_option
@format_option
@json_option
def pick(
    *,
    count: int,
    run: str,
    by: str | None,
    prices: Path | None,
    store_path: Path | None,
    form: str,
    as_json: bool,
    **asked: Any,
) -> int:
    """Pick the N devices of RUN that train fastest together, or cheapest.

    Synchronous data-parallel training goes at the pace of its slowest member plus the all-reduce of
    the gradient. Each member trains the same number of rows of a step, in micro-batches of its own
    measured size; the all-reduce goes around a ring over the measured links, and the order of the
    ranks shown is that of the ring. Sets that no ring of measured links joins are left out, and
    that is said. Every set is weighed in a small fleet; in a large one it is said by how much a
    better one could still be better. RUN is an id, its beginning, or a name (default: the newest
    profile).
    """
    from pichak_coordinator.cli.pick_view import print_team, print_team_as
    from pichak_coordinator.cli.run_choice import chosen_run
    from pichak_coordinator.pick_many import CannotPickError, pick_many
    from pichak_coordinator.stored_faults import rows_as_known
    from pichak_coordinator.stored_links import stored_links

    form = chosen_format(form, as_json)
    book = prices_of(prices)
    wish = _wish(count, by, asked)
    with open_store(store_path, read_only=True) as store:
        chosen = chosen_run(store.runs(), run)
        rows = rows_as_known(store, chosen, curves=False)
        _check_names(wish, {n for row in rows for n in _names(row)})
        tell_unknown(book, rows)
        links = stored_links(store, list(dict.fromkeys(row.node.node for row in rows)))
    if not any(row.measured for row in rows):
        raise NothingMeasuredError(f"nothing was measured in the run {chosen}")
    try:
        team = pick_many(rows, links, book, wish)
    except CannotPickError as error:
        raise UserError(str(error)) from error
    if form == "json":
        print_json({"schema": 1, "run": chosen, "pick": team.as_dict()})
    elif form != "table":
        print_team_as(team, form, chosen)
    else:
        print_team(team, out(), chosen)
    return EXIT_DONE


def _wish(count: int, by: str | None, asked: dict[str, Any]) -> Wish:
    from pichak_coordinator.pick_many import Wish
    from pichak_coordinator.ring_time import Link
    from pichak_core.plan import CONSTANT

    mbit, mib = asked["assume_link_mbit"], asked["gradient_mib"]
    if asked["assume_rtt_ms"] and mbit is None:
        raise UserError("--assume-rtt-ms goes with --assume-link-mbit; give both")
    assumed = None
    if mbit is not None:
        source = f"{CONSTANT}: --assume-link-mbit {mbit:g}"
        assumed = Link(mbit / 8, asked["assume_rtt_ms"], source, measured=False)
    return Wish(
        count,
        "cost" if by == "cost" else "speed",
        None if mib is None else max(1, round(mib * 2**20)),
        asked["batch_rows"],
        assumed,
        frozenset(asked["allow"]),
        frozenset(asked["without"]),
    )


def _names(row: Any) -> Sequence[str]:
    return row.node.label, row.node.host, row.node.node


def _check_names(wish: Wish, known: set[str]) -> None:
    for option, names in (("--allow-fault", wish.allow - {"all"}), ("--without", wish.without)):
        for name in sorted(names - known):
            some = ", ".join(sorted(n for n in known if n)[:8])
            raise UserError(f"{option} {name}: no such node in this run; there are {some}")
