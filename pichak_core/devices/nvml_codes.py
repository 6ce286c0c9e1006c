"""What NVML's numbers mean: return codes, enumerations, bits, and its ways of saying "not here"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pichak_core.measurement import Reason, Unmeasured

#: NVML's "not available" as unsigned 64 and 32 bit numbers. 2^64 - 1 bytes is the famous
#: 17179869184 GiB; neither may reach any arithmetic.
SENTINELS = frozenset({2**64 - 1, 2**32 - 1})

#: No code of NVML's: a recording that is played back holds no answer to the question.
NOT_RECORDED = -1

UNKNOWN_ERROR = 999
MISMATCH = "NVMLLibraryMismatchError"

#: What each NVML return code says of the thing that was asked for.
_REASONS = {
    NOT_RECORDED: Reason.NOT_ASKED,
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
    26: Reason.NOT_SUPPORTED,
    28: Reason.LOST,
}
_HINTS = {
    9: "the NVIDIA kernel module is not loaded",
    12: "no NVIDIA driver library on this machine; that alone does not mean that there is no GPU",
    13: "the driver is older than nvidia-ml-py and has no such call",
    15: "the GPU fell off the bus or became unreachable",
    16: "the GPU must be reset",
    UNKNOWN_ERROR: "in a container this often means that it lost its right to the GPU: recreate it",
}

#: The virtualisation mode's values (NVML's enumeration, never its text).
VIRTUALISATION: Mapping[int, str] = {
    0: "none",
    1: "passthrough",
    2: "vGPU",
    3: "host vGPU",
    4: "host vSGA",
}
DRIVER_MODELS: Mapping[int, str] = {0: "WDDM", 1: "TCC", 2: "MCDM"}

#: Bits of the clock event ("throttle") reasons.
IDLE, APPLICATION_CLOCKS, SW_POWER_CAP, HW_SLOWDOWN = 0x1, 0x2, 0x4, 0x8
SYNC_BOOST, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x10, 0x20, 0x40, 0x80
DISPLAY_CLOCKS = 0x100
THROTTLE_REASONS: Mapping[int, str] = {
    IDLE: "idle",
    APPLICATION_CLOCKS: "application clocks setting",
    SW_POWER_CAP: "software power cap",
    HW_SLOWDOWN: "hardware slowdown",
    SYNC_BOOST: "sync boost",
    SW_THERMAL: "software thermal slowdown",
    HW_THERMAL: "hardware thermal slowdown",
    HW_POWER_BRAKE: "hardware power brake",
    DISPLAY_CLOCKS: "display clock setting",
}
#: Bits that hold a card below what it was sold for. Idle, a power cap at full load, and clocks
#: that somebody set are how a healthy card works.
FAULTY_REASONS = HW_SLOWDOWN | SW_THERMAL | HW_THERMAL | HW_POWER_BRAKE

#: What NVML says of peer access between two GPUs.
PEER_STATUS: Mapping[int, str] = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by a registry key",
    5: "not supported",
    6: "unknown",
}


def text(raw: Any) -> str:
    """NVML's names are bytes in one of the packages that provide pynvml and text in the other."""
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def number(raw: Any) -> int | None:
    """The number, None for "not available" in any of its forms."""
    return None if raw is None or int(raw) in SENTINELS else int(raw)


def throttle_names(bitmask: int) -> list[str]:
    """The reasons in a bitmask; a bit without a name is shown by its value."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bitmask & bit]
    rest = bitmask & ~sum(THROTTLE_REASONS)
    return [*names, f"unknown bits {rest:#x}"] if rest else names


def refusals(nvml: Any, *others: type[Exception]) -> tuple[type[Exception], ...]:
    """What a call raises when NVML does not answer it, and `others`. Newer bindings have, beside
    NVMLError, a class of their own for "the driver is older than I am"."""
    mismatch = getattr(nvml, MISMATCH, None)
    error: type[Exception] = nvml.NVMLError
    return (error, *([mismatch] if isinstance(mismatch, type) else []), *others)


def why(name: str, error: BaseException) -> Unmeasured:
    """An NVML error as a named reason in plain text: the objects themselves may not travel."""
    code = getattr(error, "value", None)
    if not isinstance(code, int):
        told = f"{type(error).__name__}: {error}"
        reason = Reason.NOT_SUPPORTED if MISMATCH in told else Reason.FAILED
        return Unmeasured(name, reason, told)
    reason = _REASONS.get(code, Reason.FAILED)
    if code == NOT_RECORDED:
        return Unmeasured(name, reason, str(error))
    hint = f"; {_HINTS[code]}" if code in _HINTS else ""
    return Unmeasured(name, reason, f"NVML code {code} ({error}){hint}")
