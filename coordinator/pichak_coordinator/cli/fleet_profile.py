"""``pichak fleet profile``: the main job."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    NothingMeasuredError,
    UserError,
    end_on_sigterm,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.options import (
    busy_options,
    open_store,
    store_option,
    workload_options,
)
from pichak_coordinator.cli.price_options import prices_of, prices_option, tell_unknown
from pichak_coordinator.cli.profile_request import profile_request, unchecked_request
from pichak_coordinator.cli.profile_resume import Sending, new_run, resumed
from pichak_coordinator.cli.progress import Progress, ProgressLine
from pichak_coordinator.cli.tables import chosen_format, format_option

if TYPE_CHECKING:
    from pichak_coordinator.cli.run_view import Shown
    from pichak_coordinator.fleet_network import NetReport
    from pichak_coordinator.records import Row
    from pichak_coordinator.request import ProfileRequest
    from pichak_coordinator.store import Store
    from pichak_coordinator.target import Target


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak fleet profile --data train.jsonl\n"
    "  RAY_ADDRESS=10.0.0.1:6379 pichak fleet profile --data train.jsonl --model builtin:gpt-25m\n"
    "  pichak fleet profile --data train.jsonl --model train.py:make --method lora --json\n"
    "  pichak fleet profile --data train.jsonl --memory-cap 600MiB --limit 64\n"
)
@workload_options
@busy_options
@click.option(
    "--address",
    help="The Ray cluster, HOST:PORT or 'auto' [default: RAY_ADDRESS, else a local Ray].",
)
@click.option("--insecure", is_flag=True, help="Join a cluster that has no authentication.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: each GPU that Ray may lease, and the CPU of nodes without one.",
)
@click.option("--depth", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option(
    "--directory",
    default="",
    help="Where each node's disk is measured [default: the agent's temporary folder].",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Take only this measurement; may be repeated."
)
@click.option(
    "--network/--no-network",
    default=None,
    help="Test the links between the nodes too [default: when there are two machines or more].",
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="KIND=SECONDS",
    help="Longest time for a job: fingerprint=, task= or ramp=; may be repeated.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the last profile, which was cut off or interrupted, on the cluster and with "
    "the options that it had.",
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most jobs on the fleet at one time; 1 keeps nodes with a common disk apart [default: "
    "256].",
)
@click.option(
    "--sort", default="", help="Column to sort the comparison by [default: fastest first]."
)
@prices_option
@click.option("--strict", is_flag=True, help="Exit with 1 when a node failed or a fault is sure.")
@click.option("--all", "every", is_flag=True, help="Show every device, also of a large fleet.")
@store_option
@format_option
@json_option
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    *,
    address: str | None,
    insecure: bool,
    network: bool | None,
    deadlines: Sequence[str],
    resume: bool,
    at_once: int | None,
    sort: str,
    prices: Path | None,
    strict: bool,
    every: bool,
    store_path: Path | None,
    form: str,
    as_json: bool,
    **asked: Any,
) -> int:
    """Measure every node of the fleet and derive each one's fine-tuning plan.

    With no cluster address a local Ray is started and this machine is profiled. Each GPU (or node
    without one) is fingerprinted and ramped by real training steps in a process of its own; the
    corpus, the noise scale and the weights are measured once, on one node. Results are kept in a
    SQLite file, and the next run says what changed.
    """
    from pichak_coordinator.cli.run_view import Shown, comparison_of
    from pichak_coordinator.stored_faults import rows_as_known

    form = chosen_format(form, as_json)
    shown = Shown(sort, prices_of(prices), every=every)
    comparison_of([], shown)  # a column that does not exist is said before anything is measured
    request = unchecked_request(asked, deadlines) if resume else profile_request(asked, deadlines)
    sending = Sending.of(address, insecure, network, at_once)
    with ExitStack() as stack:
        store = stack.enter_context(open_store(store_path))
        if resume:
            run, request, sending = resumed(store, request, sending, _named(ctx))
        else:
            run = new_run(store, request, sending)
        try:
            interrupted, timing, links = _measure(request, store, run, sending, resume)
        finally:
            store.finish_run(run)
        _judge(store, run)
        rows = store.rows_of(run)
        tell_unknown(shown.prices, rows)
        _present(store, run, rows_as_known(store, run), shown, form, timing, links)
    if interrupted:
        click.echo("pichak: interrupted; what was measured is kept", err=True)
        return EXIT_INTERRUPTED
    return _exit_code(rows, strict)


def _named(ctx: click.Context) -> set[str]:
    """The request's fields that the user gave on the command line."""
    given = {
        name
        for name in ctx.params
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    return {"memory_cap_bytes" if name == "memory_cap" else name for name in given}


def _measure(
    request: ProfileRequest,
    store: Store,
    run: str,
    sending: Sending,
    resume: bool,
) -> tuple[bool, dict[str, float], NetReport | None]:
    """Join the cluster, profile it, leave; (interrupted, seconds by what they went to, links)."""
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.cluster_address import ClusterError
    from pichak_coordinator.courier import MOST_IN_FLIGHT
    from pichak_coordinator.dispatch import Dispatcher
    from pichak_coordinator.fleet_network import network_of_profile
    from pichak_coordinator.profile import Profiler

    started = time.monotonic()
    with Progress() as progress:
        try:
            progress.say("joining the cluster" if sending.address else "starting")
            cluster = Cluster(sending.address or "local", insecure=sending.insecure)
        except ClusterError as error:
            raise UserError(str(error)) from error
        end_on_sigterm()  # Ray has put its own handler there
        with cluster:
            nodes = cluster.wait_for_nodes()
            where = "a local Ray" if cluster.local else f"the cluster at {cluster.address}"
            progress.say(f"{where}: {len(nodes)} node{'' if len(nodes) == 1 else 's'}")
            if not nodes:
                raise NothingMeasuredError(f"{where} {cluster.why_none()}")
            dispatcher = Dispatcher(cluster)
            profiler = Profiler(
                *(request, cluster, dispatcher, store, _Watcher(progress), run), resumed=resume
            )
            profiler.courier.most_in_flight = sending.at_once or MOST_IN_FLIGHT
            targets = profiler.run(nodes)
            links, began = None, time.monotonic()
            if not profiler.interrupted:
                links = network_of_profile(
                    *(sending.network, request.only, cluster, dispatcher, store, run, targets),
                    progress.say,
                )
            measuring = profiler.courier.busy_seconds
            measuring += time.monotonic() - began if links else 0.0
    interrupted = profiler.interrupted or bool(links and links.interrupted)
    return interrupted, {"total": time.monotonic() - started, "measuring": measuring}, links


class _Watcher:
    """Turns the profiler's targets into progress lines."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        self._progress.say(text)

    def show(self, targets: Sequence[Target]) -> None:
        now = time.monotonic()
        self._progress.update(
            [ProgressLine(t.label, t.phase, t.text, max(0.0, now - t.since)) for t in targets]
        )


def _judge(store: Store, run: str) -> None:
    from pichak_coordinator.judging import judge_run

    judge_run(store, run)


def _present(
    store: Store,
    run: str,
    rows: Sequence[Row],
    shown: Shown,
    form: str,
    timing: Mapping[str, float],
    links: NetReport | None,
) -> None:
    from pichak_coordinator.cli.comparison_forms import print_run_as
    from pichak_coordinator.cli.run_view import print_run, run_as_dict

    if form == "json":
        record = run_as_dict(store, run, rows, shown)
        print_json({**record, "network": links.as_dict() if links else None})
        return
    if form != "table":
        print_run_as(store, run, rows, shown, form, plans=True)
        if links is not None:
            click.echo(
                f"pichak: the links between the nodes are no part of {form}: --json has them, and "
                "`pichak fleet report`",
                err=True,
            )
        return
    console = out()
    print_run(store, run, rows, shown, console, plans=True)
    if links is not None:
        from pichak_coordinator.cli.net_view import show_network

        console.print()
        show_network(links, console)
    rest = timing["total"] - timing["measuring"]
    console.print(
        f"took {timing['total']:.0f} s, of which {rest:.0f} s was not measuring; kept as {run} in "
        f"{store.path}",
        soft_wrap=True,
        markup=False,
    )


def _exit_code(rows: Sequence[Row], strict: bool) -> int:
    if not any(row.measured for row in rows):
        click.echo("pichak: nothing could be measured on any node", err=True)
        return EXIT_NOTHING
    sure = any(f.state == "confirmed" and f.severity != "info" for r in rows for f in r.findings)
    if strict and (sure or any(row.error for row in rows)):
        return EXIT_NOTHING
    sys.stdout.flush()
    return EXIT_DONE
