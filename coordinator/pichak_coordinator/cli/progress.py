"""Progress on stderr: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from pichak_coordinator.cli.common import err
from pichak_coordinator.text import printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

#: Rows of a live table; a fleet larger than this shows its busy and failed nodes first.
_MOST_LINES = 24
_DONE = ("done", "failed")


@dataclass(frozen=True)
class ProgressLine:
    """What one node is doing: its label, the phase ("ramp"), the last word of it, since when."""

    label: str
    phase: str
    text: str = ""
    seconds: float = 0.0


class Progress:
    """Shows `ProgressLine`s while used as a context manager; `say` prints one sentence."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = err()
        self._live: Live | None = None
        self._phases: dict[str, str] = {}
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """One sentence that stays on the screen."""
        if not self._quiet:
            line = f"{self._clock()}  {printable(text)}"
            self._console.print(line, markup=False, soft_wrap=True)

    def update(self, lines: Sequence[ProgressLine]) -> None:
        """The state of every node now."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(self._table(lines))
            return
        for line in lines:
            if self._phases.get(line.label) != line.phase:
                self._phases[line.label] = line.phase
                self.say(f"{line.label}: {line.phase}" + (f": {line.text}" if line.text else ""))

    def _table(self, lines: Sequence[ProgressLine]) -> Table:
        from rich.table import Table
        from rich.text import Text

        done = sum(line.phase in _DONE for line in lines)
        table = Table(box=None, pad_edge=False, padding=(0, 2), expand=False)
        for heading, style in (("node", "bold"), ("phase", ""), ("s", "dim"), ("now", "dim")):
            table.add_column(heading, style=style, no_wrap=True, overflow="ellipsis")
        shown = sorted(lines, key=lambda line: line.phase == "done")[:_MOST_LINES]
        for line in shown:
            seconds = f"{line.seconds:.0f}" if line.phase not in _DONE else ""
            style = {"failed": "red", "done": "green"}.get(line.phase, "")
            table.add_row(
                Text(printable(line.label)),
                Text(line.phase, style),
                seconds,
                Text(printable(line.text)),
            )
        table.caption = f"{self._clock()}  {done} of {len(lines)} done"
        table.caption_justify = "left"
        return table

    def _clock(self) -> str:
        return f"{time.monotonic() - self._started:6.1f} s"
