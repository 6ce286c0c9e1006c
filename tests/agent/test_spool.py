from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pichak_agent.disk import Disk
from pichak_agent.messages import Outcome, decode, encode
from pichak_agent.spool import Key, Spool, SpoolError

DAY = 86400.0


def outcome(job_id: str = "job", attempt: int = 1, size: int = 0) -> bytes:
    return encode(Outcome(job_id, attempt, "ramp", "ok", {"filling": "x" * size, "n": attempt}))


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_the_same_bytes_come_back_until_they_are_acknowledged(tmp_path: Path) -> None:
    data = outcome(size=100)
    path = Spool(tmp_path).put(data)
    assert path.read_bytes() == data
    again = Spool(tmp_path)
    assert again.pending() == [(Key("job", 1), data)]
    assert again.get("job", 1) == data
    assert again.acknowledge("job", 1) is True
    assert again.acknowledge("job", 1) is False
    assert again.acknowledge("never", 7) is False
    assert again.pending() == []
    assert again.get("job", 1) is None
    assert list(tmp_path.iterdir()) == []


def test_the_first_outcome_of_a_key_stays(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    first = outcome()
    spool.put(first)
    spool.put(encode(Outcome("job", 1, "ramp", "error", error="second")))
    spool.put(outcome(attempt=2))
    assert [data for _, data in spool.pending()] == [first, outcome(attempt=2)]


def test_names_that_hold_dots_are_told_apart(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    keys = [("a", 1), ("a.1", 1), ("a.1", 11), (".a", 1), ("-a_b.mpk", 2), ("x" * 128, 1000)]
    for job_id, attempt in keys:
        spool.put(outcome(job_id, attempt))
    assert {key for key, _ in spool.pending()} == {Key(*key) for key in keys}
    spool.acknowledge("a.1", 1)
    assert {key for key, _ in spool.pending()} == {Key(*key) for key in keys} - {Key("a.1", 1)}


def test_bytes_that_are_no_outcome_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="no outcome"):
        Spool(tmp_path).put(b"garbage")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "zeros", "renamed"])
def test_a_damaged_file_is_put_aside_and_told(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path)
    whole = outcome("whole")
    path = spool.put(outcome("broken", size=200))
    spool.put(whole)
    data = path.read_bytes()
    if damage == "renamed":
        path.rename(tmp_path / "strange.mpk")
    else:
        flipped = data[:100] + b"y" + data[101:]
        damaged = {"cut": data[:-7], "flipped": flipped, "empty": b"", "zeros": bytes(len(data))}
        path.write_bytes(damaged[damage])
    again = Spool(tmp_path)
    assert [data for _, data in again.pending()] == [whole]
    assert any("put aside" in message for message in again.messages)
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert [data for _, data in again.pending()] == [whole]


def test_what_was_put_aside_is_told_by_the_next_agent_too(tmp_path: Path) -> None:
    """Who put it aside may be killed before anybody hears of it."""
    first = Spool(tmp_path)
    assert list(first.messages) == []
    (tmp_path / "strange.mpk").write_bytes(b"x")
    first.pending()
    (message,) = Spool(tmp_path).messages
    corner = tmp_path / "quarantine"
    assert message.startswith(f"a damaged file was put aside in {corner}, the last strange.mpk")
    (corner / "strange.mpk").unlink()
    assert list(Spool(tmp_path).messages) == []


def test_the_quarantine_does_not_grow_for_ever(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(40):
        (tmp_path / f"strange-{number}.mpk").write_bytes(b"x")
    spool.pending()
    assert len(list((tmp_path / "quarantine").iterdir())) == 32


# -- killed at every step ---------------------------------------------------------------------


class Killing(Disk):
    """Kills its process before the disk step number `left`; writes go in pieces."""

    def __init__(self, left: int) -> None:
        self._left = left

    def _count(self) -> None:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._count()
        return super().write(fd, data[:300])

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._count()
        super().sync_folder(folder)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)


