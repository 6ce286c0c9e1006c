"""NVML: one GPU, its MIG slices and its peers, as values or named reasons. The only module that
imports pynvml.

The module object is a parameter everywhere, so that a fake or a recording can stand in for it.
Nothing here is called in a process that matters: `pichak_core.devices.nvml_child` runs in one of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pichak_core.devices.nvml_codes import (
    PEER_STATUS,
    UNKNOWN_ERROR,
    VIRTUALISATION,
    number,
    why,
)
from pichak_core.devices.nvml_fields import LICENCE, QUERIES, SYSTEM, Query, ask, ask_all
from pichak_core.devices.nvml_processes import (
    LINUX_PID_LIMIT,
    WINDOWS_PID_LIMIT,
    GpuProcess,
    Processes,
    read_processes,
)
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import Scalar

#: More than any machine has; a number past it is garbage.
_MOST_GPUS, _MOST_SLICES = 256, 64
_INSTANCES = {
    "mig_gpu_instance": "nvmlDeviceGetGpuInstanceId",
    "mig_compute_instance": "nvmlDeviceGetComputeInstanceId",
}
_MEMORY = ("total", "used", "free", "reserved")
#: What says whether somebody works on a GPU.
_USE = frozenset({"uuid", "name", "pci_bus_id", "driver_model", "mig_mode", "utilisation_percent"})


@dataclass(frozen=True)
class Gpu:
    """What NVML says of one GPU: `values` by field name, and `gaps` for what it does not say.

    Fields carry their unit (``power_watts``). `lost` is set when the GPU could not be read at all,
    or not to the end. `slices` are its MIG devices, each read like a GPU; a slice's `index` is its
    parent's, and its values hold ``mig_index`` and ``parent_uuid``. `processes` are the rows of its
    process lists, of a `read_use` only: their ids may be another namespace's.
    """

    index: int
    values: dict[str, Scalar] = field(default_factory=dict)
    gaps: dict[str, Unmeasured] = field(default_factory=dict)
    lost: Unmeasured | None = None
    slices: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()

    def get(self, name: str) -> Scalar | Unmeasured:
        """The field's value, or why there is none."""
        if name in self.values:
            return self.values[name]
        why = self.gaps.get(name) or self.lost
        return why or Unmeasured(name, Reason.NOT_ASKED, "NVML was not asked for it")

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        return None if value is None or isinstance(value, (str, bool)) else float(value)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return None if value is None else str(value)

    def flag(self, name: str) -> bool | None:
        value = self.values.get(name)
        return value if isinstance(value, bool) else None

    def budget_bytes(self) -> int | None:
        """Memory that nobody holds: total - reserved - used. Version 1 of the query counts the
        driver's reserve as used already, so there it is not taken off twice."""
        total, used = self.number("memory_total_bytes"), self.number("memory_used_bytes")
        if total is None or used is None:
            return None
        return max(0, int(total - used - (self.number("memory_reserved_bytes") or 0)))


@dataclass(frozen=True)
class Peer:
    """Whether two GPUs (by NVML index) reach each other's memory: a status of `PEER_STATUS`, or
    why it is not known."""

    first: int
    second: int
    read: str | Unmeasured


def read_memory(nvml: Any, handle: Any) -> dict[str, Scalar] | Unmeasured:
    """``memory_{total,used,free}_bytes`` and, from version 2 of the query, ``reserved``.

    Version 2 is tried first; an answer that cannot be (no total, more used than there is, a
    sentinel) counts as no answer.
    """
    version = getattr(nvml, "nvmlMemory_v2", None)
    attempts = [(2, (version,))] if version is not None else []
    gap = Unmeasured("memory", Reason.NOT_SUPPORTED, "NVML knows no memory of this GPU")
    for which, extra in [*attempts, (1, ())]:
        try:
            raw = nvml.nvmlDeviceGetMemoryInfo(handle, *extra)
            parts = {n: number(getattr(raw, n, None)) for n in _MEMORY}
        except (nvml.NVMLError, ValueError, TypeError, AttributeError) as error:
            gap = why("memory", error)
            if gap.reason is Reason.LOST:
                return gap
            continue
        total, used, reserved = parts["total"], parts["used"], parts["reserved"] or 0
        if not total or used is None or used + reserved > total:
            gap = Unmeasured("memory", Reason.NOT_SUPPORTED, "NVML's memory figures cannot be")
            continue
        found: dict[str, Scalar] = {
            f"memory_{name}_bytes": value for name, value in parts.items() if value is not None
        }
        return {**found, "memory_query_version": which}
    return gap


