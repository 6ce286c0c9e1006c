"""More than 100,000 broken messages against the reader and the store, held against README.md."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

from attack import attack

COUNT, SEED = 120_000, 0
MEMORY_MB = 600.0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = attack(Path(folder) / "fleet.db", COUNT, SEED)
    met = {
        "1 nothing crashes, nothing of what is refused is stored": not found["wrong"],
        "2 only sound messages are taken": found["never_refused"] == ["replayed"],
        "3 memory stays bounded": found["peak_rss_growth_mb"] <= MEMORY_MB,
    }
    result = {
        "question": "What does the coordinator do with messages that are not what they should be?",
        "rule": "README.md, written before the run",
        "met": all(met.values()),
        "date": date.today().isoformat(),
        "environment": {
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "parts": met,
        "figures": found,
    }
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
