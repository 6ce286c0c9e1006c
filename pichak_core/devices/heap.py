"""Memory that this process has freed, given back to the system."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys

_M_ARENA_MAX = -8  # <malloc.h> of glibc


def keep_heap_small() -> bool:
    """Have glibc use two arenas, not eight a core: each keeps what threads freed in it to itself.

    For a process that lives long and whose threads come and go. False where there is no glibc.
    """
    call = _glibc("mallopt")
    return call is not None and bool(call(_M_ARENA_MAX, 2))


def give_back_freed() -> bool:
    """Give freed memory back, from all arenas (``malloc_trim``); whether any was.

    What only cycles still hold is freed first. Python looks through its old objects when a quarter
    of them is new, so a process that has imported much, as Ray's workers have, waits long for that.
    """
    gc.collect()
    call = _glibc("malloc_trim")
    return call is not None and bool(call(ctypes.c_size_t(0)))


@functools.cache
def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    # Another C library (musl) has neither.
    found: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), name, None)
    return found