def read_gpu(nvml: Any, index: int, *, live_only: bool = False) -> Gpu:
    """One GPU. A lost GPU's handle is not touched again: some drivers crash on it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        gap = why("gpu", error)
        # A container that lost its right to the device hears "unknown error" at every handle.
        if getattr(error, "value", None) == UNKNOWN_ERROR:
            gap = Unmeasured("gpu", Reason.LOST, gap.detail)
        return Gpu(index, lost=gap)
    gpu = _read_handle(nvml, handle, index, live_only=live_only)
    if live_only or gpu.lost or gpu.flag("mig_mode") is not True:
        return gpu
    return Gpu(index, gpu.values, gpu.gaps, slices=_read_slices(nvml, handle, gpu))


def read_use(nvml: Any, index: int) -> Gpu:
    """Who is on one GPU, and whether it works: a few quick queries and the process lists."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return Gpu(index, lost=why("gpu", error))
    values, gaps, lost = ask_all(nvml, [query for query in QUERIES if query.field in _USE], handle)
    if lost:
        return Gpu(index, values, gaps, lost)
    memory = read_memory(nvml, handle)
    if isinstance(memory, Unmeasured):
        gaps.update({f"memory_{n}_bytes": memory for n in _MEMORY})
    else:
        values.update(memory)
    return Gpu(index, values, gaps, processes=_add_processes(nvml, handle, values, gaps))


def _read_handle(nvml: Any, handle: Any, index: int, *, live_only: bool = False) -> Gpu:
    queries = [query for query in QUERIES if query.live or not live_only]
    values, gaps, lost = ask_all(nvml, queries, handle)
    if lost:
        return Gpu(index, values, gaps, lost)
    memory = read_memory(nvml, handle)
    if isinstance(memory, Unmeasured):
        gaps.update({f"memory_{n}_bytes": memory for n in _MEMORY})
        lost = memory if memory.reason is Reason.LOST else None
    else:
        values.update(memory)
    if live_only or lost:
        return Gpu(index, values, gaps, lost)
    if VIRTUALISATION.get(_as_int(values.get("virtualisation_mode"))) == "vGPU":
        licence = ask(nvml, LICENCE, handle)
        if isinstance(licence, Unmeasured):
            gaps[LICENCE.field] = licence
        else:
            values[LICENCE.field] = licence
    _add_processes(nvml, handle, values, gaps)
    return Gpu(index, values, gaps)


def _add_processes(
    nvml: Any, handle: Any, values: dict[str, Scalar], gaps: dict[str, Unmeasured]
) -> tuple[GpuProcess, ...]:
    """The believable rows; their counts join `values`."""
    total = values.get("memory_total_bytes")
    rows: list[GpuProcess] = []
    for kind in ("compute", "graphics"):
        found = read_processes(
            nvml,
            handle,
            kind,
            total_bytes=int(total) if total is not None else None,
            pid_limit=WINDOWS_PID_LIMIT if "driver_model" in values else LINUX_PID_LIMIT,
        )
        if isinstance(found, Processes):
            values[f"{kind}_processes"] = len(found.rows)
            values[f"{kind}_processes_dropped"] = found.dropped
            rows += found.rows
        else:
            gaps[f"{kind}_processes"] = found
    return tuple(rows)


def _read_slices(nvml: Any, handle: Any, parent: Gpu) -> tuple[Gpu, ...]:
    """The MIG devices of a GPU; a place without one answers "not found"."""
    try:
        places = min(int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)), _MOST_SLICES)
    except (nvml.NVMLError, AttributeError, ValueError, TypeError):
        return ()
    found: list[Gpu] = []
    for place in range(places):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except (nvml.NVMLError, AttributeError):
            continue
        made = _read_handle(nvml, device, parent.index)
        identity: dict[str, Scalar] = {"mig_index": place}
        for name, function in _INSTANCES.items():
            identifier = ask(nvml, Query(name, ((function,),)), device)
            if not isinstance(identifier, Unmeasured):
                identity[name] = identifier
        if parent.text("uuid"):
            identity["parent_uuid"] = str(parent.text("uuid"))
        found.append(Gpu(made.index, {**made.values, **identity}, made.gaps, made.lost))
    return tuple(found)


def _as_int(value: Scalar | None) -> int:
    return value if isinstance(value, int) else -1


def read_peers(nvml: Any, indices: Sequence[int]) -> list[Peer]:
    """Peer access between every two of the GPUs with these indices, none of them lost."""
    try:
        handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
    except nvml.NVMLError:
        return []
    found: list[Peer] = []
    for i, first in enumerate(indices):
        for second in indices[i + 1 :]:
            answer: str | Unmeasured
            try:
                status = int(nvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], 0))
                answer = PEER_STATUS.get(status, f"status {status}")
            except (nvml.NVMLError, AttributeError) as error:
                answer = why("peer_access", error)
            found.append(Peer(first, second, answer))
    return found


def ask_count(nvml: Any) -> int | Unmeasured:
    """How many GPUs NVML numbers."""
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except (nvml.NVMLError, ValueError, TypeError) as error:
        return why("nvml", error)
    if not 0 <= count <= _MOST_GPUS:
        return Unmeasured("nvml", Reason.FAILED, f"NVML counts {count} GPUs, which cannot be")
    return count


def read_system(nvml: Any) -> dict[str, Scalar]:
    """Versions of driver, NVML and the CUDA that the driver supports; what fails is left out."""
    return ask_all(nvml, SYSTEM)[0]


def load() -> Any:
    """The module; `ImportError` says what to install."""
    try:
        import pynvml
    except ImportError as error:
        raise ImportError(f"{error}; pip install nvidia-ml-py") from error
    return pynvml
