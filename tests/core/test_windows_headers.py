"""Structures, sizes and codes of the Windows API, as a compiler for Windows reads its headers.

Compiled only, never run: what the ctypes declarations say is asserted against pdh.h, pdhmsg.h,
winbase.h and fileapi.h of mingw-w64. Its headers lack d3dkmthk.h, whose structures
`test_windows.py` holds to the sizes in Microsoft's reference.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from pichak_core.devices import _direct_windows as direct
from pichak_core.devices import windows_pdh as pdh
from pichak_core.devices import windows_volumes as volumes

COMPILER = "x86_64-w64-mingw32-gcc"

CODES = {
    "PDH_FMT_LARGE": pdh.FORMAT_LARGE,
    "PDH_FMT_NOSCALE": pdh.FORMAT_NO_SCALE,
    "PDH_MORE_DATA": pdh.MORE_DATA,
    "PDH_NO_DATA": pdh.NO_DATA,
    "PDH_CSTATUS_NO_INSTANCE": pdh.NO_INSTANCE,
    "PDH_CSTATUS_NO_OBJECT": pdh.NO_OBJECT,
    "PDH_CSTATUS_NO_COUNTER": pdh.NO_COUNTER,
    "PDH_INVALID_DATA": 0xC0000BC6,
    "PDH_INVALID_ARGUMENT": 0xC0000BBD,
    "PDH_MEMORY_ALLOCATION_FAILURE": 0xC0000BBB,
    "PDH_CSTATUS_VALID_DATA": 0,
    "PDH_CSTATUS_NEW_DATA": 1,
    "GENERIC_READ": direct.GENERIC_READ,
    "FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE": direct.FILE_SHARE_ALL,
    "OPEN_EXISTING": direct.OPEN_EXISTING,
    "FILE_FLAG_OVERLAPPED": direct.FILE_FLAG_OVERLAPPED,
    "FILE_FLAG_NO_BUFFERING": direct.FILE_FLAG_NO_BUFFERING,
    "ERROR_FILE_NOT_FOUND": direct.ERROR_FILE_NOT_FOUND,
    "ERROR_PATH_NOT_FOUND": direct.ERROR_PATH_NOT_FOUND,
    "ERROR_ACCESS_DENIED": direct.ERROR_ACCESS_DENIED,
    "ERROR_SHARING_VIOLATION": direct.ERROR_SHARING_VIOLATION,
    "ERROR_HANDLE_EOF": direct.ERROR_HANDLE_EOF,
    "ERROR_NOT_SUPPORTED": direct.ERROR_NOT_SUPPORTED,
    "ERROR_INVALID_PARAMETER": direct.ERROR_INVALID_PARAMETER,
    "ERROR_IO_PENDING": direct.ERROR_IO_PENDING,
    "DRIVE_REMOTE": volumes.DRIVE_REMOTE,
    "DRIVE_RAMDISK": volumes.DRIVE_RAMDISK,
}

SIZES = {
    "sizeof(PDH_FMT_COUNTERVALUE)": ctypes.sizeof(pdh.FormattedValue),
    "sizeof(PDH_FMT_COUNTERVALUE_ITEM_W)": ctypes.sizeof(pdh.FormattedItem),
    "offsetof(PDH_FMT_COUNTERVALUE, largeValue)": pdh.FormattedValue.value.offset,
    "offsetof(PDH_FMT_COUNTERVALUE_ITEM_W, FmtValue)": pdh.FormattedItem.formatted.offset,
    "sizeof(OVERLAPPED)": ctypes.sizeof(direct.Overlapped),
    "offsetof(OVERLAPPED, Offset)": direct.Overlapped.offset_low.offset,
    "offsetof(OVERLAPPED, OffsetHigh)": direct.Overlapped.offset_high.offset,
    "offsetof(OVERLAPPED, hEvent)": direct.Overlapped.event.offset,
}

#: Result and parameters, so that a declaration with another number or kind does not compile.
SIGNATURES = """
PDH_STATUS (WINAPI *a)(LPCWSTR, DWORD_PTR, PDH_HQUERY *) = PdhOpenQueryW;
PDH_STATUS (WINAPI *b)(PDH_HQUERY, LPCWSTR, DWORD_PTR, PDH_HCOUNTER *) = PdhAddEnglishCounterW;
PDH_STATUS (WINAPI *c)(PDH_HQUERY, LPCWSTR, DWORD_PTR, PDH_HCOUNTER *) = PdhAddCounterW;
PDH_STATUS (WINAPI *d)(PDH_HQUERY) = PdhCollectQueryData;
PDH_STATUS (WINAPI *e)(PDH_HCOUNTER, DWORD, LPDWORD, LPDWORD, PPDH_FMT_COUNTERVALUE_ITEM_W) =
    PdhGetFormattedCounterArrayW;
PDH_STATUS (WINAPI *f)(LPCWSTR, DWORD, LPWSTR, LPDWORD) = PdhLookupPerfNameByIndexW;
PDH_STATUS (WINAPI *g)(PDH_HQUERY) = PdhCloseQuery;
WINBOOL (WINAPI *h)(LPCWSTR, LPWSTR, DWORD) = GetVolumePathNameW;
WINBOOL (WINAPI *i)(LPCWSTR, LPWSTR, DWORD, LPDWORD, LPDWORD, LPDWORD, LPWSTR, DWORD) =
    GetVolumeInformationW;
UINT (WINAPI *j)(LPCWSTR) = GetDriveTypeW;
WINBOOL (WINAPI *k)(HANDLE, LPVOID, DWORD, LPDWORD, LPOVERLAPPED) = ReadFile;
WINBOOL (WINAPI *l)(HANDLE, LPOVERLAPPED, LPDWORD, WINBOOL) = GetOverlappedResult;
WINBOOL (WINAPI *m)(HANDLE, PLARGE_INTEGER) = GetFileSizeEx;
"""


def test_the_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    lines = ["#include <stddef.h>", "#include <windows.h>", "#include <pdh.h>"]
    lines += ["#include <pdhmsg.h>"]
    lines += [
        f'_Static_assert((DWORD)({name}) == {code}u, "{name}");' for name, code in CODES.items()
    ]
    lines += [f'_Static_assert({what} == {size}, "{what}");' for what, size in SIZES.items()]
    source = tmp_path / "check.c"
    source.write_text("\n".join(lines) + SIGNATURES)
    done = subprocess.run(
        [COMPILER, "-Werror", "-fsyntax-only", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
