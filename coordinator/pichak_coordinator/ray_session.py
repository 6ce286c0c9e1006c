"""The folder of a local Ray: its logs and sockets, which Ray leaves behind when it ends."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

_LATEST = "session_latest"
_TRIES, _PAUSE_SECONDS = 5, 0.2


def remove_session(folder: Path) -> None:
    """Remove the folder of a Ray that has ended, and the link that calls it the latest. What cannot
    be removed stays, and is nobody's trouble."""
    if folder.is_symlink() or not folder.name.startswith("session_"):
        return
    latest = folder.with_name(_LATEST)
    with contextlib.suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == folder.name:
            latest.unlink()
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_PAUSE_SECONDS)  # the last of its processes were still writing
