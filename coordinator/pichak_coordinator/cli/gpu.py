"""``pichak gpu``: the fingerprint of this machine and one of its GPUs."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    NothingMeasuredError,
    UserError,
    err,
    examples,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.files import FileName
from pichak_coordinator.cli.options import busy_options

if TYPE_CHECKING:
    from pichak_core.devices.gpu_use import GpuUse
    from pichak_core.measurement import Fingerprint


@click.command(
    epilog=examples(
        "pichak gpu",
        "pichak gpu --device cuda:1 --depth full > ticket.txt",
        "pichak gpu --only cpu --only host_memory",
        "pichak gpu --json | jq '.fingerprint[\"cpu.usable_cores\"]'",
        "pichak gpu --record nvml.json    # what the driver says, for a report",
        "pichak gpu --replay nvml.json    # the page of such a file, on any machine",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda[:N]",
    help="What to measure; auto is the first GPU, or the CPU without one.",
)
@click.option(
    "--depth",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="How long to measure: about 20 s, or 2 min.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Run this measurement alone; may be repeated."
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="Where the disk is measured.  [default: the current directory]",
)
@click.option(
    "--record",
    "record_to",
    type=FileName(path_type=Path),
    default=None,
    metavar="FILE",
    help="Write every raw answer of NVML to FILE, to attach to a report; measures nothing.",
)
@click.option(
    "--replay",
    "replay_of",
    type=click.Path(path_type=Path),
    default=None,
    metavar="FILE",
    help="Show the page of a recording, taken here or elsewhere; measures nothing.",
)
@busy_options
@json_option
def gpu(
    device: str,
    depth: str,
    only: tuple[str, ...],
    directory: Path | None,
    record_to: Path | None,
    replay_of: Path | None,
    even_if_busy: bool,
    wait_seconds: float,
    as_json: bool,
) -> int:
    """Fingerprint this machine and one of its GPUs: what it is, what it can do, how fast it is.

    Every number carries its spread and where it came from; what could not be measured is listed
    with the reason.
    """
    if record_to is not None or replay_of is not None:
        return _recordings(device, only, record_to, replay_of, as_json)
    from pichak_core.measure import Context, probes, run_probes

    unknown = [name for name in only if name not in probes()]
    if unknown:
        raise UserError(
            f"--only {unknown[0]}: no such measurement; there are {', '.join(probes())}"
        )
    context = Context(
        device=_resolved(device),
        depth="full" if depth == "full" else "quick",
        directory=directory or Path.cwd(),
    )
    if context.device.startswith("cuda") and any(_loads_gpu(n) for n in only or probes()):
        _leave_alone(context.device, even_if_busy, wait_seconds)
    kept: list[Fingerprint] = []
    started = time.monotonic()
    code = EXIT_DONE
    try:
        with _progress() as told:
            run_probes(context, only=only or None, on_progress=told, on_readings=kept.append)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        click.echo("pichak: interrupted; what was measured until then follows", err=True)
    _show(kept, context.device, depth, time.monotonic() - started, as_json)
    return code


def _loads_gpu(name: str) -> bool:
    from pichak_core.measure import probes

    probe = probes()[name]
    return "torch" in probe.needs and "cuda" in probe.devices


def _leave_alone(device: str, even_if_busy: bool, wait_seconds: float) -> None:
    """Go on when nobody works on the GPU; what is seen there of others is told on stderr."""
    from pichak_core.devices.gpu_look import GpuBusyError, look_at, wait_until_free

    def say(text: str) -> None:
        click.echo(f"pichak: {text}", err=True)

    def look() -> GpuUse:
        return look_at(device)

    try:
        use = look() if even_if_busy else wait_until_free(look, wait_seconds=wait_seconds, say=say)
    except GpuBusyError as error:
        raise NothingMeasuredError(
            f"{error}; --wait-if-busy SECONDS waits for it, --even-if-busy measures it anyway"
        ) from error
    if use.state != "idle":
        say(use.sentence)


def _recordings(
    device: str,
    only: tuple[str, ...],
    record_to: Path | None,
    replay_of: Path | None,
    as_json: bool,
) -> int:
    from pichak_coordinator.cli.gpu_recording import record, show_replay

    if record_to is not None and replay_of is not None:
        raise UserError("--record and --replay: use one of them at a time")
    if only:
        raise UserError("--only goes with a measurement; --record and --replay measure nothing")
    if record_to is not None:
        return record(record_to, as_json)
    assert replay_of is not None  # noqa: S101 - one of the two was given
    return show_replay(replay_of, device, as_json)


def _show(kept: list[Fingerprint], device: str, depth: str, seconds: float, as_json: bool) -> None:
    from pichak_coordinator.cli.fingerprint_page import render_fingerprint
    from pichak_core.measurement import Fingerprint, Measurement

    fingerprint = kept[-1] if kept else Fingerprint()
    if as_json:
        print_json(
            {
                "schema": 1,
                "host": socket.gethostname(),
                "device": device,
                "depth": depth,
                "seconds": seconds,
                "fingerprint": fingerprint.to_dict(),
            }
        )
    else:
        title = f"pichak gpu: {socket.gethostname()}, {device}, {depth}, {seconds:.1f} s"
        render_fingerprint(fingerprint, out(), title)
    if not any(isinstance(reading, Measurement) for reading in fingerprint.values()):
        raise NothingMeasuredError(
            "nothing could be measured; `pichak doctor` says what is missing"
        )


def _resolved(device: str) -> str:
    """The device's full name; `UserError` when there is none such here."""
    if device == "cpu":
        return device
    if device != "auto" and not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise UserError(f"--device {device}: write auto, cpu, cuda or cuda:N")
    try:
        import torch
    except ImportError as error:
        if device == "auto":
            return "cpu"
        raise UserError(
            f"--device {device} needs torch: pip install 'pichak-fleet[torch]', or use --device cpu"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if index < count:
        return f"cuda:{index}"
    if device == "auto":
        return "cpu"
    raise UserError(
        f"--device {device}: torch {torch.__version__} sees {count} CUDA devices; `pichak doctor` "
        "says why, --device cpu measures without one"
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Tell each measurement's name on stderr: a moving line on a terminal, a line each without."""
    console = err()
    if not console.is_terminal:
        yield lambda name: console.print(f"measuring {name}", markup=False)
        return
    with console.status("starting", refresh_per_second=4) as status:  # its thread takes CPU time
        yield lambda name: status.update(f"measuring {name}")
