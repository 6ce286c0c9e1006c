"""The file in which an agent tells its problems to the node's other processes: its service's log
and ``pichak agent status`` show them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from pichak_agent.home import PROBLEMS, Home, is_alive, spare_roots
from pichak_agent.places import Places

_MOST, _MOST_TEXT = 50, 1000


class ProblemsFile:
    """Written anew whenever there is something else to tell; gone while there is nothing."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._told: list[str] = []
        self._at: Path | None = None
        self._lock = threading.Lock()

    def tell(self, problems: Sequence[str]) -> None:
        """Tell these; where nothing can be written nobody hears of them this way."""
        with self._lock:
            if list(problems) == self._told:
                return
            try:
                if problems:
                    self._at = self._places.first(lambda home: _written(home, problems))
                elif self._at is not None:
                    self._at.unlink(missing_ok=True)
            except OSError:
                return
            self._told = list(problems)


def told_problems(root: Path, *, everywhere: bool = True) -> list[str]:
    """What the living agents of `root` tell; with `everywhere` also those that have to keep things
    elsewhere now. Each sentence once."""
    roots = [root, *(spare_roots() if everywhere else ())]
    found: dict[str, None] = {}
    for path in (path for each in roots for path in sorted(each.glob(f"agent/*/{PROBLEMS}"))):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not is_alive(path.parent):
            continue
        found.update(dict.fromkeys(_texts(told)))
    return list(found)[:_MOST]


def _texts(told: object) -> Iterable[str]:
    listed = told if isinstance(told, list) else []
    return [each[:_MOST_TEXT] for each in listed if isinstance(each, str)]


def _written(home: Home, problems: Sequence[str]) -> Path:
    beside = home.problems_file.with_suffix(".part")
    try:
        beside.write_text(json.dumps(list(problems)), encoding="utf-8")
        beside.replace(home.problems_file)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return home.problems_file