def killed_at(folder: Path, step: int, use: Callable[[Spool], object]) -> bool:
    """Use the spool in a process of its own, killed before disk step `step`; whether it was."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            use(Spool(folder, disk=Killing(step), max_bytes=9000))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_a_kill_at_any_step_of_a_write_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    old, new = outcome("old"), encode(Outcome("new", 1, "ramp", "ok", {"filling": "x" * 700}))
    seen = set()
    for step in range(20):
        folder = tmp_path / str(step)
        Spool(folder).put(old)
        killed = killed_at(folder, step, lambda spool: spool.put(new))
        after = Spool(folder)
        found = dict(after.pending())
        assert found.pop(Key("old", 1)) == old
        assert found in ({}, {Key("new", 1): new})
        assert not after.messages
        assert not list(folder.glob("*.part"))
        seen.add((killed, bool(found)))
        after.put(new)
        assert dict(after.pending())[Key("new", 1)] == new
        if not killed:
            break
    # Create, three writes, sync, rename, sync: killed before and after the rename, and not at all.
    assert step == 7
    assert seen == {(True, False), (True, True), (False, True)}


def test_a_kill_at_any_step_of_an_acknowledgement_leaves_all_of_it_or_nothing(
    tmp_path: Path,
) -> None:
    for step in range(10):
        folder = tmp_path / str(step)
        Spool(folder).put(outcome())
        killed = killed_at(folder, step, lambda spool: spool.acknowledge("job", 1))
        assert Spool(folder).pending() in ([], [(Key("job", 1), outcome())])
        if not killed:
            break
    assert step == 2


def test_a_kill_while_an_old_outcome_makes_room_keeps_one_for_each_key(tmp_path: Path) -> None:
    """The old one is there whole, or its note is; never none, never both."""
    for step in range(40):
        folder = tmp_path / str(step)
        Spool(folder).put(outcome("old", size=8000))
        killed = killed_at(folder, step, lambda spool: spool.put(outcome("new", size=5000)))
        found = dict(Spool(folder).pending())
        old = decode(found[Key("old", 1)], Outcome)
        assert old.ok or "dropped on the node" in old.error
        assert set(found) <= {Key("old", 1), Key("new", 1)}
        assert len(list(folder.glob("*.mpk"))) == len(found)
        if not killed:
            assert set(found) == {Key("old", 1), Key("new", 1)}
            break
    assert step > 10


# -- disks that fail --------------------------------------------------------------------------


class Failing(Disk):
    """Fails one of its calls with "no space left"."""

    def __init__(self, call: str) -> None:
        def fail(*_arguments: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(self, call, fail)


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_folder"])
def test_a_disk_that_fails_is_told_and_leaves_nothing(tmp_path: Path, call: str) -> None:
    spool = Spool(tmp_path, disk=Failing(call))
    with pytest.raises(SpoolError, match=r"job job, attempt 1 .* No space left on device"):
        spool.put(outcome())
    assert list(tmp_path.iterdir()) == []
    assert spool.pending() == []


@pytest.mark.root
def test_a_really_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.decode()}")
    try:
        spool = Spool(small / "spool")
        kept = outcome("kept", size=600_000)
        spool.put(kept)
        with pytest.raises(SpoolError, match="No space left on device"):
            spool.put(outcome("too-much", size=600_000))
        assert dict(spool.pending()) == {Key("kept", 1): kept}
        spool.acknowledge("kept", 1)
        spool.put(outcome("too-much", size=600_000))
        assert dict(spool.pending()) == {Key("too-much", 1): outcome("too-much", size=600_000)}
    finally:
        subprocess.run(["umount", str(small)], check=True)


# -- limits -----------------------------------------------------------------------------------


def age(spool: Spool, job_id: str, seconds: float, clock: Clock) -> None:
    (path,) = spool.folder.glob(f"{job_id}.1.*.mpk")
    os.utime(path, (clock.now - seconds, clock.now - seconds))


def test_the_oldest_gives_way_to_a_note_that_says_so(tmp_path: Path) -> None:
    clock = Clock(1e9)
    spool = Spool(tmp_path, max_bytes=25_000, clock=clock)
    for number, name in enumerate(("first", "second")):
        spool.put(outcome(name, size=10_000))
        age(spool, name, 100 - number, clock)
    spool.put(outcome("third", size=10_000))
    found = {key.job_id: decode(data, Outcome) for key, data in spool.pending()}
    assert found["second"].ok
    assert found["third"].ok
    lost = found["first"]
    assert (lost.status, lost.attempt, lost.kind, lost.result) == ("error", 1, "ramp", {})
    assert lost.error == (
        "its outcome was dropped on the node (it was 'ok'): the spool's 25,000 bytes were full"
    )
    assert any("dropped: the outcome of first" in message for message in spool.messages)


def test_an_outcome_too_old_gives_way_to_a_note_and_the_note_ends_too(tmp_path: Path) -> None:
    clock, steady = Clock(1e9), Clock(0.0)

    def open_again() -> Spool:
        return Spool(tmp_path, max_age_seconds=30 * DAY, clock=clock, monotonic=steady)

    spool = open_again()
    for name in ("old", "young"):
        spool.put(outcome(name))
    age(spool, "old", 30.5 * DAY, clock)
    age(spool, "young", 28 * DAY, clock)
    again = open_again()
    steady.now = 1.1 * DAY
    again.put(outcome("new"))
    found = {key.job_id: decode(data, Outcome) for key, data in again.pending()}
    assert found["young"].ok
    assert "nobody acknowledged it in 32 days" in found["old"].error
    age(again, "old", 31 * DAY, clock)
    last = open_again()
    steady.now = 2.2 * DAY
    last.acknowledge("young", 1)
    last.put(outcome("newer"))
    assert {key.job_id for key, _ in last.pending()} == {"new", "newer"}
    assert any("dropped: the outcome of old" in message for message in last.messages)


@pytest.mark.parametrize("jump", [-40 * 365 * DAY, 40 * 365 * DAY])
def test_a_clock_that_is_set_drops_nothing(tmp_path: Path, jump: float) -> None:
    """A machine's clock may start in 1970 and be set right while outcomes wait, or be set wrong."""
    clock, steady = Clock(1e9), Clock(0.0)
    spool = Spool(tmp_path, clock=clock, monotonic=steady)
    spool.put(outcome("before"))
    age(spool, "before", 0.0, clock)
    clock.now += jump
    for day in range(29):
        steady.now = day * DAY
        spool.put(outcome(f"at-{day}"))
    assert all(decode(data, Outcome).ok for _, data in spool.pending())
    # Nor where the next agent finds them: it waits for a day.
    again = Spool(tmp_path, clock=clock, monotonic=steady)
    steady.now += 0.9 * DAY
    again.put(outcome("later"))
    assert all(decode(data, Outcome).ok for _, data in again.pending())


