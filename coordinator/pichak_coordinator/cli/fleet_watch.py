"""``pichak fleet watch``: re-probing on a schedule."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    NothingMeasuredError,
    UserError,
    end_on_sigterm,
    examples,
)
from pichak_coordinator.cli.options import (
    FiniteRange,
    check_data,
    check_model,
    store_option,
    workload_options,
)
from pichak_coordinator.cli.progress import Progress
from pichak_coordinator.cli.schedule_options import Duration, length_of, policy_of

if TYPE_CHECKING:
    from pichak_coordinator.metrics_server import MetricsServer
    from pichak_coordinator.schedule import Policy
    from pichak_coordinator.watch import Tally
    from pichak_coordinator.watch_probe import Requests
    from pichak_coordinator.watch_store import WatchStore
    from pichak_coordinator.webhook import Webhook


@click.command(
    epilog=examples(
        "pichak fleet watch                       # a local Ray: watch this machine",
        "RAY_ADDRESS=10.0.0.1:6379 pichak fleet watch --every light=10m --every full=24h",
        "pichak fleet watch --cron 'full=0 3 * * *' --quiet-hours 22-02 --budget 600s/h",
        "pichak fleet watch --once --strict       # from a timer: exits with 1 on a sure fault",
        "pichak fleet watch --metrics-port 9479  # http://127.0.0.1:9479/metrics for Prometheus",
        "pichak fleet watch --webhook https://hooks.example.com/t/1 --webhook-secret-file key",
    )
)
@workload_options
@click.option(
    "--address",
    help="The Ray cluster, HOST:PORT or 'auto' [default: RAY_ADDRESS, else a local Ray].",
)
@click.option("--insecure", is_flag=True, help="Join a cluster that has no authentication.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option("--depth", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option(
    "--directory",
    default="",
    help="Where each node's disk is measured [default: the agent's temporary folder].",
)
@click.option(
    "--every",
    multiple=True,
    metavar="DEPTH=TIME",
    help="light= or full=, a time or 'never' [default: light=10m, full=24h]. A node's own interval "
    "is a quarter to four times that, by its noise.",
)
@click.option(
    "--cron",
    "crons",
    multiple=True,
    metavar="DEPTH=EXPRESSION",
    help="light= or full= at times of the calendar (five fields) instead of every so often.",
)
@click.option("--quiet-hours", metavar="FROM-TO", help="No probes then, local time: 22-06.")
@click.option(
    "--budget", metavar="TIME/h", help="Probe-seconds an hour over the whole fleet: 120s/h."
)
@click.option("--parallel", type=click.IntRange(1, 256), default=8, show_default=True,
              help="Nodes that are probed side by side.")  # fmt: skip
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="KIND=TIME",
    help="Longest time for a job: light=, fingerprint=, task= or ramp=; may be repeated.",
)
@click.option("--keep-days", type=FiniteRange(1.0, 36500.0), default=90.0, show_default=True,
              help="Older probes of the watch are forgotten, but each node's last.")  # fmt: skip
@click.option("--once", is_flag=True, help="One round: whoever is due, and second looks.")
@click.option("--for", "for_seconds", type=Duration(), help="End after this time.")
@click.option(
    "--webhook", metavar="URL", envvar="PICHAK_WEBHOOK",
    help="POST events there, also from PICHAK_WEBHOOK (which no process list shows).",
)  # fmt: skip
@click.option(
    "--webhook-secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file with the secret that signs them.",
)
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics there, and /healthz; 0 takes a free port.",
)  # fmt: skip
@click.option("--metrics-host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Where --metrics-port listens.")  # fmt: skip
@click.option("--strict", is_flag=True, help="With --once: exit with 1 while a sure fault is open.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line on stdout, only.")
@store_option
def watch(
    *,
    address: str | None,
    insecure: bool,
    every: Sequence[str],
    crons: Sequence[str],
    quiet_hours: str | None,
    budget: str | None,
    parallel: int,
    deadlines: Sequence[str],
    once: bool,
    for_seconds: float | None,
    keep_days: float,
    webhook: str | None,
    webhook_secret_file: Path | None,
    metrics_port: int | None,
    metrics_host: str,
    strict: bool,
    as_json: bool,
    store_path: Path | None,
    **asked: Any,
) -> int:
    """Probe the fleet again and again, and say what changes.

    Light probes (seconds, nothing written to disk) come often, full ones rarely: the whole
    fingerprint, and with --data or --seq-len the ramp of `fleet profile` too. Only idle GPUs are
    probed. Something odd is looked at again at once, and told as sure when it repeats. One line an
    event on stdout; the schedule is in the history's file: stop and start at will.
    """
    if strict and not once:
        raise UserError("--strict is for one round's exit code: give --once too")
    requests = _requests(asked, deadlines)
    policy = policy_of(every, crons, quiet_hours, budget, parallel, requests, asked["seed"])
    target = _webhook(webhook, webhook_secret_file)
    with ExitStack() as stack:
        metrics = _metrics(metrics_port, metrics_host)
        if metrics is not None:
            stack.enter_context(metrics)
        store = stack.enter_context(_open_store(store_path))
        progress = stack.enter_context(Progress())
        if not requests.ramp and "full" in policy.depths:
            progress.say("full probes do not train: give --data FILE or --seq-len TOKENS for that")
        if metrics is not None:
            progress.say(f"metrics: {metrics.url}")
        tally = _watch(
            *(policy, requests, store, progress, target, once, for_seconds, address, insecure),
            asked["device"],
            as_json,
            metrics,
            keep_days,
        )
        left = store.pending_deliveries() if target else 0
        progress.say(_told(tally) + (f"; {left} events still wait for the webhook" if left else ""))
    sys.stdout.flush()
    if tally.interrupted:
        return EXIT_INTERRUPTED
    if once and tally.probes and not tally.measured and not tally.busy:
        click.echo("pichak: nothing could be measured on any node", err=True)
        return EXIT_NOTHING
    sure = bool(tally.open_faults) or tally.failed > 0 or tally.silent > 0
    return EXIT_NOTHING if once and strict and sure else EXIT_DONE


def _told(tally: Tally) -> str:
    parts = [f"{tally.probes} probes in {tally.seconds:.0f} probe-seconds"]
    faults = sum(tally.open_faults.values())
    for count, what in (
        (tally.failed, "failed"),
        (tally.busy, "found no idle device"),
        (tally.waiting_for_budget, "wait for the hour's budget"),
        (tally.silent, f"node{'' if tally.silent == 1 else 's'} gave nothing when last asked"),
        (faults, "confirmed fault is open" if faults == 1 else "confirmed faults are open"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return "; ".join(parts)


def _requests(asked: Mapping[str, Any], deadlines: Sequence[str]) -> Requests:
    from pichak_coordinator.request import ProfileRequest
    from pichak_coordinator.watch_probe import Requests

    given = dict(asked)
    given["memory_cap_bytes"] = given.pop("memory_cap")
    check_data(given["data"])
    check_model(given["model"])
    seconds: dict[str, float] = {}
    for text in deadlines:
        kind, _, length = text.partition("=")
        if kind not in ("light", "fingerprint", "task", "ramp"):
            raise UserError(f"--deadline {text}: write light=, fingerprint=, task= or ramp=")
        seconds[kind] = length_of(f"--deadline {text}", length)
    ramp = bool(
        given["data"] or given["seq_len"] or not given["model"].startswith(("builtin:", "hf:"))
    )
    return Requests.of(ProfileRequest(**given, deadline_seconds=seconds), ramp=ramp)


def _webhook(url: str | None, secret_file: Path | None) -> Webhook | None:
    from pichak_coordinator.webhook import Webhook, WebhookError, read_secret

    if not url:
        if secret_file is not None:
            raise UserError("--webhook-secret-file without --webhook: give the URL too")
        return None
    try:
        return Webhook(url, read_secret(secret_file) if secret_file else b"")
    except WebhookError as error:
        raise UserError(str(error)) from error


def _metrics(port: int | None, host: str) -> MetricsServer | None:
    from pichak_coordinator.metrics_server import MetricsError, MetricsServer

    if port is None:
        return None
    try:
        return MetricsServer(port, host)
    except MetricsError as error:
        raise UserError(str(error)) from error


@contextmanager
def _open_store(path: Path | None) -> Iterator[WatchStore]:
    from pichak_coordinator.database import StoreError, translated
    from pichak_coordinator.watch_store import WatchStore

    try:
        with WatchStore.open(path) as store, store.held(), translated(store.path):
            yield store
    except StoreError as error:
        raise UserError(str(error)) from error


def _watch(
    policy: Policy,
    requests: Requests,
    store: WatchStore,
    progress: Progress,
    webhook: Webhook | None,
    once: bool,
    for_seconds: float | None,
    address: str | None,
    insecure: bool,
    device: str,
    as_json: bool,
    metrics: MetricsServer | None,
    keep_days: float,
) -> Tally:
    """Join the cluster, watch it, leave."""
    from pichak_coordinator.cluster import Cluster
    from pichak_coordinator.cluster_address import ClusterError
    from pichak_coordinator.dispatch import Dispatcher
    from pichak_coordinator.watch import Watch
    from pichak_coordinator.webhook import Sender

    stdout = sys.stdout  # a joined cluster keeps what Ray prints away from it
    try:
        progress.say("joining the cluster" if address else "starting")
        cluster = Cluster(address, insecure=insecure)
    except ClusterError as error:
        raise UserError(str(error)) from error
    end_on_sigterm()  # Ray has put its own handler there
    with cluster:
        nodes = cluster.wait_for_nodes()
        where = "a local Ray" if cluster.local else f"the cluster at {cluster.address}"
        if not nodes and once:
            raise NothingMeasuredError(f"{where} {cluster.why_none()}")
        count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        none = f"no node to measure yet (it {cluster.why_none()})" if not nodes else ""
        progress.say(f"watching {where}: {none or count}")
        sender = Sender(webhook, store, progress.say, time.time) if webhook else None
        end = math.inf if for_seconds is None else time.monotonic() + for_seconds

        def tell(record: Mapping[str, Any]) -> None:
            _print(record, stdout, as_json)
            if sender is not None:
                sender.wake()

        with sender or nullcontext():
            return Watch(
                *(policy, requests, cluster, Dispatcher(cluster), store),
                say=progress.say,
                tell=tell,
                notify=webhook is not None,
                device=device,
                show=metrics.show if metrics is not None else None,
                keep_days=keep_days,
            ).run(once=once, until=lambda: time.monotonic() >= end)


def _print(record: Mapping[str, Any], stdout: TextIO, as_json: bool) -> None:
    """One event a line, at once: whoever reads a pipe shall not wait for a buffer."""
    from pichak_coordinator.text import json_text, printable

    if as_json:
        line = json_text(record)
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
        line = printable(f"{when}  {record['name']}  {record['event']}: {record['text']}")
    click.echo(line, file=stdout)
    stdout.flush()
