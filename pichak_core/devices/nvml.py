"""NVML: raw codes in, values or named reasons out. The only module that knows pynvml.

The module object is a parameter everywhere, so that a fake can stand in for it. Nothing here is
called in a process that matters: `pichak_core.devices.nvml_child` runs in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import Scalar

#: NVML's "not available" as unsigned 64 and 32 bit numbers. 2^64 - 1 bytes is the famous
#: 17179869184 GiB; neither may reach any arithmetic.
SENTINELS = frozenset({2**64 - 1, 2**32 - 1})

#: What each NVML return code says of the thing that was asked for.
_REASONS = {
    3: Reason.NOT_SUPPORTED,
    4: Reason.NO_PERMISSION,
    6: Reason.NO_DEVICE,
    9: Reason.NO_DEVICE,
    10: Reason.TIMED_OUT,
    12: Reason.NO_DEVICE,
    13: Reason.NOT_SUPPORTED,
    15: Reason.LOST,
    16: Reason.LOST,
    25: Reason.NOT_SUPPORTED,
    28: Reason.LOST,
}
_HINTS = {
    9: "the NVIDIA kernel module is not loaded",
    12: "no NVIDIA driver library on this machine; that alone does not mean that there is no GPU",
    13: "the driver is older than nvidia-ml-py and has no such call",
    15: "the GPU fell off the bus or became unreachable",
    16: "the GPU must be reset",
    999: "in a container this often means that it lost its right to the GPU: recreate it",
}

#: The virtualisation mode's values (NVML's enumeration, never its text).
VIRTUALISATION = {0: "none", 1: "passthrough", 2: "vGPU", 3: "host vGPU", 4: "host vSGA"}
DRIVER_MODELS = {0: "WDDM", 1: "TCC", 2: "MCDM"}


@dataclass(frozen=True)
class Gpu:
    """What NVML says of one GPU: `values` by field name, and `gaps` for what it does not say.

    Fields carry their unit (``power_watts``). `lost` is set when the GPU could not be read at all.
    """

    index: int
    values: dict[str, Scalar] = field(default_factory=dict)
    gaps: dict[str, Unmeasured] = field(default_factory=dict)
    lost: Unmeasured | None = None

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

    def budget_bytes(self) -> int | None:
        """Memory that nobody holds: total - reserved - used. Version 1 of the query counts the
        driver's reserve as used already, so there it is not taken off twice."""
        total, used = self.number("memory_total_bytes"), self.number("memory_used_bytes")
        if total is None or used is None:
            return None
        return max(0, int(total - used - (self.number("memory_reserved_bytes") or 0)))


def text(raw: Any) -> str:
    """NVML's names are bytes in one of the packages that provide pynvml and text in the other."""
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def number(raw: Any) -> int | None:
    """The number, None for "not available" in any of its forms."""
    return None if raw is None or int(raw) in SENTINELS else int(raw)


@dataclass(frozen=True)
class _Query:
    """One field: the functions that can give it, newest first, and how their result is read."""

    field: str
    functions: tuple[str, ...]
    convert: Callable[[Any], Scalar | None] = number
    arguments: tuple[int, ...] = ()
    live: bool = False


def _watts(raw: Any) -> float | None:
    milliwatts = number(raw)
    return None if milliwatts is None else milliwatts / 1000


def _first(raw: Any) -> int | None:
    return number(raw[0] if isinstance(raw, (list, tuple)) else raw)


_QUERIES = (
    _Query("uuid", ("nvmlDeviceGetUUID",), text),
    _Query("name", ("nvmlDeviceGetName",), text),
    _Query("pci_bus_id", ("nvmlDeviceGetPciInfo",), lambda raw: text(raw.busId)),
    _Query("vbios", ("nvmlDeviceGetVbiosVersion",), text),
    _Query("virtualisation_mode", ("nvmlDeviceGetVirtualizationMode",)),
    _Query("driver_model", ("nvmlDeviceGetDriverModel", "nvmlDeviceGetCurrentDriverModel"), _first),
    _Query(
        "throttle_bitmask",
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        live=True,
    ),
    _Query("sm_clock_mhz", ("nvmlDeviceGetClockInfo",), number, (1,), live=True),
    _Query("memory_clock_mhz", ("nvmlDeviceGetClockInfo",), number, (2,), live=True),
    _Query("sm_clock_max_mhz", ("nvmlDeviceGetMaxClockInfo",), number, (1,)),
    _Query("power_watts", ("nvmlDeviceGetPowerUsage",), _watts, live=True),
    _Query("power_limit_watts", ("nvmlDeviceGetEnforcedPowerLimit",), _watts),
    _Query("temperature_celsius", ("nvmlDeviceGetTemperature",), number, (0,), live=True),
    _Query("pcie_generation", ("nvmlDeviceGetCurrPcieLinkGeneration",), number, live=True),
    _Query("pcie_width", ("nvmlDeviceGetCurrPcieLinkWidth",), number, live=True),
    _Query("pcie_generation_max", ("nvmlDeviceGetMaxPcieLinkGeneration",)),
    _Query("pcie_width_max", ("nvmlDeviceGetMaxPcieLinkWidth",)),
    _Query(
        "utilisation_percent",
        ("nvmlDeviceGetUtilizationRates",),
        lambda raw: number(raw.gpu),
        live=True,
    ),
)
_LICENCE = _Query(
    "vgpu_licensed",
    ("nvmlDeviceGetGridLicensableFeatures",),
    lambda raw: any(
        raw.gridLicensableFeatures[i].featureState for i in range(int(raw.licensableFeaturesCount))
    ),
)
_SYSTEM = (
    _Query("driver_version", ("nvmlSystemGetDriverVersion",), text),
    _Query("nvml_version", ("nvmlSystemGetNVMLVersion",), text),
    _Query(
        "cuda_driver_version",
        ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"),
        lambda raw: f"{int(raw) // 1000}.{int(raw) % 1000 // 10}",
    ),
)


