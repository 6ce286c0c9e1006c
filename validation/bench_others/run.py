"""The ramp and the noise scale beside other tools, on the same step and the same gradients.

`make bench` runs it in the environment of requirements.txt.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import noises
import ramps

TIME_LIMIT = 300
#: Rows that fit, and the most steps of the search that the rule allows.
EDGES = {0: 1, 23: 7, 100: 10, 1000: 13}
LARGEST = "Pichak Fleet"
PACKAGES = ("torch", "lightning", "accelerate", "pichak", "gns-pytorch")

Row = dict[str, Any]


def in_own_process(function: Callable[..., Row], arguments: Sequence[tuple[Any, ...]]) -> list[Row]:
    """`function` for each of `arguments`, in one new process. One that takes too long is a row
    that says so, and ends it."""
    rows: list[Row] = []
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for given in arguments:
            try:
                rows.append(pool.apply_async(function, given).get(TIME_LIMIT))
            except multiprocessing.TimeoutError:
                error = f"did not end in {TIME_LIMIT} s"
                rows.append({"tool": given[0], "ended": False, "answer": None, "error": error})
                break
    return rows


def made_up_memory() -> dict[str, Any]:
    by_edge: dict[int, list[Row]] = {edge: [] for edge in EDGES}
    for tool in (*ramps.OURS, ramps.GUESSED, *ramps.OTHERS):
        edges = [edge for edge in EDGES if edge or tool != ramps.GUESSED]
        rows = in_own_process(ramps.made_up, [(tool, edge) for edge in edges])
        for edge, row in zip(edges, rows, strict=False):
            by_edge[edge].append(row)
    for edge, rows in by_edge.items():
        fits = f"{edge:,} rows fit" if edge else "not even one row fits"
        show(f"Made-up memory, affine with rounding: {fits}", ramp_table(rows, edge))
    worst = {edge: in_own_process(ramps.our_worst, [(edge,)])[0] for edge in EDGES if edge}
    for edge, found in worst.items():
        print(
            f"Pichak Fleet on {found['shapes']} other shapes with the edge at {edge:,}: "
            f"{found['wrong']} wrong answers, at most {found['most_steps']} steps and "
            f"{found['most_refusals']} refusals"
        )
    return {"tools": by_edge, "other_shapes": worst}


def real_model() -> dict[str, Any]:
    whole = in_own_process(ramps.real_edge, [("",)])[0]
    tools = (*ramps.OURS, *ramps.OTHERS)
    rows = [row for tool in tools for row in in_own_process(ramps.real, [(tool,)])]
    title = f"A real model on the CPU: {whole['answer']} rows fit"
    show(title, ramp_table([*rows, whole], whole["answer"]))
    return {"every_size": whole, "tools": rows}


def noise_scale() -> list[Row]:
    by_tool = [
        in_own_process(noises.case, [(tool, *case) for case in noises.CASES])
        for tool in noises.TOOLS
    ]
    for i, (rows, cv, rho) in enumerate(noises.CASES):
        shared = f", tokens of a row share {rho:.0%} of the variance" if rho else ""
        reach = rows * noises.MEAN_TOKENS / noises.TRUTH
        title = f"Noise scale: {rows} rows (T = {reach:g} B_noise), token counts' cv {cv:g}{shared}"
        show(title, noise_table([made[i] for made in by_tool if i < len(made)]))
    return [row for made in by_tool for row in made]


def ramp_table(rows: list[Row], edge: int) -> list[list[str]]:
    ours = next((row["rows"] for row in rows if row["tool"] == LARGEST), 0)
    table = [
        ["tool", "steps", "calls", "rows", "refusals", "answer", "÷ edge", "rows ÷ ours", "ended"]
    ]
    for row in rows:
        answer = row["answer"]
        counts = [str(row.get(name, "-")) for name in ("sizes", "calls", "rows", "refusals")]
        share = "-" if answer is None or not edge else f"{answer / edge:.2f}"
        ratio = f"{row['rows'] / ours:.2f}" if ours and "rows" in row else "-"
        ended = "yes" if row["ended"] else "NO"
        said = "none" if answer is None else str(answer)
        if answer is not None and answer > edge:
            said += " (does not fit)"
        if row.get("kept", answer) != answer:
            said += f" (keeps {row['kept']})"
        table.append([row["tool"], *counts, said, share, ratio, ended])
        if "error" in row:
            table.append([f"  {row['error']}"])
    return table


def noise_table(rows: list[Row]) -> list[list[str]]:
    table = [
        ["tool", "median ÷ truth", "5 %", "95 %", "mean S ÷ truth", "0", "< 0", "∞", "only a bound"]
    ]
    for row in rows:
        if "error" in row:
            table += [[row["tool"]], [f"  {row['error']}"]]
            continue
        s = f"{row['s_mean']:.3f} ± {row['s_standard_error']:.3f}" if "s_mean" in row else "-"
        figures = [f"{row[name]:.2f}" for name in ("median", "p5", "p95")]
        shares = [
            f"{row[name] / row['trials']:.1%}"
            for name in ("zero", "negative", "infinite", "said_bound")
        ]
        table.append([row["tool"], *figures, s, *shares])
    return table


def show(title: str, table: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in table if len(line) > 1) for i in range(len(table[0]))]
    print(f"\n{title}")
    for line in table:
        if len(line) == 1:
            print(line[0])
            continue
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
    sys.stdout.flush()


def verdicts(made_up: dict[str, Any], real: dict[str, Any], noise: list[Row]) -> dict[str, bool]:
    """The rule of the README, part by part."""
    found = {(edge, row["tool"]): row for edge, rows in made_up["tools"].items() for row in rows}
    edges = [edge for edge in EDGES if edge]
    largest = [(edge, found[edge, LARGEST]) for edge in edges]
    guessed = [(edge, found[edge, ramps.GUESSED]) for edge in edges]
    ours = next(row for row in real["tools"] if row["tool"] == LARGEST)
    readings = [row for row in noise if row["tool"] == noises.OURS]
    enough = [row for row in readings if row["rows"] == 64 and not row["rho"]]
    return {
        "1 exact edge": all(row["answer"] == edge for edge, row in largest + guessed),
        "1 few steps": all(row["steps_run"] <= EDGES[edge] for edge, row in largest),
        "1 few refusals": all(row["refusals"] <= 2 for _, row in largest + guessed),
        "1 calls add up": all(
            row["steps_run"] + row["repeat_steps"] == row["calls"] for _, row in largest + guessed
        ),
        "1 other shapes": all(
            not worst["wrong"]
            and worst["most_steps"] <= EDGES[edge]
            and worst["most_refusals"] <= 2
            for edge, worst in made_up["other_shapes"].items()
        ),
        "1 first guess": all(row["steps_run"] <= 3 for _, row in guessed),
        "1 nothing fits": found[0, LARGEST].get("error", "").startswith("DoesNotFit"),
        "2 real model": ours["answer"] == real["every_size"]["answer"] and ours["refusals"] <= 2,
        "3 median": all(abs(row["median"] - 1) <= 0.15 for row in enough),
        "3 mean of S": all(
            abs(row["s_mean"] - 1) <= 0.02 + 2 * row["s_standard_error"] for row in enough
        ),
        "3 never senseless": not any(
            row["zero"] or row["negative"] or row["infinite"] for row in readings
        ),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def environment() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions(),
    }


def rounded(value: Any) -> Any:
    """Four significant digits, so that a rerun can be compared by eye."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    return value


def main() -> int:
    missing = [name for name, version in versions().items() if version is None]
    if missing:
        print(f"not installed here: {', '.join(missing)}; `make bench` has them in .venv-bench")
    made_up, real, noise = made_up_memory(), real_model(), noise_scale()
    held = verdicts(made_up, real, noise)
    result = {
        "question": "What do the ramp and the noise scale need and answer beside other tools?",
        "rule": "the three parts of README.md, written before the run",
        "met": all(held.values()),
        "verdicts": held,
        "date": date.today().isoformat(),
        "environment": environment(),
        "made_up_memory": made_up,
        "real_model": real,
        "noise_scale": noise,
    }
    print()
    for part, kept in held.items():
        print("held  " if kept else "FAILED", part)
    if missing:
        print("result.json is left as it was")
    else:
        text = json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n"
        Path(__file__).with_name("result.json").write_text(text, encoding="utf-8")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
