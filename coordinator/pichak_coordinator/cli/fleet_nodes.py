"""``pichak fleet nodes``: what a cluster has, or what the history knows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pichak_coordinator.cli.common import EXIT_NOTHING, UserError, json_option, print_json
from pichak_coordinator.cli.options import open_store, store_option
from pichak_coordinator.cli.tables import chosen_format, format_option, print_records

#: Of more nodes a person is shown the count and the first ones.
_MOST_LINES = 40


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet nodes                          what the history knows\n"
    "  pichak fleet nodes --address 10.0.0.1:6379  what the cluster has now\n"
)
@click.option("--address", envvar="RAY_ADDRESS", help="The Ray cluster [default: RAY_ADDRESS].")
@click.option("--insecure", is_flag=True, help="Join a cluster that has no authentication.")
@click.option("--all", "every", is_flag=True, help="Every node, also of a large fleet.")
@store_option
@format_option
@json_option
def nodes(
    *,
    address: str | None,
    insecure: bool,
    every: bool,
    store_path: Path | None,
    form: str,
    as_json: bool,
) -> int:
    """List the nodes of a cluster; without an address, those that were profiled before."""
    form = chosen_format(form, as_json)
    found = _of_store(store_path) if address is None else _of_cluster(address, insecure)
    if form == "json":
        print_json({"schema": 1, "source": address or "history", "nodes": found})
        return 0 if found else EXIT_NOTHING
    if not found:
        where = f"the cluster at {address} has no node" if address else "no node was profiled yet"
        click.echo(f"pichak: {where}; `pichak fleet profile` measures one", err=True)
        return EXIT_NOTHING
    few = every or form != "table" or len(found) <= _MOST_LINES
    if not few:
        click.echo(_summary(found))
    print_records(found if few else found[:_MOST_LINES], form, right=("cpus", "gpus"))
    if not few:
        click.echo(f"{len(found) - _MOST_LINES:,} more (--all lists every one)")
    return 0


def _summary(found: Sequence[dict[str, Any]]) -> str:
    dead = sum(node.get("state") == "dead" for node in found)
    gpus = sum(int(node["gpus"]) for node in found)
    return f"{len(found):,} nodes with {gpus:,} GPUs" + (f", {dead:,} dead" if dead else "")


def _of_cluster(address: str, insecure: bool) -> list[dict[str, Any]]:
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.cluster_address import ClusterError

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
        # The dead ones first, the others as the cluster lists them.
        for n in sorted(listed, key=lambda n: n.alive)
    ]


def _of_store(path: Path | None) -> list[dict[str, Any]]:
    with open_store(path, read_only=True) as store:
        simulated = store.simulated_nodes()
        return [
            {
                "node": n.node,
                "host": n.host,
                "address": n.address,
                "gpus": len(n.gpu_uuids),
                "last_seen": time.strftime("%Y-%m-%d %H:%M", time.localtime(n.last_seen_unix)),
                "simulated": n.node in simulated,
            }
            for n in store.nodes()
        ]
