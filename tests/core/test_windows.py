"""Windows' GPU memory counters: names, adapters, missing and damaged counters, the calls.

The counters and the adapters come from fakes of pdh.dll and gdi32.dll that hold the structures of
the Windows API; everything behind the two libraries is real.
"""

# ruff: noqa: N802 - the fakes have the names of the Windows API

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_windows import (
    CARD,
    GERMAN,
    GHOSTS,
    INDEX,
    INTEL,
    LAPTOP,
    SECOND,
    FakeGdi32,
    FakePdh,
    name,
    no_registry,
    nvidia,
    row,
    rows_of,
)

from pichak_core.devices import GpuMemoryUse, gpu_memory_reader, windows_adapters, windows_pdh
from pichak_core.devices.cuda_backend import CudaBackend
from pichak_core.devices.filesystems import from_volume
from pichak_core.devices.windows import gpu_memory
from pichak_core.devices.windows_adapters import Adapter, list_adapters, luids_of_card
from pichak_core.devices.windows_counters import (
    ADAPTER_DEDICATED,
    ADAPTER_SHARED,
    PATHS,
    PROCESS_DEDICATED,
    PROCESS_SHARED,
    CounterItem,
    CounterPath,
    Luid,
    english_indices,
    gpu_memory_use,
    parse_instance,
)
from pichak_core.devices.windows_pdh import (
    NO_DATA,
    FormattedItem,
    PdhError,
    read_counters,
)
from pichak_core.devices.windows_volumes import volume_of
from pichak_core.measurement import Reason, Unmeasured
from pichak_core.testing import GIB, MIB, FakeClock, FakeCuda
from pichak_core.tune.ramp import ramp_micro_batch

# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instance", "pid", "luid"),
    [
        ("pid_77_luid_0x0_0x1532A_phys_0", 77, CARD),  # field case 40
        ("pid_7_luid_0x00000000_0x0001532A_phys_0", 7, CARD),
        ("luid_0x00000000_0x0001532A_phys_0", None, CARD),
        ("luid_0x00000001_0x0000C4A5_phys_1", None, Luid(1, 0xC4A5)),
        ("PID_77_LUID_0X0_0x1532a_PHYS_0", 77, CARD),
        ("pid_77_luid_0x0_0x1532A_phys_0#1", 77, CARD),
    ],
)
def test_an_instance_names_process_and_adapter(instance: str, pid: int | None, luid: Luid) -> None:
    at = parse_instance(instance)
    assert at is not None
    assert (at.pid, at.luid) == (pid, luid)


@pytest.mark.parametrize(
    "instance",
    [
        "",
        "_Total",
        "pid_77",
        "pid_77_luid_0x0_phys_0",
        "pid_x_luid_0x0_0x1_phys_0",
        "pid_77_luid_0x0_0x1_phys_0_eng_3_engtype_3D",  # of the engines, not of memory
    ],
)
def test_what_is_no_such_instance_is_left_out(instance: str) -> None:
    assert parse_instance(instance) is None


# --- sums --------------------------------------------------------------------------------------


def test_one_card_with_placeholders_beside_an_integrated_gpu() -> None:
    # field case 40: three LUIDs of one card, an Intel one whose 78 MiB shared are no spill
    rows = {
        PROCESS_DEDICATED: [
            row(name(CARD, 77), GIB),
            *[row(name(ghost, 77), 0) for ghost in GHOSTS],
            row(name(INTEL, 77), 0),
            row(name(CARD, 7), 5 * GIB),  # pid_7 is not pid_77
            row(name(CARD, 777), 6 * GIB),
        ],
        PROCESS_SHARED: [
            row(name(CARD, 77), 10 * MIB),
            *[row(name(ghost, 77), 0) for ghost in GHOSTS],
            row(name(INTEL, 77), 78 * MIB),
            row(name(CARD, 7), 3 * GIB),
        ],
        ADAPTER_DEDICATED: [row(name(CARD), 7 * GIB), row(name(INTEL), 0)],
        ADAPTER_SHARED: [row(name(CARD), 4 * GIB), row(name(INTEL), 900 * MIB)],
    }
    expected = GpuMemoryUse(GIB, 10 * MIB, 7 * GIB, 4 * GIB)
    assert gpu_memory_use(rows, {CARD}, 77) == expected
    assert gpu_memory_use(rows, {CARD, *GHOSTS}, 77) == expected


def test_a_process_with_zero_is_not_a_process_that_is_absent() -> None:
    assert gpu_memory_use(rows_of(0, 0), {CARD}, 77) == GpuMemoryUse(0, 0, GIB, 3 * MIB)


