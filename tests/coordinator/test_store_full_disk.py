"""A disk that is really full: a small tmpfs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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


def stuff(disk: Path) -> None:
    """Not one more byte fits."""
    with (
        (disk / "everything").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="space"),
    ):
        while True:
            file.write(bytes(4096))


def test_a_closed_history_is_read_on_a_full_disk(disk: Path) -> None:
    path = disk / "fleet.db"
    with Store.open(path) as store:
        run = store.begin_run("fleet profile")
    stuff(disk)
    with Store.open(path, read_only=True) as store:
        assert [r.run for r in store.runs()] == [run]
    with pytest.raises(StoreError, match="full"):
        Store.open(path).begin_run("fleet profile")


def killed_writer(path: Path) -> None:
    """What it wrote is in the log alone."""
    code = "import os, sys; from pichak_coordinator.store import Store\n"
    code += "Store.open(sys.argv[1]).begin_run('fleet profile', {'name': 'last'}); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    Path(f"{path}-shm").unlink()


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_what_a_killed_writer_left_in_the_log_is_read_too(disk: Path, how: str) -> None:
    path = disk / "fleet.db"
    Store.open(path).close()
    killed_writer(path)
    if how == "full":
        stuff(disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    with Store.open(path, read_only=True) as store:
        assert [r.settings["name"] for r in store.runs()] == ["last"]
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == before


def test_no_room_for_a_copy_is_said(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = disk / "fleet.db"
    Store.open(path).close()
    killed_writer(path)
    stuff(disk)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with pytest.raises(StoreError, match=r"no room for a copy to read .*TMPDIR"):
        Store.open(path, read_only=True)


def test_a_history_cannot_be_begun_on_a_full_disk(disk: Path) -> None:
    with pytest.raises(OSError, match="space"):
        (disk / "everything").write_bytes(bytes(2**21))
    with pytest.raises(StoreError, match="full: make room"):
        Store.open(disk / "fleet.db")
