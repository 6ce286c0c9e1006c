"""The system calls behind a file that must survive a kill."""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """The system calls behind a write, one method each, so that a test can fail any of them."""

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file."""
        binary = getattr(os, "O_BINARY", 0)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | binary, 0o600)

    def write(self, fd: int, data: memoryview) -> int:
        """Bytes of `data` that were written."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Until what was written is on the disk."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic, within one file system."""
        source.rename(target)

    def sync_folder(self, folder: Path) -> None:
        """Until the names in `folder` are on the disk."""
        directory = getattr(os, "O_DIRECTORY", None)
        if directory is None:
            # Windows opens no folders; NTFS keeps a journal of its names.
            return
        fd = os.open(folder, os.O_RDONLY | directory)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Unlink; nothing when it is gone already."""
        path.unlink(missing_ok=True)
