"""Freed memory goes back to the system."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from pichak_core.devices import heap

CODE = """
import threading, psutil
from pichak_core.devices.heap import give_back_freed, keep_heap_small

def fill(kept):
    # What glibc itself allocates: too large for Python's own pools, too small for a mapping.
    held = [bytes(2000) for _ in range(10_000)]
    kept.append(held[::1000])  # and something stays between what is freed

if SMALL:
    assert keep_heap_small()
kept, rss = [], psutil.Process().memory_info
before = rss().rss
threads = [threading.Thread(target=fill, args=(kept,)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
freed = rss().rss
assert give_back_freed()
print(freed - before, rss().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize("small", [False, True])
def test_freed_memory_goes_back(small: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("SMALL", str(small))],
        capture_output=True,
        text=True,
        check=True,
    )
    left, after = map(int, done.stdout.split())
    # 80 objects of 2 kB are kept; what was freed around them is 160 MB in all, less what threads
    # took from one another.
    assert left > 10 * 2**20
    assert after < 3 * 2**20


def test_what_only_a_cycle_holds_is_freed_too() -> None:
    class Node:
        me: Node

    node = Node()
    node.me = node
    gone = weakref.ref(node)
    gc.collect()  # it is an old object now
    del node
    assert gone() is not None
    heap.give_back_freed()
    assert gone() is None


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    heap._glibc.cache_clear()
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _name: object())
    assert not heap.keep_heap_small()
    assert not heap.give_back_freed()
    heap._glibc.cache_clear()
