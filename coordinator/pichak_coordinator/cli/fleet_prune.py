"""``pichak fleet prune``: forget old history."""

from __future__ import annotations

from pathlib import Path

import click

from pichak_coordinator.cli.common import examples, json_option, print_json
from pichak_coordinator.cli.options import FiniteRange, open_store, store_option
from pichak_coordinator.store_prune import KEEP_DAYS


@click.command(
    epilog=examples(
        "pichak fleet prune                    # what is older than 90 days",
        "pichak fleet prune --keep-days 7",
    )
)
@click.option(
    "--keep-days", type=FiniteRange(0.0, 36500.0), default=KEEP_DAYS, show_default=True,
    metavar="DAYS", help="What is younger stays.",
)  # fmt: skip
@store_option
@json_option
def prune(keep_days: float, store_path: Path | None, as_json: bool) -> int:
    """Forget runs and events that are older, and give the room back to the disk.

    Of each node the last run that measured it stays, with its findings; so do events of open
    findings. `pichak export` keeps a copy of what goes.
    """
    from pichak_coordinator.store_prune import prune as forget

    with open_store(store_path, read_only=True):
        pass  # one that does not exist is not made
    with open_store(store_path) as store:
        before = store.path.stat().st_size
        gone = forget(store, keep_days, store.now())
        store.give_room_back()
        freed = max(0, before - store.path.stat().st_size)
        left = len(store.runs())
    if as_json:
        told = {"runs": gone.runs, "events": gone.events, "runs_left": left, "freed_bytes": freed}
        print_json({"schema": 1, **told})
    else:
        click.echo(
            f"forgotten: {_count(gone.runs, 'run')} and {_count(gone.events, 'event')}; "
            f"{_count(left, 'run')} left; {freed / 1e6:.1f} MB are free again"
        )
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
