"""Bias, spread and coverage of the noise scale's estimators where the truth is known.

python validation/noise_estimators/run.py [--trials 1600] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CONFIDENCE, SEED, case, row_case, sketch_case, stopping_case

RATIOS = (2.0, 4.0, 8.0)
QUESTION = "Are S and |G|² unbiased, and do nominal 90 % intervals of B_noise hold the truth?"


def near(value: float, truth: float, tolerance: float, error: float) -> bool:
    """Within the tolerance of the truth, give or take two standard errors."""
    return abs(value - truth) <= tolerance + 2 * error


def holds(coverage: float, trials: int) -> bool:
    """Within 88-97 %, give or take two standard errors of a share near 90 %."""
    slack = 2 * math.sqrt(0.9 * 0.1 / trials)
    return 0.88 - slack <= coverage <= 0.97 + slack


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """The rule of the README, part by part."""
    tokens, rows, sketch = result["independent_tokens"], result["rows"], result["sketch"]
    stopping = result["stopping"]

    def unbiased(c: dict[str, Any], name: str) -> bool:
        error = c[f"spread_{name}"] / math.sqrt(c["trials"])
        return near(c[f"bias_{name}"], 0.0, 0.02, error)

    at_each_ratio = [
        float(np.mean([c["coverage"] for c in tokens if c["T/B"] == ratio])) for ratio in RATIOS
    ]
    few_long_rows = [c for c in rows if c["k"] == 64 and c["row_cv"] <= 1]
    own = float(np.mean([c["coverage"] for c in stopping]))
    return {
        "1 bias": all(unbiased(c, name) for c in tokens for name in ("s_rob", "s_tok", "g2")),
        "2 coverage at each T/B": all(0.88 <= share <= 0.97 for share in at_each_ratio),
        "2 coverage in each case": all(holds(c["coverage"], c["trials"]) for c in tokens),
        "3 spread": all(
            c["spread_s_rob"] <= 1.05 * math.sqrt(1 + c["cv"] ** 2) * c["spread_s_tok"]
            and c["spread_s_tok"] <= 1.05 * c["spread_s_unweighted"]
            for c in tokens
        ),
        "4 rows, S": all(
            near(c["s_rob_over_truth"], 1.0, 0.05, c["s_rob_standard_error"]) for c in few_long_rows
        ),
        "4 rows, coverage": all(holds(c["coverage"], c["trials"]) for c in rows),
        "5 sketch": all(
            holds(c["coverage"], c["trials"]) for c in sketch if c["noise"] == "power law"
        ),
        "6 own stopping": holds(own, sum(c["trials"] for c in stopping)),
        "7 never negative": all(0 < c["least"] <= c["largest"] < math.inf for c in stopping),
    }


def environment() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def run(trials: int, say: Callable[[str], None]) -> dict[str, Any]:
    started = time.monotonic()
    rng = np.random.default_rng(SEED)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "question": QUESTION,
        "rule": "the seven parts of README.md",
        "date": date.today().isoformat(),
        "environment": environment(),
        "seed": SEED,
        "confidence": CONFIDENCE,
    }
    result["independent_tokens"] = [
        case(rng, trials, k=24, cv=cv, ratio=ratio, shape=shape, along=along)
        for cv in (0.0, 0.5, 1.0, 2.0)
        for ratio in RATIOS
        for shape, along in (
            ("flat", "like noise"),
            ("power law", "like noise"),
            ("power law", "largest direction"),
        )
    ]
    say(f"independent tokens: {time.monotonic() - started:.0f} s")
    result["rows"] = [
        row_case(rng, trials if k == 16 else trials // 4, k=k, rows=4, cv=cv, rho=rho)
        for k in (16, 64)
        for cv in (0.5, 1.0, 2.0)
        for rho in (0.02, 0.3)
    ]
    say(f"rows: {time.monotonic() - started:.0f} s")
    result["sketch"] = [
        *(sketch_case(trials // 4, ratio=ratio, shape="power law") for ratio in RATIOS),
        sketch_case(trials // 16, ratio=4.0, shape="flat"),
    ]
    say(f"sketch: {time.monotonic() - started:.0f} s")
    result["stopping"] = [
        stopping_case(rng, trials // 8, truth=truth, cv=cv, along=along)
        for truth in (200.0, 600.0)
        for cv in (0.0, 1.0)
        for along in ("like noise", "largest direction")
    ]
    result["seconds"] = time.monotonic() - started
    result["verdicts"] = verdicts(result)
    result["met"] = all(result["verdicts"].values())
    return result


def rounded(x: Any) -> Any:
    """Four significant digits, so that a rerun can be compared by eye."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.4g}") if isinstance(x, float) and not isinstance(x, bool) else x


def main() -> int:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--trials", type=int, default=1600)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    result = run(options.trials, print)
    options.out.write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    for rule, held in result["verdicts"].items():
        print("held  " if held else "FAILED", rule)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
