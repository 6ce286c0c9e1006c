"""``pichak agent status``: what the services of this machine are doing."""

from __future__ import annotations

from typing import Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_NOTHING,
    examples,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.text import printable


@click.command(
    epilog=examples(
        "pichak agent status",
        "pichak agent status --json | jq -r .services[].state",
        "PICHAK_HOME=/var/lib/pichak pichak agent status     of the service that systemd runs",
    )
)
@json_option
def status(as_json: bool) -> int:
    """Say what `pichak agent run` does on this machine. Exits with 1 where it does not run.

    State and spool are read from the folder that PICHAK_HOME names (~/.local/state/pichak without
    it), where the service keeps them.
    """
    from pichak_agent.service import running_services, spooled

    found = [
        {**state.as_dict(), "state": state.state if alive else "dead", "running": alive}
        for state, alive in running_services()
    ]
    count, size = spooled()
    if as_json:
        kept = {"outcomes": count, "bytes": size}
        print_json({"schema": 1, "services": found, "spool": kept})
    else:
        _print(found, count, size)
    return EXIT_DONE if any(each["running"] for each in found) else EXIT_NOTHING


def _print(found: list[dict[str, Any]], count: int, size: int) -> None:
    from pichak_agent.service import age

    console = out()
    if not found:
        click.echo("pichak: no agent service runs here; `pichak agent run` starts one", err=True)
    for each in found:
        name = printable(str(each["name"])) + (" (simulated)" if each["simulated"] else "")
        console.print(f"{name}: {each['state']} for {age(each['since_unix'])}", markup=False)
        rows = [
            (
                "why",
                each["why"] if each["running"] else "its process is gone; the next one clears up",
            ),
            ("cluster", f"{each['address']}, joined {_times(each['joins'])}"),
            ("ray node", each["node_id"]),
            ("process", f"{each['pid']}, up {age(each['started_unix'])}"),
            ("versions", ", ".join(f"{k} {v}" for k, v in each["versions"].items())),
            ("metrics", each["metrics"]),
            ("simulated", each["simulated"]),
            ("home", each["home"]),
        ]
        for label, text in rows:
            if text:
                console.print(f"  {label:<10} {printable(str(text))}", markup=False, soft_wrap=True)
    if count:
        console.print(
            f"{count} outcomes ({size:,} bytes) wait for a coordinator to take them", markup=False
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
