"""A process that keeps NVML open and answers requests, and that nobody ever waits for.

Opening NVML costs seconds on a card without persistence, and a sick driver hangs in any call. So
one child stays, is asked with a line, and its answer is collected when it is there; one that
exceeds its budget is killed and left behind.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pichak_core.devices.gpus import Report, end_child, no_gpu, parse_record, start_child
from pichak_core.measurement import Reason, Unmeasured

Request = Literal["full", "live"]


@dataclass
class Answer:
    """What came back for one request. `report` holds what was said until then also where the child
    died or hung: `report.gap` says so, and `ended` that the session is over. `cpu_seconds` is what
    the child spent, `seconds` how long NVML took."""

    request: Request
    report: Report = field(default_factory=Report)
    count: int | None = None
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    ended: bool = False


class NvmlSession:
    """One child. `recording` is a file of `pichak gpu --record` that stands for the driver.

    `OSError` when no process can be started. Not for several threads at once.
    """

    def __init__(
        self, recording: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        arguments = ["serve", *([str(recording.absolute())] if recording else [])]
        self._process = start_child(arguments, stdin=subprocess.PIPE, quiet=True)
        self._lock = threading.Lock()
        self._pending: Answer | None = None
        self._finished: Answer | None = None
        self._asked = self._budget = 0.0
        self._listener_seconds = 0.0
        self._thread = threading.Thread(target=self._listen, name="nvml-session", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def listener_cpu_seconds(self) -> float:
        """CPU time that this process has spent on listening."""
        return self._listener_seconds

    @property
    def alive(self) -> bool:
        """Whether the child runs, which it also does where it is stuck and was killed."""
        return self._process.poll() is None

    @property
    def waiting(self) -> bool:
        """Whether a request is under way, or its answer was not collected."""
        return self._pending is not None or self._finished is not None

    def ask(self, request: Request, budget_seconds: float) -> None:
        """Send a request; nothing when one is under way already."""
        with self._lock:
            if self.waiting:
                return
            self._pending = Answer(request)
        self._asked, self._budget = self._clock(), budget_seconds
        stream = self._process.stdin
        with contextlib.suppress(OSError, ValueError):  # it is dead: its end is the answer
            if stream is not None:
                stream.write(f"{request}\n".encode())
                stream.flush()

    def collect(self) -> Answer | None:
        """The answer once it is complete, the child is dead or the budget is over; else None."""
        with self._lock:
            answer, self._finished = self._finished, None
            if answer is not None or self._pending is None:
                return answer
            if self._clock() - self._asked <= self._budget:
                return None
            answer, self._pending = self._pending, None
        answer.ended = True
        answer.report.gap = Unmeasured(
            "nvml", Reason.TIMED_OUT, f"NVML gave no answer within {self._budget:g} s"
        )
        self.close(patience_seconds=0.0)
        return answer

    def close(self, patience_seconds: float = 2.0) -> None:
        """End the child: it may end by itself first, then it is killed."""
        stream = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.close()
        if patience_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_seconds)
        if self._process.poll() is None:
            end_child(self._process)
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        for raw in stream:
            record = parse_record(raw)
            if record is not None:
                self._take(record)
            self._listener_seconds = time.thread_time()
        self._end()
        stream.close()

    def _take(self, record: dict[str, Any]) -> None:
        with self._lock:
            answer = self._pending
            if answer is None:
                return  # too late: it was given up
            if "done" in record:
                answer.cpu_seconds = float(record["done"]["cpu_seconds"])
                answer.seconds = float(record["done"]["seconds"])
                if answer.count == 0:
                    answer.report.gap = no_gpu()
                self._pending, self._finished = None, answer
            else:
                told = answer.report.take(record)
                answer.count = told if told is not None else answer.count

    def _end(self) -> None:
        """The child closed its end: what it had said, and how it died."""
        try:
            code: int | None = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        with self._lock:
            answer, self._pending = self._pending, None
            if answer is None:
                return
            answer.ended = True
            if answer.report.gap is None:
                how = f"of signal {-code}" if code and code < 0 else f"with exit code {code}"
                reason = Reason.LOST if code and code < 0 else Reason.FAILED
                detail = f"the process that reads NVML died {how}"
                answer.report.gap = Unmeasured("nvml", reason, detail)
            self._finished = answer
