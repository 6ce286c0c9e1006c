"""``pichak agent run``: this machine as a node of a fleet, for as long as it lives."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.agent_voice import say, tell_warnings
from pichak_coordinator.cli.common import EXIT_DONE, EXIT_NOTHING, UserError, examples
from pichak_coordinator.cli.files import told_of_host
from pichak_core.small_file import read_small

if TYPE_CHECKING:
    from pichak_agent.service import RayStart, Service

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
#: The service looks at nothing else meanwhile.
_ASK_SECONDS = 2.0
_OTHER_SYSTEMS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@click.command(
    epilog=examples(
        "pichak agent run --address 10.0.0.1:6379 --token-file ~/.ray/auth_token",
        "pichak agent run --address head:6379 --labels pichak.io/price-per-hour=2.50",
        "pichak agent run --address head:6379 -- --min-worker-port 20000 --max-worker-port 20100",
        "pichak agent run --address head:6379 --simulate host.toml --name sim-1",
        "pichak agent status                      what it is doing",
    ),
)
@click.option(
    "--address", required=True, envvar="RAY_ADDRESS", metavar="HOST:PORT", help="The Ray head."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The cluster's token [default: where Ray looks, ~/.ray/auth_token].",
)
@click.option("--insecure", is_flag=True, help="Join a cluster that has no authentication.")
@click.option("--name", default="", help="What the node is called [default: the host's name].")
@click.option("--labels", default="", metavar="KEY=VALUE,…", help="Labels of the Ray node.")
@click.option("--resources", default="", metavar="JSON", help="Resources of the Ray node.")
@click.option("--num-cpus", type=click.IntRange(min=0), help="CPUs that Ray may lease.")
@click.option("--num-gpus", type=click.IntRange(min=0), help="GPUs that Ray may lease.")
@click.option(
    "--object-store-memory",
    type=click.IntRange(min=80_000_000),
    metavar="BYTES",
    help="Ray's object store [default: 100 MiB; results are small].",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Answer /metrics and /ring.json there, on loopback only (0: a free port).",
)
@click.option(
    "--simulate",
    type=click.Path(path_type=Path),
    metavar="HOST.toml",
    help="Be the host of this file, which does not exist; all that it answers says so.",
)
@click.option(
    "--even-if-another",
    is_flag=True,
    help="Run although an agent of another home runs on this machine.",
)
@click.argument("ray_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- RAY_OPTION…]")
def run(
    address: str,
    token_file: Path | None,
    insecure: bool,
    name: str,
    labels: str,
    resources: str,
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_memory: int | None,
    metrics_port: int | None,
    simulate: Path | None,
    even_if_another: bool,
    ray_options: Sequence[str],
) -> int:
    """Join the cluster at HOST:PORT and stay in it; SIGTERM or Ctrl-C ends it without trace.

    One service on a machine. It starts Ray here, watches it, and joins again after the head was
    restarted or Ray died here; while the head is away it waits, and what this node has measured
    stays in its spool until a coordinator has it. What follows -- goes to `ray start` as it is.
    """
    from pichak_agent.service import (
        OBJECT_STORE_BYTES,
        Beside,
        RayStart,
        Service,
        ServiceError,
        ServiceTakenError,
    )

    _check_system()
    _check_address(address)
    _check_token(token_file)
    if token_file is None:
        _check_open(address, insecure)
    may_join = partial(_why_not_joined, address, insecure, token_file)
    _check_name(name)
    how = RayStart(
        address,
        token_file.absolute() if token_file else None,
        name,
        {**_labels(labels), **({"pichak.io/name": name} if name else {})},
        _resources(resources),
        num_cpus,
        num_gpus,
        object_store_memory or OBJECT_STORE_BYTES,
        _ray_options(ray_options),
    )
    if simulate is None:
        beside = Beside(metrics_port, say)
        service = Service(how, name or socket.gethostname(), say, beside)
    else:
        if metrics_port is not None:
            raise UserError("--metrics-port: a simulated host has no readings; leave it out")
        service = _simulated(how, simulate)
    service.even_if_another, service.objection = even_if_another, may_join
    tell_warnings()
    try:
        service.run()
    except ServiceTakenError as error:
        click.echo(f"pichak: {error}", err=True)
        return EXIT_NOTHING
    except ServiceError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(
            f"the service's files cannot be kept in {error.filename or 'its home'} "
            f"({error.strerror or error}); set PICHAK_HOME to a folder that can be written"
        ) from error
    return EXIT_DONE


def _simulated(how: RayStart, file: Path) -> Service:
    """The service of a host that does not exist; several of them run on one machine."""
    from pichak_agent.simulation import simulated_service

    with told_of_host(file):
        return simulated_service(how, file, say)


def _check_name(name: str) -> None:
    """What Ray takes as a label's value."""
    if name and not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name}: up to 63 letters, digits, dots, dashes and underscores, the first and "
            "the last a letter or a digit"
        )


