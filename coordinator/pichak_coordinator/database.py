"""The SQLite file behind the store: opened with care, migrated in order, never overwritten.

A file that is not ours, is damaged, or was written by a newer version is refused with what to do
about it, and not one byte of it is changed.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from pichak_coordinator.database_still import NoRoomError, open_still

#: "PFLT" in the file's header says that it is ours.
APPLICATION_ID = 0x50464C54
BUSY_SECONDS = 10.0
#: Up to this size the whole file is checked whenever it is opened for writing (about 0.1 s).
CHECKED_BYTES = 64 * 1024 * 1024

#: The log is brought into the file every 16 MB: each time waits for the disk twice more.
_CHECKPOINT_PAGES = 4000
_ASK_MILLISECONDS = 4
#: What SQLite says where a file beside the database cannot be made.
_CANNOT_WRITE = ("disk I/O", "full", "readonly", "unable to open")
_ELSEWHERE = "name another file (--store FILE), or another folder (PICHAK_HOME)"
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100


class StoreError(RuntimeError):
    """A store that cannot be used: what, where, and what to do."""


class CorruptStoreError(StoreError):
    """The file is damaged. It was left as it is."""


def default_path() -> Path:
    """``$PICHAK_HOME/fleet.db``, else ``~/.local/share/pichak/fleet.db``."""
    home = os.environ.get("PICHAK_HOME", "").strip()
    base = Path(home).expanduser() if home else Path.home() / ".local" / "share" / "pichak"
    return base / "fleet.db"


def migrations() -> list[str]:
    """The SQL of every migration; the first takes an empty file to schema 1."""
    folder = files("pichak_coordinator") / "migrations"
    named = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    for number, name in enumerate(named, start=1):
        if int(name.split("_")[0]) != number:
            raise StoreError(f"migration {name} is out of order: number {number} was expected")
    return [(folder / name).read_text(encoding="utf-8") for name in named]


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A checked, migrated connection in WAL mode; explicit transactions only.

    With `read_only` nothing can be written through it, and a file that does not exist is an
    error. Raises `StoreError`, and `CorruptStoreError` for a damaged file.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder where the history's file is expected")
    empty = not path.exists() or path.stat().st_size == 0
    if empty and read_only:
        raise StoreError(f"no history at {path} yet; `pichak fleet profile` begins one")
    if not empty:
        _refuse_foreign(path)
    with translated(path):
        try:
            return _connect(path, read_only=read_only)
        except sqlite3.OperationalError as error:
            if not read_only or not any(part in str(error) for part in _CANNOT_WRITE):
                raise
            return _connect_still(path)


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if read_only and _needs_a_writer(path):
        _connect(path, read_only=False).close()
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _prepared(_open(path, read_only=read_only), path, read_only=read_only)


def _connect_still(path: Path) -> sqlite3.Connection:
    """For reading, where no file can be made beside it."""
    try:
        db = open_still(
            path,
            current=lambda db: _version(db) >= len(migrations()),
            renew=lambda copy: _connect(copy, read_only=False).close(),
        )
    except NoRoomError as error:
        raise StoreError(
            f"{path} was left by a pichak that was killed, or by an older one, on a disk that is "
            f"full or read-only, and there is no room for a copy to read ({error.strerror}): make "
            "room on either (TMPDIR names another temporary folder); nothing stored was lost"
        ) from error
    return _prepared(db, path, read_only=True)


def _prepared(db: sqlite3.Connection, path: Path, *, read_only: bool) -> sqlite3.Connection:
    try:
        _prepare(db, path, read_only=read_only)
    except BaseException:
        db.close()
        raise
    return db


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _open(path: Path, *, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    if read_only and _is_still(path):
        mode = "ro&immutable=1"
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _is_still(path: Path) -> bool:
    """Whether nobody can be writing to the file, and a reader could not make the files beside it
    that WAL needs: it lies on a read-only mount, or in another user's folder, and has no log."""
    return not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()


