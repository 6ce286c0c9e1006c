"""Is profiling a corpus as quick as its tokenizer, and does its memory stay flat?

See README.md for the rule, written before the run, and for what this does not show.

    python validation/corpus_speed/run.py [--rows 40000] [--size-mb 2000] [--out result.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROUNDS = 7
LEAST_RATIO = 0.8
MOST_GROWTH_MB = 16.0
MOST_BYTES_A_ROW = 200
DATE = "2026-11-30"


def main() -> int:
    """Run both checks and write the result; 1 when the rule is not met."""
    parser = argparse.ArgumentParser(description="Speed and memory of the corpus profile.")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the speed check")
    parser.add_argument("--size-mb", type=int, default=2_000, help="large file of the memory check")
    parser.add_argument("--out", type=Path, default=HERE / "result.json", help="the result")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    pairs = documentation()
    lines = [json.dumps({"prompt": p, "completion": c}).encode() + b"\n" for p, c in pairs]
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        numbers = [draw.randrange(len(pairs)) for _ in range(options.rows)]
        rows_path = folder / "rows.jsonl"
        rows_path.write_bytes(b"".join(lines[number] for number in numbers))
        strings = [text for number in numbers for text in pairs[number]]
        tokenizer_json = trained_tokenizer(folder, [text for pair in pairs for text in pair])
        timed = speed(rows_path, tokenizer_json, strings)
        load_timed = os.getloadavg()[0]
        peaks = memory_by_size(folder, lines, options.size_mb, draw)
    sampled = peaks["large.jsonl, 512 rows"]["peak_mb"] - peaks["small.jsonl, 512 rows"]["peak_mb"]
    every, few = peaks["medium.jsonl, every row"], peaks["small.jsonl, every row"]
    a_row = 1e6 * (every["peak_mb"] - few["peak_mb"]) / (every["rows"] - few["rows"])
    ratio = timed["transformers, tok(strings)"]["wall"]["ratio"]["median"]
    result = {
        "question": "Is profiling a corpus as quick as its tokenizer, and is its memory flat?",
        "rule": (
            f"median of {ROUNDS} wall-time ratios >= {LEAST_RATIO} against transformers' own batch "
            f"call; peak memory of 512 rows from a file of {options.size_mb} MB at most "
            f"{MOST_GROWTH_MB} MB above one of a hundredth of that; at most {MOST_BYTES_A_ROW} "
            "bytes a row when every row is read"
        ),
        "met": ratio >= LEAST_RATIO and sampled <= MOST_GROWTH_MB and a_row <= MOST_BYTES_A_ROW,
        "date": DATE,
        "environment": environment(load_before, load_timed),
        "rows": options.rows,
        "text_bytes_a_row": round(rows_bytes(strings) / options.rows, 1),
        "ratio": ratio,
        "growth_mb_sampled": round(sampled, 1),
        "growth_bytes_a_row_every_row": round(a_row, 1),
        "speed": timed,
        "memory": peaks,
    }
    text = json.dumps(result, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if result["met"] else 1


def documentation() -> list[tuple[str, str]]:
    """Signatures and docstrings of the standard library, as `scripts/build_corpus.py` has them."""
    script = HERE.parents[1] / "scripts" / "build_corpus.py"
    spec = importlib.util.spec_from_file_location("build_corpus", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_corpus"] = module
    spec.loader.exec_module(module)
    pairs, _ = module.collect(Path(sysconfig.get_path("stdlib")))
    return [(pair.prompt, pair.completion) for pair in pairs]


def rows_bytes(strings: list[str]) -> int:
    """UTF-8 bytes of the texts together."""
    return sum(len(text.encode()) for text in strings)


def trained_tokenizer(folder: Path, texts: list[str]) -> Path:
    """A byte-level BPE of 8,000 tokens with a BOS, trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=8000,
            special_tokens=["<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = folder / "tokenizer.json"
    tok.save(str(path))
    return path


def speed(path: Path, tokenizer_json: Path, strings: list[str]) -> dict[str, Any]:
    """Seconds of profiling every row, against the tokenizer's own batch call on its strings.

    The two take turns, so that what else the machine does meets both.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from pichak_core.tune.corpus import profile_corpus

    hugging_face = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), bos_token="<s>")
    backend = Tokenizer.from_file(str(tokenizer_json))
    cases: dict[str, tuple[Any, Callable[[], Any]]] = {
        "transformers, tok(strings)": (hugging_face, lambda: hugging_face(strings)["input_ids"]),
        "tokenizers, encode_batch(strings)": (
            str(tokenizer_json),
            lambda: [e.ids for e in backend.encode_batch(strings, add_special_tokens=False)],
        ),
    }
    found = {}
    for name, (tokenizer, own_call) in cases.items():
        own, profile = [], []
        for _ in range(ROUNDS + 1):
            own.append(seconds(own_call))
            profile.append(seconds(lambda t=tokenizer: profile_corpus(path, t, sample=None)))
        own, profile = own[1:], profile[1:]  # the first of each warms up
        found[name] = {
            kind: {
                "own_call_seconds": spread([o[i] for o in own]),
                "profile_seconds": spread([p[i] for p in profile]),
                "ratio": spread([o[i] / p[i] for o, p in zip(own, profile, strict=True)]),
            }
            for i, kind in enumerate(("wall", "cpu"))
        }
    return found


def memory_by_size(
    folder: Path, lines: list[bytes], size_mb: int, draw: random.Random
) -> dict[str, dict[str, float]]:
    """Peaks of profiles of files of a hundredth, a tenth, and all of `size_mb`."""
    found = {}
    for name, share, samples in (
        ("small.jsonl", 0.01, (512, None)),
        ("medium.jsonl", 0.1, (None,)),
        ("large.jsonl", 1.0, (512,)),
    ):
        path = folder / name
        write_large(path, lines, size_mb * share, draw)
        for sample in samples:
            key = f"{name}, {'every row' if sample is None else f'{sample} rows'}"
            found[key] = memory(path, sample)
        path.unlink()
    return found


def write_large(path: Path, lines: list[bytes], size_mb: float, draw: random.Random) -> None:
    """Lines drawn with replacement until `path` holds `size_mb` MB (10^6 bytes)."""
    written = 0
    with path.open("wb") as file:
        while written < size_mb * 1e6:
            block = b"".join(draw.choices(lines, k=2000))
            file.write(block)
            written += len(block)


def memory(path: Path, sample: int | None) -> dict[str, float]:
    """Peak resident memory of a fresh process that profiles `path` with the bytes tokenizer."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        peak_mb, taken, rows = pool.apply(profile_in_child, (str(path), sample))
    return {
        "file_mb": round(path.stat().st_size / 1e6),
        "rows": rows,
        "peak_mb": round(peak_mb, 1),
        "seconds": round(taken, 2),
    }


def profile_in_child(path: str, sample: int | None) -> tuple[float, float, int]:
    """(peak in MB, seconds, rows of the file)."""
    from pichak_core.tune.corpus import profile_corpus

    started = time.perf_counter()
    profile = profile_corpus(path, "bytes", sample=sample)
    taken = time.perf_counter() - started
    # ru_maxrss is handed down from the parent process; the kernel's own mark is not.
    status = Path("/proc/self/status").read_text()
    peak_kb = int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1])
    return peak_kb * 1024 / 1e6, taken, profile.rows_total


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of every thread) of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def spread(samples: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        "median": round(statistics.median(samples), 3),
        "low": round(min(samples), 3),
        "high": round(max(samples), 3),
    }


def environment(load_before: float, load_timed: float) -> dict[str, Any]:
    """What the figures were measured on; load averages before, and at the end of the timing."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("tokenizers", "transformers")},
        "load_average_before": round(load_before, 2),
        "load_average_timed": round(load_timed, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
