"""The places of one agent: its home, and those that stand in while that cannot be written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pichak_agent.home import Home, InstanceTakenError, open_spare_home, spare_roots, tidy
from pichak_agent.room import NoRoomError, no_room
from pichak_agent.spool import Key, SpoolError, UnwritableError

T = TypeVar("T")


class Places:
    """`home` first, then a home in each of `spare_roots`, opened when it is needed. What is kept
    in one of those is handed out from there, and taken over by the next agent. `tell` hears why
    outcomes are elsewhere."""

    def __init__(self, home: Home, tell: Callable[[str], None]) -> None:
        self.home = home
        self._tell = tell
        self._spares: list[Home] = []
        self._lock = threading.Lock()

    def first(self, use: Callable[[Home], T]) -> T:
        """What `use` gives in the first place in which it does not fail; `NoRoomError`, an
        `OSError`, where it fails in all."""
        return self._first(use)[0]

    def keep(self, outcome: bytes) -> None:
        """Put an outcome into the first spool whose disk takes it; `SpoolError` where none does, or
        where a spool's own limit is reached."""

        def put(home: Home) -> Home:
            try:
                home.spool.put(outcome)
            except UnwritableError as error:
                raise OSError(_why(error)) from error
            return home

        try:
            home, failed = self._first(put)
        except OSError as error:
            raise SpoolError(f"outcomes are kept in memory only: {error}") from error
        if failed:
            where, why = next(iter(failed.items()))
            self._tell(f"outcomes are kept in {home.root}, because {where} takes none: {why}")

    def _first(self, use: Callable[[Home], T]) -> tuple[T, dict[Path, str]]:
        failed: dict[Path, str] = {}
        for root in dict.fromkeys((self.home.root, *spare_roots())):
            try:
                return use(self._at(root)), failed
            except (OSError, InstanceTakenError) as error:
                failed[root] = _why(error)
        raise NoRoomError(no_room(failed))

    def get(self, key: Key) -> bytes | None:
        """The outcome with this key, wherever it is kept."""
        for home in self._open():
            held = home.spool.get(*key)
            if held is not None:
                return held
        return None

    def pending(self, limit_bytes: int) -> list[bytes]:
        """Unacknowledged outcomes of this agent and of those that died: see `Spool.pending`."""
        failed = self.home.adopt_siblings()
        if failed:
            # The home itself is full: a place in which there is room can take them.
            for root in spare_roots():
                with contextlib.suppress(OSError, InstanceTakenError):
                    if not self._at(root).adopt_siblings():
                        break
            for folder, sentence in failed.items():
                if not folder.exists():
                    self.home.spool.untell(sentence)
        found: list[bytes] = []
        for home in self._open():
            left = limit_bytes - sum(map(len, found))
            if left > 0:
                found += [data for _, data in home.spool.pending(limit_bytes=left)]
        return found

    def acknowledge(self, key: Key) -> bool:
        """Forget an outcome; whether it was anywhere."""
        return sum(home.spool.acknowledge(*key) for home in self._open()) > 0

    def messages(self) -> list[str]:
        """What a person should know of every spool."""
        return [message for home in self._open() for message in home.spool.messages]

    def close(self) -> None:
        """Give every place back."""
        for home in self._open():
            home.close()
            if home is not self.home:
                tidy(home.root)

    def _open(self) -> list[Home]:
        with self._lock:
            return [self.home, *self._spares]

    def _at(self, root: Path) -> Home:
        with self._lock:
            for home in (self.home, *self._spares):
                if home.root == root:
                    return home
            made = open_spare_home(root, self.home.instance)
            self._spares.append(made)
            return made


def _why(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, UnwritableError) else error
    return (isinstance(cause, OSError) and cause.strerror) or str(error)
