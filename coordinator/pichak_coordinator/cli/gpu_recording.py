"""``pichak gpu --record`` and ``--replay``: what NVML said as a file, and the page of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pichak_coordinator.cli.common import EXIT_DONE, UserError, out, print_json
from pichak_coordinator.text import printable

if TYPE_CHECKING:
    from pichak_core.devices.nvml_recording import Recording
    from pichak_core.measure._replay import Replay
    from pichak_core.measurement import Fingerprint

_MARK = "REPLAY"


def record(path: Path, as_json: bool) -> int:
    """Record this machine into `path`, also where there is no NVML: then the file says so."""
    from pichak_core.devices.nvml_recording import take_recording

    if path.is_dir():
        raise UserError(f"--record {path}: a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"--record {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"--record {path}: this user may not write in {path.parent}")
    click.echo("reading NVML twice; nothing is measured", err=True)
    made = take_recording()
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(made.dumps(), encoding="utf-8")
        os.replace(part, path)  # noqa: PTH105 - an existing file is replaced whole or not at all
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(
            f"--record {path}: {error.strerror or error}; name a file that can be written"
        ) from None
    first = made.reports()[0]
    calls = len(made.start) + sum(map(len, made.rounds))
    if as_json:
        print_json(
            {
                "schema": 1,
                "recording": str(path),
                "calls": calls,
                "readings": len(made.rounds),
                "gpus": [gpu.text("uuid") for gpu in first.gpus],
                "gap": first.gap.describe() if first.gap else "",
                "ended": made.ended,
            }
        )
        return EXIT_DONE
    names = ", ".join(gpu.text("name") or f"GPU {gpu.index} (lost)" for gpu in first.gpus)
    asked = "1 call" if calls == 1 else f"{calls} calls"
    rounds = "1 reading" if len(made.rounds) == 1 else f"{len(made.rounds)} readings"
    click.echo(f"{path}: {asked} of NVML in {rounds}; {names or 'no GPU'}")
    for why in (first.gap.describe() if first.gap else "", made.ended):
        if why:
            click.echo(f"  {printable(why)}")
    click.echo("It holds GPU UUIDs, versions and readings; no host name, serial number or process.")
    return EXIT_DONE


def show_replay(path: Path, device: str, as_json: bool) -> int:
    """The page of the recording in `path`, marked as one at both ends. `device` names one of its
    devices; ``auto`` shows all."""
    from pichak_core.measure._replay import replay

    found = replay(_loaded(path))
    devices = found.devices
    if device != "auto":
        wanted = "cuda:0" if device == "cuda" else device
        if wanted not in devices:
            raise UserError(f"--device {device}: {path} holds {', '.join(devices)}")
        devices = {wanted: devices[wanted]}
    if as_json:
        print_json(_as_dict(path, found, devices))
        return EXIT_DONE
    _print(path, found, devices)
    return EXIT_DONE


def _loaded(path: Path) -> Recording:
    from pichak_core.devices.nvml_recording import RecordingError, load_recording

    try:
        return load_recording(path)
    except OSError as error:
        raise UserError(
            f"--replay {path}: {error.strerror or error}; name a file that `pichak gpu --record` "
            "wrote"
        ) from None
    except RecordingError as error:
        raise UserError(
            f"--replay {path}: {printable(str(error))}; take a new one with `pichak gpu --record`"
        ) from None


def _as_dict(path: Path, found: Replay, devices: dict[str, Fingerprint]) -> dict[str, object]:
    return {
        "schema": 1,
        "replay": str(path),
        "measured_here": False,
        "notes": found.notes,
        "devices": [
            {"device": label, "fingerprint": fingerprint.to_dict()}
            for label, fingerprint in devices.items()
        ],
    }


def _print(path: Path, found: Replay, devices: dict[str, Fingerprint]) -> None:
    from pichak_coordinator.cli.fingerprint_page import render_fingerprint

    console = out()
    width = min(100, max(60, console.width))
    banner = f" {_MARK} of a recording: nothing below was measured on this machine "
    console.print(banner.center(width, "="), markup=False, style="bold", soft_wrap=True)
    console.print(f"{_MARK} {path}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {printable(note)}", markup=False)
    for label, fingerprint in devices.items():
        console.print()
        render_fingerprint(fingerprint, console, f"{_MARK}: {label}")
    console.print()
    console.print(f" end of the {_MARK} ".center(width, "="), markup=False, style="bold")