@pytest.mark.parametrize(
    ("rows", "reason", "words"),
    [
        # field case 39: the counters are there, and this process never appears
        (rows_of(GIB, 0, pid=12), Reason.NOT_SUPPORTED, "none of process 77"),
        # field case 39: nothing at all, as with a damaged registry
        ({}, Reason.NOT_SUPPORTED, "missing or damaged"),
        (rows_of(GIB, 0, luid=INTEL), Reason.NOT_SUPPORTED, "on other adapters only"),
        # field case 14's sentinel, as a signed number
        (rows_of(-1, 0), Reason.FAILED, "no such size"),
        (rows_of(GIB, 2**62), Reason.FAILED, "no such size"),
        (
            rows_of(GIB, 0) | {PROCESS_SHARED: [row(name(CARD, 77), 0, 0xC0000BC6)]},
            Reason.FAILED,
            "status 0xC0000BC6",
        ),
        (
            {k: v for k, v in rows_of(GIB, 0).items() if k != PROCESS_SHARED},
            Reason.NOT_SUPPORTED,
            "Shared Usage lists nothing",
        ),
    ],
)
def test_missing_and_damaged_counters_are_unknown_and_never_zero(
    rows: dict[CounterPath, list[CounterItem]], reason: Reason, words: str
) -> None:
    found = gpu_memory_use(rows, {CARD}, 77)
    assert isinstance(found, Unmeasured)
    assert found.reason is reason
    assert found.detail.startswith("spill unknown")
    assert words in found.detail


def test_the_cards_own_figures_may_be_missing_alone() -> None:
    rows = rows_of(GIB, MIB)
    rows[ADAPTER_SHARED] = [row(name(CARD), -1)]
    del rows[ADAPTER_DEDICATED]
    assert gpu_memory_use(rows, {CARD}, 77) == GpuMemoryUse(GIB, MIB, None, None)


# --- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["00000000:01:00.0", "0000:01:00.0", "00000000:01:00", ""])
def test_a_card_is_found_by_its_address_with_all_its_ids(address: str) -> None:
    # field case 40
    assert luids_of_card(LAPTOP, address) == frozenset({CARD, GHOSTS[0]})


def test_of_two_cards_none_is_guessed() -> None:
    both = [nvidia(CARD), nvidia(GHOSTS[0], SECOND)]
    assert luids_of_card(both, "00000000:41:00.0") == frozenset({GHOSTS[0]})
    found = luids_of_card(both, "")
    assert isinstance(found, Unmeasured)
    assert "2 NVIDIA cards" in found.detail


def test_a_card_without_a_graphics_adapter_is_unknown() -> None:
    found = luids_of_card(LAPTOP, "00000000:02:00.0")
    assert isinstance(found, Unmeasured)
    assert "no NVIDIA graphics adapter at PCI 00000000:02:00.0 (listed: 01:00.0)" in found.detail
    none = luids_of_card([Adapter(INTEL, 0x8086, (0, 2, 0))], "")
    assert isinstance(none, Unmeasured)
    assert none.reason is Reason.NO_DEVICE


def test_an_address_that_is_none() -> None:
    with pytest.raises(ValueError, match="is not a PCI address"):
        luids_of_card(LAPTOP, "GPU-0")


def test_adapters_are_listed_and_every_handle_is_given_back() -> None:
    adapters = [*LAPTOP, Adapter(Luid(0xFFFFFFFF, 5), None, (3, 1, 2))]
    fake = FakeGdi32(adapters)
    assert list_adapters(fake) == adapters
    assert not fake.open


def test_adapters_that_cannot_be_listed_are_an_error() -> None:
    with pytest.raises(OSError, match="NTSTATUS 0xC0000002"):
        list_adapters(FakeGdi32([], status=-1073741822))


def test_the_structures_have_the_sizes_of_the_windows_api() -> None:
    """On 64 bits; d3dkmthk.h and pdh.h."""
    assert ctypes.sizeof(windows_adapters.AdapterInfo) == 20
    assert ctypes.sizeof(windows_adapters.EnumAdapters2) == 16
    assert ctypes.sizeof(windows_adapters.QueryAdapterInfo) == 24
    assert ctypes.sizeof(windows_adapters.DeviceIds) == 28
    assert ctypes.sizeof(windows_pdh.FormattedValue) == 16
    assert ctypes.sizeof(FormattedItem) == 24
    assert FormattedItem.formatted.offset == 8


# --- the counter library -----------------------------------------------------------------------


def registry() -> Sequence[str]:
    flat = ["1", "1847", "2", "System", "x", "GPU Process Memory"]
    for word, number in INDEX.items():
        flat += [str(number), word]
    return [*flat, "9999"]


