"""Which NVML calls give which field of a GPU, and in which unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pichak_core.devices.nvml_codes import number, refusals, text, why
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.plan import Scalar

Call = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """One field: the calls that can give it (function name and arguments behind the handle),
    newest first, and how their result is read. `live` fields move while the GPU works."""

    field: str
    calls: tuple[Call, ...]
    convert: Callable[[Any], Scalar | None] = number
    live: bool = False


def _query(
    field: str,
    *calls: str | Call,
    convert: Callable[[Any], Scalar | None] = number,
    live: bool = False,
) -> Query:
    made = tuple((call,) if isinstance(call, str) else call for call in calls)
    return Query(field, made, convert, live)


def _watts(raw: Any) -> float | None:
    milliwatts = number(raw)
    return None if milliwatts is None else milliwatts / 1000


def _at(index: int) -> Callable[[Any], int | None]:
    return lambda raw: number(raw[index] if isinstance(raw, (list, tuple)) else raw)


def _flag(index: int) -> Callable[[Any], bool | None]:
    def read(raw: Any) -> bool | None:
        value = _at(index)(raw)
        return None if value is None else bool(value)

    return read


def _watts_at(index: int) -> Callable[[Any], float | None]:
    return lambda raw: _watts(raw[index])


def _performance_state(raw: Any) -> int | None:
    state = number(raw)
    return state if state is not None and 0 <= state <= 15 else None  # 32 is "unknown"


def _seconds(raw: Any) -> float | None:
    """Nanoseconds of a counter: of `nvmlDeviceGetViolationStatus`, or a field value's."""
    if hasattr(raw, "violationTime"):
        count = number(raw.violationTime)
    else:
        (entry,) = raw
        if int(entry.nvmlReturn) != 0:
            return None
        # NVML's value types: 1 unsigned int, 2 unsigned long, 3 unsigned long long
        member = {1: "uiVal", 2: "ulVal", 3: "ullVal"}.get(int(entry.valueType))
        count = number(getattr(entry.value, member)) if member else None
    return None if count is None else count / 1e9


def _policy(name: str, policy: int) -> Query:
    # Field value 74 + policy is the same counter. The fields of the hardware slowdowns are not
    # asked: their numbers differ between driver releases (251-253, later 269-271), so that one
    # release answers them with something else.
    return _query(
        f"throttled_{name}_seconds",
        ("nvmlDeviceGetViolationStatus", policy),
        ("nvmlDeviceGetFieldValues", [74 + policy]),
        convert=_seconds,
        live=True,
    )


_ECC = ("nvmlDeviceGetTotalEccErrors",)
_PAGES = ("nvmlDeviceGetRetiredPages",)

