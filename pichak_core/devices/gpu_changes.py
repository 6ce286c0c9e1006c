"""Which GPUs are gone between two readings of a machine, by UUID. Pure.

A card can vanish without an error anywhere: NVML then lists one less and numbers the others anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from pichak_core.devices.gpus import Report
from pichak_core.measurement import Reason, Unmeasured


@dataclass(frozen=True)
class Gone:
    """A GPU that was read before and cannot be read now; `index` is NVML's number of it then."""

    uuid: str
    name: str
    index: int
    why: Unmeasured


def gone(before: Report, now: Report) -> list[Gone]:
    """The GPUs of `before` whose UUIDs `now` no longer reads, and what NVML says of it.

    When NVML itself no longer answers, all of them are gone for this process: a container that
    lost its right to its devices hears "unknown error" while the host is healthy.
    """
    readable = {gpu.text("uuid") for gpu in now.gpus if gpu.lost is None}
    lost = {gpu.index: gpu.lost for gpu in now.gpus if gpu.lost is not None}
    found: list[Gone] = []
    for gpu in before.gpus:
        uuid = gpu.text("uuid")
        if uuid is None or gpu.lost is not None or uuid in readable:
            continue
        why = now.gap or lost.get(gpu.index)
        if why is None:
            detail = (
                f"NVML listed {len(before.gpus)} GPUs and lists {len(now.gpus)}; "
                "it says nothing of this one"
            )
            why = Unmeasured("gpu", Reason.LOST, detail)
        found.append(Gone(uuid, gpu.text("name") or "?", gpu.index, why))
    return found