def why(name: str, error: BaseException) -> Unmeasured:
    """An NVML error as a named reason in plain text: the objects themselves may not travel."""
    code = getattr(error, "value", None)
    if not isinstance(code, int):
        return Unmeasured(name, Reason.FAILED, f"{type(error).__name__}: {error}")
    reason = _REASONS.get(code, Reason.FAILED)
    hint = f"; {_HINTS[code]}" if code in _HINTS else ""
    return Unmeasured(name, reason, f"NVML code {code} ({error}){hint}")


def ask(nvml: Any, query: _Query, *leading: Any) -> Scalar | Unmeasured:
    """One field through the first of its functions that answers."""
    gap = Unmeasured(query.field, Reason.NOT_SUPPORTED, "this nvidia-ml-py is too old to ask")
    for name in query.functions:
        function = getattr(nvml, name, None)
        if function is None:
            continue
        try:
            value = query.convert(function(*leading, *query.arguments))
        except (nvml.NVMLError, ValueError, TypeError, AttributeError, LookupError) as error:
            gap = why(query.field, error)
            if gap.reason is Reason.LOST:
                return gap
            continue
        if value is not None:
            return value
        gap = Unmeasured(query.field, Reason.NOT_SUPPORTED, "NVML answered 'not available'")
    return gap


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
        except (nvml.NVMLError, TypeError, AttributeError) as error:
            gap = why("memory", error)
            if gap.reason is Reason.LOST:
                return gap
            continue
        parts = {n: number(getattr(raw, n, None)) for n in ("total", "used", "free", "reserved")}
        total, used = parts["total"], parts["used"]
        if not total or used is None or used > total:
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
        return Gpu(index, lost=why("gpu", error))
    values: dict[str, Scalar] = {}
    gaps: dict[str, Unmeasured] = {}
    for query in _QUERIES:
        if live_only and not query.live:
            continue
        answer = ask(nvml, query, handle)
        if isinstance(answer, Unmeasured):
            gaps[query.field] = answer
            if answer.reason is Reason.LOST:
                return Gpu(index, values, gaps, lost=answer)
        else:
            values[query.field] = answer
    memory = read_memory(nvml, handle)
    if isinstance(memory, Unmeasured):
        gaps.update({f"memory_{n}_bytes": memory for n in ("total", "used", "free", "reserved")})
    else:
        values.update(memory)
    if VIRTUALISATION.get(_as_int(values.get("virtualisation_mode"))) == "vGPU" and not live_only:
        licence = ask(nvml, _LICENCE, handle)
        if isinstance(licence, Unmeasured):
            gaps["vgpu_licensed"] = licence
        else:
            values["vgpu_licensed"] = licence
    return Gpu(index, values, gaps)


def _as_int(value: Scalar | None) -> int:
    return value if isinstance(value, int) else -1


def ask_count(nvml: Any) -> int | Unmeasured:
    """How many GPUs NVML numbers."""
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        return why("nvml", error)


def read_system(nvml: Any) -> dict[str, Scalar]:
    """Versions of driver, NVML and the CUDA that the driver supports; what fails is left out."""
    answers = {query.field: ask(nvml, query) for query in _SYSTEM}
    return {name: value for name, value in answers.items() if not isinstance(value, Unmeasured)}


def load() -> Any:
    """The module; `ImportError` says what to install."""
    try:
        import pynvml
    except ImportError as error:
        raise ImportError(f"{error}; pip install nvidia-ml-py") from error
    return pynvml
