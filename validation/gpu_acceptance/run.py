"""Every GPU path of the library on one GPU: checks, one JSON, a summary. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

MIB = 2**20
TOTAL_SECONDS = 300

#: (model, cap in MiB, tokens a row): on a GPU, and to try the script on a CPU.
RAMPS = [("builtin:gpt-1m", 1024, 512), ("builtin:gpt-25m", 4096, 512), ("hf", 10240, 512)]
SMALL_RAMPS = [("builtin:gpt-1m", 40, 32), ("builtin:gpt-1m", 60, 32), ("hf", 40, 32)]


def plan(small: bool) -> list[tuple[str, dict[str, Any], float]]:
    """(stage, its arguments, its time limit in seconds), in the order in which they run."""
    made: list[tuple[str, dict[str, Any], float]] = [
        ("fingerprint", {}, 120),
        ("launch", {}, 60),
        ("copies", {"sizes_mb": [1, 4] if small else [5, 256]}, 90),
        ("cap", {"small": small}, 60),
    ]
    for model, cap_mib, tokens in SMALL_RAMPS if small else RAMPS:
        steps = 6 if small else 300
        size = {"model": model, "tokens": tokens, "small": small}
        made.append(("ramp", {**size, "cap_mib": cap_mib}, 120))
        made.append(("training", {**size, "steps": steps}, 120))
    made.append(("noise", {"small": small}, 90))
    made += [("golden", {"flip": False}, 60), ("golden", {"flip": True}, 60)]
    return made


def run_stage(name: str, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One stage in a process of its own; what goes wrong with it is a check that does not hold."""
    with tempfile.TemporaryDirectory(prefix="gpu_acceptance") as folder:
        out = Path(folder) / "out.json"
        given = json.dumps({**arguments, "folder": folder})
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / "stages.py"), name, given, str(out)],
                timeout=seconds,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            said, ending = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            said, ending = error.stdout or b"", f"no answer within {seconds:.0f} s"
        if out.exists():
            made: dict[str, Any] = json.loads(out.read_text())
        else:
            tail = said.decode("utf-8", "replace")[-1500:]
            made = {"checks": [["ended", False, f"{ending}: {tail}"]], "figures": {}}
        made.update(stage=name, arguments=arguments, seconds=round(time.monotonic() - begun, 1))
    return made


def environment(device: str) -> dict[str, Any]:
    import psutil
    import torch
    import transformers

    made = {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device != "cpu":
        from pichak_core.devices.gpus import read_gpus

        report = read_gpus()
        properties = torch.cuda.get_device_properties(device)
        made["device"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        made["cuda"] = torch.version.cuda
        made["driver"] = report.system.get("driver_version", str(report.gap))
    return made


def missing_gpu(device: str) -> str:
    """Why the run cannot be done here; "" when it can."""
    try:
        import torch
    except ImportError as error:
        return f"{error}; install a CUDA build of torch"
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device on this machine, and this experiment "
            "is about a GPU; to try the script itself: --device cpu --small"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} CUDA devices, and {device} is none of them"
    return ""


def run_all(device: str, small: bool) -> dict[str, Any]:
    """Every stage, told as it ends."""
    stages: list[dict[str, Any]] = []
    ramped: dict[str, Any] = {}
    begun = time.monotonic()
    for name, arguments, seconds in plan(small):
        given = {**arguments, "device": device}
        if name == "training":
            # what the ramp found just before; without it there is nothing to train at
            if "micro_batch_max" not in ramped:
                continue
            given.update(rows=ramped["micro_batch_max"], cap_bytes=ramped["cap_bytes"])
        stage = run_stage(name, given, seconds)
        ramped = stage["figures"] if name == "ramp" else ramped
        stages.append(stage)
        told = ", ".join(str(v) for k, v in arguments.items() if k in ("model", "cap_mib", "flip"))
        print(f"{name:<12}{told:<24}{stage['seconds']:>6.1f} s", flush=True)
        for what, holds, detail in stage["checks"]:
            print(f"    {'ok  ' if holds else 'FAIL'} {what}: {detail}", flush=True)
    total = time.monotonic() - begun
    whole = whole_checks(stages, total, small)
    for what, holds, detail in whole:
        print(f"    {'ok  ' if holds else 'FAIL'} {what}: {detail}", flush=True)
    return {
        "question": "Does every GPU path of the library work on a real GPU?",
        "rule": "README.md, written before the run",
        "met": all(holds for stage in stages for _, holds, _ in stage["checks"])
        and all(holds for _, holds, _ in whole),
        "date": date.today().isoformat(),
        "dry_run": small or device == "cpu",
        "environment": environment(device),
        "seconds": round(total, 1),
        "checks": whole,
        "stages": stages,
    }


def whole_checks(stages: list[dict[str, Any]], seconds: float, small: bool) -> list[list[Any]]:
    """What only several stages together show."""
    golden = [s["figures"].get("digest") for s in stages if s["stage"] == "golden"]
    ramps = [s for s in stages if s["stage"] == "ramp"]
    trained = [s for s in stages if s["stage"] == "training"]
    limit = TOTAL_SECONDS * (10 if small else 1)  # a busy CPU is no measure of it
    return [
        ["two processes compute the same bits", len(set(golden)) == 1 and None not in golden,
         ", ".join(str(digest)[:12] for digest in golden)],
        ["every ramp was trained at", len(ramps) == len(trained) == 3,
         f"{len(ramps)} ramps, {len(trained)} trainings"],
        ["the whole run is short", seconds <= limit, f"{seconds:.0f} s of {limit}"],
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu with --small")
    parser.add_argument("--small", action="store_true", help="try the script: small, few steps")
    parser.add_argument("--out", type=Path, help="the result's file")
    given = parser.parse_args()
    if given.device == "cpu" and not given.small:
        parser.error("--device cpu only tries the script: give --small as well")
    reason = missing_gpu(given.device)
    if reason:
        print(f"gpu_acceptance: {reason}", file=sys.stderr)
        return 2
    result = run_all(given.device, given.small)
    out = given.out or (None if result["dry_run"] else HERE / "result.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print("rule met" if result["met"] else "RULE NOT MET", end="")
    print(" (a dry run: nothing about a GPU)" if result["dry_run"] else "")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
