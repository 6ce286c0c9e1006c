"""Windows' word on GPU memory: what a process has on a card, and what it has in system memory.

There is no other way to see the spill that does not raise: NVML knows nothing of single processes
under WDDM, and the card's own "free" ends at zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from pichak_core.devices import GpuMemoryUse
from pichak_core.devices.windows_adapters import Adapter, list_adapters, luids_of_card
from pichak_core.devices.windows_counters import (
    PATHS,
    CounterItem,
    CounterPath,
    gpu_memory_use,
    unknown,
)
from pichak_core.devices.windows_pdh import read_counters
from pichak_core.measurement import Reason, Unmeasured


def gpu_memory(
    pci_bus_id: str,
    pid: int | None = None,
    *,
    adapters: Callable[[], Sequence[Adapter]] = list_adapters,
    counters: Callable[
        [Sequence[CounterPath]], Mapping[CounterPath, Sequence[CounterItem]]
    ] = read_counters,
) -> GpuMemoryUse | Unmeasured:
    """What process `pid` (by default this one) uses of the card at `pci_bus_id` now, in bytes.

    `pci_bus_id` is NVML's ``domain:bus:device.function``; "" is the only NVIDIA card. Adapters are
    listed anew at each call, since a driver restart renames them. Counters that are missing,
    damaged or that do not know the process are `Unmeasured` with "spill unknown" and why.
    """
    try:
        luids = luids_of_card(adapters(), pci_bus_id)
        if isinstance(luids, Unmeasured):
            return luids
        return gpu_memory_use(counters(PATHS), luids, os.getpid() if pid is None else pid)
    except OSError as error:
        # Also a library or an entry of it that this Windows does not have.
        return unknown(Reason.FAILED, str(error))
    except AttributeError as error:
        return unknown(Reason.NOT_SUPPORTED, f"this system lacks a call: {error}")
