"""What Windows' GPU memory counters say of every NVIDIA card at once, and of chosen processes.
Pure: rows and adapters in, bytes out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pichak_core.devices.windows_adapters import NVIDIA, Adapter
from pichak_core.devices.windows_counters import (
    ADAPTER_DEDICATED,
    ADAPTER_SHARED,
    PROCESS_DEDICATED,
    PROCESS_SHARED,
    CounterItem,
    CounterPath,
    Luid,
    parsed,
    total_bytes,
    unknown,
)
from pichak_core.measurement import Reason, Unmeasured

Address = tuple[int, int, int]


@dataclass(frozen=True)
class CardMemory:
    """The card at `address` (PCI bus, device, function): all programs' bytes on it (`dedicated`)
    and in system memory that stands in for it (`shared`), None where the counters do not say; and
    those of each process that was asked for and is listed on the card, by its id."""

    address: Address
    dedicated: int | None = None
    shared: int | None = None
    processes: Mapping[int, tuple[int, int]] | None = None

    def to_wire(self) -> list[Any]:
        """Plain values for JSON."""
        processes = [[pid, *both] for pid, both in (self.processes or {}).items()]
        return [list(self.address), self.dedicated, self.shared, processes]

    @classmethod
    def from_wire(cls, parts: Sequence[Any]) -> CardMemory:
        """Of `to_wire`."""
        (bus, device, function), dedicated, shared, processes = parts
        return cls(
            (int(bus), int(device), int(function)),
            None if dedicated is None else int(dedicated),
            None if shared is None else int(shared),
            {int(pid): (int(there), int(here)) for pid, there, here in processes},
        )


def card_memories(
    rows: Mapping[CounterPath, Sequence[CounterItem]],
    adapters: Sequence[Adapter],
    pids: Collection[int],
) -> list[CardMemory] | Unmeasured:
    """Each NVIDIA card that has a graphics adapter, by its address.

    A process that is absent from a card, or whose row is no size, is left out: neither is a zero.
    `Unmeasured` ("spill unknown") where there is no such card, and where the counters list no
    process at all: under WDDM the desktop itself is always one.
    """
    cards: dict[Address, set[Luid]] = defaultdict(set)
    for one in adapters:
        if one.vendor == NVIDIA and one.address is not None:
            cards[one.address].add(one.luid)
    if not cards:
        return unknown(
            Reason.NO_DEVICE,
            "no NVIDIA graphics adapter is listed; a card in TCC mode has none, and does not spill",
        )
    by_card = {path: _by_luid(rows.get(path, ()), pids) for path in rows}
    for path in (PROCESS_DEDICATED, PROCESS_SHARED):
        if not rows.get(path):
            return unknown(
                Reason.NOT_SUPPORTED,
                f"{path.wildcard} lists nothing: the counters are missing or damaged "
                "(try: lodctr /R)",
            )

    def total(path: CounterPath, luids: Collection[Luid], pid: int | None) -> int | None:
        found = by_card.get(path, {})
        return total_bytes([item for luid in luids for item in found.get((luid, pid), ())])

    made = []
    for address, luids in sorted(cards.items()):
        both = {
            pid: (total(PROCESS_DEDICATED, luids, pid), total(PROCESS_SHARED, luids, pid))
            for pid in sorted(pids)
        }
        processes = {
            pid: (dedicated, shared)
            for pid, (dedicated, shared) in both.items()
            if dedicated is not None and shared is not None
        }
        made.append(
            CardMemory(
                address,
                total(ADAPTER_DEDICATED, luids, None),
                total(ADAPTER_SHARED, luids, None),
                processes,
            )
        )
    return made


def _by_luid(
    items: Sequence[CounterItem], pids: Collection[int]
) -> Mapping[tuple[Luid, int | None], list[CounterItem]]:
    """The adapters' own rows and those of `pids`, by adapter and process."""
    found: dict[tuple[Luid, int | None], list[CounterItem]] = defaultdict(list)
    for item, at in parsed(items):
        if at.pid is None or at.pid in pids:
            found[at.luid, at.pid].append(item)
    return found
