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
        "pichak export --all --out all.mpk && pichak fleet prune --keep-days 0",
    )
)
@click.option(
    "--keep-days", type=FiniteRange(0.0, 36500.0), default=KEEP_DAYS, show_default=True,
    metavar="DAYS", help="What is younger stays; 0 keeps only what is needed.",
)  # fmt: skip
@store_option
@json_option
def prune(keep_days: float, store_path: Path | None, as_json: bool) -> int:
    """Forget runs and events that are older, and give the room back to the disk.

    A run goes with its jobs, results, readings, plans and findings; results that nobody asked for
    go too. Whatever its age, what is still needed stays: of each device the last run of each
    command that measured it, events of findings that are open and of the joining of nodes that have
    not left, and events that the webhook has not had yet; so do nodes and the watch's schedule.
    `pichak export` keeps a copy of what goes.

    Giving the room back takes as much of it for a moment, and waits for whoever writes; a history
    that does not exist is not made. `pichak fleet watch --keep-days` does the same for its probes
    as it goes.
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
