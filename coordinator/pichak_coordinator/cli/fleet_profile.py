"""``pichak fleet profile``: the main job."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Container, Mapping, Sequence
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
from pichak_coordinator.cli.profile_request import (
    check_request,
    profile_request,
    unchecked_request,
)
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
    help="Go on with the last profile, which was cut off or interrupted, with the options that it "
    "had; name --address again where there was one.",
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

    form = chosen_format(form, as_json)
    shown = Shown(sort, prices_of(prices), every=every)
    comparison_of([], shown)  # a column that does not exist is said before anything is measured
    request = unchecked_request(asked, deadlines) if resume else profile_request(asked, deadlines)
    with ExitStack() as stack:
        store = stack.enter_context(open_store(store_path))
        if resume:
            run, request = _resumed(store, request, _named(ctx), address)
        else:
            run = _new_run(store, request, address)
        try:
            interrupted, timing, links = _measure(
                *(request, store, run, address, insecure, network, at_once, resume)
            )
        finally:
            store.finish_run(run)
        _judge(store, run)
        rows = store.rows_of(run)
        tell_unknown(shown.prices, rows)
        _present(store, run, rows, shown, form, timing, links)
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


def _resumed(
    store: Store, request: ProfileRequest, named: Container[str], address: str | None
) -> tuple[str, ProfileRequest]:
    """The run that is to go on, and what it was asked; `UserError` where there is none, or where an
    option that was `named` contradicts it."""
    from pichak_coordinator.cut_runs import run_to_go_on

    asked = {name: value for name, value in request.settings().items() if name in named}
    try:
        cut = run_to_go_on(store, "fleet profile", asked)
    except ValueError as error:
        raise UserError(f"--resume: {error}") from error
    was = cut.settings.get("cluster")
    if was and not address:
        raise UserError(
            f"--resume: {cut.run} is of the cluster at {was}; give --address (or RAY_ADDRESS), "
            "for this machine alone is another fleet"
        )
    if was == "" and address:
        raise UserError(
            f"--resume: {cut.run} is of this machine alone; leave --address and RAY_ADDRESS out"
        )
    try:
        request = request.with_settings(cut.settings)
    except ValueError as error:
        raise UserError(f"--resume: {cut.run} cannot go on: {error}") from error
    check_request(request)
    store.reopen_run(cut.run)
    return cut.run, request


def _new_run(store: Store, request: ProfileRequest, address: str | None) -> str:
    """A new run; says so where one was cut off that could go on."""
    from pichak_coordinator.cut_runs import count_ended, run_to_go_on

    settings = request.settings()
    with contextlib.suppress(ValueError):
        cut = run_to_go_on(store, "fleet profile", settings)
        if cut.finished_unix is None:
            done, jobs = count_ended(store, cut.run)
            click.echo(
                f"pichak: {cut.run} was cut off when {done} of {jobs} jobs were done; --resume "
                "goes on with it, this is a new profile",
                err=True,
            )
    return store.begin_run("fleet profile", {**settings, "cluster": address or ""})


def _measure(
    request: ProfileRequest,
    store: Store,
    run: str,
    address: str | None,
    insecure: bool,
    network: bool | None,
    at_once: int | None,
    resume: bool,
) -> tuple[bool, dict[str, float], NetReport | None]:
    """Join the cluster, profile it, leave; (interrupted, seconds by what they went to, links)."""
    from pichak_coordinator.cluster import Cluster, ClusterError
    from pichak_coordinator.courier import MOST_IN_FLIGHT
    from pichak_coordinator.dispatch import Dispatcher
    from pichak_coordinator.fleet_network import network_of_profile
    from pichak_coordinator.profile import Profiler

    started = time.monotonic()
    with Progress() as progress:
        try:
            progress.say("joining the cluster" if address else "starting")
            cluster = Cluster(address, insecure=insecure)
        except ClusterError as error:
            raise UserError(str(error)) from error
        end_on_sigterm()  # Ray has put its own handler there
        with cluster:
            nodes = cluster.wait_for_nodes()
            where = "a local Ray" if cluster.local else f"the cluster at {cluster.address}"
            progress.say(f"{where}: {len(nodes)} node{'' if len(nodes) == 1 else 's'}")
            if not nodes:
                raise NothingMeasuredError(
                    f"{where} has no living node to measure (`ray status` shows why)"
                )
            dispatcher = Dispatcher(cluster)
            profiler = Profiler(
                *(request, cluster, dispatcher, store, _Watcher(progress), run), resumed=resume
            )
            profiler.courier.most_in_flight = at_once or MOST_IN_FLIGHT
            targets = profiler.run(nodes)
            links, began = None, time.monotonic()
            if not profiler.interrupted:
                links = network_of_profile(
                    *(network, request.only, cluster, dispatcher, store, run, targets),
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
