"""What a person wrote is read whole or refused; nothing without an end is read to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pichak_core.small_file import MOST_BYTES, read_small


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * MOST_BYTES)
    assert read_small(path, regular=True) == b"x" * MOST_BYTES
    path.write_bytes(b"x" * (MOST_BYTES + 1))
    with pytest.raises(OSError, match="more than 1,048,576 bytes"):
        read_small(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a device of Unix")
def test_a_device_without_an_end() -> None:
    with pytest.raises(OSError, match="more than"):
        read_small(Path("/dev/zero"))
    with pytest.raises(OSError, match="no regular file"):
        read_small(Path("/dev/zero"), regular=True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(OSError, match="no regular file"):
        read_small(tmp_path / "p", regular=True)


def test_a_folder_and_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path, regular=True)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none", regular=True)
