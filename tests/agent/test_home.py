from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pichak_agent.daemon import Agent
from pichak_agent.home import (
    InstanceTakenError,
    open_home,
    open_some_home,
    open_spare_home,
    spare_roots,
)
from pichak_agent.locks import FileLock
from pichak_agent.messages import MessageError, Outcome, decode, encode
from pichak_agent.spool import Spool

HOLDER = """
import sys, time
from pathlib import Path
from pichak_agent.home import open_home
from pichak_agent.messages import Outcome, encode
home = open_home(Path(sys.argv[1]), "node")
home.spool.put(encode(Outcome("theirs", 1, "ramp", "ok")))
(home.work / "left-over").mkdir()
print(home.instance, flush=True)
time.sleep(300)
"""


def other_agent(root: Path) -> tuple[subprocess.Popen[str], str]:
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout
    return agent, agent.stdout.readline().strip()


def end(agent: subprocess.Popen[str]) -> None:
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    if agent.stdout:
        agent.stdout.close()


def test_two_agents_do_not_share_a_folder_and_the_dead_one_is_taken_over(tmp_path: Path) -> None:
    agent, theirs = other_agent(tmp_path)
    try:
        assert theirs == "node"
        with pytest.raises(InstanceTakenError, match=f"belongs to another agent .pid {agent.pid}"):
            open_home(tmp_path, "node", exactly=True)
        second = open_home(tmp_path, "node")
        assert second.instance == "node.2"
        # Its owner lives: nothing of it is touched.
        assert second.spool.pending() == []
        second.close()
    finally:
        end(agent)
    third = open_home(tmp_path, "other")
    assert [key.job_id for key, _ in third.spool.pending()] == ["theirs"]
    assert sorted(p.name for p in (tmp_path / "agent").iterdir()) == ["other"]
    third.close()


def test_the_same_agent_again_finds_its_own(tmp_path: Path) -> None:
    agent, _ = other_agent(tmp_path)
    end(agent)
    home = open_home(tmp_path, "node", exactly=True)
    assert [key.job_id for key, _ in home.spool.pending()] == ["theirs"]
    assert list(home.work.iterdir()) == []
    home.close()


def test_a_folder_is_given_back(tmp_path: Path) -> None:
    home = open_home(tmp_path, "node", exactly=True)
    home.close()
    open_home(tmp_path, "node", exactly=True).close()


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 200])
def test_names_that_leave_the_root_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((MessageError, InstanceTakenError, OSError)):
        open_home(tmp_path / "root", name)
    assert [p for p in tmp_path.rglob("*") if "root" not in p.parts] == []


def test_a_home_that_cannot_be_written_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home, why = open_some_home("node")
    assert home.root == tmp_path / f"pichak-{os.getuid()}"
    assert "the usual place failed" in why
    home.spool.put(encode(Outcome("job", 1, "ramp", "ok")))
    home.close()


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A folder on another file system than the tests' own."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is no second file system to write to")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_what_was_kept_in_the_temporary_folder_is_taken_over(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that started on a full disk and died: the next one finds its outcomes, across file
    systems."""
    monkeypatch.setattr("tempfile.tempdir", str(other_disk))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "file" / "below"))
    first, _ = open_some_home("node")
    first.spool.put(encode(Outcome("kept", 1, "ramp", "ok")))
    damaged = first.spool.put(encode(Outcome("damaged", 1, "ramp", "ok")))
    damaged.write_bytes(b"x")
    assert [key.job_id for key, _ in first.spool.pending()] == ["kept"]
    first.close()
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    second, why = open_some_home("node")
    assert why == ""
    assert [key.job_id for key, _ in second.spool.pending()] == ["kept"]
    assert [path.name for path in (second.folder / "spool" / "quarantine").iterdir()] == [
        damaged.name
    ]
    assert list(other_disk.rglob("*.mpk")) == []
    second.close()


def test_an_heir_whose_home_is_full_hands_them_out_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, full = tmp_path / "temporary", tmp_path / "full"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    dead = open_spare_home(spare_roots()[0], "dead")
    dead.spool.put(encode(Outcome("kept", 1, "ramp", "ok")))
    dead.close()
    really = Spool.adopt

    def adopt(spool: Spool, other: Path) -> int:
        if full in spool.folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(spool, other)

    monkeypatch.setattr(Spool, "adopt", adopt)
    heir = Agent("heir", root=full)
    assert "No space left" in heir.problems()[0]
    assert [decode(data, Outcome).job_id for data in heir.pending()] == ["kept"]
    assert heir.problems() == []
    assert heir.acknowledge("kept", 1)
    assert heir.pending() == []
    heir.close()
    assert list(temporary.rglob("*.mpk")) == []


@pytest.mark.parametrize("how", ["open to others", "a link", "a file"])
def test_a_temporary_folder_of_others_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pichak_agent.room.LAST_RESORT", tmp_path / "none")
    root = tmp_path / f"pichak-{os.getuid()}"
    mine = tmp_path / "mine"
    (mine / "agent" / "precious").mkdir(parents=True)
    (mine / "agent" / "precious" / "lock").touch()
    if how == "a link":
        root.symlink_to(mine)
    elif how == "a file":
        root.touch()
    else:
        mine.rename(root)
        root.chmod(0o777)
    open_home(tmp_path / "home", "node").close()
    assert len(list(tmp_path.rglob("precious/lock"))) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=r"not a folder of this user's alone|File exists"):
        open_some_home("node")
    assert len(list(tmp_path.rglob("precious/lock"))) == 1


def test_a_users_own_folder_named_agent_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "agent" / "of_the_user").mkdir(parents=True)
    open_home(tmp_path, "node").close()
    assert (tmp_path / "agent" / "of_the_user").is_dir()


def test_a_sibling_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    strange = tmp_path / "agent" / "strange"
    strange.mkdir(parents=True)
    (strange / "lock").mkdir()
    home = open_home(tmp_path, "node")
    assert any("strange could not be taken over" in message for message in home.spool.messages)
    home.close()


def test_a_measuring_lock_is_one_for_all_agents_of_the_machine(tmp_path: Path) -> None:
    first, second = open_home(tmp_path, "a"), open_home(tmp_path, "b")
    mine, theirs = first.measuring_lock("cpu"), second.measuring_lock("cpu")
    assert mine.try_acquire("job 1")
    assert not theirs.try_acquire("job 2")
    assert theirs.holder() == "job 1"
    assert second.measuring_lock("gpu-1").try_acquire()
    mine.release()
    assert theirs.try_acquire("job 2")
    theirs.release()
    first.close()
    second.close()


def test_a_lock_ends_with_its_holder_and_survives_its_files_removal(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.try_acquire()
    path.unlink()
    path.parent.rmdir()
    # Whoever comes now locks a new file; the old holder holds what nobody can find.
    assert second.try_acquire()
    third = FileLock(path)
    assert not third.try_acquire()
    first.release()
    assert not third.try_acquire()
    second.release()
    assert third.try_acquire()
    third.release()
    third.release()


def test_a_lock_has_one_holder_among_threads(tmp_path: Path) -> None:
    inside, most, taken = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most, taken
        lock = FileLock(tmp_path / "lock")
        for _ in range(200):
            if lock.try_acquire():
                with guard:
                    inside += 1
                    most = max(most, inside)
                    taken += 1
                with guard:
                    inside -= 1
                lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken > 0
    assert most == 1
