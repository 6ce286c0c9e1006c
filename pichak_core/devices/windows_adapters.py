"""Which adapters Windows has now, and which of them are a given card.

``D3DKMTEnumAdapters2`` and ``D3DKMTQueryAdapterInfo`` of gdi32 (d3dkmthk.h), which need no rights
and no COM. The address on the PCI bus is what NVML and torch know as well; LUIDs change, so nothing
is kept. `gdi32` is called only through the object passed in, so that a fake can stand for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pichak_core.devices.windows_counters import Luid, unknown
from pichak_core.measurement import Reason, Unmeasured

NVIDIA = 0x10DE

# KMTQUERYADAPTERINFOTYPE
ADAPTER_ADDRESS = 6
PHYSICAL_ADAPTER_DEVICE_IDS = 31

# What an adapter without a place on the bus (a software or a remote one) may answer.
_NO_ADDRESS = 0xFFFFFFFF


class AdapterInfo(ctypes.Structure):
    """D3DKMT_ADAPTERINFO."""

    _fields_ = (
        ("adapter", ctypes.c_uint32),
        ("luid_low", ctypes.c_uint32),
        ("luid_high", ctypes.c_int32),
        ("sources", ctypes.c_uint32),
        ("precise_present_regions", ctypes.c_int32),
    )


class EnumAdapters2(ctypes.Structure):
    """D3DKMT_ENUMADAPTERS2: how many fit, then how many there are."""

    _fields_ = (("count", ctypes.c_uint32), ("adapters", ctypes.POINTER(AdapterInfo)))


class QueryAdapterInfo(ctypes.Structure):
    """D3DKMT_QUERYADAPTERINFO."""

    _fields_ = (
        ("adapter", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("data_bytes", ctypes.c_uint32),
    )


class CloseAdapter(ctypes.Structure):
    """D3DKMT_CLOSEADAPTER."""

    _fields_ = (("adapter", ctypes.c_uint32),)


class AdapterAddress(ctypes.Structure):
    """D3DKMT_ADAPTERADDRESS; it has no PCI domain."""

    _fields_ = (
        ("bus", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("function", ctypes.c_uint32),
    )


class DeviceIds(ctypes.Structure):
    """D3DKMT_QUERY_DEVICE_IDS: which of linked adapters is asked for, and its ids."""

    _fields_ = (
        ("physical_adapter", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("subsystem_vendor", ctypes.c_uint32),
        ("subsystem", ctypes.c_uint32),
        ("revision", ctypes.c_uint32),
        ("bus_type", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Adapter:
    """One adapter. `address` is (bus, device, function); None where there is none or it is not
    told, like `vendor`."""

    luid: Luid
    vendor: int | None = None
    address: tuple[int, int, int] | None = None


def luids_of_card(adapters: Sequence[Adapter], pci_bus_id: str) -> frozenset[Luid] | Unmeasured:
    """The LUIDs of the NVIDIA card at ``domain:bus:device.function`` (hexadecimal, as NVML writes
    it). With "" it is the only NVIDIA card there is; of two, none is guessed."""
    nvidia = [one for one in adapters if one.vendor == NVIDIA]
    cards = {one.address for one in nvidia if one.address is not None}
    if pci_bus_id:
        wanted = pci_address(pci_bus_id)
    elif len(cards) == 1:
        wanted = next(iter(cards))
    else:
        return unknown(
            Reason.NO_DEVICE,
            f"{len(cards)} NVIDIA cards have graphics adapters, and which of them this device is "
            "cannot be told: torch and NVML give no PCI address",
        )
    found = frozenset(one.luid for one in nvidia if one.address == wanted)
    if not found:
        listed = ", ".join(sorted(address_text(address) for address in cards)) or "none"
        return unknown(
            Reason.NO_DEVICE,
            f"no NVIDIA graphics adapter at PCI {pci_bus_id} (listed: {listed}); a card in TCC "
            "mode has none, and does not spill",
        )
    return found


def list_adapters(gdi32: Any = None) -> list[Adapter]:
    """Every adapter now. `OSError` where the system does not list them."""
    library = _load_gdi32() if gdi32 is None else gdi32
    request = EnumAdapters2(0, None)
    _check("D3DKMTEnumAdapters2", library.D3DKMTEnumAdapters2(ctypes.byref(request)))
    infos = (AdapterInfo * request.count)()
    request.adapters = ctypes.cast(infos, ctypes.POINTER(AdapterInfo))
    _check("D3DKMTEnumAdapters2", library.D3DKMTEnumAdapters2(ctypes.byref(request)))
    adapters = []
    for info in infos[: request.count]:
        try:
            adapters.append(_adapter(library, info))
        finally:  # each of them was opened by the enumeration
            library.D3DKMTCloseAdapter(ctypes.byref(CloseAdapter(info.adapter)))
    return adapters


def _adapter(library: Any, info: AdapterInfo) -> Adapter:
    address, ids = AdapterAddress(), DeviceIds(0)
    placed = _query(library, info.adapter, ADAPTER_ADDRESS, address)
    placed = placed and _NO_ADDRESS not in (address.bus, address.device, address.function)
    known = _query(library, info.adapter, PHYSICAL_ADAPTER_DEVICE_IDS, ids)
    return Adapter(
        Luid(info.luid_high & 0xFFFFFFFF, info.luid_low),
        int(ids.vendor) if known else None,
        (address.bus, address.device, address.function) if placed else None,
    )


def _query(library: Any, adapter: int, kind: int, answer: ctypes.Structure) -> bool:
    address = ctypes.cast(ctypes.pointer(answer), ctypes.c_void_p)
    request = QueryAdapterInfo(adapter, kind, address, ctypes.sizeof(answer))
    return int(library.D3DKMTQueryAdapterInfo(ctypes.byref(request))) == 0


def _check(call: str, status: int) -> None:
    if status:
        raise OSError(f"{call} failed with NTSTATUS 0x{status & 0xFFFFFFFF:08X}")


def pci_address(pci_bus_id: str) -> tuple[int, int, int]:
    """Bus, device and function of NVML's ``domain:bus:device.function``; `ValueError` for another
    text."""
    try:
        _, bus, rest = pci_bus_id.split(":")
        device, _, function = rest.partition(".")
        return int(bus, 16), int(device, 16), int(function or "0", 16)
    except ValueError as error:
        raise ValueError(f"{pci_bus_id!r} is not a PCI address such as 00000000:01:00.0") from error


def address_text(address: tuple[int, int, int]) -> str:
    """``01:00.0``."""
    bus, device, function = address
    return f"{bus:02x}:{device:02x}.{function:x}"


def _load_gdi32() -> Any:
    library: Any = ctypes.WinDLL("gdi32")  # type: ignore[attr-defined, unused-ignore]
    for name in ("D3DKMTEnumAdapters2", "D3DKMTQueryAdapterInfo", "D3DKMTCloseAdapter"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_void_p]
    return library
