"""Writing a page: whole or not at all, and never over a file that is none of ours."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pichak_coordinator.report.page import GENERATOR

_HEAD_BYTES = 2048


class NotOursError(RuntimeError):
    """There is something at the path that is no report; the text says what."""


def check_place(path: Path, *, force: bool, store: Path | None = None) -> None:
    """`NotOursError` where a page may not be written; made before anything is computed. Over the
    `store` that it is read from it may never be."""
    if store is not None and path.exists() and store.exists() and path.samefile(store):
        raise NotOursError(f"{path} is the history itself; name another file")
    if path.is_dir():
        raise NotOursError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise NotOursError(f"{path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_file():
        raise NotOursError(f"{path} is a pipe or a device; write --html - for standard output")
    if not force and not _ours(path):
        raise NotOursError(f"{path} exists and is no report of ours; --force replaces it")


def _ours(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return not head or f'content="{GENERATOR}"'.encode() in head


def write_page(path: Path, text: str) -> int:
    """Write beside the place, sync, and move there; returns the bytes. A link is followed."""
    place = path.resolve()
    data = text.encode("utf-8")
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return len(data)
