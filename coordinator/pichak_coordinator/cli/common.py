"""What every command shares: errors without tracebacks, JSON on stdout alone, consoles."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from pichak_coordinator.cli.encoding import is_unicode
from pichak_coordinator.text import json_text, printable

if TYPE_CHECKING:
    from rich.console import Console

#: Exit codes of SPEC 8.
EXIT_DONE = 0
EXIT_NOTHING = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
#: Nothing is laid out for less.
_LEAST_WIDTH = 20

Command = TypeVar("Command", bound=Callable[..., Any])


class UserError(click.ClickException):
    """A mistake that the user can mend: one sentence saying what, where and what to do."""

    exit_code = EXIT_USAGE

    def show(self, file: Any = None) -> None:
        # Some of it may be what a node sent: its name, a metric's, an error.
        told = printable(self.format_message(), keep_newlines=True)
        click.echo(f"pichak: {told}", file=file, err=True)


class NothingMeasuredError(UserError):
    """The command ran and measured nothing at all."""

    exit_code = EXIT_NOTHING


def json_option(command: Command) -> Command:
    """``--json``: machine-readable, on stdout alone."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, only.")(
        command
    )


def print_json(record: Any) -> None:
    """One JSON document on stdout; never NaN or Infinity, which are not JSON."""
    click.echo(json_text(record, indent=1, ascii_only=not is_unicode(_stdout())))


def out() -> Console:
    """The console for results. It writes plain text when stdout is not a terminal."""
    from rich.console import Console

    stream = _stdout()
    return Console(file=stream, highlight=False, soft_wrap=False, width=_width(stream))


def _stdout() -> TextIO:
    """Standard output; Python has none where the shell closed it."""
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise UserError("standard output is closed (>&-); leave it open, or name a file (> FILE)")
    return stream


def err() -> Console:
    """The console for progress and messages (stderr)."""
    from rich.console import Console

    # Where the shell closed it there is nobody to tell, and rich would turn to stdout.
    stream = sys.stderr or io.StringIO()
    return Console(file=stream, highlight=False, width=_width(stream))


def _width(stream: Any) -> int | None:
    """None lets rich ask the terminal; a pipe gets a page's width unless COLUMNS says otherwise. A
    COLUMNS that is no width (0 in some terminals and in containers) says nothing."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return max(_LEAST_WIDTH, int(columns))
    if not stream.isatty():
        return 120
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def examples(*lines: str) -> str:
    """The examples block of a command's help, kept as it is by click."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def end_on_sigterm() -> None:
    """A service manager's SIGTERM ends a command as Ctrl-C does: what was measured is kept."""

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
