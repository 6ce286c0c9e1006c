"""Stand-ins for the libraries of Windows that tell GPU memory, and a machine to put behind them."""

# ruff: noqa: N802 - the fakes have the names of the Windows API

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pichak_core.devices import windows_adapters, windows_pdh
from pichak_core.devices.windows_adapters import Adapter, list_adapters
from pichak_core.devices.windows_child import CounterAnswer, Server
from pichak_core.devices.windows_counters import (
    ADAPTER_DEDICATED,
    ADAPTER_SHARED,
    PATHS,
    PROCESS_DEDICATED,
    PROCESS_SHARED,
    CounterItem,
    CounterPath,
    Luid,
)
from pichak_core.devices.windows_pdh import MORE_DATA, NO_OBJECT, CounterQuery, FormattedItem
from pichak_core.testing import GIB, MIB

CARD = Luid(0, 0x1532A)
GHOSTS = (Luid(0, 0x15300), Luid(0, 0x15301))
INTEL = Luid(0, 0xC4A5)


def name(luid: Luid, pid: int | None = None) -> str:
    owner = "" if pid is None else f"pid_{pid}_"
    return f"{owner}luid_0x{luid.high:08X}_0x{luid.low:08X}_phys_0"


def row(instance: str, value: int, status: int = 0) -> CounterItem:
    return CounterItem(instance, status, value)


def rows_of(
    dedicated: int, shared: int, *, pid: int = 77, luid: Luid = CARD
) -> dict[CounterPath, list[CounterItem]]:
    return {
        PROCESS_DEDICATED: [row(name(luid, pid), dedicated)],
        PROCESS_SHARED: [row(name(luid, pid), shared)],
        ADAPTER_DEDICATED: [row(name(luid), dedicated + GIB)],
        ADAPTER_SHARED: [row(name(luid), shared + 3 * MIB)],
    }


FIRST, SECOND = (1, 0, 0), (0x41, 0, 0)


def nvidia(luid: Luid, address: tuple[int, int, int] | None = FIRST) -> Adapter:
    return Adapter(luid, windows_adapters.NVIDIA, address)


LAPTOP = [
    Adapter(INTEL, 0x8086, (0, 2, 0)),
    nvidia(CARD),
    nvidia(GHOSTS[0]),
    Adapter(GHOSTS[1], windows_adapters.NVIDIA, None),
    Adapter(Luid(0, 9), 0x1414, None),  # the software renderer
]


class FakeGdi32:
    """gdi32's D3DKMT calls over a list of adapters."""

    def __init__(self, adapters: Sequence[Adapter], *, status: int = 0) -> None:
        self.adapters, self.status = adapters, status
        self.open: set[int] = set()

    def D3DKMTEnumAdapters2(self, request: Any) -> int:
        asked = request._obj
        if self.status:
            return self.status
        if not asked.adapters:
            asked.count = 16  # the most there can be
            return 0
        assert asked.count >= len(self.adapters)
        for place, adapter in enumerate(self.adapters):
            handle = 0x40000000 + place
            high = ctypes.c_int32(adapter.luid.high).value
            asked.adapters[place] = windows_adapters.AdapterInfo(
                handle, adapter.luid.low, high, 1, 0
            )
            self.open.add(handle)
        asked.count = len(self.adapters)
        return 0

    def D3DKMTQueryAdapterInfo(self, request: Any) -> int:
        asked = request._obj
        adapter = self.adapters[asked.adapter - 0x40000000]
        if asked.type == windows_adapters.ADAPTER_ADDRESS:
            assert asked.data_bytes == 12
            answer = windows_adapters.AdapterAddress.from_address(asked.data)
            none = (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
            answer.bus, answer.device, answer.function = adapter.address or none
            return 0
        assert asked.type == windows_adapters.PHYSICAL_ADAPTER_DEVICE_IDS
        assert asked.data_bytes == 28
        if adapter.vendor is None:
            return -1073741637  # STATUS_NOT_SUPPORTED
        windows_adapters.DeviceIds.from_address(asked.data).vendor = adapter.vendor
        return 0

    def D3DKMTCloseAdapter(self, request: Any) -> int:
        self.open.remove(request._obj.adapter)
        return 0


GERMAN = {
    "GPU Process Memory": "GPU-Prozessspeicher",
    "GPU Adapter Memory": "GPU-Adapterspeicher",
    "Dedicated Usage": "Dedizierte Auslastung",
    "Shared Usage": "Freigegebene Auslastung",
}
INDEX = {
    "GPU Process Memory": 9000,
    "GPU Adapter Memory": 9100,
    "Dedicated Usage": 9002,
    "Shared Usage": 9004,
}


@dataclass
class FakePdh:
    """pdh.dll over rows. `language` gives the system's own names; with `english` it knows the
    English ones as well, as from Vista on. Values grow in number while they are asked for, `grows`
    times. Names of `PdhLookupPerfNameByIndexW` come by `INDEX`."""

    rows: dict[CounterPath, list[CounterItem]]
    language: dict[str, str] = field(default_factory=dict)
    english: bool = True
    grows: int = 0
    collect_status: int = 0
    added: list[str] = field(default_factory=list)
    open: int = 0
    _counters: list[CounterPath] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)

    def PdhOpenQueryW(self, source: None, data: int, query: Any) -> int:
        query._obj.value = 1
        self.open += 1
        return 0

    def PdhCloseQuery(self, query: Any) -> int:
        self.open -= 1
        return 0

    def _add(self, text: str, counter: Any, local: Callable[[str], str]) -> int:
        for path in self.rows:
            spelled = CounterPath(local(path.counter_set), local(path.counter))
            if spelled.wildcard == text:
                self.added.append(text)
                self._counters.append(path)
                counter._obj.value = len(self._counters)
                return 0
        return NO_OBJECT

    def PdhAddEnglishCounterW(self, query: Any, text: str, data: int, counter: Any) -> int:
        return self._add(text, counter, str) if self.english else NO_OBJECT

    def PdhAddCounterW(self, query: Any, text: str, data: int, counter: Any) -> int:
        return self._add(text, counter, lambda word: self.language.get(word, word))

    def PdhLookupPerfNameByIndexW(self, machine: None, index: int, buffer: Any, size: Any) -> int:
        words = [word for word, number in INDEX.items() if number == index]
        if not words:
            return 0xC0000BB9
        buffer.value = self.language.get(words[0], words[0])
        size._obj.value = len(buffer.value) + 1
        return 0

    def PdhCollectQueryData(self, query: Any) -> int:
        return self.collect_status

    def PdhGetFormattedCounterArrayW(
        self, counter: Any, form: int, size: Any, count: Any, buffer: Any
    ) -> int:
        assert form & windows_pdh.FORMAT_LARGE
        path = self._counters[counter.value - 1]
        if buffer is not None and self.grows:
            self.grows -= 1
            extra = [row(name(CARD, 5000 + i), 1) for i in range(100)]
            self.rows[path] = self.rows[path] + extra
        items = self.rows[path]
        needed = len(items) * ctypes.sizeof(FormattedItem)
        if buffer is None or len(buffer) < needed:
            size._obj.value = needed
            return MORE_DATA if needed else 0
        array = (FormattedItem * len(items)).from_buffer(buffer)
        for place, item in enumerate(items):
            text = ctypes.create_unicode_buffer(item.instance)
            self._kept.append(text)  # the real one keeps the names behind the array
            array[place].name = ctypes.cast(text, ctypes.c_wchar_p)
            array[place].formatted.status = item.status
            array[place].formatted.value.large = item.value
        size._obj.value, count._obj.value = needed, len(items)
        return 0


