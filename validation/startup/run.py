"""The cost of importing the library and of asking the command for help."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

RUNS = 20
HEAVY = ("ray", "torch", "pynvml", "psutil", "numpy")
IMPORT = (
    "import time; t = time.perf_counter(); import pichak_core; "
    "print((time.perf_counter() - t) * 1000)"
)
LOADED = (
    "import sys; from pichak_coordinator import cli; sys.argv = ['pichak', '--help'];\n"
    "try: cli.main()\n"
    "except SystemExit: pass\n"
    "print([n for n in sys.modules if n in NAMES], file=sys.stderr)".replace("NAMES", repr(HEAVY))
)


def import_ms() -> float:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def help_ms() -> float:
    started = time.perf_counter()
    command = Path(sys.executable).with_name("pichak")
    subprocess.run([str(command), "--help"], capture_output=True, check=True)
    return (time.perf_counter() - started) * 1000


def heavy_modules() -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    return done.stderr.strip()


def main() -> int:
    imports = [import_ms() for _ in range(RUNS)]
    helps = [help_ms() for _ in range(RUNS)]
    heavy = heavy_modules()
    figures = {
        "import_ms_median": round(statistics.median(imports), 1),
        "import_ms_max": round(max(imports), 1),
        "help_ms_median": round(statistics.median(helps), 1),
        "help_ms_max": round(max(helps), 1),
        "heavy_modules_loaded_by_help": heavy,
    }
    met = figures["import_ms_median"] < 50 and figures["help_ms_median"] < 200 and heavy == "[]"
    result = {
        "question": "What do importing the library and `pichak --help` cost?",
        "rule": "README.md, written before the run",
        "met": met,
        "date": date.today().isoformat(),
        "environment": {
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "figures": figures,
    }
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(figures, indent=1), "rule met" if met else "RULE NOT MET", sep="\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
