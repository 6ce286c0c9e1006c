"""The process that reads the counters, with `FakeWindows` for the libraries of Windows.

The file that FAKE_WINDOWS names says before each reading what is there, and what the driver does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fake_windows import FakeWindows

from pichak_core.devices.nvml_child import write_record
from pichak_core.devices.windows_child import serve


def main(arguments: Sequence[str]) -> None:
    windows = FakeWindows()

    def look() -> None:
        told = json.loads(Path(os.environ["FAKE_WINDOWS"]).read_text())
        windows.processes = {int(pid): tuple(both) for pid, both in told["processes"].items()}
        windows.status = told.get("status", 0)
        if told.get("does") == "hang":
            time.sleep(600)
        if told.get("does") == "die":
            os._exit(3)

    windows.look = look
    serve(windows.server(time.monotonic), sys.stdin, write_record)
