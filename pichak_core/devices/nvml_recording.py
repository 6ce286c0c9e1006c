"""A recording of what NVML said on one machine: taken, written, read again and played back.

The file is JSON: facts of the system, torch's devices, and every raw call (see `nvml_record`). It
holds the GPUs' UUIDs and no host name, serial number, process id or process name.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pichak_core.devices.cuda_visible import MASK, ORDER
from pichak_core.devices.gpu_join import TorchGpu, torch_gpus
from pichak_core.devices.gpus import Report, no_gpu, run_child
from pichak_core.devices.host import this_host
from pichak_core.devices.nvml_child import KERNEL_MODULE, readings, start
from pichak_core.devices.nvml_record import Event, Player
from pichak_core.plan import Scalar

FORMAT, VERSION = "pichak-nvml-recording", 1

#: A recording of eight cards is about 1 MB.
_LARGEST_BYTES = 64 * 2**20
_TORCH_FIELDS = {
    "index": int,
    "name": str,
    "uuid": str,
    "pci_bus_id": str,
    "total_bytes": int,
    "integrated": bool,
}


class RecordingError(ValueError):
    """A file that is no recording; says what is wrong with it."""


@dataclass
class Recording:
    """`facts` of the system, `torch` devices or `torch_gap` (why there are none), the calls of
    the `start` and of each reading (`rounds`), and how it `ended` if that was too early."""

    facts: dict[str, Scalar] = field(default_factory=dict)
    torch: list[TorchGpu] = field(default_factory=list)
    torch_gap: str = ""
    start: list[Event] = field(default_factory=list)
    rounds: list[list[Event]] = field(default_factory=list)
    ended: str = ""

    def text(self, fact: str) -> str | None:
        value = self.facts.get(fact)
        return None if value is None else str(value)

    def number(self, fact: str) -> int | None:
        value = self.facts.get(fact)
        return None if value is None or isinstance(value, str) else int(value)

    def reports(self) -> list[Report]:
        """What each of its readings says, read by the very code that reads a real NVML."""
        player = Player([*self.start, *(self.rounds[0] if self.rounds else [])])
        gap = start(player, self.text("nvml_library") or "", self.text("kernel_module") or "")
        if gap is not None:
            return [Report(gap=gap)]
        reports = []
        constants = [e for events in self.rounds for e in events if "constant" in e]
        for events in self.rounds:
            report = Report()
            for line in readings(Player([*constants, *events])):
                if report.take(line) == 0:
                    report.gap = no_gpu(self.text("nvml_stderr") or "")
            reports.append(report)
        return reports

    def dumps(self) -> str:
        """The file's text: a call a line, so that two recordings can be compared."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "facts": self.facts,
            "torch": [asdict(device) for device in self.torch],
            "torch_gap": self.torch_gap,
            "ended": self.ended,
        }
        parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        parts.append(f' "start": {_lines(self.start)}')
        parts.append(' "rounds": [' + ",\n".join(_lines(events) for events in self.rounds) + "]")
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(events: list[Event]) -> str:
    return "[" + ",".join("\n  " + json.dumps(event) for event in events) + "]"


def load_recording(path: Path) -> Recording:
    """The recording in a file. `OSError` when it cannot be read, `RecordingError` when it is none
    (another format, a newer version, damaged)."""
    if path.stat().st_size > _LARGEST_BYTES:
        raise RecordingError(f"larger than {_LARGEST_BYTES // 2**20} MiB")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # a UnicodeDecodeError is one
        raise RecordingError(f"not JSON ({error})") from None
    except RecursionError:
        raise RecordingError("not JSON that anybody wrote (nested too deep)") from None
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise RecordingError("not a recording of `pichak gpu --record` (its format is not named)")
    if found.get("version") != VERSION:
        raise RecordingError(
            f"a recording of version {found.get('version')!r}; this program reads version {VERSION}"
        )
    try:
        made = _from(found)
        made.reports()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"damaged ({type(error).__name__}: {error})") from None
    return made


def _from(found: Mapping[str, Any]) -> Recording:
    facts = dict(found["facts"])
    wrong = [name for name, v in facts.items() if not isinstance(v, (bool, int, float, str))]
    if wrong:
        raise ValueError(f"the fact {wrong[0]} is neither number nor text")
    made = Recording(
        facts,
        [_torch_gpu(device) for device in found["torch"]],
        str(found["torch_gap"] or ""),
        list(found["start"]),
        [list(events) for events in found["rounds"]],
        str(found["ended"] or ""),
    )
    if not made.start and not made.ended:
        raise ValueError("it holds no call")
    return made


def _torch_gpu(record: Mapping[str, Any]) -> TorchGpu:
    made = TorchGpu(**record)
    for name, kind in _TORCH_FIELDS.items():
        if not isinstance(getattr(made, name), kind):
            raise ValueError(f"torch's device has no {kind.__name__} as its {name}")
    return made


def take_recording(
    *, rounds: int = 2, seconds: float = 1.0, timeout_seconds: float = 30.0
) -> Recording:
    """Record this machine, whatever NVML does: it is read in a child, and what was said before the
    child died or hung is kept. Also where there is no NVML at all."""
    made = Recording(_facts())
    lines, ending, noise = run_child(["record", str(rounds), str(seconds)], timeout_seconds)
    target = made.start
    for line in lines:
        if "call" in line:
            target.append(line["call"])
        elif "round" in line:
            target = []
            made.rounds.append(target)
        elif "fact" in line:
            name, value = line["fact"]
            made.facts[name] = value
        elif "gap" in line:
            made.ended = f"{line['gap'][1]}: {line['gap'][2]}"
    if ending is not None:
        made.ended = ending.describe()
    if noise:
        made.facts["nvml_stderr"] = noise
    try:
        made.torch = torch_gpus()
    except (ImportError, RuntimeError) as error:
        made.torch_gap = str(error)
    return made


def _facts() -> dict[str, Scalar]:
    host = this_host()
    asked: dict[str, Callable[[], Scalar]] = {
        "os": host.operating_system,
        "kernel": host.kernel,
        "host_kind": lambda: host.kind().kind,
        "hypervisor": lambda: host.kind().hypervisor,
        "driver_model": host.gpu_driver_model,
        "memory_total_bytes": host.memory_total_bytes,
        "memory_available_bytes": lambda: host.usable_memory_bytes()[0],
        "kernel_module": lambda: Path(KERNEL_MODULE).read_text(encoding="utf-8").strip(),
        "nvidia_ml_py": lambda: metadata.version("nvidia-ml-py"),
        "torch": lambda: metadata.version("torch"),
        MASK: lambda: os.environ[MASK],
        ORDER: lambda: os.environ[ORDER],
    }
    found: dict[str, Scalar] = {"python": platform.python_version()}
    for name, get in asked.items():
        try:
            found[name] = get()
        except (OSError, NotImplementedError, ValueError, LookupError, ImportError):
            continue  # a fact that the system does not tell is not in the file
    return found
