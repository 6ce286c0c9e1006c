"""``pichak fleet simulate``: a whole fleet, and a watch over it, without machines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    UserError,
    examples,
    json_option,
    print_json,
)
from pichak_coordinator.cli.files import FileName
from pichak_coordinator.cli.options import MOST_SEED, FiniteRange
from pichak_coordinator.cli.schedule_options import budget_of, intervals_of
from pichak_coordinator.cli.tables import chosen_format, format_option

if TYPE_CHECKING:
    from pichak_coordinator.schedule import Policy
    from pichak_coordinator.simulated_fleet import SimulatedFleet
    from pichak_coordinator.simulated_history import History
    from pichak_coordinator.simulated_rounds import Clock
    from pichak_core.simulated_host import SimulatedHost

#: Probe-seconds an hour that each device adds to the budget.
_BUDGET_A_DEVICE = 3.6
_MOST_NODES = 5000
#: A run's id begins with its date, and ids are sorted as text.
_LAST_YEAR = 9990
_DRAWN = ("nodes", "fault_rate", "noise")


@click.command(
    epilog=examples(
        "pichak fleet simulate                                  50 hosts, a week",
        "pichak fleet simulate --nodes 500 --days 30 --fault-rate 0.05 --seed 1",
        "pichak fleet simulate --nodes 12 --store sim.db; pichak fleet compare --store sim.db",
        "pichak fleet simulate --host a.toml --host b.toml --days 3 --json",
        "pichak fleet simulate --every light=30m --budget 900s/h   a schedule, before it runs",
    )
)
@click.option(
    "--nodes",
    type=click.IntRange(1, _MOST_NODES),
    default=50,
    show_default=True,
    help="Hosts of four kinds, drawn from the seed.",
)
@click.option(
    "--days", type=FiniteRange(0.1, 366.0), default=7.0, show_default=True, help="Days to watch."
)
@click.option(
    "--fault-rate",
    type=FiniteRange(0.0, 1.0),
    default=0.1,
    show_default=True,
    help="Share of the hosts that fall ill in that time.",
)
@click.option(
    "--noise",
    type=FiniteRange(0.0, 0.5),
    default=0.02,
    show_default=True,
    help="Relative deviation of each sample; one host in ten has three times that.",
)
@click.option(
    "--host",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="HOST.toml",
    help="Your own host instead of drawn ones (as for `agent probe --simulate`); may be repeated. "
    "A fault's \"+10m\" counts from the simulation's start.",
)
@click.option("--seed", type=click.IntRange(0, MOST_SEED), default=0, show_default=True)
@click.option(
    "--start",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]),
    default="2026-01-01",
    show_default=True,
    help="When it begins, UTC.",
)
@click.option(
    "--every",
    multiple=True,
    metavar="DEPTH=TIME",
    help="light= or full=, a time or 'never' [default: light=2h, full=24h].",
)
@click.option(
    "--budget",
    metavar="TIME/h",
    help="Probe-seconds an hour over the whole fleet [default: 3.6 s for each device].",
)
@click.option(
    "--store",
    "store_path",
    type=FileName(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A new file for the history that the fleet leaves [default: none is kept].",
)
@format_option
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    *,
    nodes: int,
    days: float,
    fault_rate: float,
    noise: float,
    files: Sequence[Path],
    seed: int,
    start: datetime,
    every: Sequence[str],
    budget: str | None,
    store_path: Path | None,
    form: str,
    as_json: bool,
) -> int:
    """Try a whole fleet without machines: what a watch over it would find, how soon, at what cost.

    Hosts and faults are drawn from the seed; the schedule, the judge, the memory and the history
    are the real ones, under a clock of their own. What a probe costs is a constant, and the figures
    of the hosts are made up: the answer is about the tools and the schedule, not about machines.
    Every result says that it is simulated.
    """
    from pichak_coordinator.cli.simulate_view import show_simulation
    from pichak_coordinator.simulated_fleet import drawn_fleet, given_fleet
    from pichak_coordinator.simulation import Simulation

    form = chosen_format(form, as_json)
    if not 1970 <= start.year <= _LAST_YEAR:
        raise UserError(f"--start {start:%Y-%m-%d}: a day of the years 1970 to {_LAST_YEAR}")
    begin = start.replace(tzinfo=timezone.utc).timestamp()
    if files:
        given = [name for name in _DRAWN if _was_given(ctx, name)]
        if given:
            option = given[0].replace("_", "-")
            raise UserError(f"--host and --{option}: hosts of your own are not drawn; choose one")
        fleet = given_fleet(_hosts(files, begin))
    else:
        drawn: dict[str, Any] = {"seed": seed, "noise": noise, "fault_rate": fault_rate}
        fleet = drawn_fleet(nodes, begin_unix=begin, days=days, **drawn)
    policy = _policy(fleet, every, budget, seed)
    with _history(store_path, begin, seed) as history:
        began = time.monotonic()
        made = Simulation(fleet, policy, begin, days)
        made.say = _Steps(days).say
        if history is not None:
            history.of(made)
        made.run()
        runs = {} if history is None else history.end(_say)
    record = {
        **made.as_dict(),
        "seed": seed,
        "store": None if store_path is None else str(store_path),
        "runs": runs,
        "budget_seconds_an_hour": policy.budget_seconds,
        "took_seconds": round(time.monotonic() - began, 1),
    }
    if form == "json":
        print_json(record)
    else:
        show_simulation(made, record, form)
    return EXIT_DONE


def _was_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _hosts(files: Sequence[Path], begin: float) -> list[SimulatedHost]:
    from pichak_core.simulated_host import SimulatedHost

    made: list[SimulatedHost] = []
    for path in files:
        try:
            host = SimulatedHost.load(path, begin)
        except OSError as error:
            raise UserError(f"--host {path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"--host {error}") from error
        if any(host.host == other.host for other in made):
            raise UserError(f"--host {path}: another file has a host {host.host!r}, too")
        if not host.metrics:
            raise UserError(f"--host {path}: it has no [metrics], so there is nothing to watch")
        made.append(host)
    return made


def _policy(fleet: SimulatedFleet, every: Sequence[str], budget: str | None, seed: int) -> Policy:
    from pichak_coordinator.schedule import HOUR, Policy
    from pichak_coordinator.simulation import LONGEST_SECONDS

    devices = [len(host.devices) for host in fleet.hosts]
    intervals = intervals_of(every, {"light": 2 * HOUR, "full": 24 * HOUR})
    if not intervals:
        raise UserError("--every light=never --every full=never: nothing is left to do")
    longest = max(devices) * max(LONGEST_SECONDS[depth] for depth in intervals)
    seconds = budget_of(budget) if budget else max(_BUDGET_A_DEVICE * sum(devices), 2 * longest)
    if seconds < longest:
        raise UserError(
            f"--budget {budget}: one probe may take {longest:.0f} s, so none would ever begin; "
            f"give at least {math.ceil(longest)}s/h"
        )
    return Policy(
        every_seconds=intervals,
        budget_seconds=seconds,
        longest_seconds=LONGEST_SECONDS,
        most_at_once=64,
        seed=seed,
    )


@contextmanager
def _history(path: Path | None, begin: float, seed: int) -> Iterator[History | None]:
    """A new history. It gets its name when it is whole: what a simulation that was killed leaves is
    called after it, with ".part" behind."""
    from pichak_coordinator.database import StoreError, translated
    from pichak_coordinator.simulated_history import History
    from pichak_coordinator.simulated_rounds import Clock
    from pichak_coordinator.watch_store import WatchStore

    if path is None:
        yield None
        return
    part = path.with_name(f"{path.name}.part")
    for there in (path, part):
        if there.exists():
            half = " of a simulation that was killed, or is under way" if there is part else ""
            way = "; remove it, or name another" if half else ""
            raise UserError(
                f"--store {path}: there is {there.name}{half}{way}; what is simulated goes into a "
                "new one"
            )
    clock: Clock = Clock(begin)
    try:
        with WatchStore.open(part, clock=clock) as store, translated(path):
            yield History(store, clock, seed)
        for end in ("-wal", ""):  # a log is there where somebody looked into it meanwhile
            beside = part.with_name(part.name + end)
            if beside.exists():
                beside.replace(path.with_name(path.name + end))
    except BaseException as error:
        for name in (part, *(part.with_name(part.name + end) for end in ("-wal", "-shm"))):
            name.unlink(missing_ok=True)
        if isinstance(error, StoreError):
            raise UserError(str(error).replace(str(part), str(path))) from error
        raise


class _Steps:
    """How far it is, on stderr: in place on a terminal, every fifth of it elsewhere."""

    def __init__(self, days: float) -> None:
        self._days, self._last = days, 0
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def say(self, day: float) -> None:
        """Note that this day was reached."""
        whole = f"{self._days:g} day{'s' * (self._days != 1)}"
        share = int(100 * day / self._days)
        if share // (1 if self._live else 20) == self._last // (1 if self._live else 20):
            return
        self._last = share
        if self._live:
            click.echo(
                f"\rsimulated {day:.1f} of {whole} ({share} %) ",
                nl=False,
                err=True,
            )
            if share >= 100:
                click.echo("", err=True)
        else:
            _say(f"simulated {day:.1f} of {whole}")


def _say(text: str) -> None:
    click.echo(f"pichak: {text}", err=True)
