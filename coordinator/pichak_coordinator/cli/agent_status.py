"""``pichak agent status``: what the services of this machine are doing."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
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
    it), where the service keeps them. A service of another home is told of on stderr.
    """
    from pichak_agent.service import (
        found_on_node,
        holder,
        problems_on_node,
        running_services,
        spooled,
    )

    services = []
    for state, alive in running_services():
        home = Path(state.home)
        count, size = spooled(home, everywhere=not state.simulated)
        services.append(
            {
                **state.as_dict(),
                "state": state.state if alive else "dead",
                "running": alive,
                "spool": {"outcomes": count, "bytes": size},
                "findings": [] if state.simulated else found_on_node(home),
                "problems": problems_on_node(home, simulated=bool(state.simulated)),
            }
        )
    other = holder()
    if other is not None and other.pid in {each["pid"] for each in services if each["running"]}:
        other = None
    if as_json:
        print_json({"schema": 1, "services": services, "other": other and asdict(other)})
    elif services:
        for each in services:
            _print(each)
    else:
        click.echo("pichak: no agent service runs here; `pichak agent run` starts one", err=True)
        _say_spooled()
    if other is not None and not as_json:
        click.echo(
            f"pichak: another agent service runs on this machine ({printable(other.sentence)})"
            + (f"; PICHAK_HOME={shlex.quote(printable(other.home))} pichak agent status shows it")
            * bool(other.home),
            err=True,
        )
    return EXIT_DONE if any(each["running"] for each in services) else EXIT_NOTHING


def _print(each: dict[str, Any]) -> None:
    from pichak_agent.service import age

    console = out()
    name = printable(str(each["name"]))
    note = " (simulated: no machine is measured)" if each["simulated"] else ""
    # When one that is gone ended, nobody noted.
    how_long = "" if each["state"] == "dead" else f" for {age(each['since_unix'])}"
    console.print(f"{name}{note}: {each['state']}{how_long}", markup=False)
    spool = each["spool"]
    kept = f"{_outcomes(spool['outcomes'])} ({spool['bytes']:,} bytes) for a coordinator to take"
    rows = [
        ("now", each["why"] if each["running"] else "its process is gone; the next clears up"),
        ("cluster", f"{each['address']}, joined {_times(each['joins'])}"),
        ("ray node", each["node_id"]),
        ("process", f"{each['pid']}, for {age(each['started_unix'])}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in each["versions"].items())),
        ("metrics", each["metrics"]),
        ("file", each["simulated"]),
        ("home", each["home"]),
        ("spool", kept if spool["outcomes"] else ""),
        *(("problem", problem) for problem in each["problems"]),
        *(("finding", _finding(found)) for found in each["findings"]),
    ]
    for label, text in rows:
        if text:
            line = f"  {label:<9} {printable(str(text))}"
            console.print(line, markup=False, soft_wrap=True)


def _say_spooled() -> None:
    from pichak_agent.service import spooled

    count, size = spooled(everywhere=True)
    if count:
        click.echo(
            f"pichak: {_outcomes(count)} ({size:,} bytes) wait for a service and a coordinator",
            err=True,
        )


def _outcomes(count: int) -> str:
    return f"{count} outcome{'' if count == 1 else 's'}"


def _finding(found: dict[str, Any]) -> str:
    return f"{found.get('severity')}, {found.get('state')}: {found.get('sentence')}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
