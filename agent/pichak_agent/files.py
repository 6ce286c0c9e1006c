"""Files that a coordinator ships to a node, named by the SHA-256 of what is in them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pichak_agent.messages import file_sha256

MAX_FILE_BYTES = 8 * 1024**3
MAX_CHUNK_BYTES = 8 * 1024**2
#: Shipping leaves at least this much of the disk free.
KEEP_FREE_BYTES = 1024**3


class FileError(ValueError):
    """A file that cannot be taken or given: which, and why."""


class FileStore:
    """Shipped files in `folder`. Threads may share it."""

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        keep_free_bytes: int = KEEP_FREE_BYTES,
    ) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._keep_free_bytes = keep_free_bytes
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, int, int], str] = {}

    def has(self, digest: str, path: str = "") -> bool:
        """Whether a file with this content is here: at `path`, or shipped."""
        shipped = self._path(digest)
        return shipped.is_file() or bool(path and self._digest(Path(path)) == digest)

    def put(self, digest: str, offset: int, chunk: bytes, total: int) -> int:
        """Take `chunk`, which starts at `offset` of `total` bytes; how many bytes are here now,
        from which the sender goes on. `FileError` when the end is not what `digest` says, or when
        there is no room."""
        target = self._path(digest)
        with self._lock:
            if target.is_file():
                return total
            if len(chunk) > MAX_CHUNK_BYTES or not 0 <= total <= self._max_file_bytes:
                raise FileError(
                    f"{total:,} bytes in chunks of {len(chunk):,}: a shipped file may have "
                    f"{self._max_file_bytes:,} in chunks of {MAX_CHUNK_BYTES:,}"
                )
            beside = target.with_suffix(".part")
            try:
                return self._append(beside, target, offset, chunk, total)
            except OSError as error:
                raise FileError(
                    f"a shipped file cannot be kept in {self._folder} "
                    f"({error.strerror or error}): free some of that disk, or set PICHAK_HOME to "
                    "a folder with room"
                ) from error

    def resolve(self, params: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """`params` with each ``{"file": {"sha256", "name", "path"}}`` in it, however deep, replaced
        by a path: the named one where it holds that content here, else the shipped file under its
        name below `folder`. `FileError` when neither is there."""
        return {key: self._resolved(value, folder) for key, value in params.items()}

    def forget(self) -> None:
        """Remove every shipped file."""
        with self._lock:
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)

    def _append(self, beside: Path, target: Path, offset: int, chunk: bytes, total: int) -> int:
        if offset == 0:
            free = shutil.disk_usage(self._folder).free
            if free - total < self._keep_free_bytes:
                raise FileError(
                    f"{total:,} bytes do not fit: {free:,} are free in {self._folder} and "
                    f"{self._keep_free_bytes:,} stay so; free some of that disk, or set "
                    "PICHAK_HOME to a folder with room"
                )
        held = beside.stat().st_size if beside.exists() else 0
        if offset > held:
            return held
        with beside.open("ab") as file:
            file.write(chunk[held - offset :])
        held = beside.stat().st_size
        if held < total:
            return held
        found = file_sha256(beside)
        if held > total or found != target.name:
            beside.unlink()
            raise FileError(
                f"what arrived ({held:,} bytes, sha256 {found[:12]}…) is not the file announced "
                f"({total:,} bytes, {target.name[:12]}…): send it again"
            )
        beside.rename(target)
        return total

    def _resolved(self, value: Any, folder: Path) -> Any:
        if isinstance(value, Mapping):
            if set(value) == {"file"} and isinstance(value["file"], Mapping):
                return str(self._locate(value["file"], folder))
            return {key: self._resolved(item, folder) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolved(item, folder) for item in value]
        return value

    def _locate(self, file: Mapping[str, Any], folder: Path) -> Path:
        digest, original = str(file.get("sha256", "")), str(file.get("path", ""))
        shipped = self._path(digest)
        if original and self._digest(Path(original)) == digest:
            return Path(original)
        name = Path(str(file.get("name") or Path(original).name)).name
        if not name or name == "..":
            raise FileError(f"file {digest[:12]}…: {file.get('name')!r} is not a file's name")
        if self._digest(shipped) != digest:
            shipped.unlink(missing_ok=True)
            raise FileError(
                f"{name} (sha256 {digest[:12]}…) is not on this node: not at {original or '(none)'}"
                " and not shipped"
            )
        # A copy: the job may write to it, and the shipped file is for other jobs too.
        target = folder / digest[:12] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shipped, target)
        return target

    def _digest(self, path: Path) -> str:
        """SHA-256 of a file, remembered while its size and times stay; "" when it is not there."""
        try:
            stat = path.stat()
            key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            if key not in self._known:
                self._known[key] = file_sha256(path)
            return self._known[key]
        except OSError:
            return ""

    def _path(self, digest: str) -> Path:
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise FileError(f"{digest[:70]!r} is not a SHA-256 in lower-case hexadecimal")
        return self._folder / digest
