"""What Windows' GPU memory counters say of one process and one card. Pure: rows in, bytes out.

The counter sets ``GPU Process Memory`` and ``GPU Adapter Memory`` have one instance for each
process and adapter, named by the adapter's LUID: ``pid_77_luid_0x00000000_0x0001532A_phys_0``. One
card may show several LUIDs, most of them placeholders at zero; an integrated GPU has its own, whose
shared memory is its ordinary memory. LUIDs are new after each boot, sleep or driver restart, so
whoever asks brings those of this very moment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pichak_core.devices import GpuMemoryUse
from pichak_core.measurement import Reason, Unmeasured

#: PDH_CSTATUS_VALID_DATA and PDH_CSTATUS_NEW_DATA: the only statuses with a value.
_VALID = frozenset({0x0, 0x1})

#: No card and no machine has a pebibyte; -1 (all bits set) is a driver's "not available".
_MOST_BYTES = 2**50

NAME = "gpu.process_memory"


class Luid(NamedTuple):
    """A locally unique id: which adapter, until the next boot or driver restart."""

    high: int
    low: int


class CounterPath(NamedTuple):
    """Counter set and counter by their English names; every instance is meant."""

    counter_set: str
    counter: str

    @property
    def wildcard(self) -> str:
        r"""``\GPU Process Memory(*)\Shared Usage``."""
        return rf"\{self.counter_set}(*)\{self.counter}"


PROCESS_DEDICATED = CounterPath("GPU Process Memory", "Dedicated Usage")
PROCESS_SHARED = CounterPath("GPU Process Memory", "Shared Usage")
ADAPTER_DEDICATED = CounterPath("GPU Adapter Memory", "Dedicated Usage")
ADAPTER_SHARED = CounterPath("GPU Adapter Memory", "Shared Usage")
PATHS = (PROCESS_DEDICATED, PROCESS_SHARED, ADAPTER_DEDICATED, ADAPTER_SHARED)


class CounterItem(NamedTuple):
    """One instance of a counter; `value` is signed, as PDH gives it, and means something only
    where `status` says that it is valid."""

    instance: str
    status: int
    value: int


@dataclass(frozen=True)
class Instance:
    """What an instance's name says; `pid` is None for an adapter's own."""

    pid: int | None
    luid: Luid


@lru_cache(maxsize=4096)
def parse_instance(name: str) -> Instance | None:
    """The process and the adapter in an instance's name, None when it is not one of these.

    Hexadecimal digits come padded or not, and PDH adds ``#1`` to a name that exists already.
    """
    match = re.fullmatch(
        r"(?:pid_(\d+)_)?luid_0x([0-9a-f]+)_0x([0-9a-f]+)_phys_\d+(?:#\d+)?", name, re.IGNORECASE
    )
    if match is None:
        return None
    pid, high, low = match.groups()
    return Instance(None if pid is None else int(pid), Luid(int(high, 16), int(low, 16)))


def gpu_memory_use(
    rows: Mapping[CounterPath, Sequence[CounterItem]], luids: Collection[Luid], pid: int
) -> GpuMemoryUse | Unmeasured:
    """What process `pid` and everybody together use of the card that has `luids`.

    `Unmeasured` ("spill unknown") where the counters do not list the process on this card, or give
    a status or a number that cannot be: an absent row is not a zero. The card's own two figures are
    None where only they are missing.
    """
    own = {}
    for path in (PROCESS_DEDICATED, PROCESS_SHARED):
        items = [item for item, at in parsed(rows.get(path, ())) if at.pid == pid]
        here = [item for item, at in parsed(items) if at.luid in luids]
        if not here:
            return unknown(Reason.NOT_SUPPORTED, _absence(rows.get(path, ()), items, path, pid))
        total = total_bytes(here)
        if total is None:
            return unknown(
                Reason.FAILED, f"{path.wildcard} of process {pid} is {_values(here)}: no such size"
            )
        own[path] = total
    card = {
        path: total_bytes([item for item, at in parsed(rows.get(path, ())) if at.luid in luids])
        for path in (ADAPTER_DEDICATED, ADAPTER_SHARED)
    }
    return GpuMemoryUse(
        own[PROCESS_DEDICATED],
        own[PROCESS_SHARED],
        card[ADAPTER_DEDICATED],
        card[ADAPTER_SHARED],
    )


def english_indices(names: Sequence[str], wanted: str) -> list[int]:
    """The indices of an English name in the value ``Counter`` of the registry key ``Perflib\\009``,
    which lists index and name in turn. A name may have several; a damaged list gives none."""
    found = []
    for index, name in zip(names[::2], names[1::2], strict=False):
        if name == wanted and index.isdecimal():
            found.append(int(index))
    return found


def unknown(reason: Reason, detail: str) -> Unmeasured:
    """A gap that says in its first words what it means for the verdict."""
    return Unmeasured(NAME, reason, f"spill unknown: {detail}")


def parsed(items: Iterable[CounterItem]) -> list[tuple[CounterItem, Instance]]:
    """Those whose names can be read, with what they say."""
    pairs = ((item, parse_instance(item.instance)) for item in items)
    return [(item, at) for item, at in pairs if at is not None]


def total_bytes(items: Sequence[CounterItem]) -> int | None:
    """Their values together. None without items, and when one of them is not a size."""
    if not items:
        return None
    for item in items:
        if item.status not in _VALID or not 0 <= item.value < _MOST_BYTES:
            return None
    return sum(item.value for item in items)


def _absence(
    every: Sequence[CounterItem], own: Sequence[CounterItem], path: CounterPath, pid: int
) -> str:
    if own:
        return (
            f"{path.wildcard} lists process {pid} on other adapters only "
            f"({', '.join(item.instance for item in own)})"
        )
    if every:
        return (
            f"{path.wildcard} lists {len(every)} instances and none of process {pid}: an old "
            "driver, or no memory of this GPU is in use yet"
        )
    return f"{path.wildcard} lists nothing: the counters are missing or damaged (try: lodctr /R)"


def _values(items: Sequence[CounterItem]) -> str:
    return ", ".join(f"{item.value} (status 0x{item.status & 0xFFFFFFFF:08X})" for item in items)