def test_the_steady_clock_ages_what_the_wall_clock_does_not(tmp_path: Path) -> None:
    clock, steady = Clock(1e9), Clock(0.0)
    spool = Spool(tmp_path, clock=clock, monotonic=steady)
    spool.put(outcome())
    age(spool, "job", 0.0, clock)
    spool.put(outcome("other"))
    steady.now = 31 * DAY
    spool.put(outcome("late"))
    found = {key.job_id: decode(data, Outcome) for key, data in spool.pending()}
    assert "nobody acknowledged it in 31 days" in found["job"].error
    assert found["late"].ok


def test_a_spool_full_of_what_cannot_give_way_refuses(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=2_000)
    for number in range(1, 20):
        try:
            spool.put(outcome("small", attempt=number, size=300))
        except SpoolError as error:
            assert "is full" in str(error)
            break
    else:
        pytest.fail("it took more than its limit")
    assert len(spool.pending()) == number - 1


def test_pending_comes_in_portions_the_oldest_first(tmp_path: Path) -> None:
    clock = Clock(1e9)
    spool = Spool(tmp_path, clock=clock)
    for number, name in enumerate(("c", "a", "b")):
        spool.put(outcome(name, size=1000))
        age(spool, name, 100 - number, clock)
    assert [key.job_id for key, _ in spool.pending()] == ["c", "a", "b"]
    assert [key.job_id for key, _ in spool.pending(limit_bytes=2500)] == ["c", "a"]
    assert [key.job_id for key, _ in spool.pending(limit_bytes=1)] == ["c"]


