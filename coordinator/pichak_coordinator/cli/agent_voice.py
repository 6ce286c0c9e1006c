"""What the commands that stay say while they run, a sentence a line on stderr."""

from __future__ import annotations

import logging

import click

from pichak_coordinator.text import printable


def say(text: str) -> None:
    """One sentence."""
    click.echo(f"pichak: {printable(text)}", err=True)


class _Sentences(logging.Handler):
    """What the agent's parts warn of, as everything else is said here."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def tell_warnings() -> None:
    """Say what the agent's parts warn of."""
    logger = logging.getLogger("pichak_agent")
    logger.handlers, logger.propagate = [_Sentences(logging.WARNING)], False
