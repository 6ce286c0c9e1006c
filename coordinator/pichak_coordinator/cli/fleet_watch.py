"""``pichak fleet watch``: re-probing on a schedule."""

from __future__ import annotations

import math
import re
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
    MOST_SEED,
    FiniteRange,
    check_data,
    check_model,
    store_option,
    workload_options,
)
from pichak_coordinator.cli.progress import Progress

if TYPE_CHECKING:
    from pichak_coordinator.metrics_server import MetricsServer
    from pichak_coordinator.schedule import Depth, Policy
    from pichak_coordinator.watch import Tally
    from pichak_coordinator.watch_probe import Requests
    from pichak_coordinator.watch_store import WatchStore
    from pichak_coordinator.webhook import Webhook

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LENGTH = re.compile(r"([0-9]*\.?[0-9]+)(s|m|h|d)")
#: No interval is shorter: a probe takes seconds itself.
_LEAST_SECONDS = 10.0
_MOST_SECONDS = 366 * 86400.0


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A length of time such as ``90s``, ``10m``, ``24h`` or ``7d``, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def seconds_of(text: str) -> float:
    """``10m`` in seconds; `ValueError` when it is no length of time, or longer than a year."""
    match = _LENGTH.fullmatch(text.strip())
    seconds = float(match.group(1)) * _UNITS[match.group(2)] if match else 0.0
    if not 0 < seconds <= _MOST_SECONDS or not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a length of time; write 90s, 10m, 24h or 7d")
    return seconds


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
@click.option("--strict", is_flag=True, help="With --once: exit with 1 when a fault is sure.")
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
    requests = _requests(asked, deadlines)
    policy = _policy(every, crons, quiet_hours, budget, parallel, requests, asked["seed"])
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
    sure = any(tally.open_faults.values()) or tally.failed > 0
    return EXIT_NOTHING if once and strict and sure else EXIT_DONE


def _told(tally: Tally) -> str:
    parts = [f"{tally.probes} probes in {tally.seconds:.0f} probe-seconds"]
    for count, what in (
        (tally.failed, "failed"),
        (tally.busy, "found no idle device"),
        (tally.waiting_for_budget, "wait for the hour's budget"),
        (sum(tally.open_faults.values()), "confirmed findings are open"),
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
        seconds[kind] = _length(f"--deadline {text}", length)
    ramp = bool(
        given["data"] or given["seq_len"] or not given["model"].startswith(("builtin:", "hf:"))
    )
    return Requests.of(ProfileRequest(**given, deadline_seconds=seconds), ramp=ramp)


def _length(option: str, text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def _policy(
    every: Sequence[str],
    crons: Sequence[str],
    quiet_hours: str | None,
    budget: str | None,
    parallel: int,
    requests: Requests,
    seed: int,
) -> Policy:
    from pichak_coordinator.schedule import DEPTHS, Policy
    from pichak_coordinator.timetable import Cron, QuietHours, TimetableError

    names: dict[str, Depth] = {depth: depth for depth in DEPTHS}
    intervals = intervals_of(every, Policy().every_seconds)
    calendar: dict[Depth, Cron] = {}
    try:
        for text in crons:
            name, _, expression = text.partition("=")
            if name not in names:
                raise UserError(f"--cron {text}: write full='0 3 * * *' or light='*/10 * * * *'")
            intervals.pop(names[name], None)
            calendar[names[name]] = Cron(expression)
        quiet = QuietHours.parse(quiet_hours) if quiet_hours else None
    except TimetableError as error:
        raise UserError(str(error)) from error
    made = Policy(
        every_seconds=intervals,
        cron=calendar,
        quiet=quiet,
        budget_seconds=budget_of(budget) if budget else None,
        longest_seconds=requests.longest_seconds(),
        most_at_once=parallel,
        seed=seed % (MOST_SEED + 1),
    )
    if not made.depths:
        raise UserError("--every light=never --every full=never: nothing is left to do")
    for depth in made.depths:
        most = made.longest_seconds[depth]
        if made.budget_seconds is not None and most > made.budget_seconds:
            raise UserError(
                f"--budget {budget}: one {depth} probe may take {most:.0f} s, so none would ever "
                f"begin; give at least {math.ceil(most)}s/h, shorten it with --deadline, or leave "
                f"it out with --every {depth}=never"
            )
    return made


def intervals_of(every: Sequence[str], default: Mapping[Depth, float]) -> dict[Depth, float]:
    """``--every``: seconds by depth, of which ``never`` leaves one out."""
    from pichak_coordinator.schedule import DEPTHS

    names: dict[str, Depth] = {depth: depth for depth in DEPTHS}
    intervals = dict(default)
    for text in every:
        name, _, length = text.partition("=")
        if name not in names:
            raise UserError(f"--every {text}: write light=10m or full=24h, or light=never")
        intervals.pop(names[name], None)
        if length != "never":
            intervals[names[name]] = _length(f"--every {text}", length)
            if intervals[names[name]] < _LEAST_SECONDS:
                raise UserError(f"--every {text}: at least {_LEAST_SECONDS:.0f} s")
    return intervals


def budget_of(text: str) -> float:
    """``--budget``: probe-seconds an hour."""
    length, separator, unit = text.partition("/")
    if separator and unit != "h":
        raise UserError(f"--budget {text}: write probe-time an hour, as in 120s/h or 10m/h")
    return _length(f"--budget {text}", length)


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
    from pichak_coordinator.cluster import Cluster, ClusterError
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
            raise NothingMeasuredError(
                f"{where} has no living node to measure (`ray status` shows why)"
            )
        count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        progress.say(f"watching {where}: {count if nodes else 'no node to measure yet'}")
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
