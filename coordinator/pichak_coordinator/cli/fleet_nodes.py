"""``pichak fleet nodes``: what a cluster has, or what the history knows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import EXIT_NOTHING, UserError, json_option, out, print_json
from pichak_coordinator.cli.options import open_store, store_option
from pichak_coordinator.text import printable

if TYPE_CHECKING:
    from rich.text import Text


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet nodes                          what the history knows\n"
    "  pichak fleet nodes --address 10.0.0.1:6379  what the cluster has now\n"
)
@click.option("--address", envvar="RAY_ADDRESS", help="The Ray cluster [default: RAY_ADDRESS].")
@click.option("--insecure", is_flag=True, help="Join a cluster that has no authentication.")
@store_option
@json_option
def nodes(address: str | None, insecure: bool, store_path: Path | None, as_json: bool) -> int:
    """List the nodes of a cluster; without an address, those that were profiled before."""
    found = _of_cluster(address, insecure) if address else _of_store(store_path)
    if as_json:
        print_json({"schema": 1, "source": address or "history", "nodes": found})
        return 0 if found else EXIT_NOTHING
    if not found:
        where = f"the cluster at {address} has no node" if address else "no node was profiled yet"
        click.echo(f"pichak: {where}; `pichak fleet profile` measures one", err=True)
        return EXIT_NOTHING
    _print(found)
    return 0


def _of_cluster(address: str, insecure: bool) -> list[dict[str, Any]]:
    from pichak_coordinator.cluster import Cluster, ClusterError

    try:
        with Cluster(address, insecure=insecure) as cluster:
            cluster.wait_for_nodes()
            listed = cluster.nodes()
    except ClusterError as error:
        raise UserError(str(error)) from error
    return [
        {
            "host": n.host,
            "address": n.address,
            "state": "alive" if n.alive else "dead",
            "cpus": n.cpus,
            "gpus": n.gpus,
            "head": n.is_head,
            "ray_node": n.node_id,
            "simulated": n.simulated,
        }
        for n in listed
    ]


def _of_store(path: Path | None) -> list[dict[str, Any]]:
    with open_store(path, read_only=True) as store:
        return [
            {
                "node": n.node,
                "host": n.host,
                "address": n.address,
                "gpus": len(n.gpu_uuids),
                "last_seen": time.strftime("%Y-%m-%d %H:%M", time.localtime(n.last_seen_unix)),
            }
            for n in store.nodes()
        ]


def _print(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in found[0]:
        table.add_column(name.replace("_", " "), overflow="fold")
    for node in found:
        table.add_row(*(_cell(value) for value in node.values()))
    out().print(table)


def _cell(value: Any) -> Text:
    """Text of a node, which must not be read as markup."""
    from rich.text import Text

    if isinstance(value, bool):
        return Text("yes" if value else "")
    return Text(printable(f"{value:g}" if isinstance(value, float) else str(value)))
