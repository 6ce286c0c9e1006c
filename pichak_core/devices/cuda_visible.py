"""Which devices CUDA_VISIBLE_DEVICES leaves visible, by CUDA's own rules. Pure.

Counting commas is wrong in every way there is: a repeated entry hides every device, an invalid one
hides itself and all behind it, an empty list hides all, and of MIG devices only one is ever shown.
Source: CUDA C Programming Guide, "CUDA Environment Variables", and the MIG User Guide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

# As C reads a number: leading blanks, a sign, digits; what follows them is ignored.
_NUMBER = re.compile(r"\s*([+-]?\d+)")
#: The older name of a MIG device: its parent's UUID, GPU instance and compute instance.
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)$", re.IGNORECASE)


@dataclass(frozen=True)
class Physical:
    """A GPU, and with MIG on the UUIDs of its MIG devices and the (GPU, compute) instance of each
    where they are known."""

    uuid: str
    slices: tuple[str, ...] = ()
    mig: bool = False
    instances: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Visible:
    """The UUIDs that CUDA numbers from 0, and what was wrong with the list, if anything."""

    uuids: tuple[str, ...]
    note: str = ""


def visible_devices(mask: str | None, gpus: Sequence[Physical]) -> Visible:
    """What of `gpus`, in CUDA's order, the variable's value `mask` leaves visible (None: not set).

    Entries are numbers, UUIDs (``GPU-…``, ``MIG-…``), or beginnings of UUIDs that fit one device.
    The kind of the first entry holds for the list: one of another kind is invalid.
    """
    if mask is None:
        return _one_slice_at_most([_first_of(gpu) for gpu in gpus if _first_of(gpu)])
    if not mask.strip():
        return Visible((), f"{MASK} is empty: no device is visible")
    entries = [entry.strip() for entry in mask.split(",")]
    kind = _kind(entries[0])
    found: list[str] = []
    for entry in entries:
        known = resolve(entry, gpus) if _kind(entry) == kind else None
        if known is None:
            note = f"{entry!r} in {MASK} names no device: it and what follows it are hidden"
            return _one_slice_at_most(found, note)
        if known in found:
            note = f"{entry!r} is in {MASK} twice: no device is visible"
            return Visible((), note)
        found.append(known)
    return _one_slice_at_most(found)


def resolve(entry: str, gpus: Sequence[Physical]) -> str | None:
    """The UUID of the one device that an entry names; None when there is none, or several."""
    kind = _kind(entry)
    if kind == "number":
        match = _NUMBER.match(entry)
        index = int(match.group(1)) if match else -1
        return _first_of(gpus[index]) if 0 <= index < len(gpus) else None
    old = _OLD_MIG.match(entry)
    if old:
        instance = (int(old.group(2)), int(old.group(3)))
        for gpu in gpus:
            if gpu.uuid.casefold() == old.group(1).casefold() and instance in gpu.instances:
                return gpu.slices[gpu.instances.index(instance)]
        return None
    every = [gpu.uuid for gpu in gpus] if kind == "GPU-" else [s for g in gpus for s in g.slices]
    wanted = entry.casefold()
    matches = [uuid for uuid in every if uuid.casefold().startswith(wanted)]
    if len(entry) <= len(kind) or len(matches) != 1:
        return None
    if kind == "GPU-":
        return next(_first_of(gpu) for gpu in gpus if gpu.uuid == matches[0])
    return matches[0]


def _kind(entry: str) -> str:
    for prefix in ("GPU-", "MIG-"):
        if entry.upper().startswith(prefix):
            return prefix
    return "number"


def _first_of(gpu: Physical) -> str | None:
    """What a GPU shows: itself, or with MIG on its first device (none if it has none)."""
    if not gpu.mig:
        return gpu.uuid
    return gpu.slices[0] if gpu.slices else None


def _one_slice_at_most(found: Sequence[str | None], note: str = "") -> Visible:
    """CUDA shows one MIG device to a process, and no other device beside it."""
    known = [uuid for uuid in found if uuid]
    slices = [uuid for uuid in known if uuid.upper().startswith("MIG-")]
    if slices and len(known) > 1:
        rest = f"of {len(known)} devices only the MIG device {slices[0]} is visible: CUDA shows one"
        return Visible((slices[0],), "; ".join(part for part in (note, rest) if part))
    return Visible(tuple(known), note)
