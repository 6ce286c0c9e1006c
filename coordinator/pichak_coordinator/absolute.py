"""What is odd about a machine without looking at another one. Pure.

Facts are confirmed when they are read. What was timed or counted over a while is suspected until
the next probe reads it again, and its confidence is low: nothing is known of its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pichak_coordinator.copy_findings import copy_findings
from pichak_coordinator.gpu_findings import gpu_findings
from pichak_coordinator.records import Finding, Row

#: A hypervisor that takes more than this of the CPU's time slows what is measured by as much.
STEAL_PERCENT = 5.0
#: Docker's default /dev/shm; a DataLoader with workers fails in it (field case 90).
SMALL_SHM_MIB = 64.0
#: PCIe works both ways at about the same rate; SPEC 3: beyond 2 "nothing about PCIe explains it".
COPY_RATIO = 2.0
#: Below this share of what the machine shows, its CPU limit is worth a word.
QUOTA_SHARE = 0.999

Rule = Callable[[Row], Iterator[Finding]]


def absolute_findings(row: Row) -> list[Finding]:
    """Every finding of every rule, for one row."""
    return [finding for rule in _RULES for finding in rule(row)]


def _steal(row: Row) -> Iterator[Finding]:
    steal = row.fingerprint.number("cpu.steal_percent")
    if steal is not None and steal > STEAL_PERCENT:
        yield Finding(
            "cpu_steal",
            "warn",
            f"the hypervisor gave {steal:.1f} % of the CPU's time to others while it was probed",
            {"steal_percent": steal, "limit_percent": STEAL_PERCENT},
            confidence="low",
            metric="cpu.steal_percent",
        )


def _cpu_limit(row: Row) -> Iterator[Finding]:
    usable = row.fingerprint.number("cpu.usable_cores")
    shown = row.fingerprint.number("cpu.logical_cores")
    if usable is not None and shown and usable < QUOTA_SHARE * shown:
        yield Finding(
            "cpu_limited",
            "info",
            f"{usable:g} of the {shown:g} CPUs that the machine shows may be used",
            {"usable_cores": usable, "logical_cores": shown},
            "confirmed",
            metric="cpu.usable_cores",
        )


def _small_shm(row: Row) -> Iterator[Finding]:
    shm = row.fingerprint.number("host.shm_mib")
    if shm is not None and shm <= SMALL_SHM_MIB:
        yield Finding(
            "small_shm",
            "warn",
            f"shared memory has {shm:.0f} MiB: a DataLoader with workers will fail; start "
            "the container with --shm-size or --ipc=host, or use no workers",
            {"shm_mib": shm},
            "confirmed",
            metric="host.shm_mib",
        )


def _lopsided_copies(row: Row) -> Iterator[Finding]:
    """Asymmetry alone is a note and no fault: healthy servers have it (field case 97)."""
    up = row.fingerprint.number("gpu.h2d_pinned_mb_s")
    down = row.fingerprint.number("gpu.d2h_pinned_mb_s")
    if up and down and max(up, down) > COPY_RATIO * min(up, down):
        fast, slow = ("to", "from") if up > down else ("from", "to")
        yield Finding(
            "lopsided_copies",
            "info",
            f"copies {fast} the GPU are {max(up, down) / min(up, down):.1f} times as fast as those "
            f"{slow} it; nothing about PCIe explains it",
            {"h2d_mb_s": up, "d2h_mb_s": down, "limit_ratio": COPY_RATIO},
            confidence="low",
            metric="gpu.d2h_pinned_mb_s",
        )


def _shared_gpu(row: Row) -> Iterator[Finding]:
    mode = row.fingerprint.text("gpu.virtualisation_mode")
    if mode == "vGPU":
        yield Finding(
            "shared_gpu",
            "info",
            "the GPU is a vGPU, a share of a card: its launches and copies go through a hypervisor",
            {"mode": mode},
            "confirmed",
            metric="gpu.virtualisation_mode",
        )


def _windows_driver(row: Row) -> Iterator[Finding]:
    if row.fingerprint.text("gpu.driver_model") == "WDDM":
        yield Finding(
            "wddm_driver",
            "info",
            "the GPU runs under WDDM: copies and small kernels are slower than on Linux (2 and 4 "
            "times have been reported), and an over-allocation is paged instead of refused",
            {"driver_model": "WDDM"},
            "confirmed",
            metric="gpu.driver_model",
        )


_RULES: tuple[Rule, ...] = (
    _steal,
    _cpu_limit,
    _small_shm,
    _lopsided_copies,
    _shared_gpu,
    _windows_driver,
    gpu_findings,
    copy_findings,
)
