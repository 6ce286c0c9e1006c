"""The process that reads Windows' GPU memory counters, and the session that asks it.

The counters' provider runs inside whoever reads them, and a driver that hangs, or is being
replaced, hangs there: nobody waits for it (`asked_child`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pichak_core.devices.asked_child import AskedChild
from pichak_core.devices.gpus import start_child
from pichak_core.devices.nvml_child import from_wire, to_wire, write_record
from pichak_core.devices.windows_adapters import Adapter, list_adapters
from pichak_core.devices.windows_cards import CardMemory, card_memories
from pichak_core.devices.windows_counters import PATHS, CounterItem, CounterPath, unknown
from pichak_core.devices.windows_pdh import CounterQuery
from pichak_core.measurement import Reason, Unmeasured

#: A query that stays open is cheaper than a new one; a new one sees a provider that was replaced.
REOPEN_SECONDS = 60.0
WHAT = "Windows' GPU memory counters"
_MODULE = "pichak_core.devices.windows_child"


@dataclass
class CounterAnswer:
    """What the counters said once: a card each, or `gap`."""

    cards: tuple[CardMemory, ...] = ()
    gap: Unmeasured | None = None
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    ended: bool = False

    def take(self, record: dict[str, Any]) -> None:
        if "gap" in record:
            self.gap = from_wire(record["gap"])
        elif "cards" in record:
            self.cards = tuple(CardMemory.from_wire(parts) for parts in record["cards"])

    def complete(self) -> None:
        if not self.cards and self.gap is None:
            self.gap = unknown(Reason.FAILED, f"{WHAT} gave an answer without a card")

    def fail(self, reason: Reason, detail: str) -> None:
        self.cards, self.gap = (), unknown(reason, detail)


class CounterSession(AskedChild[CounterAnswer]):
    """One child. Ask it with `request`. `module` is run as the child, by default this one.

    `OSError` when no process can be started. Not for several threads at once.
    """

    def __init__(
        self, module: str = _MODULE, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        process = start_child(["serve"], stdin=subprocess.PIPE, quiet=True, module=module)
        super().__init__(process, lambda _: CounterAnswer(), WHAT, clock)


def request(pids: Collection[int]) -> str:
    """A line that asks for the cards, and for these processes on them."""
    return json.dumps(sorted(pids))


class _Query(Protocol):
    def read(self) -> Mapping[CounterPath, Sequence[CounterItem]]: ...

    def close(self) -> None: ...


class Server:
    """Answers from a query that stays open; after an error, and now and then, it is opened anew.
    Adapters are listed for each answer, since a driver restart renames them."""

    def __init__(
        self,
        adapters: Callable[[], Sequence[Adapter]] = list_adapters,
        query: Callable[[], _Query] = lambda: CounterQuery(PATHS),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adapters, self._open, self._clock = adapters, query, clock
        self._query: _Query | None = None
        self._opened = 0.0

    def answer(self, line: str) -> dict[str, Any]:
        """The record of one request."""
        try:
            adapters = self._adapters()
            found = card_memories(self._rows(), adapters, frozenset(json.loads(line)))
        except OSError as error:
            # Also a library or an entry of it that this Windows does not have.
            found = unknown(Reason.FAILED, str(error))
        except AttributeError as error:
            found = unknown(Reason.NOT_SUPPORTED, f"this system lacks a call: {error}")
        if isinstance(found, Unmeasured):
            self.close()
            return {"gap": to_wire(found)}
        return {"cards": [card.to_wire() for card in found]}

    def close(self) -> None:
        """Give the query back."""
        query, self._query = self._query, None
        if query is not None:
            query.close()

    def _rows(self) -> Mapping[CounterPath, Sequence[CounterItem]]:
        if self._query is not None and self._clock() - self._opened >= REOPEN_SECONDS:
            self.close()
        if self._query is None:
            self._query, self._opened = self._open(), self._clock()
        return self._query.read()


def serve(server: Server, requests: Iterable[str], write: Callable[[dict[str, Any]], None]) -> None:
    """Answer each request until there are no more. Behind each answer comes ``done``: what it took,
    in seconds of CPU time and of the clock."""
    spent = time.process_time()
    for line in requests:
        began = time.monotonic()
        write(server.answer(line))
        before, spent = spent, time.process_time()
        write({"done": {"cpu_seconds": spent - before, "seconds": time.monotonic() - began}})
    server.close()


def main(arguments: Sequence[str]) -> None:  # noqa: ARG001 - every child has the same entry
    """The child's entry: requests on stdin, answers on stdout."""
    serve(Server(), sys.stdin, write_record)
