"""A process that keeps NVML open and answers requests.

Opening NVML costs seconds on a card without persistence, so one child stays; see `asked_child`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pichak_core.devices.asked_child import AskedChild
from pichak_core.devices.gpus import Report, no_gpu, start_child
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

    def take(self, record: dict[str, Any]) -> None:
        told = self.report.take(record)
        self.count = told if told is not None else self.count

    def complete(self) -> None:
        if self.count == 0:
            self.report.gap = no_gpu()

    def fail(self, reason: Reason, detail: str) -> None:
        # What it said of itself before it ended says more; that it hung is the last word.
        if self.report.gap is None or reason is Reason.TIMED_OUT:
            self.report.gap = Unmeasured("nvml", reason, detail)


class NvmlSession(AskedChild[Answer]):
    """One child. `recording` is a file of `pichak gpu --record` that stands for the driver.

    `OSError` when no process can be started. Not for several threads at once.
    """

    def __init__(
        self, recording: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        arguments = ["serve", *([str(recording.absolute())] if recording else [])]
        process = start_child(arguments, stdin=subprocess.PIPE, quiet=True)
        super().__init__(process, lambda asked: Answer(cast(Request, asked)), "NVML", clock)
