"""A process that answers requests, and that nobody ever waits for.

What a sick driver does to a call, a child pays for: it is asked with a line, its answer is
collected when it is there, and one that exceeds its budget is killed and left behind.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pichak_core.devices.gpus import end_child, parse_record
from pichak_core.measurement import Reason


class Asked(Protocol):
    """What comes back for one request. `cpu_seconds` is what the child spent, `seconds` how long it
    took; `ended`: the session is over."""

    cpu_seconds: float
    seconds: float
    ended: bool

    def take(self, record: dict[str, Any]) -> None:
        """Add a record of the child's."""

    def complete(self) -> None:
        """Nothing follows."""

    def fail(self, reason: Reason, detail: str) -> None:
        """The child hung or died; what it had said before stands."""


A = TypeVar("A", bound=Asked)


class AskedChild(Generic[A]):
    """`process` reads requests on stdin, a line each, and writes JSON records to stdout, the last
    of each answer ``done``; `answer` makes an empty answer for a request; `what` is what it reads.

    Not for several threads at once.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        answer: Callable[[str], A],
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process, self._answer, self._what, self._clock = process, answer, what, clock
        self._lock = threading.Lock()
        self._pending: A | None = None
        self._finished: A | None = None
        self._asked = self._budget = 0.0
        self._listener_seconds = 0.0
        self._thread = threading.Thread(target=self._listen, name=f"asks {what}", daemon=True)
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

    def ask(self, request: str, budget_seconds: float) -> None:
        """Send a request; nothing when one is under way already."""
        with self._lock:
            if self.waiting:
                return
            self._pending = self._answer(request)
        self._asked, self._budget = self._clock(), budget_seconds
        stream = self._process.stdin
        with contextlib.suppress(OSError, ValueError):  # it is dead: its end is the answer
            if stream is not None:
                stream.write(f"{request}\n".encode())
                stream.flush()

    def collect(self) -> A | None:
        """The answer once it is complete, the child is dead or the budget is over; else None."""
        with self._lock:
            answer, self._finished = self._finished, None
            if answer is not None or self._pending is None:
                return answer
            if self._clock() - self._asked <= self._budget:
                return None
            answer, self._pending = self._pending, None
        answer.ended = True
        answer.fail(Reason.TIMED_OUT, f"{self._what} gave no answer within {self._budget:g} s")
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
                answer.complete()
                self._pending, self._finished = None, answer
            else:
                answer.take(record)

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
            how = f"of signal {-code}" if code and code < 0 else f"with exit code {code}"
            reason = Reason.LOST if code and code < 0 else Reason.FAILED
            answer.fail(reason, f"the process that reads {self._what} died {how}")
            self._finished = answer
