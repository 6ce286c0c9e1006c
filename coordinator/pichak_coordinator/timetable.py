"""Times of day and of the calendar at which probes may or shall begin: quiet hours, cron. Pure.

Local time is that of `tz`; None is this machine's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?")
_DAY_MINUTES = 24 * 60
#: What a clock change or a rare expression may cost in steps before an expression is given up.
_MOST_STEPS = 100


class TimetableError(ValueError):
    """A time that cannot be understood: what was written, and how it is written."""


@dataclass(frozen=True)
class QuietHours:
    """From `begin` to `end`, minutes of the local day; past midnight where `end` is not later."""

    begin: int
    end: int
    tz: tzinfo | None = None

    @classmethod
    def parse(cls, text: str, tz: tzinfo | None = None) -> QuietHours:
        """``22-06`` or ``22:30-06:15``; `TimetableError` says what is wrong."""
        parts = text.split("-")
        minutes = [_minutes(part.strip()) for part in parts]
        if len(minutes) != 2 or None in minutes or minutes[0] == minutes[1]:
            raise TimetableError(f"{text!r} is not a span of hours: write 22-06 or 22:30-06:00")
        begin, end = minutes
        assert begin is not None  # noqa: S101 - for the type checker
        assert end is not None  # noqa: S101
        return cls(begin % _DAY_MINUTES, end % _DAY_MINUTES, tz)

    def ends_after(self, start: float, seconds: float) -> float | None:
        """When the first quiet span that touches [start, start + seconds] ends, in Unix seconds;
        None when none does."""
        first = datetime.fromtimestamp(start, self.tz)
        for days in (-1, 0, 1):
            day = (first + timedelta(days=days)).replace(hour=0, minute=0, second=0, microsecond=0)
            begin = day.replace(hour=self.begin // 60, minute=self.begin % 60)
            end = day.replace(hour=self.end // 60, minute=self.end % 60)
            if self.end <= self.begin:
                end += timedelta(days=1)
            if begin.timestamp() <= start + seconds and start < end.timestamp():
                return end.timestamp()
        return None


def _minutes(text: str) -> int | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    hour, minute = int(match.group(1)), int(match.group(2) or 0)
    within = (hour < 24 and minute < 60) or (hour == 24 and minute == 0)
    return hour * 60 + minute if within else None


@dataclass(frozen=True)
class Cron:
    """A cron expression of five fields (minute, hour, day, month, weekday)."""

    expression: str
    tz: tzinfo | None = None

    def __post_init__(self) -> None:
        self.after(0.0)

    def after(self, now: float) -> float:
        """The first time later than `now`; `TimetableError` when the expression is none, or names
        a time that never comes."""
        try:
            from cronsim import CronSim, CronSimError
        except ImportError as error:
            raise TimetableError("cron expressions need the package cronsim (pip install)") from (
                error
            )
        try:
            times = CronSim(self.expression, datetime.fromtimestamp(now, self.tz))
            for _ in range(_MOST_STEPS):
                # A naive local time inside the hour that a clock change repeats may lie before.
                found = float(next(times).timestamp())
                if found > now:
                    return found
        except CronSimError as error:
            raise TimetableError(
                f"{self.expression!r} is not a cron expression ({error}): write five fields, as in "
                "'0 3 * * *'"
            ) from error
        except StopIteration:
            pass
        raise TimetableError(f"{self.expression!r} names a time that never comes")
