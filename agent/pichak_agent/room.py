"""Folders for what a job needs while it runs, where there is room for it: a full disk, or one that
became read-only, is found by writing to it."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Memory of the machine, which is writable where every disk and temporary folder is not.
LAST_RESORT = Path("/dev/shm")  # noqa: S108
#: Bytes that a job's folder must take beside its input.
ROOM_BYTES = 64 * 1024
#: Failures that no other place mends: there is no descriptor left.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE)


class NoRoomError(OSError):
    """No place can be written: each, why, and what to do."""


def scratch_places(first: Path | None = None) -> Iterator[Path]:
    """`first`, the system's temporary folder, memory."""
    if first is not None:
        yield first
    with contextlib.suppress(FileNotFoundError):  # none of the system's can be written
        yield Path(tempfile.gettempdir())
    yield LAST_RESORT


def roomy_folder(prefix: str, places: Iterable[Path], needed_bytes: int = ROOM_BYTES) -> Path:
    """A new folder in the first of `places` that takes `needed_bytes`; `NoRoomError` where none
    does."""
    failed: dict[Path, str] = {}
    for place in dict.fromkeys(places):
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        except OSError as error:
            failed[place] = error.strerror or str(error)
            continue
        trial = folder / "room"
        try:
            trial.write_bytes(bytes(needed_bytes))
            trial.unlink()
        except OSError as error:
            failed[place] = error.strerror or str(error)
            trial.unlink(missing_ok=True)  # without a descriptor, of which there may be none
            folder.rmdir()
            if error.errno in _OF_THE_PROCESS:
                raise
        else:
            return folder
    raise NoRoomError(no_room(failed))


def no_room(failed: dict[Path, str]) -> str:
    """The sentence for places that cannot be written, each with why."""
    told = "; ".join(f"{place}: {why}" for place, why in failed.items())
    return (
        f"there is nowhere to write ({told}): free some of one of these disks, or set PICHAK_HOME "
        "or TMPDIR to a folder with room and start the agent again"
    )
