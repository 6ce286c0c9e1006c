"""Every test of the agent leaves nothing: no process, no file in the temporary folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pichak_core.devices.processes import kill_all, marked

MARK = "PICHAK_TEST"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Marks every process that descends from the test, and gives it a temporary folder of its own;
    fails when one process or file is left at its end."""
    token = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv(MARK, token)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    yield
    until = time.monotonic() + 5.0
    while (left := marked(MARK, token)) and time.monotonic() < until:
        time.sleep(0.02)
    commands = {pid: _command(pid) for pid in left}
    kill_all(lambda: marked(MARK, token))
    files = [str(p) for p in folder.rglob("*")]
    shutil.rmtree(folder)
    assert not commands
    assert not files


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"gone meanwhile (test pid {os.getpid()})"