def _check_system() -> None:
    """Ray makes clusters of Linux machines only, unless it is told otherwise (field case 83)."""
    from pichak_core.devices.host import IS_LINUX

    if IS_LINUX or os.environ.get(_OTHER_SYSTEMS):
        return
    refused = (
        f"Ray joins no cluster on this system unless {_OTHER_SYSTEMS}=1 is set, and does not "
        "support it"
    )
    if hasattr(os, "fork"):
        raise UserError(
            f"{refused}; `pichak agent probe --out FILE` measures this machine without Ray"
        )
    raise UserError(
        f"{refused}, and an agent's jobs need fork(), which it lacks: run the agent inside WSL2; "
        "`pichak agent watch` watches this machine's GPUs from here"
    )


def _check_address(address: str) -> None:
    from pichak_coordinator.cluster_address import is_address

    if not is_address(address):
        raise UserError(
            f"--address {address}: write HOST:PORT, as `ray start --head` shows it on the head "
            "(Ray's default port is 6379)"
        )


def _check_token(file: Path | None) -> None:
    """It can be read, holds one word, and is nobody else's to read. It is never shown."""
    if file is None:
        return
    try:
        text = read_small(file).decode("utf-8")
        mode = file.stat().st_mode
    except UnicodeDecodeError as error:
        raise UserError(f"--token-file {file}: it holds bytes that are no text") from error
    except OSError as error:
        raise UserError(f"--token-file {file}: it cannot be read ({error.strerror})") from error
    if len(text.split()) != 1:
        raise UserError(
            f"--token-file {file}: one word was expected, the output of `ray get-auth-token` on "
            "the head"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        say(f"others on this machine can read the token in {file}: chmod 600 {file}")


def _check_open(address: str, insecure: bool) -> None:
    from pichak_coordinator.cluster_address import ClusterError, refuse_open_cluster

    try:
        refuse_open_cluster(address, insecure=insecure)
    except ClusterError as error:
        raise UserError(str(error)) from error


def _why_not_joined(address: str, insecure: bool, token_file: Path | None) -> str:
    """Why what answers is not to be joined, "" where it may be."""
    from pichak_coordinator.cluster_address import ClusterError, refuse_what_answers

    try:
        refuse_what_answers(
            address,
            insecure=insecure,
            has_token=None if token_file is None else True,
            timeout_seconds=_ASK_SECONDS,
        )
    except ClusterError as error:
        return str(error)
    return ""


def _labels(text: str) -> dict[str, str]:
    made: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, sign, value = part.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--labels {part}: write KEY=VALUE, several with commas between them")
        made[key.strip()] = value.strip()
    return made


def _resources(text: str) -> str:
    if not text:
        return ""
    try:
        given: Any = json.loads(text)
    except ValueError:
        given = None
    numbers = isinstance(given, dict) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in given.values()
    )
    if not numbers:
        raise UserError(f"""--resources {text}: write JSON, as in '{{"fast_disk": 1}}'""")
    return text


def _ray_options(given: Sequence[str]) -> list[str]:
    from pichak_agent.service import RAY_OPTIONS_OF_OURS

    for word in given:
        if word.split("=", 1)[0] in RAY_OPTIONS_OF_OURS:
            raise UserError(f"{word} after --: the service decides that itself")
    return list(given)
