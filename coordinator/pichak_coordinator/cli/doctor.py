"""``pichak doctor``: what is missing here, and how to get it."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_NOTHING,
    examples,
    json_option,
    out,
    print_json,
)

Status = Literal["ok", "warn", "missing"]

_STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}
_MIB = 2**20
#: Docker's default; PyTorch's loaders and Ray's object store both want far more.
_SMALL_SHM_MIB = 1024
_FEW_FILES = 4096
_LITTLE_MEMORY_MIB = 2048


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, what was found, and what to do (empty when ok)."""

    name: str
    status: Status
    found: str
    advice: str = ""


@click.command(
    epilog=examples("pichak doctor", "pichak doctor --json"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@json_option
def doctor(as_json: bool) -> int:
    """Say what is missing here and how to get it.

    Nothing is installed or changed. The exit code is 1 only when nothing works but Python.
    """
    checks = list(all_checks(Path.cwd()))
    works = any(check.status == "ok" for check in checks if check.name != "python")
    if as_json:
        print_json({"schema": 1, "checks": [asdict(check) for check in checks]})
    else:
        console = out()
        for check in checks:
            console.print(f"{check.status:<8}", style=_STYLES[check.status], end="", markup=False)
            room = max(20, console.width - 26)
            lines = textwrap.wrap(
                check.found, room, break_long_words=False, break_on_hyphens=False
            ) or [""]
            lines += textwrap.wrap(
                f"-> {check.advice}" if check.advice else "",
                room,
                subsequent_indent="   ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            console.print(f"{check.name:<18}{lines[0]}", markup=False, soft_wrap=True)
            for line in lines[1:]:
                console.print(f"{'':<26}{line}", markup=False, soft_wrap=True)
    return EXIT_DONE if works else EXIT_NOTHING


def all_checks(folder: Path) -> Iterator[Check]:
    """Every check, in the order of the page; `folder` is where the disk is tried."""
    for name, check in (
        ("python", _python),
        ("torch", _torch),
        ("cuda", _cuda),
        ("nvml", _nvml),
        ("ray", _ray),
        ("ray token", _ray_token),
        ("direct i/o", lambda: _direct_io(folder)),
        ("shared memory", _shared_memory),
        ("open files", _open_files),
        ("memory", _memory),
        ("cores", _cores),
        ("state folder", _state_folder),
    ):
        yield _guarded(name, check)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except NotImplementedError as error:
        return Check(name, "warn", f"does not apply: {error}", "nothing needs to be done")
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        found = f"could not be looked at: {type(error).__name__}: {error}"
        return Check(name, "warn", found, "the error says what refused; other lines stand")


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Check:
    version = _version("torch")
    if version is None:
        advice = (
            "pip install 'pichak-fleet[torch]'; without it only CPU, memory and disk are measured"
        )
        return Check("torch", "missing", "not installed", advice)
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "torch", "missing", f"{version} cannot be imported: {error}", "reinstall torch"
        )
    return Check("torch", "ok", str(torch.__version__))


def _cuda() -> Check:
    if _version("torch") is None:
        return Check("cuda", "missing", "cannot be seen without torch", "install torch first")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("cuda", "ok", f"{len(names)} visible: {', '.join(names)}")
    if torch.version.cuda is None and torch.version.hip is None:
        return Check(
            "cuda",
            "missing",
            "this build of torch is for the CPU",
            "fine on a machine without a GPU; else choose the CUDA build at "
            "https://pytorch.org/get-started/locally",
        )
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if masked is not None:
        advice = "unset CUDA_VISIBLE_DEVICES, or name a device in it"
        return Check("cuda", "missing", f"CUDA_VISIBLE_DEVICES is {masked!r}", advice)
    return Check(
        "cuda",
        "missing",
        f"torch was built for CUDA {torch.version.cuda} and sees no device",
        "look at the line nvml: a driver that is missing or older than that CUDA; in a container, "
        "start it with --gpus all",
    )


def _nvml() -> Check:
    from pichak_core.devices.gpus import read_gpus

    report = read_gpus()
    if report.gap is not None:
        return Check(
            "nvml",
            "missing",
            report.gap.describe(),
            "fine on a machine without an NVIDIA GPU; else install its driver, or in a container "
            "pass it through (--gpus all)",
        )
    lost = [gpu for gpu in report.gpus if gpu.lost is not None]
    names = ", ".join(gpu.text("name") or f"GPU {gpu.index}" for gpu in report.gpus)
    found = f"driver {report.system.get('driver_version', 'unknown')}: {names}"
    if lost:
        why = lost[0].lost.describe() if lost[0].lost else ""
        return Check("nvml", "warn", f"{found}; GPU {lost[0].index}: {why}", "reset it, or reboot")
    return Check("nvml", "ok", found)


def _ray() -> Check:
    version = _version("ray")
    if version is None:
        return Check(
            "ray", "missing", "not installed", "pip install ray; `pichak gpu` works without"
        )
    found = f"{version} with Python {platform.python_version()}"
    return Check("ray", "ok", f"{found} (every machine of a cluster needs the same two)")


def _ray_token() -> Check:
    if _version("ray") is None:
        return Check("ray token", "missing", "no Ray here", "install ray first")
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None and mode.lower() != "token":
        return Check(
            "ray token",
            "warn",
            f"RAY_AUTH_MODE is {mode!r}: whoever reaches the cluster runs code on it",
            "unset RAY_AUTH_MODE, or set it to token",
        )
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(given) if given else Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Check("ray token", "ok", "in RAY_AUTH_TOKEN")
    if file.is_file():
        return Check("ray token", "ok", f"in {file}")
    return Check(
        "ray token",
        "warn",
        f"no token in {file}; a local cluster makes its own",
        "to join a cluster, copy its ~/.ray/auth_token to this machine",
    )


def _direct_io(folder: Path) -> Check:
    from pichak_core.devices.direct_io import (
        ALIGNMENT,
        BypassRefusedError,
        UnnamedFile,
        aligned_buffer,
        open_direct,
    )

    try:
        file = UnnamedFile(folder)
    except OSError as error:
        advice = "give `pichak disk` a folder that can be written, or files to read"
        return Check("direct i/o", "missing", f"{folder}: {error.strerror}", advice)
    try:
        os.write(file.fd, os.urandom(ALIGNMENT))
        os.fsync(file.fd)
        reader = open_direct(file.path)
        try:
            reader.read_into(aligned_buffer(ALIGNMENT), 0, ALIGNMENT)
        finally:
            reader.close()
    except BypassRefusedError as error:
        advice = "a disk's speed can only be measured past the cache: use a folder on a real disk"
        return Check("direct i/o", "missing", f"{folder}: {error}", advice)
    finally:
        file.close()
    return Check("direct i/o", "ok", f"{folder} reads past the cache")


def _shared_memory() -> Check:
    from pichak_core.devices.host import this_host

    size = this_host().shared_memory()
    found = f"{size.path}: {size.total_bytes // _MIB:,} MiB"
    if size.total_bytes < _SMALL_SHM_MIB * _MIB:
        advice = "start the container with --shm-size=8g; until then use DataLoader workers = 0"
        return Check("shared memory", "warn", found, advice)
    return Check("shared memory", "ok", found)


def _open_files() -> Check:
    from pichak_core.devices.host import this_host

    limit = this_host().open_file_limit()
    if 0 <= limit < _FEW_FILES:
        return Check("open files", "warn", f"limit {limit:,}", "ulimit -n 65536 (Ray holds many)")
    return Check("open files", "ok", "no limit" if limit < 0 else f"limit {limit:,}")


def _memory() -> Check:
    from pichak_core.devices.host import this_host

    usable, why = this_host().usable_memory_bytes()
    found = f"{usable // _MIB:,} MiB can be had now ({why})"
    if usable < _LITTLE_MEMORY_MIB * _MIB:
        return Check(
            "memory", "warn", found, "close other programs, or raise the container's limit"
        )
    return Check("memory", "ok", found)


def _cores() -> Check:
    from pichak_core.devices.host import this_host

    usable, why = this_host().usable_cores()
    seen = os.cpu_count() or usable
    found = f"{usable} of {seen} can be used ({why})"
    if usable < seen:
        advice = "use this many threads and loader workers, not what the machine shows"
        return Check("cores", "warn", found, advice)
    return Check("cores", "ok", found)


def _state_folder() -> Check:
    given = os.environ.get("PICHAK_HOME", "").strip()
    folders = (
        [Path(given)]
        if given
        else [Path.home() / ".local/state/pichak", Path.home() / ".local/share/pichak"]
    )
    for folder in folders:
        place = folder
        while not place.exists() and place != place.parent:
            place = place.parent
        if not (place.is_dir() and os.access(place, os.W_OK)):
            advice = "set PICHAK_HOME to a folder that can be written"
            return Check("state folder", "missing", f"{folder} cannot be written", advice)
    return Check("state folder", "ok", " and ".join(str(folder) for folder in folders))
