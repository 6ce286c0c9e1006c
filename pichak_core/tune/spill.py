"""The spill that does not raise: forbid it, and recognise it where it was not forbidden.

On Windows and WSL2 the driver backs an over-allocation with system memory instead of refusing it,
and the step crawls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


SpillKind = Literal["unknown", "none", "pinned", "spill", "others pushed out"]


@dataclass(frozen=True)
class Spill:
    """What two readings of the system's counters say.

    `moved_bytes` of this process are in system memory instead of on the card, `others_bytes` of
    other programs went there meanwhile; each is None where what it takes is missing, which is
    "unknown", never "no spill". `kind`: "pinned" is host memory that the GPU may reach, and no
    spill; "others pushed out" is this process at the cost of another one.
    """

    kind: SpillKind
    moved_bytes: int | None
    others_bytes: int | None = None


def spill_between(before: ProcessMemory | None, after: ProcessMemory | None) -> Spill:
    """Whether this process, or another one, was moved to system memory between two readings.

    A spill raises the shared usage and lowers ``dedicated - reserved`` by the same amount; pinned
    host memory raises the shared usage alone. What was moved before the first reading stays moved:
    it shows in what the allocator holds and the card does not. The card's shared memory growing by
    more than this process's own is another program pushed out. Changes within the counters' noise
    (64 MiB) are none. Where nobody says what the allocator had reserved, what was moved is unknown:
    pinned memory that replaces freed memory looks the same.
    """
    if before is None or after is None:
        return Spill("unknown", None)
    shared_growth = after.shared - before.shared
    moved = None
    if before.reserved is not None and after.reserved is not None:
        missing = (before.dedicated - before.reserved) - (after.dedicated - after.reserved)
        still_moved = min(after.shared, after.reserved - after.dedicated)
        moved = _above_noise(max(min(shared_growth, missing), still_moved))
    others = None
    if before.card_shared is not None and after.card_shared is not None:
        others = _above_noise(after.card_shared - before.card_shared - shared_growth)
    kind: SpillKind = "none"
    if moved is None:
        kind = "unknown"
    elif moved:
        kind = "spill"
    elif others:
        kind = "others pushed out"
    elif _above_noise(shared_growth):
        kind = "pinned"
    return Spill(kind, moved, others)


def spilled_bytes(before: ProcessMemory | None, after: ProcessMemory | None) -> int | None:
    """Bytes of this process that the driver moved to system memory; see `spill_between`.

    0 within the counters' noise; None when either reading is missing.
    """
    return spill_between(before, after).moved_bytes


def _above_noise(count: int) -> int:
    return count if count > _NOISE_BYTES else 0
