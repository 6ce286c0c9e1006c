"""Python's collector of cycles, out of the way while very many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No look for cycles inside: a look goes through all that was made so far, again and again, and
    among the readings of ten thousand nodes there are none. Memory is freed as ever by counting
    references. Also a decorator, ``@paused()``; nested ones end with the outermost."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
