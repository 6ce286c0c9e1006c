"""The ramp on a real transformer under a real cap, against trying every size."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pichak_core.devices.caps import remember_cap
from pichak_core.devices.live_tensors import LiveTensors
from pichak_core.devices.torch_backend import backend_for
from pichak_core.tune.ramp import ramp_micro_batch
from pichak_core.tune.ramp_result import DoesNotFit, RampResult
from pichak_core.tune.training_step import TrainingStep

torch = pytest.importorskip("torch")

SEQ, WIDTH, VOCABULARY = 16, 32, 64
CAP = 3 * 2**19


class Transformer(torch.nn.Module):
    """One pre-norm block of causal attention and a feed-forward layer, between two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.feed = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)

    def loss_of(self, b: int, length: int = SEQ) -> Any:
        ids = torch.randint(0, VOCABULARY, (b, length + 1))
        x = self.tokens(ids[:, :-1])
        q, k, v = self.qkv(self.norm(x)).view(b, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(b, length, WIDTH))
        x = x + self.feed(x)
        return torch.nn.functional.cross_entropy(
            self.out(x).view(-1, VOCABULARY), ids[:, 1:].reshape(-1)
        )


def built() -> tuple[Transformer, Any]:
    torch.manual_seed(0)
    model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def one_thread_and_no_caps() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    remember_cap("cpu", None)


def peak_over_three_steps(rows: int) -> int:
    model, optimizer = built()
    counter = LiveTensors()
    with TrainingStep(model.loss_of, optimizer) as step, counter.counting():
        for _ in range(3):
            step(rows)
    return counter.peak_bytes


def answer(cap_bytes: int, headroom: float, **options: Any) -> RampResult:
    model, optimizer = built()
    return ramp_micro_batch(
        TrainingStep(model.loss_of, optimizer),
        backend=backend_for("cpu", cap_bytes=cap_bytes),
        headroom=headroom,
        keep="largest",
        **options,
    )


@pytest.mark.parametrize(
    "sizes", [range(17, 25), pytest.param(range(1, 33), marks=pytest.mark.slow)]
)
def test_the_answer_is_that_of_trying_every_size(sizes: range) -> None:
    # Whatever else is alive in this process counts too, here and there.
    peaks = {rows: peak_over_three_steps(rows) for rows in sizes}
    for headroom in (0.0, 0.12):
        budget = int(CAP * (1 - headroom))
        edge = max(rows for rows, peak in peaks.items() if peak <= budget)
        assert sizes[0] < edge < sizes[-1], "the test needs an edge inside what it tries"
        result = answer(CAP, headroom)
        assert result.micro_batch_max == edge
        assert result.peak_bytes == pytest.approx(peaks[edge], abs=64)
        assert result.limited_by == ("headroom" if headroom else "memory")
        assert result.steps_run <= 7
        assert result.refusals <= 1
        assert result.passes == 2


def test_one_row_that_does_not_fit_names_its_phase() -> None:
    wide = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 2))

    def ramp(cap_bytes: int) -> RampResult:
        step = TrainingStep(lambda b: wide(torch.randn(b, 100)).sum(), built_optimizer(wide))
        backend = backend_for("cpu", cap_bytes=cap_bytes)
        return ramp_micro_batch(step, backend=backend, headroom=0.0, limit=1)

    # One row peaks in the optimizer's step, with all weights, gradients, moments and temporaries.
    enough = ramp(2**30).peak_bytes
    assert ramp(enough).micro_batch == 1
    with pytest.raises(DoesNotFit, match="optimizer with less state") as caught:
        ramp(enough - 1)
    assert caught.value.phase in ("state", "optimizer")
    weights = sum(p.numel() for p in built()[0].parameters()) * 4
    with pytest.raises(DoesNotFit, match="gradient checkpointing") as caught:
        answer(weights + 30_000, 0.0)
    assert caught.value.phase in ("forward", "backward")


# field case 58
def test_mixed_lengths_in_any_order_train_at_the_kept_size() -> None:
    rows = answer(CAP, 0.12).micro_batch
    ascending = [3] * 25 + [SEQ] * 5
    shuffled = random.Random(0).sample(ascending, len(ascending))
    model, optimizer = built()
    with LiveTensors(CAP).counting():
        for length in ascending + shuffled:
            optimizer.zero_grad()
            for _ in range(2):
                model.loss_of(rows, length).backward()
            optimizer.step()
    # The cap was no formality: a ramp at the short rows answers too much for the long ones.
    del optimizer
    short = ramp_micro_batch(
        TrainingStep(lambda b: model.loss_of(b, 3), built_optimizer(model)),
        backend=backend_for("cpu", cap_bytes=CAP),
        keep="largest",
    ).micro_batch
    with pytest.raises(torch.OutOfMemoryError), LiveTensors(CAP).counting():
        model.loss_of(short).backward()


def built_optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_fresh_processes_give_the_same_answer_to_the_byte() -> None:
    program = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('probe', sys.argv[1])\n"
        "probe = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(probe)\n"
        "result = probe.answer(probe.CAP, 0.12)\n"
        "print(json.dumps([[r.batch, r.peak_bytes, r.verdict] for r in result.tried]"
        " + [result.micro_batch_max, result.peak_bytes]))\n"
    )
    answers = []
    for seed, threads in (("1", "1"), ("2", "2")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(Path(__file__))],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1]


def test_the_fastest_size_is_timed_without_the_counting() -> None:
    model, optimizer = built()
    seen: list[tuple[int, bool]] = []

    class Step(TrainingStep):
        def __call__(self, b: int) -> None:
            counting = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
            seen.append((b, counting))
            super().__call__(b)

    result = ramp_micro_batch(
        Step(model.loss_of, optimizer), backend=backend_for("cpu", cap_bytes=CAP)
    )
    largest = result.micro_batch_max
    assert seen.count((largest, True)) >= 3
    assert seen.count((largest, False)) >= 3
    assert result.micro_batch in {rung.batch for rung in result.tried}
    assert result.peak_bytes <= result.budget_bytes
    assert "without the counting" in result.source
    assert not optimizer.state
