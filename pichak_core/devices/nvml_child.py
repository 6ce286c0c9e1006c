"""The process that reads NVML, and what it writes: one JSON record a line on stdout."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pichak_core.devices.nvml import (
    Gpu,
    Peer,
    ask_count,
    load,
    read_gpu,
    read_peers,
    read_system,
    read_use,
)
from pichak_core.devices.nvml_codes import UNKNOWN_ERROR, why
from pichak_core.devices.nvml_processes import GpuProcess
from pichak_core.devices.nvml_record import Player, Recorder
from pichak_core.measurement import Reason, Unmeasured

KERNEL_MODULE = "/proc/driver/nvidia/version"
_LIBRARY = re.compile(r"libnvidia-ml\.so\.([0-9.]+[0-9])")


def start(nvml: Any, maps: str | None = None, module: str | None = None) -> Unmeasured | None:
    """Initialise NVML; None when it runs, or the reason it does not.

    `maps` and `module` are where the versions of a mismatch are read: this process's memory map
    and ``/proc/driver/nvidia/version``, or what a recording holds of them.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code == 18:
            versions = mismatch(
                _slurp("/proc/self/maps") if maps is None else maps,
                _slurp(KERNEL_MODULE) if module is None else module,
            )
            return Unmeasured("nvml", Reason.FAILED, versions)
        # After a reload of its host's services a container keeps the library and loses the device.
        gap = why("nvml", error)
        return Unmeasured("nvml", Reason.LOST, gap.detail) if code == UNKNOWN_ERROR else gap
    return None


def mismatch(maps: str, kernel_module: str) -> str:
    """NVML's code 18 as one line naming both versions where they can be read: the library's from
    the process's memory map, the kernel module's from ``/proc/driver/nvidia/version``."""
    library = _LIBRARY.search(maps)
    module = re.search(r"Kernel Module[^0-9]*([0-9]+(?:\.[0-9]+)+)", kernel_module)
    return (
        f"the NVIDIA library ({library.group(1) if library else 'version unreadable'}) and the "
        f"kernel module ({module.group(1) if module else 'version unreadable'}) differ: reboot, or "
        "reload the module, after a driver update"
    )


def records(nvml: Any, first: int = 0) -> Iterator[dict[str, Any]]:
    """What the child writes: a header, then a record a GPU from `first` on, each as it is read,
    then which of them reach one another."""
    gap = start(nvml)
    if gap is not None:
        yield {"gap": to_wire(gap)}
        return
    yield from readings(nvml, first)


def readings(nvml: Any, first: int = 0) -> Iterator[dict[str, Any]]:
    """`records` of an NVML that is already initialised."""
    count = ask_count(nvml)
    if isinstance(count, Unmeasured):
        yield {"gap": to_wire(count)}
        return
    yield {"system": read_system(nvml), "count": count}
    healthy: list[int] = []
    for index in range(first, count):
        gpu = read_gpu(nvml, index)
        if gpu.lost is None:
            healthy.append(index)
        yield {"gpu": gpu_to_wire(gpu)}
    yield {"peers": [peer_to_wire(peer) for peer in read_peers(nvml, healthy)]}


def use(nvml: Any, rounds: int, seconds: float, write: Callable[[dict[str, Any]], None]) -> None:
    """Who is on which GPU, looked at `rounds` times. A lost GPU is not touched again."""
    gap = start(nvml)
    count = gap if gap is not None else ask_count(nvml)
    if isinstance(count, Unmeasured):
        write({"gap": to_wire(count)})
        return
    write({"system": {}, "count": count})
    living = list(range(count))
    for number in range(rounds):
        if number:
            time.sleep(seconds)
        for index in list(living):
            gpu = read_use(nvml, index)
            if gpu.lost is not None:
                living.remove(index)
            write({"gpu": gpu_to_wire(gpu)})


def record(nvml: Any, rounds: int, seconds: float, write: Callable[[dict[str, Any]], None]) -> None:
    """Every raw call of `rounds` readings, `seconds` apart, as it is made. A later reading shows
    which counters grow, and which card is gone by then."""
    recorder = Recorder(nvml, lambda event: write({"call": event}))
    gap = start(recorder)
    library = _LIBRARY.search(_slurp("/proc/self/maps"))
    if library:
        write({"fact": ["nvml_library", library.group(0)]})
    if gap is not None:
        return
    for number in range(rounds):
        if number:
            time.sleep(seconds)
        write({"round": number})
        for _ in readings(recorder):
            pass


