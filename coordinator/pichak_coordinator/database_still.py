"""Reading a history where nothing can be written: its disk is full, or mounted read-only.

In WAL mode a reader makes a small file beside the database. Where it cannot, nobody else has the
history open either (they would have made that file), so that it stands still while it is read.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path


class NoRoomError(OSError):
    """What was not yet brought into the file cannot be read without a copy, for which there is no
    room; the message says where."""


def open_still(
    path: Path, *, current: Callable[[sqlite3.Connection], bool], renew: Callable[[Path], None]
) -> sqlite3.Connection:
    """A connection that reads `path` and touches nothing beside it.

    Where a writer ended in the middle (its log is there), or the schema is not `current`, a copy in
    the temporary folder is read instead: `renew` brings it up to date, and it has no name any more
    when this returns. `NoRoomError` where it does not fit.
    """
    log = Path(f"{path}-wal")
    held = log.exists() and log.stat().st_size > 0
    if not held:
        db = _immutable(path)
        if current(db):
            return db
        db.close()
    try:
        # Windows removes no file that is open: it stays in the temporary folder there.
        with tempfile.TemporaryDirectory(prefix="pichak-", ignore_cleanup_errors=True) as folder:
            copy = Path(folder) / "fleet.db"
            shutil.copyfile(path, copy)
            if held:
                shutil.copyfile(log, f"{copy}-wal")
            renew(copy)
            with contextlib.closing(_plain(copy, "rw")) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return _immutable(copy)
    except OSError as error:
        raise NoRoomError(
            error.errno, f"{error.strerror or error} in {tempfile.gettempdir()}"
        ) from error


def _immutable(path: Path) -> sqlite3.Connection:
    return _plain(path, "ro&immutable=1")


def _plain(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