def test_every_instance_is_read_by_the_english_names() -> None:
    rows = rows_of(5 * GIB, 2**45)
    fake = FakePdh(dict(rows), language=GERMAN)
    assert read_counters(PATHS, fake, no_registry) == rows
    assert fake.added == [path.wildcard for path in PATHS]
    assert fake.added[0] == r"\GPU Process Memory(*)\Dedicated Usage"
    assert fake.open == 0


def test_where_english_names_are_not_found_the_registry_gives_the_local_ones() -> None:
    # field case 38: the English path gives "not found", the localised one works
    rows = rows_of(5 * GIB, GIB)
    fake = FakePdh(dict(rows), language=GERMAN, english=False)
    assert read_counters(PATHS, fake, registry) == rows
    assert r"\GPU-Prozessspeicher(*)\Freigegebene Auslastung" in fake.added


@pytest.mark.parametrize("names", [lambda: ["9000"], lambda: [], lambda: ["", "", "x"]])
def test_without_either_name_it_is_unknown(names: Callable[[], Sequence[str]]) -> None:
    # field case 38, 39: result and reason, never 0
    fake = FakePdh({PROCESS_SHARED: []}, language=GERMAN, english=False)
    with pytest.raises(PdhError, match="no such counter set"):
        read_counters(PATHS, fake, names)
    assert fake.open == 0
    found = gpu_memory(
        "", 77, adapters=lambda: LAPTOP, counters=lambda paths: read_counters(paths, fake, names)
    )
    assert isinstance(found, Unmeasured)
    assert found.detail.startswith("spill unknown: PdhAddEnglishCounterW(")
    assert "0xC0000BB8" in found.detail


def test_an_unreadable_registry_leaves_the_first_error() -> None:
    # field case 39
    def closed() -> Sequence[str]:
        raise PermissionError("access denied")

    with pytest.raises(PdhError, match="PdhAddEnglishCounterW"):
        read_counters(PATHS, FakePdh({}, english=False), closed)


def test_indices_of_a_name_in_the_registrys_list() -> None:
    assert english_indices(["2", "System", "6", "% Time", "9", "System", "5"], "System") == [2, 9]
    assert english_indices(["two", "System"], "System") == []


def test_instances_that_appear_meanwhile_are_asked_for_again() -> None:
    fake = FakePdh(rows_of(GIB, MIB), grows=2)
    found = read_counters(PATHS, fake, no_registry)
    assert len(found[PROCESS_DEDICATED]) == 201
    endless = FakePdh(rows_of(GIB, MIB), grows=1000)
    with pytest.raises(PdhError, match="kept growing"):
        read_counters(PATHS, endless, no_registry)
    assert endless.open == 0


def test_no_instances_are_an_empty_list_and_unknown_further_on() -> None:
    empty: dict[CounterPath, list[CounterItem]] = {path: [] for path in PATHS}
    assert read_counters(PATHS, FakePdh(empty), no_registry) == empty
    assert read_counters(PATHS, FakePdh(empty, collect_status=NO_DATA), no_registry) == empty
    assert isinstance(gpu_memory_use(empty, {CARD}, 77), Unmeasured)


def test_a_collection_that_fails_is_an_error() -> None:
    with pytest.raises(PdhError, match=r"PdhCollectQueryData failed with 0xC0000BC6 \(invalid"):
        read_counters(PATHS, FakePdh(rows_of(1, 1), collect_status=0xC0000BC6), no_registry)


# --- all of it ---------------------------------------------------------------------------------


def reading(gdi32: FakeGdi32, pdh: FakePdh, pid: int = 77) -> GpuMemoryUse | Unmeasured:
    return gpu_memory(
        "00000000:01:00.0",
        pid,
        adapters=lambda: list_adapters(gdi32),
        counters=lambda paths: read_counters(paths, pdh, no_registry),
    )


def test_ids_that_change_with_a_driver_restart_are_followed() -> None:
    # field case 40: never cached
    new = Luid(0, 0xBEEF)
    assert reading(FakeGdi32(LAPTOP), FakePdh(rows_of(GIB, 0))) == GpuMemoryUse(
        GIB, 0, 2 * GIB, 3 * MIB
    )
    again = FakeGdi32([Adapter(INTEL, 0x8086, (0, 2, 0)), nvidia(new)])
    assert isinstance(reading(again, FakePdh(rows_of(GIB, 0))), Unmeasured)
    found = reading(again, FakePdh(rows_of(2 * GIB, 0, luid=new)))
    assert isinstance(found, GpuMemoryUse)
    assert found.dedicated == 2 * GIB


