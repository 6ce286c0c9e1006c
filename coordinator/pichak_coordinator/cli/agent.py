"""``pichak agent``: what runs on a node itself. Each subcommand is a module of its own."""

from __future__ import annotations

import click

from pichak_coordinator.cli import LazyGroup


class AgentGroup(LazyGroup):
    """The node's commands, imported when one is used."""

    commands_table = {  # noqa: RUF012 - the base class declares its type
        "probe": (
            "pichak_coordinator.cli.agent_probe",
            "probe",
            "Measure this machine without Ray or network, into one file.",
        ),
    }


@click.group(
    cls=AgentGroup,
    epilog="\b\nExamples:\n"
    "  pichak agent probe --data train.jsonl --out result.mpk\n"
    "  pichak import result.mpk                 on the machine that compares them\n",
)
def agent() -> None:
    """Measure the machine that this runs on."""
