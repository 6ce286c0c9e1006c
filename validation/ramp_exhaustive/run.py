"""The ramp's edge against an exhaustive search under one memory cap, then 200 steps at it."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

# One thread: peaks do not depend on it, and on a busy machine two would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

SEQ_LEN = 128
HEADROOM = 0.12
STEPS = 200
SETTINGS = [(method, mib) for method in ("full", "lora") for mib in (100, 160, 260)]
MIB = 1024**2


def open_parts(method: str, mib: int) -> tuple[Any, Any]:
    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.workload import Settings, open_workload

    settings = Settings(model="builtin:gpt-1m", device="cpu", method=method, seq_len=SEQ_LEN)
    return open_workload(settings), backend_for("cpu", cap_bytes=mib * MIB)


def by_ramp(method: str, mib: int) -> dict[str, Any]:
    from pichak_core.tune import TrainingStep, ramp_micro_batch

    workload, backend = open_parts(method, mib)
    step = TrainingStep(workload.loss_of, workload.optimizer)
    found = ramp_micro_batch(step, backend=backend, headroom=HEADROOM, keep="largest")
    return {
        "answer": found.micro_batch_max,
        "steps": found.steps_run,
        "repeats": found.repeat_steps,
        "refusals": found.refusals,
        "peak_bytes": found.peak_bytes,
        "source": found.source,
    }


def by_exhaustion(method: str, mib: int) -> dict[str, Any]:
    import torch

    from pichak_core.tune import TrainingStep

    workload, backend = open_parts(method, mib)
    budget = int(mib * MIB * (1 - HEADROOM))
    answer, steps = 0, 0
    with TrainingStep(workload.loss_of, workload.optimizer) as step:
        for b in range(1, 513):
            peak = 0
            try:
                for _ in range(3):
                    steps += 1
                    with backend.watch() as seen:
                        step(b)
                    peak = max(peak, seen.reserved)
            except torch.OutOfMemoryError:
                break
            if peak > budget:
                break
            answer = b
    return {"answer": answer, "steps": steps}


def by_training(method: str, mib: int, rows: int) -> dict[str, Any]:
    """200 optimizer steps of rows of mixed length, under the whole cap."""
    import torch

    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.workload import Settings, open_workload

    backend = backend_for("cpu", cap_bytes=mib * MIB)
    lengths = torch.Generator().manual_seed(7)
    settings = Settings(model="builtin:gpt-1m", device="cpu", method=method, seq_len=SEQ_LEN)
    workload = open_workload(settings)
    optimizer = workload.optimizer
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    refused = 0
    with backend.watch() as seen:
        for step in range(STEPS):
            try:
                for _ in range(2):
                    drawn = int(torch.randint(8, SEQ_LEN + 1, (1,), generator=lengths))
                    workload.seq_len = drawn if step else SEQ_LEN
                    workload.loss_of(rows).backward()
                optimizer.step()
            except torch.OutOfMemoryError:
                refused += 1
            optimizer.zero_grad(set_to_none=True)
    peak = seen.reserved
    return {"steps": STEPS, "refused": refused, "peak_bytes": peak}


def fresh(function: Any, *args: Any) -> dict[str, Any]:
    """In a process of its own, as a fleet's ramp is."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def environment() -> dict[str, Any]:
    import psutil
    import torch

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _line(ramp: dict[str, Any], whole: dict[str, Any], trained: dict[str, Any]) -> str:
    return (
        f"ramp {ramp['answer']} in {ramp['steps']} steps, exhaustive {whole['answer']} in "
        f"{whole['steps']}; training: {trained['refused']} of {STEPS} steps refused, peak "
        f"{trained['peak_bytes'] / MIB:.1f} MiB"
    )


def main() -> int:
    runs = []
    for method, mib in SETTINGS:
        ramp, again = fresh(by_ramp, method, mib), fresh(by_ramp, method, mib)
        whole = fresh(by_exhaustion, method, mib)
        trained = fresh(by_training, method, mib, ramp["answer"])
        met = {
            "same_edge": ramp["answer"] == whole["answer"],
            "fewer_steps": ramp["steps"] < whole["steps"],
            "training_fits": trained["refused"] == 0
            and trained["peak_bytes"] <= int(mib * MIB * (1 - HEADROOM)),
            "repeatable": {**ramp, "source": ""} == {**again, "source": ""},
        }
        runs.append(
            {
                "method": method,
                "cap_mib": mib,
                "ramp": ramp,
                "exhaustive": whole,
                "training": trained,
                "met": met,
            }
        )
        print(f"{method:5} {mib:4} MiB: {_line(ramp, whole, trained)}; {met}", flush=True)
    result = {
        "question": "Does the ramp find the edge of an exhaustive search, and does training run?",
        "rule": "README.md, written before the run",
        "met": all(all(run["met"].values()) for run in runs),
        "date": date.today().isoformat(),
        "environment": environment(),
        "runs": runs,
    }
    Path(__file__).with_name("result.json").write_text(json.dumps(result, indent=1) + "\n")
    print("rule met" if result["met"] else "RULE NOT MET")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