def test_this_process_is_the_default() -> None:
    found = gpu_memory(
        "", adapters=lambda: LAPTOP, counters=lambda _: rows_of(GIB, 0, pid=os.getpid())
    )
    assert isinstance(found, GpuMemoryUse)


def test_a_system_without_the_libraries_is_unknown() -> None:
    # field case 39
    def missing() -> list[Adapter]:
        raise OSError("[WinError 126] the module could not be found")

    def old() -> list[Adapter]:
        raise AttributeError("function 'D3DKMTEnumAdapters2' not found")

    for adapters, reason in ((missing, Reason.FAILED), (old, Reason.NOT_SUPPORTED)):
        found = gpu_memory("", adapters=adapters, counters=lambda _: {})
        assert isinstance(found, Unmeasured)
        assert found.reason is reason
        assert found.detail.startswith("spill unknown")


def test_the_reader_exists_on_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 36: WSL2 is a Linux without these counters
    asked: list[str] = []
    monkeypatch.setattr("pichak_core.devices._sys.platform", "linux")
    assert gpu_memory_reader(lambda: "") is None
    monkeypatch.setattr("pichak_core.devices._sys.platform", "win32")
    seen: list[str] = []

    def use(pci_bus_id: str) -> GpuMemoryUse:
        seen.append(pci_bus_id)
        return GpuMemoryUse(1, 2)

    monkeypatch.setattr("pichak_core.devices.windows.gpu_memory", use)

    def address() -> str:
        asked.append("once")
        return "00000000:01:00.0"

    read = gpu_memory_reader(address)
    assert read is not None
    assert not asked, "NVML is not asked before somebody wants to know"
    assert [read(), read()] == [GpuMemoryUse(1, 2)] * 2
    assert (asked, seen) == (["once"], ["00000000:01:00.0"] * 2)


# --- the ramp on Windows -----------------------------------------------------------------------