# -- taking over ------------------------------------------------------------------------------


def test_what_cannot_be_taken_over_is_told_and_stays(tmp_path: Path) -> None:
    dead, heir = Spool(tmp_path / "dead"), Spool(tmp_path / "heir")
    dead.put(outcome("theirs"))
    strange = dead.folder / "strange.mpk"
    strange.write_bytes(b"x")
    (heir.folder / "quarantine").write_text("no folder can be made here")
    for _ in range(3):
        with pytest.raises(OSError, match="1 damaged files of it could not be moved"):
            heir.adopt(dead.folder)
    assert strange.exists()
    assert [key.job_id for key, _ in heir.pending()] == ["theirs"]
    # Said once, however often it is tried.
    assert len([text for text in heir.messages if "cannot be moved" in text]) == 1


def test_a_kill_at_any_step_of_taking_over_loses_nothing(tmp_path: Path) -> None:
    for step in range(20):
        folder = tmp_path / str(step)
        dead, heir = Spool(folder / "dead"), Spool(folder / "heir")
        wanted = {}
        for name in ("a", "b"):
            dead.put(outcome(name))
            wanted[Key(name, 1)] = outcome(name)
        heir.put(outcome("mine"))
        killed = killed_at(heir.folder, step, lambda spool, dead=dead: spool.adopt(dead.folder))
        next_one = Spool(heir.folder)
        next_one.adopt(dead.folder)
        assert dict(next_one.pending()) == {**wanted, Key("mine", 1): outcome("mine")}
        assert list(dead.folder.glob("*.mpk")) == []
        if not killed:
            break
    assert step == 3  # two names, and the folder's sync


def test_taking_over_from_another_file_system_survives_a_kill_too(tmp_path: Path) -> None:
    class Elsewhere(Killing):
        def rename(self, source: Path, target: Path) -> None:
            if source.parent != target.parent:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            super().rename(source, target)

    for step in range(20):
        folder = tmp_path / str(step)
        dead, heir = Spool(folder / "dead"), Spool(folder / "heir")
        dead.put(outcome("a"))
        pid = os.fork()
        if pid == 0:
            try:
                Spool(heir.folder, disk=Elsewhere(step)).adopt(dead.folder)
            finally:
                os._exit(0)
        killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        next_one = Spool(heir.folder)
        with contextlib.suppress(OSError):
            next_one.adopt(dead.folder)
        assert dict(next_one.pending()) == {Key("a", 1): outcome("a")}
        if not killed:
            break
    assert step > 5


def test_adopt_moves_everything_once(tmp_path: Path) -> None:
    dead, heir = Spool(tmp_path / "dead"), Spool(tmp_path / "heir")
    dead.put(outcome("theirs"))
    dead.put(encode(Outcome("both", 1, "ramp", "error", error="theirs")))
    (tmp_path / "dead" / "strange.mpk").write_bytes(b"x")
    heir.put(outcome("both"))
    assert heir.adopt(tmp_path / "dead") == 1
    assert dict(heir.pending()) == {
        Key("theirs", 1): outcome("theirs"),
        Key("both", 1): outcome("both"),
    }
    assert list((tmp_path / "dead").glob("*.mpk")) == []
    assert len(list((tmp_path / "heir" / "quarantine").iterdir())) == 2
    assert heir.adopt(tmp_path / "dead") == 0
    shutil.rmtree(tmp_path / "dead")
    assert heir.adopt(tmp_path / "dead") == 0
