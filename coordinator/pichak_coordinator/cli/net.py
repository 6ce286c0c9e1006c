"""``pichak net``: the links between the nodes of a cluster, and an all-reduce over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    NothingMeasuredError,
    UserError,
    end_on_sigterm,
    examples,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.options import ByteSize, open_store, store_option
from pichak_coordinator.cli.progress import Progress

if TYPE_CHECKING:
    from pichak_coordinator.cluster import ClusterNode
    from pichak_coordinator.fleet_network import NetReport, NetRequest
    from pichak_coordinator.links import Pairs
    from pichak_coordinator.net_collective import Backend
    from pichak_coordinator.store import Store
    from pichak_core.measure import Depth


@click.command(
    epilog=examples(
        "pichak net --address 10.0.0.1:6379",
        "pichak net --nodes gpu-a,gpu-b --depth full",
        "pichak net --pairs ring --no-collective --json > links.json",
        "pichak net --gradient 500MB            what a step of your model will wait for",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--address", envvar="RAY_ADDRESS", help="The Ray cluster [default: RAY_ADDRESS].")
@click.option("--insecure", is_flag=True, help="Join a cluster that has no authentication.")
@click.option(
    "--nodes",
    default="",
    metavar="NAME,…",
    help="Only these nodes, by host name or address [default: all].",
)
@click.option("--depth", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option(
    "--pairs",
    type=click.Choice(["auto", "all", "ring", "sample"]),
    default="auto",
    show_default=True,
    help="Which links: all, each node with two neighbours, or each with six others; auto is all up "
    "to twelve nodes, else sample.",
)
@click.option(
    "--collective/--no-collective",
    default=True,
    show_default=True,
    help="Time an all-reduce over the nodes too.",
)
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    help="For the all-reduce [default: nccl where every node has a GPU, else gloo].",
)
@click.option(
    "--gradient",
    type=ByteSize(),
    default="64MiB",
    show_default=True,
    help="The largest size to all-reduce: the bytes of your model's gradients.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 when a fault is sure or a node failed.")
@store_option
@json_option
def net(
    *,
    address: str | None,
    insecure: bool,
    nodes: str,
    depth: Depth,
    pairs: Pairs,
    collective: bool,
    backend: Backend | None,
    gradient: int,
    strict: bool,
    store_path: Path | None,
    as_json: bool,
) -> int:
    """Measure the links between a cluster's nodes: who reaches whom, round trips, throughput in
    each direction, loss, and an all-reduce.

    Every two nodes are tested through the addresses by which Ray knows them, in rounds in which no
    node is in two tests at once. What seems wrong is looked at a second time before it is said to
    be sure. It takes about 8 s a round (a fleet of n nodes has n − 1 rounds), and the links are
    full meanwhile.
    """
    from pichak_coordinator.fleet_network import NetRequest

    if address is None:
        raise UserError(
            "no cluster: a network test needs two nodes; give --address HOST:PORT, or set "
            "RAY_ADDRESS (`ray start --head` begins a cluster, `ray start --address …` joins it)"
        )
    if gradient < 4:
        raise UserError(f"--gradient {gradient}: a gradient has 4 bytes at least; write 64MiB")
    request = NetRequest(depth, pairs, collective, backend, gradient)
    with open_store(store_path) as store:
        run = store.begin_run("net", request.settings())
        try:
            report = _measure(request, store, run, address, insecure, nodes)
        finally:
            store.finish_run(run)
    if as_json:
        print_json({"schema": 1, "run": run, **report.as_dict()})
    else:
        from pichak_coordinator.cli.net_view import show_network

        show_network(report, out())
    return _exit_code(report, strict)


def _measure(
    request: NetRequest, store: Store, run: str, address: str, insecure: bool, names: str
) -> NetReport:
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.cluster_address import ClusterError
    from pichak_coordinator.dispatch import Dispatcher
    from pichak_coordinator.fleet_network import run_network, start_agents

    with Progress() as progress:
        try:
            progress.say("joining the cluster")
            cluster = Cluster(address, insecure=insecure)
        except ClusterError as error:
            raise UserError(str(error)) from error
        end_on_sigterm()  # Ray has put its own handler there
        with cluster:
            chosen = choose(cluster.wait_for_nodes(), names, cluster.left_out())
            progress.say(f"starting an agent on {len(chosen)} nodes")
            dispatcher = Dispatcher(cluster)
            ready, gaps = start_agents(dispatcher, store, run, chosen)
            if len(ready) < 2:
                raise NothingMeasuredError(
                    f"a network test needs two nodes and {len(ready)} answered: {'; '.join(gaps)}"
                )
            report = run_network(request, cluster, dispatcher, store, run, ready, progress.say)
            report.gaps[:0] = gaps
            return report


def choose(
    nodes: Sequence[ClusterNode], names: str, left_out: Sequence[ClusterNode] = ()
) -> list[ClusterNode]:
    """The living nodes that were named, all without names; `UserError` for fewer than two. Those
    that are `left_out` are none of them."""
    from pichak_coordinator.cluster import LEFT_OUT

    label = "=".join(LEFT_OUT)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = ", ".join(sorted(node.host or node.address for node in nodes)) or "none"
    for name in wanted:
        if not any(name in (node.host, node.address) for node in nodes):
            if any(name in (node.host, node.address) for node in left_out):
                raise UserError(f"--nodes {name}: it is left out by its label {label}")
            raise UserError(f"--nodes {name}: no such living node; there are: {known}")
    chosen = [node for node in nodes if not wanted or {node.host, node.address} & set(wanted)]
    if len(chosen) < 2:
        raise UserError(
            f"a network test needs two nodes; there is {len(chosen)} ({known}): add one with "
            "`ray start --address=HOST:PORT`"
            + (", or name more in --nodes" if wanted else "")
            + (f"; {len(left_out)} more left out by the label {label}" if left_out else "")
        )
    return chosen


def _exit_code(report: NetReport, strict: bool) -> int:
    if report.interrupted:
        click.echo("pichak: interrupted; what was measured is kept", err=True)
        return EXIT_INTERRUPTED
    if not report.measured:
        click.echo("pichak: nothing could be measured of any link", err=True)
        return EXIT_NOTHING
    findings = [each.finding for each in report.findings]
    sure = any(f.state == "confirmed" and f.severity != "info" for f in findings)
    if strict and (sure or any(node.error for node in report.nodes)):
        return EXIT_NOTHING
    return EXIT_DONE
