"""The volume of Windows on which a path lies: its file system, and what kind of drive holds it.

``GetVolumePathNameW``, ``GetVolumeInformationW`` and ``GetDriveTypeW`` of kernel32 (fileapi.h).
`kernel32` is called only through the object passed in, so that a fake can stand for it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

DRIVE_REMOTE = 4
DRIVE_RAMDISK = 6

_CHARACTERS = 32_768  # the longest path of the API
_NAME_CHARACTERS = 261  # MAX_PATH + 1, as GetVolumeInformationW asks for


@dataclass(frozen=True)
class Volume:
    """`root` is where it is mounted (``C:\\``), `type` its file system's name as Windows writes it
    (``NTFS``, "" when it does not say), `drive` the drive type's number."""

    root: str
    type: str
    drive: int


def volume_of(path: str, kernel32: Any = None) -> Volume | None:
    """The volume that holds `path`; None where the system does not say."""
    library = _load_kernel32() if kernel32 is None else kernel32
    root = ctypes.create_unicode_buffer(_CHARACTERS)
    if not library.GetVolumePathNameW(path, root, _CHARACTERS):
        return None
    name = ctypes.create_unicode_buffer(_NAME_CHARACTERS)
    known = library.GetVolumeInformationW(
        root.value, None, 0, None, None, None, name, _NAME_CHARACTERS
    )
    return Volume(root.value, name.value if known else "", int(library.GetDriveTypeW(root.value)))


def _load_kernel32() -> Any:
    library: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    text, dword, address = ctypes.c_wchar_p, ctypes.c_uint32, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "GetVolumePathNameW": (ctypes.c_int, [text, address, dword]),
        "GetVolumeInformationW": (
            ctypes.c_int,
            [text, address, dword, address, address, address, address, dword],
        ),
        "GetDriveTypeW": (dword, [text]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
