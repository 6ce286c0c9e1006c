"""Reading Windows' performance counters by their English names, whatever the system's language.

``PdhAddEnglishCounterW`` takes English names everywhere; asked for every instance at once
(``(*)``), the counter's values come with their instances from ``PdhGetFormattedCounterArrayW``, so
that no localised name is ever needed to list them. Where the call does not find a name, the
registry's English index map (``Perflib\\009``) and ``PdhLookupPerfNameByIndexW`` give the system's
own names. `pdh` is called only through the object passed in. Sources: the Windows API reference for
pdh.h, and "Using PDH APIs correctly in a localized language".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pichak_core.devices.windows_counters import CounterItem, CounterPath, english_indices

FORMAT_LARGE = 0x00000400  # PDH_FMT_LARGE: a 64-bit integer
FORMAT_NO_SCALE = 0x00001000

SUCCESS = 0
MORE_DATA = 0x800007D2
NO_DATA = 0x800007D5
NO_INSTANCE = 0x800007D1
NO_OBJECT = 0xC0000BB8
NO_COUNTER = 0xC0000BB9

_MEANING = {
    MORE_DATA: "the list of instances kept growing",
    NO_DATA: "no data",
    NO_INSTANCE: "no instance",
    NO_OBJECT: "no such counter set",
    NO_COUNTER: "no such counter",
    0xC0000BC6: "invalid data",
    0xC0000BBB: "out of memory",
    0xC0000BBD: "invalid argument",
}

# Instances appear between asking for the size and asking for the values.
_TRIES = 5
_NAME_CHARACTERS = 1024


class _Value(ctypes.Union):
    _fields_ = (("large", ctypes.c_int64), ("double", ctypes.c_double))


class FormattedValue(ctypes.Structure):
    """PDH_FMT_COUNTERVALUE."""

    _fields_ = (("status", ctypes.c_uint32), ("value", _Value))


class FormattedItem(ctypes.Structure):
    """PDH_FMT_COUNTERVALUE_ITEM_W; the names lie behind the array in the same buffer."""

    _fields_ = (("name", ctypes.c_wchar_p), ("formatted", FormattedValue))


class PdhError(OSError):
    """A call of pdh.dll failed; `status` is its PDH status."""

    def __init__(self, call: str, status: int) -> None:
        self.status = status & 0xFFFFFFFF
        meaning = _MEANING.get(self.status)
        super().__init__(
            f"{call} failed with 0x{self.status:08X}" + (f" ({meaning})" if meaning else "")
        )


class CounterQuery:
    """A query over every instance of each counter that stays open, for who reads it again and
    again; close it in the end.

    `OSError` when a counter does not exist. `english_names` gives the index map; it is asked only
    where it is needed.
    """

    def __init__(
        self,
        paths: Sequence[CounterPath],
        pdh: Any = None,
        english_names: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._library = _load_pdh() if pdh is None else pdh
        names = _registry_names if english_names is None else english_names
        self._query = ctypes.c_void_p()
        _check("PdhOpenQueryW", self._library.PdhOpenQueryW(None, 0, ctypes.byref(self._query)))
        try:
            self._handles = {path: _add(self._library, self._query, path, names) for path in paths}
        except BaseException:
            self.close()
            raise

    def read(self) -> Mapping[CounterPath, list[CounterItem]]:
        """All of them at one moment; a counter without instances has an empty list. `OSError` when
        one cannot be read."""
        status = self._library.PdhCollectQueryData(self._query) & 0xFFFFFFFF
        if status == NO_DATA:  # what was added exists, and nobody uses it
            return {path: [] for path in self._handles}
        _check("PdhCollectQueryData", status)
        return {path: _values(self._library, handle) for path, handle in self._handles.items()}

    def close(self) -> None:
        """Give the query back."""
        self._library.PdhCloseQuery(self._query)


def read_counters(
    paths: Sequence[CounterPath],
    pdh: Any = None,
    english_names: Callable[[], Sequence[str]] | None = None,
) -> Mapping[CounterPath, list[CounterItem]]:
    """`CounterQuery` for a single reading."""
    with contextlib.closing(CounterQuery(paths, pdh, english_names)) as query:
        return query.read()


def _add(
    library: Any,
    query: ctypes.c_void_p,
    path: CounterPath,
    english_names: Callable[[], Sequence[str]],
) -> ctypes.c_void_p:
    counter = ctypes.c_void_p()
    status = library.PdhAddEnglishCounterW(query, path.wildcard, 0, ctypes.byref(counter))
    if status == SUCCESS:
        return counter
    error = PdhError(f"PdhAddEnglishCounterW({path.wildcard})", status)
    for local in _localised(library, path, english_names):
        if library.PdhAddCounterW(query, local.wildcard, 0, ctypes.byref(counter)) == SUCCESS:
            return counter
    raise error


def _localised(
    library: Any, path: CounterPath, english_names: Callable[[], Sequence[str]]
) -> Iterator[CounterPath]:
    """The system's own names of a counter; nothing where the registry does not tell."""
    try:
        names = english_names()
    except OSError:
        return
    for set_index in english_indices(names, path.counter_set):
        for counter_index in english_indices(names, path.counter):
            found = [_name(library, index) for index in (set_index, counter_index)]
            if all(found):
                yield CounterPath(*found)


