"""The NVIDIA GPUs of this machine, read in a child process.

NVML hangs on a sick driver and has crashed on a lost card; a child with a watchdog costs its own
answer, never this process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pichak_core.devices.nvml import Gpu, Peer
from pichak_core.devices.nvml_child import from_wire, gpu_from_wire, peer_from_wire
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import Scalar

# Isolated from the working folder (a user's own json.py), then given this process's own path.
_BOOT = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "importlib.import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)
_NVML = "pichak_core.devices.nvml_child"


@dataclass
class Report:
    """What NVML said: `system` versions, one `Gpu` for each index, which of them reach one
    another, and `gap` when it said nothing (no library, no GPU, driver mismatch, hung)."""

    system: dict[str, Scalar] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)
    gap: Unmeasured | None = None
    peers: list[Peer] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> int | None:
        """Add one record of the child's; the number of GPUs where it says so."""
        if "gap" in line:
            self.gap = from_wire(line["gap"])
        elif "count" in line:
            self.system.update(line["system"])
            return int(line["count"])
        elif "gpu" in line:
            self.gpus.append(gpu_from_wire(line["gpu"]))
        elif "peers" in line:
            self.peers += [peer_from_wire(parts) for parts in line["peers"]]
        return None


def read_gpus(timeout_seconds: float = 10.0) -> Report:
    """Every GPU, whatever NVML does.

    The first child may take `timeout_seconds`. A GPU at which a child dies or hangs is reported
    as lost, and another child goes on behind it; all of them together end within three times the
    timeout.
    """
    deadline = time.monotonic() + 3 * timeout_seconds
    report = Report()
    first, count, noise = 0, None, ""
    while count is None or first < count:
        left = min(timeout_seconds, deadline - time.monotonic())
        if left <= 0:
            ending: Unmeasured | None = Unmeasured("gpu", Reason.TIMED_OUT, "NVML hung before it")
            lines: list[dict[str, Any]] = []
        else:
            lines, ending, noise = run_child(["read", str(first)], left)
        for line in lines:
            told = report.take(line)
            count = told if told is not None else count
        if report.gap is not None and count is None:
            return report
        if report.gap is not None:  # it worked, a card took it down, and it does not start again
            ending, report.gap = report.gap, None
            report.gpus += [Gpu(index, lost=ending) for index in range(first, count or 0)]
        first = report.gpus[-1].index + 1 if report.gpus else first
        if count is None:
            report.gap = ending or Unmeasured("nvml", Reason.FAILED, f"no answer; {noise}")
            return report
        if first < count:
            lost = ending or Unmeasured("gpu", Reason.FAILED, "the child ended before it")
            report.gpus.append(Gpu(first, lost=lost))
            first += 1
    if count == 0:
        report.gap = no_gpu(noise)
    return report


def no_gpu(noise: str = "") -> Unmeasured:
    """NVML runs and numbers none: its link-time stub, or a container without the device."""
    detail = "NVML runs and sees no GPU" + (f"; it said: {noise}" if noise else "")
    return Unmeasured("nvml", Reason.NO_DEVICE, detail)


class LiveGpu:
    """Readings of one GPU while something else runs, from a child that outlives a single reading.

    `latest()` gives the readings since it was last called. Nothing arrives from a machine without
    NVML, and none of it is an error: conditions explain a number, they are not the number.
    """

    def __init__(self, index: int, interval_seconds: float = 0.1) -> None:
        self._readings: list[Gpu] = []
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._process = start_child(["live", str(index), str(interval_seconds)], quiet=True)
        self._thread = threading.Thread(target=self._listen, name="nvml-listener", daemon=True)
        self._thread.start()

    def wait_for_first(self, timeout_seconds: float) -> bool:
        """Whether a reading arrived; starting NVML takes seconds on a card without persistence."""
        return self._arrived.wait(timeout_seconds)

    def latest(self) -> list[Gpu]:
        with self._lock:
            taken, self._readings = self._readings, []
        return taken

    def close(self) -> None:
        end_child(self._process)
        self._thread.join(timeout=2.0)

    def _listen(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        for raw in stream:
            record = parse_record(raw)
            if record is not None and "gpu" in record:
                with self._lock:
                    self._readings.append(gpu_from_wire(record["gpu"]))
                self._arrived.set()


def start_child(
    arguments: list[str],
    *,
    stdin: int = subprocess.DEVNULL,
    quiet: bool = False,
    module: str = _NVML,
) -> subprocess.Popen[bytes]:
    """The process that reads NVML, with `nvml_child.main`'s arguments, or another `module` that has
    a `main`; `quiet` drops its stderr."""
    path = [entry or str(Path.cwd()) for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, json.dumps(path), module, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else subprocess.PIPE,
    )


def run_child(
    arguments: list[str], timeout_seconds: float
) -> tuple[list[dict[str, Any]], Unmeasured | None, str]:
    """The child with these arguments (see `nvml_child.main`): (the records it wrote, how it died
    if it did, the end of what it said on stderr)."""
    try:
        child = start_child(arguments)
    except OSError as error:
        return [], Unmeasured("nvml", Reason.FAILED, f"no child process: {error}"), ""
    ending: Unmeasured | None = None
    try:
        output, errors = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        ending = Unmeasured(
            "nvml", Reason.TIMED_OUT, f"NVML gave no answer within {timeout_seconds:.0f} s"
        )
        end_child(child)
        output, errors = _drain(child)
    code, noise = child.returncode, errors.decode("utf-8", "replace").strip()[-300:]
    if ending is None and code:
        how = f"of signal {-code}" if code < 0 else f"with exit code {code}: {noise}"
        reason = Reason.LOST if code < 0 else Reason.FAILED
        ending = Unmeasured("nvml", reason, f"the process that reads NVML died {how}")
    records = [record for raw in output.splitlines() if (record := parse_record(raw)) is not None]
    return records, ending, noise


def _drain(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a killed child had written. One that is stuck in the driver does not die; it is left."""
    try:
        return child.communicate(timeout=1.0)
    except subprocess.TimeoutExpired as error:
        return error.output or b"", error.stderr or b""


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill it; one that is stuck in the driver stays behind."""
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1.0)


def parse_record(raw: bytes) -> dict[str, Any] | None:
    """A record, or None for a line that the driver's library wrote between them."""
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
