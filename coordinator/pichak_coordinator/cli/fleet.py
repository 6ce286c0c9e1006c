"""``pichak fleet``: the whole fleet. Each subcommand is a module of its own."""

from __future__ import annotations

import click

from pichak_coordinator.cli import LazyGroup


class FleetGroup(LazyGroup):
    """The fleet's commands, imported when one is used."""

    commands_table = {  # noqa: RUF012 - the base class declares its type
        "profile": (
            "pichak_coordinator.cli.fleet_profile",
            "profile",
            "Measure every node and derive its plan.",
        ),
        "watch": (
            "pichak_coordinator.cli.fleet_watch",
            "watch",
            "Probe the fleet again on a schedule and say what changes.",
        ),
        "compare": (
            "pichak_coordinator.cli.fleet_compare",
            "compare",
            "Show the comparison of a stored run again.",
        ),
        "pick": (
            "pichak_coordinator.cli.fleet_pick",
            "pick",
            "Pick the N machines that train best together.",
        ),
        "nodes": ("pichak_coordinator.cli.fleet_nodes", "nodes", "List the nodes of a cluster."),
        "history": (
            "pichak_coordinator.cli.fleet_history",
            "history",
            "Show stored runs, or one metric over time.",
        ),
        "simulate": (
            "pichak_coordinator.cli.fleet_simulate",
            "simulate",
            "Try a whole fleet, and a watch over it, without machines.",
        ),
        "prune": ("pichak_coordinator.cli.fleet_prune", "prune", "Forget old history."),
        "report": (
            "pichak_coordinator.cli.fleet_report",
            "report",
            "Write a stored run as one HTML page.",
        ),
    }


@click.group(
    cls=FleetGroup,
    epilog="\b\nExamples:\n"
    "  pichak fleet profile --data train.jsonl\n"
    "  RAY_ADDRESS=10.0.0.1:6379 pichak fleet profile --data train.jsonl --model hf:/models/llama\n"
    "  pichak fleet watch --every light=10m --every full=24h\n"
    "  pichak fleet compare --sort disk\n"
    "  pichak fleet pick 4 --prices prices.toml --by cost\n"
    "  pichak fleet history\n"
    "  pichak fleet report --html fleet.html\n"
    "  pichak fleet simulate --nodes 50 --days 7 --store sim.db\n",
)
def fleet() -> None:
    """Profile, compare and follow a fleet of machines."""
