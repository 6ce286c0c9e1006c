"""Nodes that do not exist, as the bytes that their agents would send: a quick fingerprint, and a
ramp with its plan, of the size and shape of real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pichak_agent.messages import Job, Outcome, encode
from pichak_core.measure import probes
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import CONSTANT, Plan, Value

MODELS = {"NVIDIA H100 80GB HBM3": 3.2, "NVIDIA A100-SXM4-80GB": 2.0,
          "NVIDIA L40S": 1.3, "NVIDIA GeForce RTX 4090": 1.0}  # fmt: skip
#: What a host reads where the figure matters here; the rest is 100 of its unit.
USUAL = {
    "gpu.kernel_launch_us": 4.2, "gpu.matmul_bf16_tflop_s": 250.0,
    "gpu.h2d_pinned_mb_s": 12_000.0, "gpu.d2h_pinned_mb_s": 12_500.0,
    "cpu.logical_cores": 32, "cpu.usable_cores": 32, "cpu.steal_percent": 0.2,
    "host.shm_mib": 16_000.0, "disk.read_mb_s": 1_800.0,
}  # fmt: skip
TEXTS = {
    "cpu.model": "AMD EPYC 9354 32-Core Processor", "software.os": "Ubuntu 22.04.5 LTS",
    "gpu.virtualisation_mode": "Pass-Through", "host.kind": "vm", "software.torch": "2.13.0+cu126",
    "software.driver": "575.57.08", "golden.gradient_digest": "b0a2dab486a83c9ea0a5a8799bbce5d1",
    "disk.filesystem": "ext4", "gpu.driver_model": "Linux",
}  # fmt: skip
#: A node's share of slow ones, and by how much.
SLOW_SHARE, SLOW_BY = 0.01, 0.80
SEQ_LEN, SCORED = 1024, 209.3


@dataclass(frozen=True)
class Node:
    """One simulated machine with one GPU."""

    number: int
    hello: dict[str, Any]
    jobs: tuple[Job, Job]
    outcomes: tuple[bytes, bytes]


def nodes(count: int, seed: int = 0) -> Iterator[Node]:
    """`count` machines of four GPU models; one in a hundred copies a fifth slower than others."""
    draw = random.Random(seed)
    for number in range(count):
        yield _node(number, draw)


def _node(number: int, draw: random.Random) -> Node:
    model = list(MODELS)[number % len(MODELS)]
    slow = draw.random() < SLOW_SHARE
    hello = {
        "host": f"node-{number:05d}",
        "address": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        "machine_id": f"{number:032x}",
        "cpu_model": TEXTS["cpu.model"],
        "gpus": [{"index": 0, "uuid": f"GPU-{number:032x}", "name": model}],
        "gpu_uuids": [f"GPU-{number:032x}"],
    }
    jobs = tuple(
        Job(f"p-{number:05d}-{kind}", 1, kind, {"device": "cuda:0"}, 60.0)
        for kind in ("fingerprint", "ramp")
    )
    own = 1 + 0.01 * draw.gauss(0, 1)
    fingerprint = Fingerprint()
    texts = {**TEXTS, "gpu.name": model, "gpu.uuid": hello["gpu_uuids"][0]}
    for probe in probes().values():
        seconds = draw.random()
        conditions = {
            "cpu.steal_percent": round(draw.random(), 3),
            "cpu.load_others_cores": round(0.1 * draw.random(), 3),
            "gpu.clock_sm_mhz": 1755 + draw.randrange(9),
        }
        for metric in probe.metrics:
            name = metric.name
            base = USUAL.get(name, 100.0) * (MODELS[model] if "matmul" in name else 1.0)
            share = SLOW_BY if slow and name == "gpu.h2d_pinned_mb_s" else 1.0
            rate = base * own * share
            fingerprint.add(
                _text(name, texts, seconds)
                or _timed(name, metric.unit, draw, rate, seconds, conditions)
                or _counted(name, metric.unit, base, seconds)
            )
    results = ({"fingerprint": fingerprint.to_dict()}, _ramp(draw, own * MODELS[model], model))
    data = tuple(
        encode(
            Outcome(
                job.job_id,
                1,
                job.kind,
                "ok",
                result,
                node=hello["host"],
                started_unix=1.79e9 + number,
                seconds=21.7,
                versions={"pichak": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"},
            )
        )
        for job, result in zip(jobs, results, strict=True)
    )
    return Node(number, hello, jobs, data)  # type: ignore[arg-type]


def _text(name: str, texts: dict[str, str], seconds: float) -> Measurement | Unmeasured | None:
    if name.startswith(("network.", "collective.")):
        return Unmeasured(name, Reason.NOT_ASKED, "links are measured by `pichak net` over a fleet")
    if name not in texts:
        return None
    return Measurement(name, texts[name], "", "what the system says of itself", seconds=seconds)


def _timed(
    name: str,
    unit: str,
    draw: random.Random,
    rate: float,
    seconds: float,
    conditions: dict[str, Any],
) -> Measurement | None:
    if not (unit.endswith("/s") or unit in ("us", "ms")):
        return None
    samples = sorted(rate * (1 + 0.01 * draw.gauss(0, 1)) for _ in range(9))
    return Measurement(
        name,
        samples[4],
        unit,
        f"median of 9 blocks of 512 of it, new content each round, verified after {seconds:.2f} s "
        "of warm-up on the same path; clocks and throttle reasons sampled meanwhile",
        samples=9,
        spread=0.01 * rate,
        seconds=seconds,
        conditions=conditions,
        detail={"samples": samples, "block_bytes": 5_000_000},
    )


def _counted(name: str, unit: str, base: float, seconds: float) -> Measurement:
    source = "the driver's own counters, read before and after the measurement beside it"
    return Measurement(name, base, unit, source, seconds=seconds)


def _ramp(draw: random.Random, speed: float, model: str) -> dict[str, Any]:
    """What a ramp job sends: the plan with its sources, and the rungs."""
    seconds = 0.35 / speed * (1 + 0.004 * draw.gauss(0, 1))
    rungs = [
        {"batch": b, "peak_bytes": (2 + b) * 10**9 + draw.randrange(10**6),
         "seconds": seconds * b / 24, "verdict": "ok", "why": f"peak {2 + b}.0 GiB in 0.3 s"}
        for b in (1, 2, 24, 25)
    ]  # fmt: skip
    story = "; ".join(f"{r['batch']} rows {r['verdict']} ({r['why']})" for r in rungs)
    source = (
        f"real training steps on cuda:0 ({model}): {story}. The largest that fits is 24: 25 was "
        "refused. Over 3 consecutive steps of 2 micro-batches, 24 rows peaked at 26.0 GiB and took "
        f"{seconds:.3f} s a step (median). Peak: what the allocator reserved, plus the context "
        "outside it. 12 % of the capacity (a constant share) are left for what one step does not "
        "show."
    )
    once = "(measured once, on node-00000)"
    plan = Plan("builtin:gpt-25m", "corpus.jsonl", f"cuda:0, {model}")
    for name, value, unit, why in (
        ("seq_len", SEQ_LEN, "tokens", "the 95 % quantile of the length of all 6,000 rows is 882 "
         f"tokens, rounded up to 1,024 (the bucket edges are a constant) {once}"),
        ("loss_policy", "completion_only", "", f"6,000 of 6,000 rows tokenised {once}"),
        ("supervised_per_row", SCORED, "scored tokens", "mean over 6,000 of 6,000 rows tokenised: "
         f"what the loss scores of a row cut to 1,024 tokens {once}"),
        ("rows_total", 6000, "rows", f"counted over the whole file {once}"),
        ("noise_scale_tokens", 4229.3, "scored tokens", "B_noise = S/|G|² from the gradients of 16 "
         f"micro-batches; 90 % interval 3,161 to 5,298 (delete-one jackknife, Fieller) {once}"),
        ("micro_batch", 24, "rows", source),
        ("micro_batch_max", 24, "rows", "the largest size that ran; the next size was refused"),
        ("headroom", 0.12, "", CONSTANT),
        ("seconds_per_step", seconds, "s", "one micro-batch: median of the repeated steps"),
        ("tokens_per_second", 24 * SEQ_LEN / seconds, "tokens/s", "24 rows of 1024 tokens"),
        ("scored_tokens_per_second", 24 * SCORED / seconds, "scored tokens/s", "24 rows of 209.3"),
        ("grad_accum", 1, "micro-batches", "1 × 24 rows × 209.3 scored tokens a row"),
        ("learning_rate", 1.97e-5, "", f"rewrite 0.00629 / 320 · √(5,023 / 4,229) {once}"),
    ):  # fmt: skip
        plan.set(name, Value(value, why, seconds=0.5, unit=unit))
    ramp = {
        "micro_batch": 24, "micro_batch_max": 24, "peak_bytes": 26 * 10**9,
        "budget_bytes": 75 * 10**9, "seconds_per_step": seconds, "seconds_spread": 0.004 * seconds,
        "tried": rungs, "source": source, "spilled": False, "limited_by": "memory",
        "conditions": {"cpu.load_others_cores": 0.1},
    }  # fmt: skip
    return {"plan": plan.to_dict(), "ramp": ramp}