class Server:
    """Answers of one NVML that stays initialised. A GPU that was lost is not touched again."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._count = 0
        self._lost: dict[int, Gpu] = {}

    def answer(self, request: str) -> Iterator[dict[str, Any]]:
        """The records of one request: ``full`` (the system, then each GPU with everything that is
        known of it) or ``live`` (each GPU's moving fields)."""
        if request == "full":
            count = ask_count(self._nvml)
            if isinstance(count, Unmeasured):
                yield {"gap": to_wire(count)}
                return
            self._count = count
            yield {"system": read_system(self._nvml), "count": count}
        for index in range(self._count):
            gpu = self._lost.get(index)
            if gpu is None:
                gpu = read_gpu(self._nvml, index, live_only=request == "live")
                if gpu.lost is not None:
                    self._lost[index] = gpu
            yield {"gpu": gpu_to_wire(gpu)}


def serve(
    nvml: Any,
    requests: Iterable[str],
    write: Callable[[dict[str, Any]], None],
    maps: str | None = None,
    module: str | None = None,
) -> None:
    """Answer each request until there are no more, or until NVML does not run. Behind each answer
    comes ``done``: what it took, in seconds of CPU time and of the clock."""
    gap = start(nvml, maps, module)
    if gap is not None:
        write({"gap": to_wire(gap)})
        return
    server = Server(nvml)
    spent = 0.0
    for request in requests:
        began = time.monotonic()
        for made in server.answer(request.strip()):
            write(made)
        before, spent = spent, time.process_time()
        write({"done": {"cpu_seconds": spent - before, "seconds": time.monotonic() - began}})


def _serve(arguments: Sequence[str]) -> None:
    """On stdin and stdout; with an argument, from the recording in that file."""
    if not arguments:
        serve(load(), sys.stdin, write_record)
        return
    from pichak_core.devices.nvml_recording import load_recording

    recording = load_recording(Path(arguments[0]))
    serve(
        Player([*recording.start, *(event for events in recording.rounds for event in events)]),
        sys.stdin,
        write_record,
        recording.text("nvml_library") or "",
        recording.text("kernel_module") or "",
    )


def to_wire(gap: Unmeasured) -> list[str]:
    return [gap.name, gap.reason.value, gap.detail]


def from_wire(parts: Sequence[str]) -> Unmeasured:
    return Unmeasured(str(parts[0]), Reason(parts[1]), str(parts[2]))


def gpu_to_wire(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "values": gpu.values,
        "gaps": {name: to_wire(gap) for name, gap in gpu.gaps.items()},
        "lost": to_wire(gpu.lost) if gpu.lost else None,
        "slices": [gpu_to_wire(each) for each in gpu.slices],
        "processes": [[row.kind, row.pid, row.used_bytes] for row in gpu.processes],
    }


def gpu_from_wire(record: dict[str, Any]) -> Gpu:
    return Gpu(
        int(record["index"]),
        dict(record["values"]),
        {name: from_wire(gap) for name, gap in record["gaps"].items()},
        from_wire(record["lost"]) if record["lost"] else None,
        tuple(gpu_from_wire(each) for each in record.get("slices", ())),
        tuple(
            GpuProcess(str(kind), int(pid), None if used is None else int(used))
            for kind, pid, used in record.get("processes", ())
        ),
    )


def peer_to_wire(peer: Peer) -> list[Any]:
    known = peer.read if isinstance(peer.read, str) else to_wire(peer.read)
    return [peer.first, peer.second, known]


def peer_from_wire(parts: Sequence[Any]) -> Peer:
    known = parts[2] if isinstance(parts[2], str) else from_wire(parts[2])
    return Peer(int(parts[0]), int(parts[1]), known)


def main(arguments: Sequence[str]) -> None:
    """The child's entry: ``read FIRST`` once, ``live INDEX SECONDS`` until nobody listens or the
    GPU is lost, ``record ROUNDS SECONDS``, ``use ROUNDS SECONDS``, or ``serve [RECORDING]``: an
    answer to each line of stdin."""
    try:
        if arguments[0] == "serve":
            _serve(arguments[1:])
            return
        nvml = load()
    except ImportError as error:
        write_record({"gap": to_wire(Unmeasured("nvml", Reason.NOT_INSTALLED, str(error)))})
        return
    if arguments[0] == "read":
        for made in records(nvml, int(arguments[1])):
            write_record(made)
    elif arguments[0] == "record":
        record(nvml, int(arguments[1]), float(arguments[2]), write_record)
    elif arguments[0] == "use":
        use(nvml, int(arguments[1]), float(arguments[2]), write_record)
    elif start(nvml) is None:
        lost = False
        while not lost:  # a lost GPU is not touched again
            gpu = read_gpu(nvml, int(arguments[1]), live_only=True)
            lost = gpu.lost is not None
            write_record({"gpu": gpu_to_wire(gpu)})
            time.sleep(float(arguments[2]))


def write_record(made: dict[str, Any]) -> None:
    """A line on stdout; the end where nobody listens."""
    line = json.dumps(made).encode() + b"\n"
    try:
        while line:
            line = line[os.write(sys.stdout.fileno(), line) :]
    except BrokenPipeError:
        sys.exit(0)


def _slurp(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
