"""``pichak agent watch``: this machine's readings and what is wrong in them, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import click

from pichak_coordinator.cli.agent_voice import say, tell_warnings
from pichak_coordinator.cli.common import EXIT_DONE, UserError, examples
from pichak_coordinator.text import printable

_LOOK_SECONDS = 1.0


@click.command(
    epilog=examples(
        "pichak agent watch",
        "pichak agent watch --metrics-port 9101       http://127.0.0.1:9101/metrics meanwhile",
    )
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Answer /metrics and /ring.json there, on loopback only (0: a free port).",
)
def watch(metrics_port: int | None) -> int:
    """Sample this machine about once a second until Ctrl-C, and say what is wrong with it.

    Without Ray, jobs and network; on Windows, too, where a training tells of itself with
    pichak_agent.own_jobs.own_training. Findings go to stdout, a line for each change: time, state,
    severity, code, sentence. Where the agent's service samples this machine already, they are what
    it finds.
    """
    from pichak_agent.service import Beside, ServiceError

    tell_warnings()
    stop = _stop_on_signals()
    beside = Beside(metrics_port, say)
    told = _Told()
    try:
        beside.start()
        say("watching this machine; Ctrl-C ends it")
        while not stop.wait(_LOOK_SECONDS):
            told.take(beside.state())
    except ServiceError as error:
        raise UserError(str(error)) from error
    finally:
        beside.stop()
    return EXIT_DONE


class _Told:
    """Says each thing once, and again when it changes."""

    def __init__(self) -> None:
        self._source = ""
        self._gaps: dict[str, str] = {}
        self._findings: dict[tuple[str, str], tuple[str, int]] = {}

    def take(self, state: Mapping[str, Any]) -> None:
        if state.get("stale"):
            return
        source = str(state.get("source"))
        if source not in (self._source, f"pid {os.getpid()}", "nobody"):
            say(f"{source} samples this machine already; this is what it finds")
        self._source = source
        for part, name in (("nvml", "NVML"), ("memory_counters", "GPU memory counters")):
            gap = str((state.get(part) or {}).get("gap") or "")
            if gap != self._gaps.get(part, ""):
                say(f"{name}: {gap or 'an answer again'}")
                self._gaps[part] = gap
        for found in state.get("findings") or []:
            key = str(found.get("code")), str(found.get("subject"))
            seen = str(found.get("state")), int(found.get("episodes", 1))
            if self._findings.get(key) != seen:
                self._findings[key] = seen
                _print(found)


def _print(found: Mapping[str, Any]) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(float(found["last_unix"])))
    words = (found["state"], found["severity"], found["code"], found["sentence"])
    click.echo(f"{at}  " + "  ".join(printable(str(word)) for word in words))


def _stop_on_signals() -> threading.Event:
    """Set by SIGTERM and SIGINT, for good: a second one must not cut the clearing up short."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