QUERIES: tuple[Query, ...] = (
    _query("uuid", "nvmlDeviceGetUUID", convert=text),
    _query("name", "nvmlDeviceGetName", convert=text),
    _query("pci_bus_id", "nvmlDeviceGetPciInfo", convert=lambda raw: text(raw.busId)),
    _query("vbios", "nvmlDeviceGetVbiosVersion", convert=text),
    _query(
        "compute_capability",
        "nvmlDeviceGetCudaComputeCapability",
        convert=lambda raw: f"{int(raw[0])}.{int(raw[1])}",
    ),
    _query("virtualisation_mode", "nvmlDeviceGetVirtualizationMode"),
    _query(
        "driver_model",
        "nvmlDeviceGetDriverModel",
        "nvmlDeviceGetCurrentDriverModel",
        convert=_at(0),
    ),
    _query("persistence_mode", "nvmlDeviceGetPersistenceMode", convert=_flag(0)),
    _query("mig_mode", "nvmlDeviceGetMigMode", convert=_flag(0)),
    _query("mig_mode_pending", "nvmlDeviceGetMigMode", convert=_flag(1)),
    _query("ecc_mode", "nvmlDeviceGetEccMode", convert=_flag(0)),
    _query("ecc_corrected", (*_ECC, 0, 0)),
    _query("ecc_uncorrected", (*_ECC, 1, 0)),
    _query("ecc_corrected_lifetime", (*_ECC, 0, 1)),
    _query("ecc_uncorrected_lifetime", (*_ECC, 1, 1)),
    _query("retired_pages_corrected", (*_PAGES, 0), convert=len),
    _query("retired_pages_uncorrected", (*_PAGES, 1), convert=len),
    _query("retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus", convert=_flag(0)),
    _query("remapped_rows_corrected", "nvmlDeviceGetRemappedRows", convert=_at(0)),
    _query("remapped_rows_uncorrected", "nvmlDeviceGetRemappedRows", convert=_at(1)),
    _query("remapped_rows_pending", "nvmlDeviceGetRemappedRows", convert=_flag(2)),
    _query("remapped_rows_failed", "nvmlDeviceGetRemappedRows", convert=_flag(3)),
    _query(
        "throttle_bitmask",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        live=True,
    ),
    _policy("power", 0),
    _policy("thermal", 1),
    _policy("sync_boost", 2),
    _policy("board_limit", 3),
    _policy("reliability", 5),
    _query("performance_state", "nvmlDeviceGetPerformanceState", convert=_performance_state),
    _query("sm_clock_mhz", ("nvmlDeviceGetClockInfo", 1), live=True),
    _query("memory_clock_mhz", ("nvmlDeviceGetClockInfo", 2), live=True),
    _query("sm_clock_max_mhz", ("nvmlDeviceGetMaxClockInfo", 1)),
    _query("memory_clock_max_mhz", ("nvmlDeviceGetMaxClockInfo", 2)),
    _query("power_watts", "nvmlDeviceGetPowerUsage", convert=_watts, live=True),
    _query("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", convert=_watts),
    _query("power_limit_default_watts", "nvmlDeviceGetPowerManagementDefaultLimit", convert=_watts),
    _query(
        "power_limit_max_watts",
        "nvmlDeviceGetPowerManagementLimitConstraints",
        convert=_watts_at(1),
    ),
    _query("temperature_celsius", ("nvmlDeviceGetTemperature", 0), live=True),
    _query("temperature_slowdown_celsius", ("nvmlDeviceGetTemperatureThreshold", 1)),
    _query("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", live=True),
    _query("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", live=True),
    _query("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _query("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    # A chip-to-chip link (Grace) carries what PCIe carries elsewhere.
    _query("c2c_enabled", "nvmlDeviceGetC2cModeInfoV", convert=lambda raw: bool(raw.isC2cEnabled)),
    _query(
        "utilisation_percent",
        "nvmlDeviceGetUtilizationRates",
        convert=lambda raw: number(raw.gpu),
        live=True,
    ),
)


def _licensed(raw: Any) -> bool | None:
    """Whether a feature that this GPU has switched on is licensed; None where it lists none."""
    count = int(raw.licensableFeaturesCount)
    if not count:
        return None
    return any(bool(raw.gridLicensableFeatures[i].featureState) for i in range(count))


LICENCE = _query("vgpu_licensed", "nvmlDeviceGetGridLicensableFeatures", convert=_licensed)

SYSTEM: tuple[Query, ...] = (
    _query("driver_version", "nvmlSystemGetDriverVersion", convert=text),
    _query("nvml_version", "nvmlSystemGetNVMLVersion", convert=text),
    _query(
        "cuda_driver_version",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlSystemGetCudaDriverVersion",
        convert=lambda raw: f"{int(raw) // 1000}.{int(raw) % 1000 // 10}",
    ),
)


def ask(nvml: Any, query: Query, *leading: Any) -> Scalar | Unmeasured:
    """One field through the first of its calls that answers."""
    gap = Unmeasured(query.field, Reason.NOT_SUPPORTED, "this nvidia-ml-py is too old to ask")
    for name, *arguments in query.calls:
        function = getattr(nvml, name, None)
        if function is None:
            continue
        try:
            value = query.convert(function(*leading, *arguments))
        except refusals(nvml, ValueError, TypeError, AttributeError, LookupError) as error:
            gap = why(query.field, error)
            if gap.reason is Reason.LOST:
                return gap
            continue
        if value is not None:
            return value
        gap = Unmeasured(query.field, Reason.NOT_SUPPORTED, "NVML answered 'not available'")
    return gap


def ask_all(
    nvml: Any, queries: Sequence[Query], *leading: Any
) -> tuple[dict[str, Scalar], dict[str, Unmeasured], Unmeasured | None]:
    """(values, gaps, the gap that says that the GPU is lost). A lost GPU is not asked further:
    some drivers crash when its handle is used again."""
    values: dict[str, Scalar] = {}
    gaps: dict[str, Unmeasured] = {}
    for query in queries:
        answer = ask(nvml, query, *leading)
        if not isinstance(answer, Unmeasured):
            values[query.field] = answer
            continue
        gaps[query.field] = answer
        if answer.reason is Reason.LOST:
            return values, gaps, answer
    return values, gaps, None
