"""Files between machines: whole, or refused; killed at any step, never half under their name."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pichak_agent.messages import MAX_BYTES, Outcome, encode
from pichak_coordinator import framed_file, probe_file
from pichak_coordinator.framed_file import (
    MAGIC,
    FramedFileError,
    FrameWriter,
    check_place,
    read_frames,
    unfinished_path,
)
from pichak_coordinator.probe_file import Probe, ProbeJob, read_probe, write_end, write_job

HELLO = {"machine_id": "m1", "host": "gpu-a", "gpu_uuids": []}
FRAMES = [{"file": "x", "n": 1}, b"\x00outcome", {"text": "Привіт"}, b""]


def written(path: Path) -> bytes:
    made = FrameWriter(path)
    for frame in FRAMES:
        if isinstance(frame, bytes):
            made.outcome(frame)
        else:
            made.object(frame)
    made.finish()
    return path.read_bytes()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(FramedFileError) as caught:
        list(read_frames(path))
    return str(caught.value)


def test_what_was_written_is_read_and_only_the_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "r.mpk"
    written(path)
    assert list(read_frames(path)) == FRAMES
    assert list(tmp_path.iterdir()) == [path]


def test_cut_anywhere_it_is_refused_and_partially_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "r.mpk"
    whole = written(path)
    most = 0
    for length in range(len(whole)):
        assert str(path) in refused(path, whole[:length])
        if length >= len(MAGIC):
            some = list(read_frames(path, partial=True))
            assert some == FRAMES[: len(some)]
            assert len(some) >= most
            most = len(some)
    assert most == len(FRAMES)


def test_any_flipped_bit_and_anything_behind_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.mpk"
    whole = written(path)
    for position in range(len(whole)):
        for bit in (0, 5, 7):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            refused(path, bytes(damaged))
    assert "end" in refused(path, whole + whole)
    assert "end" in refused(path, whole + b"x")


def test_strangers_and_the_too_large_are_told(tmp_path: Path) -> None:
    path = tmp_path / "r.mpk"
    whole = written(path)
    assert "empty" in refused(path, b"")
    assert "same version" in refused(path, b"PICHAK02" + whole[8:])
    assert "not a file of" in refused(path, os.urandom(4096))
    # A frame that claims 4 GiB is refused by its length, before anything of it is read.
    assert "damaged" in refused(path, MAGIC + b"O" + b"\xff" * 4 + b"\0" * 16 + b"x")
    assert MAX_BYTES < 0xFFFFFFFF
    with pytest.raises(FramedFileError, match="cannot be read"):
        list(read_frames(tmp_path / "missing.mpk"))


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "r.mpk"
    path.write_bytes(b"precious")
    with pytest.raises(FramedFileError, match="--force"):
        FrameWriter(path)
    made = FrameWriter(path, replace=True)
    assert path.read_bytes() == b"precious"
    made.object({"new": 1})
    made.finish()
    assert list(read_frames(path)) == [{"new": 1}]
    left = FrameWriter(tmp_path / "other.mpk")
    left.close()
    with pytest.raises(FramedFileError, match="--partial"):
        FrameWriter(tmp_path / "other.mpk")
    with pytest.raises(FramedFileError, match="folder"):
        FrameWriter(tmp_path)
    with pytest.raises(FramedFileError, match="such does not exist: make that folder first"):
        FrameWriter(tmp_path / "no" / "such" / "folder.mpk")
    with pytest.raises(FramedFileError, match=r"other\.mpk\.part is no folder"):
        FrameWriter(tmp_path / "other.mpk.part" / "r.mpk")


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.mpk"
    made = FrameWriter(path)
    path.write_bytes(b"precious")
    with pytest.raises(FramedFileError, match="meanwhile"):
        made.finish()
    assert path.read_bytes() == b"precious"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    made = FrameWriter(tmp_path / "r.mpk")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, made._file.fileno())
    os.close(full)
    made.object({"a": 1})
    with pytest.raises(FramedFileError, match=r"r\.mpk\.part cannot be written: No space left"):
        made.sync()
    made.close()


# --- kill -9 ------------------------------------------------------------------------------------

JOBS = [
    ProbeJob.ended("cpu", encode(Outcome(f"p1-{kind}-0", 1, kind, "ok")))
    for kind in ("fingerprint", "task", "ramp")
]
PROBE = Probe("p1", 1.0e9, HELLO, {})


def write_probe(path: Path, done: Callable[[], object]) -> None:
    made = FrameWriter(path, replace=True)
    made.object(PROBE.header())
    made.sync()
    for job in JOBS:
        write_job(made, job)
        done()
    write_end(made, 1.0e9 + 60, False)


def killed_at(step: int, path: Path) -> tuple[bool, int]:
    """Write in a process that is killed before the given line of the writing code; (it was killed,
    jobs whose writing had returned)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        lines = 0

        def trace(frame, event, _argument):
            nonlocal lines
            if frame.f_code.co_filename not in (framed_file.__file__, probe_file.__file__):
                return None
            if event == "line":
                lines += 1
                if lines == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            write_probe(path, lambda: os.write(write, b"."))
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    done = len(os.read(read, 100))
    os.close(read)
    return os.WIFSIGNALED(status), done


@pytest.mark.parametrize("before", [False, True], ids=["new", "replacing"])
def test_killed_at_each_step_it_is_whole_or_not_there(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "r.mpk"
    step = steps_with_part = 0
    alive = False
    while not alive:
        step += 1
        unfinished_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if before:
            path.write_bytes(b"the old one")
        killed, done = killed_at(step, path)
        alive = not killed
        if path.exists() and path.read_bytes() != b"the old one":
            assert read_probe(path).jobs == tuple(JOBS)
            continue
        assert path.exists() == before
        part = unfinished_path(path)
        if not part.exists() or done == 0:
            assert done == 0
            continue
        steps_with_part += 1
        some = read_probe(part, partial=True)
        assert some.jobs == tuple(JOBS)[: len(some.jobs)]
        assert len(some.jobs) >= done
        if some.finished_unix is None:
            with pytest.raises(FramedFileError, match="--partial"):
                read_probe(part)
    assert step > 60
    assert steps_with_part > 20


def test_no_place_and_a_device_are_refused_and_left(tmp_path: Path) -> None:
    with pytest.raises(FramedFileError, match="is a folder"):
        check_place(Path(""), replace=True)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(FramedFileError, match="device or a pipe"):
            check_place(path, replace=True)
        assert not path.is_file()