def no_registry() -> Sequence[str]:
    raise AssertionError("the registry is not needed")


@dataclass
class FakeWindows:
    """A machine with one NVIDIA card beside an integrated GPU: what `processes` use of the card
    (dedicated and shared, by process id), and everybody else (`others`). `status` is what
    collecting the counters gives; `opened` counts the queries."""

    processes: dict[int, tuple[int, int]] = field(default_factory=dict)
    others: tuple[int, int] = (GIB, 100 * MIB)
    status: int = 0
    luid: Luid = CARD
    opened: int = 0
    look: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.pdh = _LivePdh(self.rows(), language=GERMAN)
        self.pdh.machine = self

    def rows(self) -> dict[CounterPath, list[CounterItem]]:
        found: dict[CounterPath, list[CounterItem]] = {}
        for place, (process, adapter) in enumerate(
            [(PROCESS_DEDICATED, ADAPTER_DEDICATED), (PROCESS_SHARED, ADAPTER_SHARED)]
        ):
            listed = {4: self.others, **self.processes}
            total = sum(both[place] for both in listed.values())
            found[process] = [
                row(name(self.luid, pid), both[place]) for pid, both in listed.items()
            ]
            found[process] += [row(name(INTEL, 4), 78 * MIB)]
            found[adapter] = [row(name(self.luid), total), row(name(INTEL), 900 * MIB)]
        return found

    def adapters(self) -> list[Adapter]:
        return list_adapters(FakeGdi32([Adapter(INTEL, 0x8086, (0, 2, 0)), nvidia(self.luid)]))

    def query(self) -> CounterQuery:
        self.opened += 1
        return CounterQuery(PATHS, self.pdh, no_registry)

    def server(self, clock: Callable[[], float]) -> Server:
        return Server(self.adapters, self.query, clock)


@dataclass
class _LivePdh(FakePdh):
    machine: Any = None

    def PdhCollectQueryData(self, query: Any) -> int:
        self.machine.look()
        self.rows.update(self.machine.rows())
        self._kept.clear()
        return int(self.machine.status)


class SessionInProcess:
    """Stands for `CounterSession`'s process, and for nothing else: each answer is there at once."""

    def __init__(
        self, windows: FakeWindows, clock: Callable[[], float], cpu: float = 0.001
    ) -> None:
        self._server, self._cpu = windows.server(clock), cpu
        self._answer: CounterAnswer | None = None
        self.pid, self.alive, self.listener_cpu_seconds = 1, True, 0.0
        self.asked: list[list[int]] = []

    @property
    def waiting(self) -> bool:
        return self._answer is not None

    def ask(self, request: str, budget_seconds: float) -> None:
        self.asked.append(json.loads(request))
        self._answer = CounterAnswer(cpu_seconds=self._cpu, seconds=self._cpu)
        self._answer.take(json.loads(json.dumps(self._server.answer(request))))
        self._answer.complete()

    def collect(self) -> CounterAnswer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self, patience_seconds: float = 2.0) -> None:
        self.alive = False
        self._server.close()
