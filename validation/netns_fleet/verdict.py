"""What every experiment on hosts of network namespaces begins and ends with."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn


def need_root(*tools: str) -> None:
    """Ends the process with 2 where these hosts cannot be made; makes SIGTERM end it cleanly."""
    missing = [
        tool for tool in ("ip", "tc", "nft", "unshare", *tools) if shutil.which(tool) is None
    ]
    if os.geteuid() != 0 or missing:
        print("not run: network namespaces need root and", ", ".join(missing or ["nothing else"]))
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def conclude(
    out: Path,
    question: str,
    rule: Mapping[str, bool],
    *,
    started: float,
    environment: Mapping[str, Any] | None = None,
    **more: Any,
) -> NoReturn:
    """Write the result with its surroundings, say part by part what was met, and exit with 0 when
    all of it was. `started` is in Unix seconds."""
    result = {
        "question": question,
        "met": all(rule.values()),
        "rule": rule,
        **more,
        "environment": {
            "cores": os.cpu_count(),
            "load_at_the_end": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "ray": version("ray"),
            **(environment or {}),
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds_in_all": round(time.time() - started),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    for part, met in rule.items():
        print("met    " if met else "NOT MET", part)
    sys.exit(0 if result["met"] else 1)
