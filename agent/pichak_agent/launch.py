"""Starts a job's processes under their warden: folders, pipes, variables, and nothing of them left
when the block ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pichak_agent.environment import MARK, RESULT_FD, child_environment
from pichak_agent.messages import Job, encode
from pichak_agent.room import ROOM_BYTES, roomy_folder, scratch_places
from pichak_core.devices.job_group import JobGroup, make_group
from pichak_core.devices.processes import initial_environment


@dataclass(frozen=True)
class Launched:
    """The ends that are ours: `control` speaks with the warden, `result` brings frames, `log` what
    the job prints. `group` is the job's own control group, or why it has none."""

    warden: subprocess.Popen[bytes]
    control: socket.socket
    result: io.FileIO
    log: io.FileIO
    group: JobGroup | str

    def say(self, line: str) -> bool:
        """A line to the warden; False when it has gone."""
        try:
            self.control.sendall(line.encode() + b"\n")
        except OSError:
            return False
        return True


@contextmanager
def launched(
    job: Job,
    argv: Sequence[str] | None,
    *,
    workdir: Path | None,
    mark: str,
    give_up_seconds: float,
) -> Iterator[Launched]:
    """Start `argv` (without one the job's own program) with the job's bytes as its input; `OSError`
    when that is not possible. Its folder is in `workdir`, or elsewhere while that takes nothing.
    `mark` is in the variables of all of its processes.
    """
    if not hasattr(os, "fork"):
        raise OSError(
            "a job runs under a process that keeps hold of its tree, which needs fork(); on "
            "Windows run the agent inside WSL2"
        )
    with ExitStack() as stack:
        given_input = encode(job)
        room = ROOM_BYTES + len(given_input)
        folder = roomy_folder("job-", scratch_places(workdir), room)
        stack.callback(_remove, folder)
        # Short, because sockets are made in it and their paths may have 107 bytes.
        temporary = roomy_folder("pk-", [*scratch_places(), folder.parent])
        stack.callback(_remove, temporary)
        # Unbuffered, so that it is all there or it is an error here.
        source = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        _write_all(source, given_input, folder)
        source.seek(0)
        control, control_theirs = socket.socketpair()
        stack.callback(control.close)
        stack.callback(control_theirs.close)
        result, result_theirs = _pipe(stack)
        log, log_theirs = _pipe(stack)
        group = make_group(mark, job.memory_cap_bytes)
        if isinstance(group, JobGroup):
            stack.callback(group.remove)
        given = (control_theirs.fileno(), result_theirs.fileno())
        warden = subprocess.Popen(
            [*_python(), "-m", "pichak_agent.warden", *map(str, given)],
            stdin=source,
            stdout=log_theirs,
            stderr=log_theirs,
            cwd=folder,
            env={
                **child_environment(
                    os.environ,
                    initial_environment(),
                    params=job.params,
                    working_folder=_working_folder(),
                ),
                MARK: mark,
                RESULT_FD: str(result_theirs.fileno()),
                "TMPDIR": str(temporary),
            },
            pass_fds=given,
            start_new_session=True,
        )
        for end in (control_theirs, result_theirs, log_theirs):
            end.close()
        made = Launched(warden, control, result, log, group)
        order = {
            "argv": list(argv or [*_python(), "-m", "pichak_agent.child"]),
            "memory_cap_bytes": job.memory_cap_bytes,
            "folders": [str(folder), str(temporary)],
            "give_up_seconds": give_up_seconds,
            "group": str(group.folder) if isinstance(group, JobGroup) else "",
        }
        made.say(json.dumps(order))
        yield made


def _python() -> list[str]:
    """This interpreter; from 3.11 on the current folder stays off its path (before that it is the
    job's own, which is empty)."""
    return [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]


def _pipe(stack: ExitStack) -> tuple[io.FileIO, io.FileIO]:
    read, write = os.pipe()
    return stack.enter_context(io.FileIO(read, "r")), stack.enter_context(io.FileIO(write, "w"))


def _write_all(file: io.RawIOBase, data: bytes, folder: Path) -> None:
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) or 0 :]
    except OSError as error:
        raise OSError(
            f"its input cannot be written in {folder} ({error.strerror or error}): free some of "
            "that disk"
        ) from error


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        # It was removed under this process.
        return Path(os.sep)


def _remove(folder: Path) -> None:
    try:
        # An empty one goes without a descriptor, of which there may be none.
        folder.rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