def _prepare(db: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    known = len(migrations())
    version = _version(db)
    if version > known:
        raise StoreError(
            f"{path} was written by a newer pichak-fleet (schema {version}; this one knows "
            f"{known}): upgrade this one, or {_ELSEWHERE}"
        )
    if read_only:
        db.execute("PRAGMA query_only = ON")
        return
    # An acknowledged outcome is on the disk, not only in the system's cache.
    db.execute("PRAGMA synchronous = FULL")
    if version < known:
        _migrate(db, known)
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StoreError(
            f"{path} lies on a file system that cannot hold a WAL database: {_ELSEWHERE}, on a "
            "local disk"
        )
    db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    if path.stat().st_size <= CHECKED_BYTES:
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)


def _migrate(db: sqlite3.Connection, known: int) -> None:
    """All pending migrations in one transaction: afterwards the file is at `known`, or as before.

    The first one runs before WAL is switched on, so that the header on the disk names us from the
    first moment on.
    """
    with transaction(db):
        # Another process may have migrated between our look and our lock.
        version = _version(db)
        if version >= known:
            return
        for script in migrations()[version:]:
            for statement in _statements(script):
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {known}")


def _statements(script: str) -> Iterator[str]:
    pending = ""
    for line in script.splitlines():
        pending += f"{line}\n"
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
    if pending.strip():
        raise StoreError(f"a migration ends inside a statement: {pending.strip()[:80]}")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: everything in the block, or nothing of it."""
    _begin(db)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # A failed COMMIT (disk full) may have rolled back by itself.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _begin(db: sqlite3.Connection) -> None:
    """Take the write lock, asking every few milliseconds. SQLite's own waiting asks ten times a
    second, and so may wait for ever beside a writer that hardly pauses."""
    give_up = time.monotonic() + BUSY_SECONDS
    db.execute(f"PRAGMA busy_timeout = {_ASK_MILLISECONDS}")
    try:
        while True:
            try:
                db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > give_up:
                    raise
                time.sleep(random.uniform(0.0, _ASK_MILLISECONDS / 1000))  # noqa: S311
    finally:
        db.execute(f"PRAGMA busy_timeout = {round(BUSY_SECONDS * 1000)}")


@contextlib.contextmanager
def translated(path: Path, *, files: bool = True) -> Iterator[None]:
    """Turn SQLite's errors into a `StoreError` that says what to do; with `files`, the system's own
    errors too, where the block touches no other file."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise  # our own mistake, not the file's
    except sqlite3.OperationalError as error:
        raise StoreError(f"{path}: {error}{_advice(str(error))}") from error
    except sqlite3.DatabaseError as error:
        raise CorruptStoreError(
            f"{path} is damaged ({error}). It was left as it is. Keep a copy, then either recover "
            f"it (`sqlite3 {path} .recover | sqlite3 recovered.db`) or move it away to begin a "
            "new history"
        ) from error
    except OSError as error:
        if not files:
            raise
        raise StoreError(
            f"{path}: {error.strerror or error}; {_ELSEWHERE}, where it can be written"
        ) from error


def _advice(text: str) -> str:
    if "locked" in text or "busy" in text:
        return f": another pichak held it for more than {BUSY_SECONDS:.0f} s; try again"
    if "full" in text:
        return ": make room on the disk and run it again; nothing stored was lost"
    if "disk I/O" in text:
        return ": its disk is full or failing (`df`); nothing stored was lost"
    if "readonly" in text or "unable to open" in text:
        return f": {_ELSEWHERE}, where it can be written"
    return ""


def _refuse_foreign(path: Path) -> None:
    """Judge by the header alone: opening a stranger's database could already change it."""
    with translated(path), path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    way_out = f"move it away, or {_ELSEWHERE}"
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        raise CorruptStoreError(
            f"{path} is not a SQLite database, or its beginning is damaged. It was left as it is; "
            f"{way_out}"
        )
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise StoreError(f"{path} is another program's database. It was left as it is; {way_out}")


def _needs_a_writer(path: Path) -> bool:
    """Whether the schema is older, or a crash left a journal to undo: no reader can do that."""
    with contextlib.closing(_open(path, read_only=True)) as db:
        try:
            return _version(db) < len(migrations())
        except sqlite3.OperationalError:
            return True