def _name(library: Any, index: int) -> str:
    buffer = ctypes.create_unicode_buffer(_NAME_CHARACTERS)
    size = ctypes.c_uint32(_NAME_CHARACTERS)
    status = library.PdhLookupPerfNameByIndexW(None, index, buffer, ctypes.byref(size))
    return buffer.value if status == SUCCESS else ""


def _values(library: Any, counter: ctypes.c_void_p) -> list[CounterItem]:
    status = MORE_DATA
    for _ in range(_TRIES):
        size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)
        status = _array(library, counter, size, count, None)
        if status in (NO_DATA, NO_INSTANCE) or (status == SUCCESS and size.value == 0):
            return []
        if status != MORE_DATA:
            break
        # A size that is too small is not corrected in place (the reference warns of it): the next
        # try asks anew. Some slack, since processes come and go.
        size.value += 64 * ctypes.sizeof(FormattedItem)
        buffer = ctypes.create_string_buffer(size.value)
        status = _array(library, counter, size, count, buffer)
        if status == SUCCESS:
            items = (FormattedItem * count.value).from_buffer(buffer)
            return [
                CounterItem(
                    item.name or "", int(item.formatted.status), int(item.formatted.value.large)
                )
                for item in items
            ]
        if status != MORE_DATA:
            break
    raise PdhError("PdhGetFormattedCounterArrayW", status)


def _array(
    library: Any,
    counter: ctypes.c_void_p,
    size: ctypes.c_uint32,
    count: ctypes.c_uint32,
    buffer: Any,
) -> int:
    status = library.PdhGetFormattedCounterArrayW(
        counter, FORMAT_LARGE | FORMAT_NO_SCALE, ctypes.byref(size), ctypes.byref(count), buffer
    )
    return int(status) & 0xFFFFFFFF


def _check(call: str, status: int) -> None:
    if status != SUCCESS:
        raise PdhError(call, status)


def _registry_names() -> Sequence[str]:
    import winreg

    key: Any = winreg
    with key.OpenKey(
        key.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Windows NT\CurrentVersion\Perflib\009"
    ) as opened:
        names, _ = key.QueryValueEx(opened, "Counter")
    return [str(name) for name in names]


def _load_pdh() -> Any:
    library: Any = ctypes.WinDLL("pdh")  # type: ignore[attr-defined, unused-ignore]
    handle, dword, address, text = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_wchar_p,
    )
    word = ctypes.c_size_t  # DWORD_PTR
    signatures: dict[str, list[Any]] = {
        "PdhOpenQueryW": [text, word, address],
        "PdhAddEnglishCounterW": [handle, text, word, address],
        "PdhAddCounterW": [handle, text, word, address],
        "PdhCollectQueryData": [handle],
        "PdhGetFormattedCounterArrayW": [handle, dword, address, address, address],
        "PdhLookupPerfNameByIndexW": [text, dword, address, address],
        "PdhCloseQuery": [handle],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = dword, arguments
    return library
