"""The stages of the acceptance run, each the whole work of one process.

``python stages.py NAME ARGUMENTS OUT``: arguments are a JSON object, and the result (checks and
figures) is written to OUT as JSON. A check is [what, whether it holds, detail].
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

MIB = 2**20
HEADROOM = 0.12
#: What a single machine without a disk or network to test cannot be asked.
LEFT_OUT = ("disk", "network", "collective")
MUST_MEASURE = {
    "cuda": (
        "gpu.kernel_launch_us",
        "gpu.h2d_pinned_mb_s",
        "gpu.d2h_pinned_mb_s",
        "gpu.h2d_pageable_mb_s",
        "gpu.d2h_pageable_mb_s",
        "gpu.memory_copy_mb_s",
        "gpu.matmul_fp16_tflop_s",
        "gpu.matmul_fp32_tflop_s",
        "golden.gradient_digest",
    ),
    "cpu": ("cpu.op_dispatch_us", "cpu.matmul_fp32_gflop_s", "golden.gradient_digest"),
}


class Report:
    """Checks and figures of one stage."""

    def __init__(self) -> None:
        self.checks: list[list[Any]] = []
        self.figures: dict[str, Any] = {}

    def check(self, what: str, holds: object, detail: object = "") -> None:
        self.checks.append([what, bool(holds), str(detail)])


def kind_of(device: str) -> str:
    return device.partition(":")[0]


def fingerprint(report: Report, device: str, folder: str) -> None:
    from pichak_core.measure import Context, probes, run_probes
    from pichak_core.measurement import Measurement, Reason, Unmeasured

    begun = time.monotonic()
    only = [name for name in probes() if name not in LEFT_OUT]
    made = run_probes(Context(device=device, directory=Path(folder)), only=only)
    seconds = time.monotonic() - begun
    report.figures = {"seconds": seconds, "fingerprint": made.to_dict()}
    failed = [
        f"{name} ({reading.detail})"
        for name, reading in made.items()
        if isinstance(reading, Unmeasured) and reading.reason is Reason.FAILED
    ]
    suspect = [
        f"{name} ({reading.suspect})"
        for name, reading in made.items()
        if isinstance(reading, Measurement) and reading.suspect
    ]
    absent = [n for n in MUST_MEASURE[kind_of(device)] if not isinstance(made.get(n), Measurement)]
    count = sum(isinstance(reading, Measurement) for reading in made.values())
    report.check("no metric fails", not failed, "; ".join(failed) or f"{count} of {len(made)} read")
    report.check("no metric is suspect", not suspect, "; ".join(suspect) or "none")
    report.check("what a GPU must give is there", not absent, ", ".join(absent) or "all")
    report.check("it is quick", seconds <= 60, f"{seconds:.1f} s")


def launch(report: Report, device: str) -> None:
    from pichak_core.measure import kernel_launch_us

    first, second = kernel_launch_us(device, 3000), kernel_launch_us(device, 3000)
    report.figures = {
        "median_us": [first.median_us, second.median_us],
        "p95_us": first.p95_us,
        "p99_us": first.p99_us,
    }
    report.check("every operation took effect", not first.suspect, first.describe())
    report.check("percentiles are in order", first.median_us <= first.p95_us <= first.p99_us)
    if kind_of(device) != "cpu":
        report.check("1 to 100 us", 1 <= first.median_us <= 100, f"{first.median_us:.2f} us")
        ratio = second.median_us / first.median_us
        report.check("it repeats within 25 %", 0.75 <= ratio <= 1.25, f"ratio {ratio:.2f}")


def copies(report: Report, device: str, sizes_mb: list[float]) -> None:
    from pichak_core.measure import transfer_bandwidth
    from pichak_core.measure._mover import HostMover

    mover = HostMover() if device == "cpu" else None
    for size in sizes_mb:
        made = transfer_bandwidth(device, size, 9, mover=mover)
        report.figures[f"{size} MB"] = {
            path: copied.as_dict() | {"mb_s": copied.mb_s} for path, copied in made.copies.items()
        } | {"notes": made.notes, "link": made.link.describe()}
        suspect = [made.suspect(path) for path in made.copies if made.suspect(path)]
        wrong = sum(copied.wrong for copied in made.copies.values())
        report.check(f"{size} MB arrive as they were sent", wrong == 0, f"{wrong} wrong")
        report.check(f"{size} MB: no rate is suspect", not suspect, "; ".join(suspect) or "none")
        print(made.describe())
    differ = [copied.clocks_differ for copied in made.copies.values() if copied.clocks_differ]
    report.check("both clocks agree on large copies", not differ, "; ".join(differ) or "they do")


def cap(report: Report, device: str, small: bool) -> None:
    """An allocation past the cap is refused at its own line."""
    import torch

    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.tune import SPILL_GUARD_BYTES, forbid_spill

    backend = backend_for(device)
    free = backend.capacity().bytes
    guard = free - 512 * MIB if small else SPILL_GUARD_BYTES
    bytes_, source = forbid_spill(device, guard_bytes=guard)
    report.figures = {"cap_bytes": bytes_, "free_bytes": free, "source": source}
    report.check("the cap leaves what is free", small or bytes_ >= free // 2, source)
    held: list[Any] = []
    refused_at, error_text, line = 0, "", ""
    with backend_for(device).watch():
        try:
            for number in range(1, 10):
                refused_at = number
                held.append(torch.empty(bytes_ // 8, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as error:
            error_text = str(error).splitlines()[0][:200]
            # the frame of this function: the line that asked for the memory
            line = next(
                frame.line or "" for frame in traceback.extract_tb(error.__traceback__)
                if frame.name == "cap"
            )  # fmt: skip
        report.check("over-allocation is refused", error_text, error_text or "nothing was raised")
        report.check("at the line that asks", "torch.empty" in line, line)
        report.check(
            "not before seven eighths", refused_at >= 8 and len(held) >= 7, f"at {refused_at}"
        )
        held.clear()
        again = torch.empty(bytes_ // 8, dtype=torch.uint8, device=device)
        report.check("what was freed can be had again", again.numel() == bytes_ // 8)
    del again
    try:
        forbid_spill(device, guard_bytes=2**62)
        report.check("a cap that leaves nothing is refused", False, "nothing was raised")
    except RuntimeError as error:
        report.check("a cap that leaves nothing is refused", True, error)


def noise(report: Report, device: str, small: bool, folder: str) -> None:
    """The same micro-batches on both devices."""
    from pichak_core.tune import measure_noise_scale
    from pichak_core.workload import Settings, open_workload

    data = Path(folder) / "rows.jsonl"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts/build_corpus.py"),
            "--rows",
            "200",
            "--out",
            str(data),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    count = 6 if small else 16
    made = []
    for where in (device, "cpu"):
        settings = Settings(data=str(data), device=where, seq_len=64, dtype="fp32")
        workload = open_workload(settings)
        made.append(measure_noise_scale(workload.grad_fn, k=count, max_micro_batches=count))
        workload.close()
    ours, plain = made
    report.figures = {"device": ours.as_dict(), "cpu": plain.as_dict()}
    report.check("a finite, positive result", 0 < ours.b_noise_tokens < 1e12, ours.source)
    ratio = ours.trace_sigma / plain.trace_sigma
    report.check("S is the CPU's within 1 %", abs(ratio - 1) <= 0.01, f"ratio {ratio:.6f}")
    report.check("the same tokens were scored", ours.tokens == plain.tokens, f"T = {ours.tokens}")


def golden(report: Report, device: str, flip: bool) -> None:
    import torch

    from pichak_core.measure.golden_step import golden_step, initial_weights

    made = golden_step(device)
    report.figures = {"loss": made.loss, "digest": made.digest, "deviation": made.deviation}
    report.check("it is the answer in fp64", made.deviation <= 1, f"{made.deviation:.3g} of 1")
    report.check("it repeats", golden_step(device) == made, made.digest)
    if flip:
        weights = initial_weights()
        weights["inner"].view(torch.int32)[3, 5] ^= 1 << 12
        report.check("a flipped bit is seen", golden_step(device, weights).digest != made.digest)


def stages() -> dict[str, Callable[..., None]]:
    from training import ramp, training

    return {
        "fingerprint": fingerprint,
        "launch": launch,
        "copies": copies,
        "cap": cap,
        "ramp": ramp,
        "training": training,
        "noise": noise,
        "golden": golden,
    }


def main() -> int:
    name, arguments, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    report, stage = Report(), stages()[name]
    wanted = stage.__code__.co_varnames[: stage.__code__.co_argcount]
    given = {key: value for key, value in arguments.items() if key in wanted}
    try:
        stage(report, **given)
    except Exception as error:  # noqa: BLE001 - whatever a stage raises is its result
        report.check("it ended", False, f"{type(error).__name__}: {error}")
        traceback.print_exc()
    heavy = [m for m in sys.modules if m.split(".")[0] in ("ray", "pichak_coordinator")]
    report.check("neither Ray nor the coordinator is imported", not heavy, ", ".join(heavy[:3]))
    record = {"checks": report.checks, "figures": report.figures}
    out.write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
