"""A disk that is really full: a small tmpfs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pichak_agent.messages import Outcome, encode
from pichak_coordinator.store import Store, StoreError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting takes root")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=False)


def outcome(number: int) -> bytes:
    return encode(Outcome(f"j{number}", 1, "ramp", "ok", {"text": "x" * 2000}, node="n"))


def test_a_full_disk_is_one_sentence_and_loses_nothing(disk: Path) -> None:
    path, kept = disk / "fleet.db", 0
    with Store.open(path) as store, pytest.raises(StoreError, match="full: make room"):
        for number in range(3000):
            store.record_outcome(outcome(number))
            kept = number + 1
    assert kept > 5
    with Store.open(path, read_only=True) as store:
        for number in range(kept):
            assert store.outcome_bytes(f"j{number}", 1) == outcome(number)
        assert store.outcome_bytes(f"j{kept}", 1) is None
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    with Store.open(path) as store:
        assert store.record_outcome(outcome(kept))
        assert next(iter(store.each("PRAGMA integrity_check"))) == ("ok",)


def test_a_history_cannot_be_begun_on_a_full_disk(disk: Path) -> None:
    with pytest.raises(OSError, match="space"):
        (disk / "everything").write_bytes(bytes(2**21))
    with pytest.raises(StoreError, match="full: make room"):
        Store.open(disk / "fleet.db")
