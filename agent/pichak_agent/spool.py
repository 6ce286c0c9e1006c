"""Outcomes on disk until the coordinator has acknowledged them.

One file for each outcome, holding exactly its bytes; its name is ``JOB.ATTEMPT.DIGEST.mpk``. It is
written beside, fsynced and renamed, and then its folder is fsynced, so that at any moment a kill or
a power cut leaves the whole outcome or none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pichak_agent.disk import Disk
from pichak_agent.messages import MessageError, Outcome, decode, encode
from pichak_agent.quarantine import FOLDER, Quarantine

MAX_BYTES = 512 * 1024**2
MAX_AGE_SECONDS = 30 * 86400.0
#: For so long an agent itself must have had an outcome before it believes that it is too old: the
#: clock of a machine that has just started may be off by decades until it is set.
MIN_HELD_SECONDS = 86400.0
_SUFFIX, _UNFINISHED = ".mpk", ".part"
_MAX_MESSAGES = 100
#: A file of at most this size is not worth replacing by the note that it was dropped.
_SMALL_BYTES = 4096
_DROPPED = "its outcome was dropped on the node"


class SpoolError(RuntimeError):
    """An outcome that cannot be kept on disk: what, where, why."""


class UnwritableError(SpoolError):
    """The disk of a spool does not take an outcome: full, read-only, broken."""


class Key(NamedTuple):
    """Names one outcome."""

    job_id: str
    attempt: int


class Spool:
    """The outcomes of one agent in `folder`, which is this agent's alone (`home.py` locks it).

    `messages` holds what a person should know of it: files put aside as damaged, outcomes dropped
    at the limits. At the limits of size and age the oldest outcome gives way to a short one with
    the same key and status "error" that says so: its coordinator still hears of it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_seconds: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self.messages: deque[str] = deque(maxlen=_MAX_MESSAGES)
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._clock, self._monotonic = clock, monotonic
        #: A file's age by the clock when this process first saw it, and when that was.
        self._first_seen: dict[str, tuple[float, float]] = {}
        self._disk = disk or Disk()
        self._quarantine = Quarantine(folder, self.tell)
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"*{_UNFINISHED}"):
            self._disk.remove(unfinished)
        self._quarantine.tell_of_before()
        self._drop_old()

    def put(self, outcome: bytes) -> Path:
        """Keep an outcome; the file that holds it. The first with a key stays: a second is ignored.

        `SpoolError` when it cannot be written, `UnwritableError` where that is the disk's fault;
        nothing of it is left on disk then.
        """
        with self._lock:
            try:
                made = decode(outcome, Outcome)
            except MessageError as error:
                raise SpoolError(f"these bytes are no outcome: {error}") from error
            key = Key(made.job_id, made.attempt)
            held = self._files().get(key)
            if held is not None:
                return held
            self._drop_old()
            self._make_room(len(outcome))
            return self._write(key, outcome)

    def get(self, job_id: str, attempt: int) -> bytes | None:
        """The outcome with this key, None when there is none (or it was damaged)."""
        with self._lock:
            path = self._files().get(Key(job_id, attempt))
            return None if path is None else self._read(path)

    def pending(self, *, limit_bytes: int | None = None) -> list[tuple[Key, bytes]]:
        """Outcomes that nobody has acknowledged, the oldest first; at most `limit_bytes` of them,
        but always one: the rest comes when these are acknowledged."""
        with self._lock:
            found: list[tuple[Key, bytes]] = []
            total = 0
            for key, path in self._oldest_first():
                data = self._read(path)
                if data is None:
                    continue
                total += len(data)
                if found and limit_bytes is not None and total > limit_bytes:
                    break
                found.append((key, data))
            return found

    def acknowledge(self, job_id: str, attempt: int) -> bool:
        """Forget an outcome that the store has; False when there was none, which is no error."""
        with self._lock:
            path = self._files().get(Key(job_id, attempt))
            if path is None:
                return False
            try:
                self._disk.remove(path)
                self._disk.sync_folder(self.folder)
            except OSError as error:
                # It stays and is delivered again, which a store ignores.
                self.tell(f"{path} could not be removed: {error}")
            return True

    def tell(self, message: str) -> None:
        """Add to `messages`, once for as long as it stands there."""
        if message not in self.messages:
            self.messages.append(message)

    def untell(self, message: str) -> None:
        """It is no longer so."""
        if message in self.messages:
            self.messages.remove(message)

    def adopt(self, other: Path) -> int:
        """Take over the outcomes in `other`, the folder of an agent that is gone; how many.

        What it had put aside comes too. `OSError` when something of it could not be taken.
        """
        taken, left = 0, 0
        with self._lock:
            for damaged in sorted(other.glob(f"{FOLDER}/*")):
                left += not self._quarantine.put(damaged, f"it lay so in {other}")
            held = self._files()
            for source in sorted(other.glob(f"*{_SUFFIX}")):
                key = _key_of(source)
                if key is None or key in held:
                    why = "an outcome with its key is here already" if key else "its name"
                    left += not self._quarantine.put(source, why)
                    continue
                held[key] = self._take(source)
                taken += 1
            if taken:
                self._disk.sync_folder(self.folder)
        if left:
            raise OSError(f"{left} damaged files of it could not be moved")
        return taken

    def _take(self, source: Path) -> Path:
        """Move a file of another spool here; by a copy from another file system."""
        target = self.folder / source.name
        try:
            self._disk.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._write_file(target, source.read_bytes())
            self._disk.remove(source)
        return target

    def _write(self, key: Key, outcome: bytes) -> Path:
        target = self.folder / f"{key.job_id}.{key.attempt}.{_digest(outcome)}{_SUFFIX}"
        try:
            self._write_file(target, outcome)
        except OSError as error:
            raise UnwritableError(
                f"the outcome of job {key.job_id}, attempt {key.attempt} ({len(outcome):,} bytes) "
                f"could not be kept in {self.folder}: {error.strerror or error}"
            ) from error
        self._first_seen[target.name] = (0.0, self._monotonic())
        return target

    def _write_file(self, target: Path, data: bytes) -> None:
        """The whole file or, with an `OSError`, nothing of it."""
        beside = self.folder / f"{target.name}{_UNFINISHED}"
        try:
            fd = self._disk.create(beside)
            try:
                left = memoryview(data)
                while left:
                    left = left[self._disk.write(fd, left) :]
                self._disk.sync(fd)
            finally:
                os.close(fd)
            self._disk.rename(beside, target)
            self._disk.sync_folder(self.folder)
        except OSError:
            for path in (beside, target):
                try:
                    self._disk.remove(path)
                except OSError:
                    continue
            raise

    def _read(self, path: Path) -> bytes | None:
        try:
            data = path.read_bytes()
        except OSError as error:
            self.tell(f"{path} cannot be read: {error}")
            return None
        if _digest(data) != path.name.split(".")[-2]:
            self._quarantine.put(path, "its bytes are not those that were written")
            return None
        try:
            decode(data, Outcome)
        except MessageError as error:
            self._quarantine.put(path, str(error))
            return None
        return data

    def _files(self) -> dict[Key, Path]:
        """Every outcome's file. A kill between an outcome's note and its removal leaves two with
        one key: the outcome itself, which is the larger, counts."""
        found: dict[Key, Path] = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            key = _key_of(path)
            if key is None:
                self._quarantine.put(path, "its name is not JOB.ATTEMPT.DIGEST.mpk")
                continue
            rival = found.get(key)
            if rival is None:
                found[key] = path
                continue
            lesser, greater = sorted((rival, path), key=_size)
            found[key] = greater
            self._disk.remove(lesser)
        return found

    def _oldest_first(self) -> list[tuple[Key, Path]]:
        return sorted(self._files().items(), key=lambda item: (_modified(item[1]), item[0]))

    def _drop_old(self) -> None:
        """By the steady clock from the moment when this process first saw a file: the wall clock
        may be set forward or back at any time."""
        wall, now = self._clock(), self._monotonic()
        with self._lock:
            files = self._oldest_first()
            known = self._first_seen
            self._first_seen = {
                path.name: known.get(path.name, (max(0.0, wall - _modified(path)), now))
                for _, path in files
            }
            for key, path in files:
                then, first_seen = self._first_seen[path.name]
                held = now - first_seen
                if then + held > self._max_age and held >= MIN_HELD_SECONDS:
                    days = (then + held) / 86400
                    self._drop(key, path, f"nobody acknowledged it in {days:.0f} days")

    def _make_room(self, needed: int) -> None:
        files = self._oldest_first()
        total = sum(_size(path) for _, path in files) + needed
        for key, path in files:
            if total <= self._max_bytes:
                return
            if _size(path) > _SMALL_BYTES:
                before = _size(path)
                after = self._drop(key, path, f"the spool's {self._max_bytes:,} bytes were full")
                total -= before - after
        if total > self._max_bytes:
            raise SpoolError(
                f"the spool in {self.folder} is full: {total - needed:,} bytes of unacknowledged "
                f"outcomes, {self._max_bytes:,} allowed; let a coordinator fetch them"
            )

    def _drop(self, key: Key, path: Path, why: str) -> int:
        """Put a short outcome in its place; its bytes. An old note itself goes for good."""
        self.tell(f"dropped: the outcome of {key.job_id}, attempt {key.attempt}: {why}")
        data = self._read(path)
        if data is None:
            return 0
        outcome = decode(data, Outcome)
        if outcome.error.startswith(_DROPPED):
            self._disk.remove(path)
            return 0
        note = replace(
            outcome,
            status="error",
            result={},
            traceback="",
            log_tail="",
            error=f"{_DROPPED} (it was {outcome.status!r}): {why}",
        )
        encoded = encode(note)
        try:
            self._write(key, encoded)
        except SpoolError as error:
            self.tell(f"it stays for now: {error}")
            return len(data)
        self._disk.remove(path)
        return len(encoded)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _key_of(path: Path) -> Key | None:
    job_id, _, rest = path.name[: -len(_SUFFIX)].rpartition(".")
    job_id, _, attempt = job_id.rpartition(".")
    if not job_id or not attempt.isdigit() or len(rest) != 16:
        return None
    return Key(job_id, int(attempt))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
