"""Files of a spool that are damaged: put aside, told, and told again by the next agent.

Who heard of it may have been killed a moment later, so what lies there speaks for itself until a
person removes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

FOLDER = "quarantine"
MAX_FILES = 32


class Quarantine:
    """The corner of the spool in `folder` for what cannot be an outcome; at most the newest few
    files stay there. `tell` takes a sentence for a person."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.corner = folder / FOLDER
        self._tell = tell

    def tell_of_before(self) -> None:
        """Tell what lies here from before, in one sentence."""
        kept = self._files()
        if kept:
            some = "a damaged file was" if len(kept) == 1 else f"{len(kept)} damaged files were"
            self._tell(
                f"{some} put aside in {self.corner}, the last {kept[-1].name}: see what damages "
                "files on that disk, then remove what lies there"
            )

    def put(self, path: Path, why: str) -> bool:
        """Move the damaged file here; False when it cannot be moved, which is told."""
        try:
            self.corner.mkdir(exist_ok=True)
            shutil.move(path, self.corner / path.name)  # a copy, from another file system
            for old in self._files()[:-MAX_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self._tell(f"{path} is damaged ({why}) and cannot be moved: {error}")
            return False
        self._tell(f"{path.name} was put aside in {self.corner}: {why}")
        return True

    def _files(self) -> list[Path]:
        """The oldest first."""
        try:
            return sorted(self.corner.iterdir(), key=_modified)
        except OSError:
            return []


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
