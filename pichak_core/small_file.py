"""Reading what a person wrote: a small file, however large the file is that was named instead."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

MOST_BYTES = 1024**2


def read_small(path: Path, *, regular: bool = False) -> bytes:
    """The bytes of a file of at most `MOST_BYTES`; a device without an end is read no further.

    `OSError`, with the reason as its `strerror`, where it cannot be read, is larger, or, with
    `regular`, is a device or a pipe, which give their bytes only once or never.
    """
    if regular and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", str(path))
    return data
