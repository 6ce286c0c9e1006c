"""A job's own process: reads the job, runs it, sends one outcome. User code runs here only.

``python -m pichak_agent.child`` with the job's bytes as its input and the descriptor for its frames
in PICHAK_RESULT_FD.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from pichak_agent.child_jobs import JOBS, RefusedError
from pichak_agent.ending import ERROR_TEXT
from pichak_agent.environment import RESULT_FD
from pichak_agent.frames import FrameWriter
from pichak_agent.gpu_manners import PARAMS, GpuBusyError, join_use, leave_alone
from pichak_agent.messages import Job, MessageError, Outcome, clip_text, decode, encode
from pichak_agent.use_teller import USE_FILE, telling
from pichak_agent.versions import own_versions
from pichak_core.devices.host import this_host

_TRACEBACK_TEXT = 32 * 1024
_NOT_THE_KINDS = PARAMS | {USE_FILE}


class Stopped(BaseException):
    """The agent asked this process to end. Not an `Exception`: user code must not swallow it."""


def main() -> None:
    """Entry; never returns. Exit code 0 says that an outcome was sent."""
    fd = int(os.environ.pop(RESULT_FD))
    # What the job starts itself must not hold the pipe open.
    os.set_inheritable(fd, False)
    writer = FrameWriter(fd)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # What was printed must have left this process when it is killed.
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    _take_signals(writer)
    _use_allowed_cores()
    job = decode(sys.stdin.buffer.read(), Job)
    outcome = run_job(job, writer)
    try:
        encoded = encode(outcome)
    except MessageError as error:
        reason = f"the job's result cannot be sent: {error}"
        encoded = encode(Outcome(job.job_id, job.attempt, job.kind, "error", error=reason))
    writer.outcome(encoded)
    _leave()


def _use_allowed_cores() -> None:
    """OpenMP counts the cores of the affinity mask and knows nothing of a quota: on 192 cores of
    which 24 are paid for, its threads would wait for one another (field case 95)."""
    with contextlib.suppress(OSError, NotImplementedError, ValueError):
        os.environ.setdefault("OMP_NUM_THREADS", str(this_host().usable_cores()[0]))


def run_job(job: Job, writer: FrameWriter) -> Outcome:
    """The outcome of one job in this process; sends progress and partial results meanwhile."""
    latest: dict[str, Any] = {}

    def partial(result: Mapping[str, Any]) -> None:
        writer.partial(result)
        latest.update(result)

    def ended(status: str, result: Mapping[str, Any], error: str = "", trace: str = "") -> Outcome:
        return Outcome(
            job.job_id,
            job.attempt,
            job.kind,
            status,
            result,
            error=clip_text(error, ERROR_TEXT),
            traceback=clip_text(trace, _TRACEBACK_TEXT, keep="end"),
            versions=own_versions(),
        )

    try:
        if job.kind not in JOBS:
            raise RefusedError(
                f"this agent knows no job {job.kind[:40]!r}; it knows {', '.join(JOBS)}"
            )
        use = leave_alone(job.kind, job.params, progress=writer.progress)
        params = {name: value for name, value in job.params.items() if name not in _NOT_THE_KINDS}
        with telling(_use_file(job)):
            result = JOBS[job.kind](params, progress=writer.progress, partial=partial)
        return ended("ok", result if use is None else join_use(result, use))
    except GpuBusyError as error:
        return ended("busy", {"gpu_use": error.use.as_dict()}, str(error))
    except RefusedError as error:
        return ended("refused", latest, str(error))
    except (Stopped, KeyboardInterrupt) as error:
        return ended("cancelled", latest, "it was stopped", _trace(error))
    except SystemExit as error:
        called = f"the job's code called sys.exit({error.code!r})"
        return ended("error", latest, called, _trace(error))
    # User code may raise anything, classes of its own outside Exception too; each is an outcome.
    except BaseException as error:  # noqa: BLE001
        return ended("error", latest, describe(error, job.memory_cap_bytes), _trace(error))


def _use_file(job: Job) -> Path | None:
    """Where to tell what the job uses of its GPU; None without a GPU or a place."""
    path = job.params.get(USE_FILE)
    on_gpu = str(job.params.get("device", "")).startswith("cuda")
    return Path(path) if on_gpu and isinstance(path, str) and path else None


def describe(error: BaseException, memory_cap_bytes: int = 0) -> str:
    """``Type: text`` of any exception, also of one whose own text cannot be had."""
    try:
        text = str(error)
    # The text comes from code of the user's.
    except Exception:  # noqa: BLE001
        text = "(its text cannot be read)"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    refused = isinstance(error, MemoryError) or "can't allocate memory" in text
    if memory_cap_bytes and refused:
        said += f" (the job's memory cap is {memory_cap_bytes / 1024**3:.2f} GiB)"
    return said


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # Formatting calls the exception's own code too.
    except Exception:  # noqa: BLE001
        return "".join(traceback.format_tb(error.__traceback__))


def _take_signals(writer: FrameWriter) -> None:
    def stop(number: int, _frame: object) -> None:
        # Once: the outcome must not be interrupted on its way out.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        writer.interrupt(Stopped(signal.Signals(number).name))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    # Says where every thread is, also when the main one hangs in C code and `stop` cannot run.
    faulthandler.register(signal.SIGTERM, chain=True)


def _leave() -> None:
    """End now: threads and exit hooks of user code must not keep or crash a process whose outcome
    is sent."""
    streams: tuple[IO[str], ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(0)


if __name__ == "__main__":
    main()
