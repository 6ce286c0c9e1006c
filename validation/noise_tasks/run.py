"""The noise scale of five real tasks, two draws each, before and after a short training.

See README.md for the rule, written before the run, and for what this does not show.

    python validation/noise_tasks/run.py [--seed 0] [--steps 80] [--processes 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks import TASKS, NoPackageError, Row

from pichak_core.tune import NoiseScale, measure_noise_scale, profile_corpus
from pichak_core.workload import Settings, Workload, open_workload

HERE = Path(__file__).resolve().parent
DATE = "2026-11-30"
QUESTION = (
    "Is the noise scale of a real task measured alike from two independent draws, and does it "
    "differ between tasks, and between states of training, by more than one constant could serve?"
)

MODEL = "builtin:gpt-1m"
BUCKETS = (128, 256)
ROWS_EACH = 8  # rows of a micro-batch, as the workload takes them at these lengths
STEPS, LEARNING_RATE = 80, 1e-3
MOST = {"True/False deductions": 256}
MOST_OTHERWISE = 96
STATES = ("initial", "trained")

AGREEING, LEAST_SPREAD, LEAST_GROWTH = 9, 4.0, 2.0


def main() -> int:
    """Measure the five tasks and write the result; 1 when the rule is not met, 2 without data."""
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--seed", type=int, default=0, help="weights and rows (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (%(default)s)")
    parser.add_argument("--most", type=int, help="at most this many micro-batches a measurement")
    parser.add_argument("--processes", type=int, default=2, help="tasks at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "result.json", help="the result")
    options = parser.parse_args()
    started = time.monotonic()
    load_before = os.getloadavg()[0]
    jobs = [
        (name, options.seed, options.steps, options.most or MOST.get(name, MOST_OTHERWISE))
        for name in TASKS
    ]
    try:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            found = dict(zip(TASKS, pool.starmap(task, jobs, chunksize=1), strict=True))
    except NoPackageError as error:
        print(f"noise_tasks: {error}", file=sys.stderr)
        return 2
    parts = verdicts(found)
    result = {
        "question": QUESTION,
        "rule": "the five parts of README.md",
        "met": all(parts.values()),
        "verdicts": parts,
        "date": DATE,
        "environment": environment(load_before),
        "model": MODEL,
        "seed": options.seed,
        "warm_up": {"steps": options.steps, "optimizer": "AdamW", "learning_rate": LEARNING_RATE},
        "seconds": time.monotonic() - started,
        "spread": {state: spread(found, state) for state in STATES},
        "growth": {name: growths(entry) for name, entry in found.items()},
        "tasks": found,
    }
    options.out.write_text(
        json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for name, entry in found.items():
        for state in STATES:
            print(f"{name:26} {state:8}", *(summary(made) for made in entry[state]), sep="  ")
    for rule, held in parts.items():
        print("held  " if held else "FAILED", rule)
    return 0 if result["met"] else 1


def task(name: str, seed: int, steps: int, most: int) -> dict[str, Any]:
    """Both draws of one task in both states, as `NoiseScale.as_dict` has them, and its profiles."""
    import torch

    torch.set_num_threads(1)  # the tasks share the cores
    started = time.process_time()
    rows, origin = TASKS[name]()
    random.Random(f"{seed} {name}").shuffle(rows)
    with tempfile.TemporaryDirectory() as temporary:
        files = write_parts(Path(temporary), rows, steps * ROWS_EACH, most * ROWS_EACH)
        held_out, *draws = files
        shape = profile_corpus(held_out, "bytes", sample=None, buckets=BUCKETS)
        entry: dict[str, Any] = {
            "origin": origin,
            "rows": len(rows),
            "rows_a_draw": most * ROWS_EACH,
            "loss_policy": shape.loss_policy,
            "seq_len": shape.seq_len,
            "draws": [],
        }
        for path in draws:
            profile = profile_corpus(path, "bytes", sample=None, buckets=(shape.seq_len,))
            entry["draws"].append(
                {
                    "scored_tokens_a_row": profile.supervised_per_row,
                    "token_p50": profile.token_p50,
                    "token_max": profile.token_max,
                    "rows_truncated": profile.rows_truncated,
                }
            )
        states = weights_before_and_after(held_out, shape.seq_len, steps, seed)
        for state, weights in zip(STATES, states, strict=True):
            entry[state] = [
                measured(path, shape.seq_len, weights, seed=seed + 1 + number, most=most).as_dict()
                for number, path in enumerate(draws)
            ]
    entry["cpu_seconds"] = time.process_time() - started
    return entry


def write_parts(folder: Path, rows: Sequence[Row], held_out: int, draw: int) -> list[Path]:
    """Disjoint rows: for the warm-up, for the first draw, for the second."""
    sizes = (held_out, draw, draw)
    if len(rows) < sum(sizes):
        raise ValueError(f"{sum(sizes):,} rows are needed, and there are {len(rows):,}")
    left = iter(rows)
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"part{number}.jsonl"
        lines = (json.dumps(next(left), ensure_ascii=False) + "\n" for _ in range(size))
        path.write_text("".join(lines), encoding="utf-8")
        paths.append(path)
    return paths


def opened(path: Path, seq_len: int, seed: int) -> Workload:
    """The built-in model over the rows at `path`; `seed` also decides their order."""
    return open_workload(
        Settings(model=MODEL, data=str(path), seq_len=seq_len, device="cpu", seed=seed)
    )


def weights_before_and_after(
    path: Path, seq_len: int, steps: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Weights by name: as they were drawn, then after `steps` AdamW steps of a micro-batch each."""
    import torch

    workload = opened(path, seq_len, seed)
    named = list(workload.named_weights())
    yield {name: weight.detach().clone() for name, weight in named}
    optimizer = torch.optim.AdamW([weight for _, weight in named], lr=LEARNING_RATE)
    for step in range(steps):
        gradients, _ = workload.grad_fn(step)
        for (_, weight), gradient in zip(named, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    yield {name: weight.detach().clone() for name, weight in named}
    workload.close()


def measured(
    path: Path, seq_len: int, weights: dict[str, Any], *, seed: int, most: int
) -> NoiseScale:
    """B_noise at the given weights, from the rows at `path` in the order of `seed`."""
    import torch

    workload = opened(path, seq_len, seed)
    named = list(workload.named_weights())
    with torch.no_grad():
        for name, weight in named:
            weight.copy_(weights[name])
    made = measure_noise_scale(
        workload.grad_fn,
        max_micro_batches=most,
        budget_seconds=None,
        seed=seed,
        names=[name for name, _ in named],
    )
    workload.close()
    return made


def verdicts(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The rule of the README, part by part."""
    pairs = [entry[state] for entry in found.values() for state in STATES]
    every = [made for pair in pairs for made in pair]
    short = [made for state in STATES for made in found["True/False deductions"][state]]
    text = [made for made in every if made not in short]
    return {
        "1 draws agree": sum(overlap(*pair) for pair in pairs) >= AGREEING,
        "2 finite and positive": all(map(sound, every))
        and all(abs(made["design_effect"] - 1) < 1e-3 for made in short),
        "3 resolved or said": all(made["kind"] == "value" for made in text)
        and all(made["kind"] == "value" or why_it_ended(made) for made in short),
        "4 spread between tasks": all(spread(found, state) >= LEAST_SPREAD for state in STATES),
        "5 growth": all(
            growth >= LEAST_GROWTH for entry in found.values() for growth in growths(entry)
        ),
    }


def overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether the two intervals have a point in common."""
    return max(float(x["low"]) for x in (a, b)) <= min(float(x["high"]) for x in (a, b))


def sound(made: dict[str, Any]) -> bool:
    """The estimate and what it stands on: finite and above zero, inside its interval."""
    numbers = [made[name] for name in ("b_noise_tokens", "trace_sigma", "s_token", "tokens")]
    effect = made["design_effect"]
    return all(
        number > 0 and math.isfinite(number) for number in (*numbers, effect or 0.0)
    ) and 0 <= made["low"] <= made["b_noise_tokens"] <= float(made["high"])


def why_it_ended(made: dict[str, Any]) -> str:
    """The note that says why no more micro-batches were taken."""
    return next((note for note in made["notes"] if "collecting gradients ended" in note), "")


def spread(found: dict[str, dict[str, Any]], state: str) -> float:
    """How far apart the tasks surely are: the largest low end over the smallest high end.

    A task's ends are the outer ones of its two draws.
    """
    pairs = [entry[state] for entry in found.values()]
    low = max(min(made["low"] for made in pair) for pair in pairs)
    high = min(max(float(made["high"]) for made in pair) for pair in pairs)
    return float(low / high)


def growths(entry: dict[str, Any]) -> list[float]:
    """B_noise after the training over before it, for each draw; a bound counts as its number."""
    return [
        after["b_noise_tokens"] / before["b_noise_tokens"]
        for before, after in zip(*(entry[state] for state in STATES), strict=True)
    ]


def summary(made: dict[str, Any]) -> str:
    """One measurement on a line."""
    return (
        f"{made['b_noise_tokens']:,.4g} [{made['low']:,.4g}, {float(made['high']):,.4g}] "
        f"{made['kind']}, k = {made['k']}, T = {made['tokens']:,.0f}, "
        f"design effect {made['design_effect'] or math.nan:.3g};"
    )


def rounded(x: Any) -> Any:
    """Five significant digits, so that a rerun can be compared by eye."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def environment(load_before: float) -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average_before": load_before,
    }


if __name__ == "__main__":
    sys.exit(main())
