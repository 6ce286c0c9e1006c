"""How a schedule is written on the command line: lengths of time, intervals, budgets, calendars."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import UserError
from pichak_coordinator.cli.options import MOST_SEED

if TYPE_CHECKING:
    from pichak_coordinator.schedule import Depth, Policy
    from pichak_coordinator.watch_probe import Requests

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LENGTH = re.compile(r"([0-9]*\.?[0-9]+)(s|m|h|d)")
#: No interval is shorter: a probe takes seconds itself.
_LEAST_SECONDS = 10.0
_MOST_SECONDS = 366 * 86400.0


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A length of time such as ``90s``, ``10m``, ``24h`` or ``7d``, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def seconds_of(text: str) -> float:
    """``10m`` in seconds; `ValueError` when it is no length of time, or longer than a year."""
    match = _LENGTH.fullmatch(text.strip())
    seconds = float(match.group(1)) * _UNITS[match.group(2)] if match else 0.0
    if not 0 < seconds <= _MOST_SECONDS or not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a length of time; write 90s, 10m, 24h or 7d")
    return seconds


def length_of(option: str, text: str) -> float:
    """`seconds_of`, whose error names the option."""
    try:
        return seconds_of(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def intervals_of(every: Sequence[str], default: Mapping[Depth, float]) -> dict[Depth, float]:
    """``--every``: seconds by depth, of which ``never`` leaves one out."""
    from pichak_coordinator.schedule import DEPTHS

    names: dict[str, Depth] = {depth: depth for depth in DEPTHS}
    intervals = dict(default)
    for text in every:
        name, _, length = text.partition("=")
        if name not in names:
            raise UserError(f"--every {text}: write light=10m or full=24h, or light=never")
        intervals.pop(names[name], None)
        if length != "never":
            intervals[names[name]] = length_of(f"--every {text}", length)
            if intervals[names[name]] < _LEAST_SECONDS:
                raise UserError(f"--every {text}: at least {_LEAST_SECONDS:.0f} s")
    return intervals


def budget_of(text: str) -> float:
    """``--budget``: probe-seconds an hour."""
    length, separator, unit = text.partition("/")
    if separator and unit != "h":
        raise UserError(f"--budget {text}: write probe-time an hour, as in 120s/h or 10m/h")
    return length_of(f"--budget {text}", length)


def policy_of(
    every: Sequence[str],
    crons: Sequence[str],
    quiet_hours: str | None,
    budget: str | None,
    parallel: int,
    requests: Requests,
    seed: int,
) -> Policy:
    """The options' policy for probes of these lengths; `UserError` when they contradict each other,
    or leave nothing that could ever be probed."""
    from pichak_coordinator.schedule import DEPTHS, Policy
    from pichak_coordinator.timetable import Cron, QuietHours, TimetableError

    names: dict[str, Depth] = {depth: depth for depth in DEPTHS}
    intervals = intervals_of(every, Policy().every_seconds)
    calendar: dict[Depth, Cron] = {}
    try:
        for text in crons:
            name, _, expression = text.partition("=")
            if name not in names:
                raise UserError(f"--cron {text}: write full='0 3 * * *' or light='*/10 * * * *'")
            intervals.pop(names[name], None)
            calendar[names[name]] = Cron(expression)
        quiet = QuietHours.parse(quiet_hours) if quiet_hours else None
    except TimetableError as error:
        raise UserError(str(error)) from error
    made = Policy(
        every_seconds=intervals,
        cron=calendar,
        quiet=quiet,
        budget_seconds=budget_of(budget) if budget else None,
        longest_seconds=requests.longest_seconds(),
        most_at_once=parallel,
        seed=seed % (MOST_SEED + 1),
    )
    if not made.depths:
        raise UserError("--every light=never --every full=never: nothing is left to do")
    for depth in made.depths:
        most = made.longest_seconds[depth]
        if made.budget_seconds is not None and most > made.budget_seconds:
            raise UserError(
                f"--budget {budget}: one {depth} probe may take {most:.0f} s, so none would ever "
                f"begin; give at least {math.ceil(most)}s/h, shorten it with --deadline, or leave "
                f"it out with --every {depth}=never"
            )
    return made
