"""``pichak agent``: what runs on a node itself. Each subcommand is a module of its own."""

from __future__ import annotations

import click

from pichak_coordinator.cli import LazyGroup


class AgentGroup(LazyGroup):
    """The node's commands, imported when one is used."""

    commands_table = {  # noqa: RUF012 - the base class declares its type
        "run": (
            "pichak_coordinator.cli.agent_run",
            "run",
            "Join a cluster as its node and stay in it.",
        ),
        "watch": (
            "pichak_coordinator.cli.agent_watch",
            "watch",
            "Watch this machine alone, and say what is wrong.",
        ),
        "status": (
            "pichak_coordinator.cli.agent_status",
            "status",
            "Say what the service of this machine is doing.",
        ),
        "probe": (
            "pichak_coordinator.cli.agent_probe",
            "probe",
            "Measure this machine without Ray or network, into one file.",
        ),
    }


@click.group(
    cls=AgentGroup,
    epilog="\b\nExamples:\n"
    "  pichak agent run --address 10.0.0.1:6379 --token-file token\n"
    "  pichak agent watch                       what is wrong here, also on Windows\n"
    "  pichak agent probe --data train.jsonl --out result.mpk\n"
    "  pichak import result.mpk                 on the machine that compares them\n",
)
def agent() -> None:
    """Make this machine a node of a fleet, or measure it alone."""
