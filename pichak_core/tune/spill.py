"""The spill that does not raise: forbid it, and recognise it where it was not forbidden.

On Windows and WSL2 the driver backs an over-allocation with system memory instead of refusing it,
and the step crawls.
"""

from __future__ import annotations

from pichak_core.devices import Backend, ProcessMemory
from pichak_core.devices.caps import cap_of
from pichak_core.devices.torch_backend import backend_for

#: Constant. Kept free under the cap for what lives outside the allocator (~76 MB of context) and
#: for other programs' growth (~130 MB in 20 minutes); with 256 MB one run in three still had
#: 264 MB demoted to system memory.
SPILL_GUARD_BYTES = 512 * 2**20

#: Constant. A step whose seconds per row exceed the best smaller size's by this factor, on both of
#: two timings, is paging.
SPILL_FACTOR = 1.6

#: Growth of the shared counter below this is bookkeeping.
_NOISE_BYTES = 64 * 2**20


def forbid_spill(
    device: str = "cuda:0",
    *,
    guard_bytes: int = SPILL_GUARD_BYTES,
    backend: Backend | None = None,
) -> tuple[int, str]:
    """Cap this process at free + held - guard, so that an over-allocation raises where it happens.

    Returns (the cap in bytes, the sentence behind it). "cuda" is the current device. The cap is
    remembered for the device and cuts what a later ramp may use; a second call measures anew.
    On the CPU live tensors are capped, while a ramp counts them. `backend` replaces the device's
    own. `RuntimeError` when nothing is left to cap at; the earlier cap then stays.
    """
    if guard_bytes < 0:
        raise ValueError(f"guard_bytes is {guard_bytes}; it cannot be negative")
    backend = backend or backend_for(device)
    earlier = cap_of(backend.device)
    backend.set_cap(None)
    capacity = backend.capacity()
    cap = capacity.bytes - guard_bytes
    if cap <= 0:
        backend.set_cap(earlier)
        raise RuntimeError(
            f"nothing is left to cap {backend.device} at: {capacity.source}, and {guard_bytes:,} "
            "bytes of guard are more than that; free the device's memory or lower guard_bytes"
        )
    backend.set_cap(cap)
    return cap, (
        f"{cap / 2**30:.2f} GiB on {backend.device}: {capacity.source}, less "
        f"{guard_bytes / 2**20:.0f} MiB (a constant) for what lies outside the allocator and for "
        "other programs' growth"
    )


def spilled_bytes(before: ProcessMemory | None, after: ProcessMemory | None) -> int | None:
    """Bytes of this process that the driver moved to system memory between two readings.

    A spill raises the shared usage and lowers ``dedicated - reserved`` by the same amount; pinned
    host memory raises the shared usage alone and is no spill. 0 within the counters' noise; None
    when either reading is missing, which is "unknown", never "no spill".
    """
    if before is None or after is None:
        return None
    shared_growth = after.shared - before.shared
    missing = (before.dedicated - before.reserved) - (after.dedicated - after.reserved)
    moved = min(shared_growth, missing)
    return moved if moved > _NOISE_BYTES else 0
