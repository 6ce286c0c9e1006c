"""Puts what the agent counted of processes and cards beside what the processes told of themselves.

One source for each number, the one that was measured nearest: a process that reads its own counters
does so in one moment with what its allocator holds, so its word stands. Where it tells none, the
agent's reading stands, with what the process told of its allocator before it and after it, if that
is the same: of two moments of an allocator at work, the difference would look like moved memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from pichak_agent.counter_keeper import Counted, CounterKeeper
from pichak_agent.readings import COUNTED, CardUse, GpuReading, OwnUse, ProcessId
from pichak_core.devices import ProcessMemory
from pichak_core.devices.processes import started_at
from pichak_core.devices.windows_adapters import address_text, pci_address
from pichak_core.devices.windows_cards import Address, CardMemory

#: What a process told of its allocator must be so fresh when its counters are asked for, and again
#: when they are answered; what it holds must not have changed by more in between.
TOGETHER_SECONDS = 3.0
STEADY_BYTES = 64 * 2**20
_TELLS = 32
#: Counters that show less of a process than this share of what its allocator holds are not its.
_COVERED_SHARE = 0.5

Key = tuple[ProcessId | None, str]
#: (when, what the allocator held then), the oldest first.
Tells = deque[tuple[float, int]]


class CountedMemory:
    """Reads the counters of this agent's processes through `keeper`. `started` is `started_at`."""

    def __init__(
        self, keeper: CounterKeeper, *, started: Callable[[int], str | None] = started_at
    ) -> None:
        self.keeper, self._started = keeper, started
        self._addresses: dict[str, Address] = {}
        self._held: dict[Key, int] = {}
        self._tells: dict[Key, Tells] = {}

    def read(
        self, own: tuple[OwnUse, ...], gpus: Collection[GpuReading]
    ) -> tuple[tuple[OwnUse, ...], tuple[CardUse, ...]]:
        """`own` with what was counted since the last call, and the cards; `gpus` are as NVML named
        them now. Where nothing new was counted, a job still holds what it held when that last was.
        """
        self._addresses |= addresses_of(gpus)
        told = {use.process for use in own if use.process is not None}
        living = {each for each in told if self._started(each.pid) == each.started}
        self._hear(own)
        counted = self.keeper.poll(living)
        if self.keeper.gap:
            self._held = {}
        if counted is None:
            return tuple(self._still(use, living) for use in own), ()
        counted = replace(counted, processes=counted.processes & living)
        uses, cards = joined(own, counted, self._addresses, self._tells)
        self._held = {
            _key(use): use.memory.dedicated
            for use in uses
            if use.memory is not None and use.memory_source == COUNTED
        }
        return uses, cards

    def _hear(self, own: Collection[OwnUse]) -> None:
        heard = {_key(use): use for use in own}
        self._tells = {key: self._tells.get(key, deque(maxlen=_TELLS)) for key in heard}
        for key, use in heard.items():
            if use.told_steady is not None and use.reserved_bytes is not None:
                tell = (use.told_steady, use.reserved_bytes)
                if tell not in self._tells[key]:
                    self._tells[key].append(tell)

    def _still(self, use: OwnUse, living: Collection[ProcessId]) -> OwnUse:
        held = self._held.get(_key(use))
        if use.held_bytes is not None or held is None or use.process not in living:
            return use
        return replace(use, held_bytes=held)


def addresses_of(gpus: Collection[GpuReading]) -> dict[str, Address]:
    """Where each GPU is on the PCI bus, by UUID, as far as NVML says so."""
    found = {}
    for gpu in gpus:
        with contextlib.suppress(ValueError):
            if gpu.uuid:
                found[gpu.uuid] = pci_address(str(gpu.get("pci_bus_id") or ""))
    return found


def joined(
    own: Collection[OwnUse],
    counted: Counted,
    addresses: Mapping[str, Address],
    tells: Mapping[Key, Tells],
) -> tuple[tuple[OwnUse, ...], tuple[CardUse, ...]]:
    """The jobs, each with its memory where somebody read it; and the cards.

    `counted.processes` are those that were asked for and live still: each has had its number in
    between.
    """
    by_address = {card.address: card for card in counted.cards}
    uuids = {address: uuid for uuid, address in addresses.items()}
    uses = tuple(_with_counters(use, counted, by_address, addresses, tells) for use in own)
    cards = tuple(
        CardUse(
            address_text(card.address), uuids.get(card.address, ""), card.dedicated, card.shared
        )
        for card in counted.cards
    )
    return uses, cards


def _with_counters(
    use: OwnUse,
    counted: Counted,
    by_address: Mapping[Address, CardMemory],
    addresses: Mapping[str, Address],
    tells: Mapping[Key, Tells],
) -> OwnUse:
    if use.memory is not None or use.process not in counted.processes:
        return use
    card = _card(use, by_address, addresses)
    process: ProcessId | None = use.process
    found = None if card is None or process is None else (card.processes or {}).get(process.pid)
    if card is None or found is None:
        return use
    dedicated, shared = found
    reserved = _reserved(tells.get(_key(use), ()), counted)
    if reserved is not None and dedicated + shared < _COVERED_SHARE * reserved:
        return use
    return replace(
        use,
        held_bytes=dedicated if use.held_bytes is None else use.held_bytes,
        memory=ProcessMemory(dedicated, shared, reserved, card.dedicated, card.shared),
        memory_source=COUNTED,
    )


def _card(
    use: OwnUse, by_address: Mapping[Address, CardMemory], addresses: Mapping[str, Address]
) -> CardMemory | None:
    """The card that a job uses; of several none is guessed."""
    if use.uuid in addresses:
        return by_address.get(addresses[use.uuid])
    alone = len(by_address) == 1 and (not use.uuid or len(addresses) <= 1)
    return next(iter(by_address.values())) if alone else None


def _reserved(tells: Iterable[tuple[float, int]], counted: Counted) -> int | None:
    """What the allocator held all through the reading, None where that was not told or changed."""
    about = [tell for tell in tells if tell[0] >= counted.asked_at - TOGETHER_SECONDS]
    before = [held for at, held in about if at <= counted.asked_at]
    after = [(at, held) for at, held in about if at > counted.asked_at]
    if not before or not after or after[-1][0] < counted.read_by - TOGETHER_SECONDS:
        return None
    held = [before[-1], *(held for _, held in after)]
    return held[-1] if max(held) - min(held) <= STEADY_BYTES else None


def _key(use: OwnUse) -> Key:
    return use.process, use.uuid