class PagingCuda(FakeCuda):
    """A card under WDDM: nothing is refused; what does not fit lies in system memory."""

    def allocate(self, count: int) -> None:
        self._allocated += count
        self._reserved = max(self._reserved, -(-self._allocated // self.rounding_bytes) * 2 * MIB)
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return max(0, self.total_bytes - self.others_bytes - self._reserved), self.total_bytes

    @property
    def spilled_bytes(self) -> int:
        return max(0, self.others_bytes + self._reserved - self.total_bytes)


class WindowsTraining:
    """Training on such a card; the step is 30 times as slow while any of it is spilled.

    `pinned_bytes` are host memory that the loader pins at the first step; `evicts_bytes` of another
    program are pushed out from six rows on.
    """

    def __init__(self, *, pinned_bytes: int = 0, evicts_bytes: int = 0, counted: bool = True):
        self.clock = FakeClock()
        self.cuda = PagingCuda(8 * GIB, others_bytes=GIB)
        self.cuda.allocate(GIB)
        self.pinned, self.evicts, self.counted = pinned_bytes, evicts_bytes, counted
        self.largest = self.steps_run = 0

    def __call__(self, rows: int) -> None:
        self.cuda.allocate(rows * GIB // 2)
        slow = 30.0 if self.cuda.spilled_bytes else 1.0
        self.clock.advance((0.1 + 0.4 * rows) * slow)
        self.cuda.free(rows * GIB // 2)
        self.largest = max(self.largest, rows)
        self.steps_run += 1

    def counters(self, paths: Sequence[CounterPath]) -> dict[CounterPath, list[CounterItem]]:
        if not self.counted:
            return {}
        spilled = self.cuda.spilled_bytes
        own = self.cuda._reserved - spilled + 100 * MIB
        shared = spilled + (self.pinned if self.steps_run else 0)
        evicted = self.evicts if self.largest >= 6 else 0
        pid = os.getpid()
        return {
            PROCESS_DEDICATED: [row(name(CARD, pid), own), row(name(INTEL, pid), 0)],
            PROCESS_SHARED: [row(name(CARD, pid), shared), row(name(INTEL, pid), 78 * MIB)],
            ADAPTER_DEDICATED: [row(name(CARD), own + 900 * MIB - evicted)],
            ADAPTER_SHARED: [row(name(CARD), shared + evicted)],
        }

    def backend(self) -> CudaBackend:
        return CudaBackend(
            "cuda:0",
            self.cuda,
            available=lambda: (64 * GIB, "a made-up host"),
            counters=lambda: gpu_memory(
                "00000000:01:00.0", adapters=lambda: LAPTOP, counters=self.counters
            ),
        )

    def ramp(self, **options: Any) -> Any:
        # The card's own figures promise more than there is, as under WDDM they may.
        backend = self.backend()
        backend.capacity()
        return ramp_micro_batch(
            self, backend=backend, clock=self.clock, headroom=0.0, limit=64, **options
        )


# 8 GiB less 1 GiB of others: 1 GiB held and 0.5 GiB a row leave room for 12 rows.
def test_a_ramp_on_windows_ends_at_the_edge_of_the_card() -> None:
    # field case 33, 34: no exception, and "does not fit" all the same
    result = WindowsTraining().ramp()
    assert result.micro_batch_max == 12
    assert result.spilled
    assert result.limited_by == "paging"


def test_where_the_card_promises_too_much_the_counters_decide() -> None:
    # field case 33: a jump in time and shared growth; the last size before the jump is kept
    training = WindowsTraining()
    training.cuda.others_bytes = 3 * GIB
    honest = training.cuda.mem_get_info
    training.cuda.mem_get_info = lambda device: (  # type: ignore[method-assign]
        min(8 * GIB, honest(device)[0] + 2 * GIB),
        8 * GIB,
    )
    result = training.ramp()
    assert result.micro_batch_max == 8
    moved = [rung for rung in result.tried if rung.verdict == "paging"]
    assert moved
    assert all("the driver moved" in rung.why for rung in moved)
    assert min(rung.batch for rung in moved) == 9


def test_pinned_memory_on_windows_ends_no_ramp() -> None:
    result = WindowsTraining(pinned_bytes=2 * GIB).ramp()
    assert result.micro_batch_max == 12
    assert not [rung for rung in result.tried if "the driver moved" in rung.why and rung.batch < 13]


def test_another_program_that_is_pushed_out_is_told() -> None:
    result = WindowsTraining(evicts_bytes=300 * MIB).ramp()
    told = [
        rung for rung in result.tried if "of other programs pushed to system memory" in rung.why
    ]
    assert told
    assert min(rung.batch for rung in told) >= 6


def test_without_counters_the_collapse_of_the_throughput_is_the_sign() -> None:
    # field case 35, 39
    training = WindowsTraining(counted=False)
    training.cuda.others_bytes = 3 * GIB
    honest = training.cuda.mem_get_info
    training.cuda.mem_get_info = lambda device: (  # type: ignore[method-assign]
        min(8 * GIB, honest(device)[0] + 2 * GIB),
        8 * GIB,
    )
    result = training.ramp()
    assert result.micro_batch_max == 8
    assert result.limited_by == "paging"
    assert "Spill unknown: " in result.source
    assert "lists nothing" in result.source
    assert not any("no spill" in rung.why for rung in result.tried)


# --- volumes -----------------------------------------------------------------------------------


class FakeKernel32:
    """The volume calls over one answer; a failing call leaves its buffer alone."""

    def __init__(self, root: str, name: str, drive: int, fail: str = "") -> None:
        self.root, self.name, self.drive, self.fail = root, name, drive, fail

    def GetVolumePathNameW(self, path: str, root: Any, size: int) -> int:
        assert size == len(root)
        if self.fail == "path":
            return 0
        root.value = self.root
        return 1

    def GetVolumeInformationW(self, root: str, *rest: Any) -> int:
        assert root == self.root
        name, size = rest[-2:]
        assert size == len(name)
        if self.fail == "information":
            return 0
        name.value = self.name
        return 1

    def GetDriveTypeW(self, root: str) -> int:
        return self.drive


@pytest.mark.parametrize(
    ("fake", "name", "kind"),
    [
        (FakeKernel32("C:\\", "NTFS", 3), "ntfs", "disk"),
        (FakeKernel32("D:\\mount\\", "ReFS", 3), "refs", "disk"),
        (FakeKernel32("E:\\", "FAT32", 2), "fat32", "disk"),
        (FakeKernel32("Z:\\", "NTFS", 4), "ntfs", "network"),
        (FakeKernel32("R:\\", "NTFS", 6), "ntfs", "memory"),
        (FakeKernel32("X:\\", "NewFS", 3), "newfs", "unknown"),
        (FakeKernel32("Y:\\", "NTFS", 3, "information"), "unknown", "unknown"),
        (FakeKernel32("", "", 0, "path"), "unknown", "unknown"),
    ],
)
def test_a_volume_is_a_disk_a_share_or_memory(fake: FakeKernel32, name: str, kind: str) -> None:
    # field case 77: a RAM disk is memory, whatever file system it has
    found = from_volume(volume_of("C:\\data\\model.bin", fake))
    assert (found.type, found.kind) == (name, kind)
