"""The file in which whoever samples a node tells its state to the node's other processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1


class StateFile:
    """JSON, written aside and renamed. `note` hears why it cannot be written."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note = path, note
        self._failures = 0

    def write(self, text: str) -> None:
        """Replace it; noted where that fails twice in a row: Windows replaces no file that somebody
        reads at that moment."""
        part = self._path.with_suffix(".part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self._path)
            self._failures = 0
        except OSError as error:
            self._failures += 1
            if self._failures > 1:
                self._note(
                    f"the readings of this machine cannot be written to {self._path} "
                    f"({error.strerror or error}), so no other process sees them until they can: "
                    "free some of that disk, or let this user write there"
                )

    def read(self) -> dict[str, Any]:
        """The state; of nobody where there is none, or no such file."""
        empty: dict[str, Any] = {"schema": SCHEMA, "at_unix": 0.0, "source": "nobody"}
        empty |= {"latest": None, "gpus": [], "findings": [], "ring": [], "problems": []}
        empty |= {"had": {}, "gaps": {}, "nvml": {"gap": "", "system": {}, "incidents": []}}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return empty
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            return empty
        return {**empty, **found}


def known_gpus(state: Mapping[str, Any]) -> dict[str, str]:
    """The GPUs that whoever wrote the state had, UUID to name."""
    had = state.get("had")
    if not isinstance(had, dict):
        return {}
    return {str(uuid): str(name) for uuid, name in had.items()}
