"""``pichak agent probe``: everything about this machine, into one file, without Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    UserError,
    examples,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.files import FileName, check_out, told_of_host
from pichak_coordinator.cli.options import busy_options, workload_options
from pichak_coordinator.cli.profile_request import profile_request
from pichak_coordinator.cli.progress import Progress, ProgressLine

if TYPE_CHECKING:
    from pichak_coordinator.probe_file import Probe
    from pichak_coordinator.request import ProfileRequest
    from pichak_core.simulated_host import SimulatedHost

_DEVICE = re.compile(r"auto|all|cpu|cuda(:[0-9]+)?")


@click.command(
    epilog=examples(
        "pichak agent probe --data train.jsonl --out gpu-a.mpk",
        "pichak agent probe --seq-len 1024 --device all --depth full --out gpu-a.mpk",
        "ssh gpu-a pichak agent probe --seq-len 1024 --out a.mpk --quiet; scp gpu-a:a.mpk .",
        "pichak agent probe --simulate host.toml --out sim.mpk",
        "pichak import *.mpk                      one table of them all, on your own machine",
    )
)
@workload_options
@busy_options
@click.option(
    "--out",
    "file",
    required=True,
    type=FileName(path_type=Path),
    metavar="FILE",
    help="The result's file; FILE.part while it is being written.",
)
@click.option("--force", is_flag=True, help="Replace FILE, and a FILE.part that was left.")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|all|cpu|cuda:N",
    help="auto: the first GPU, or the CPU without one; all: every GPU, one after another.",
)
@click.option("--depth", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the disk is measured [default: the current directory].",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Take only this measurement; may be repeated."
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="KIND=SECONDS",
    help="Longest time for a job: fingerprint=, task= or ramp=; may be repeated.",
)
@click.option(
    "--simulate",
    type=click.Path(path_type=Path),
    metavar="HOST.toml",
    help="Measure nothing: write what the host of this file would give. The result says so.",
)
@click.option("--quiet", is_flag=True, help="Print neither progress nor the plan.")
@click.option("--strict", is_flag=True, help="Exit with 1 when a part of it failed.")
@json_option
def probe(
    *,
    file: Path,
    force: bool,
    device: str,
    directory: Path | None,
    deadlines: Sequence[str],
    simulate: Path | None,
    quiet: bool,
    strict: bool,
    as_json: bool,
    **asked: Any,
) -> int:
    """Measure this machine and derive its plan, without Ray and without a network, into one FILE.

    For machines that can only be reached by ssh or by copying a file: the file holds what an agent
    of a fleet would have sent, and `pichak import` puts it beside the others. Each job runs in a
    process of its own; one that fails is in the file with its reason. Ctrl-C (or a lost ssh
    connection) ends it with what was measured.
    """
    if not _DEVICE.fullmatch(device):
        raise UserError(f"--device {device}: write auto, all, cpu or cuda:N")
    check_out(file, force)
    where = (directory or Path.cwd()).absolute()
    host = None if simulate is None else _simulated(simulate)
    if host is not None and asked["data"] is None:
        asked["seq_len"] = asked["seq_len"] or int(host.training["seq_len"])
    request = profile_request({**asked, "device": device, "directory": str(where)}, deadlines)
    devices = devices_of(device) if host is None else _devices_among(host.devices, device)
    made = _measure(request, devices, file, force, quiet, host)
    if as_json:
        print_json(_as_dict(made, file))
    elif not quiet:
        _show(made, file)
    if made.interrupted:
        click.echo(f"pichak: interrupted; {file} holds what was measured", err=True)
        return EXIT_INTERRUPTED
    if not any(row.measured for row in made.rows()):
        click.echo(f"pichak: nothing could be measured; {file} says why", err=True)
        return EXIT_NOTHING
    return EXIT_NOTHING if strict and any(job.error for job in made.jobs) else EXIT_DONE


def devices_of(asked: str) -> list[str]:
    """The devices that `--device` means on this machine; `UserError` when there is none such."""
    if asked == "cpu":
        return ["cpu"]
    try:
        import torch
    except ImportError as error:
        if asked in ("auto", "all"):
            return ["cpu"]
        raise UserError(
            f"--device {asked} needs torch: pip install 'pichak-fleet[torch]', or use --device cpu"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(asked.partition(":")[2] or 0)
    if asked == "all":
        return [f"cuda:{i}" for i in range(count)] or ["cpu"]
    if index < count:
        return [f"cuda:{index}"]
    if asked == "auto":
        return ["cpu"]
    raise UserError(
        f"--device {asked}: torch {torch.__version__} sees {count} CUDA devices; `pichak doctor` "
        "says why, --device cpu measures without one"
    )


def _devices_among(there: Sequence[str], asked: str) -> list[str]:
    """The simulated devices that `--device` means."""
    if asked == "all":
        return list(there)
    wanted = {"auto": there[0], "cuda": "cuda:0"}.get(asked, asked)
    if wanted not in there:
        raise UserError(f"--device {asked}: the simulated host has {', '.join(there)}")
    return [wanted]


def _simulated(file: Path) -> SimulatedHost:
    from pichak_core.simulated_host import SimulatedHost

    with told_of_host(file):
        return SimulatedHost.load(file)


def _measure(
    request: ProfileRequest,
    devices: Sequence[str],
    file: Path,
    force: bool,
    quiet: bool,
    host: SimulatedHost | None,
) -> Probe:
    from pichak_coordinator.alone import Alone
    from pichak_coordinator.framed_file import FramedFileError

    files: dict[str, Any] = {"working_folder": str(Path.cwd())}
    if request.data is not None:
        files["data"] = str(request.data.absolute())
    _end_on_hangup()
    started = time.monotonic()
    with Progress(quiet=quiet) as progress:

        def say(text: str) -> None:
            # The terminal may be gone; the file is what counts.
            with contextlib.suppress(OSError):
                progress.say(text)

        if host is None:
            _tell_of_service(say)

        def show(device: str, phase: str, text: str) -> None:
            with contextlib.suppress(OSError):
                progress.update([ProgressLine(device, phase, text, time.monotonic() - started)])

        alone = Alone(request, devices, files, say, show)
        if host is not None:
            from pichak_agent.simulation import simulated_runner

            alone.run, alone.describe = simulated_runner(host), host.hello
        try:
            return alone.probe(file, replace_file=force)
        except FramedFileError as error:
            raise UserError(str(error)) from error


def _tell_of_service(say: Callable[[str], None]) -> None:
    from pichak_agent.service import stranger_here

    other = stranger_here()
    if other is not None:
        say(
            f"an agent service of another home runs here ({other.sentence}): while it measures, "
            "the numbers of both are worse than the machine is"
        )


def _end_on_hangup() -> None:
    """A lost connection ends it like Ctrl-C, unless nohup or the user's shell said otherwise."""
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, lambda *_: os.kill(os.getpid(), signal.SIGINT))


def _as_dict(made: Probe, file: Path) -> dict[str, Any]:
    return {
        "schema": 1,
        "file": str(file),
        "probe": made.name,
        "simulated": made.simulated,
        "interrupted": made.interrupted,
        "nodes": [row.as_dict() for row in made.rows()],
    }


def _show(made: Probe, file: Path) -> None:
    from pichak_coordinator.cli.comparison_view import render_comparison, render_rows
    from pichak_coordinator.compare import compare

    console, rows = out(), made.rows()
    render_rows(rows, console)
    render_comparison(compare(rows), console)
    console.print(
        f"written to {file} ({file.stat().st_size:,} bytes); `pichak import` puts it beside others",
        soft_wrap=True,
        markup=False,
    )
