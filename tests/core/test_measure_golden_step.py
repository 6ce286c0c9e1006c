"""The golden step: right by an independent computation, equal across processes, and sensitive to
a single bit."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from pichak_core.measure import Context, probes, run_one  # noqa: E402
from pichak_core.measure import golden_step as module  # noqa: E402
from pichak_core.measure.golden_step import (  # noqa: E402
    HEADS,
    INNER,
    LENGTH,
    ROWS,
    SHAPES,
    VOCABULARY,
    WIDTH,
    GoldenStep,
    golden_step,
    initial_weights,
    loss_of,
    token_rows,
)
from pichak_core.measurement import Measurement  # noqa: E402

_IN_A_PROCESS = """
import json
from pichak_core.measure.golden_step import golden_step
print(json.dumps([golden_step().loss, golden_step().digest]))
"""


def in_a_process(**environment: str) -> list[Any]:
    import os

    done = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer: list[Any] = json.loads(done.stdout)
    return answer


def reference_loss(weights: dict[str, Any]) -> float:
    """The same step in fp64 with numpy, row by row and head by head, written from its definition
    (Vaswani et al. 2017, pre-norm; layer norm without scale, eps 1e-5; exact GELU)."""
    w = {name: numpy.asarray(value, dtype=numpy.float64) for name, value in weights.items()}

    def norm(x: Any) -> Any:
        mean = x.mean(axis=-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
        return (x - mean) / numpy.sqrt(variance + 1e-5)

    def softmax(x: Any) -> Any:
        e = numpy.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def erf(x: Any) -> Any:
        return torch.erf(torch.from_numpy(x)).numpy()

    each, total = WIDTH // HEADS, 0.0
    for row in token_rows():
        x = w["tokens"][row[:-1]] + w["positions"]
        mixed = norm(x) @ w["query_key_value"]
        outs = []
        for head in range(HEADS):
            start = head * each
            q = mixed[:, start : start + each]
            k = mixed[:, WIDTH + start : WIDTH + start + each]
            v = mixed[:, 2 * WIDTH + start : 2 * WIDTH + start + each]
            scores = q @ k.T / math.sqrt(each)
            scores[numpy.triu_indices(LENGTH, 1)] = -numpy.inf
            outs.append(softmax(scores) @ v)
        x = x + numpy.concatenate(outs, axis=1) @ w["attention_out"]
        inner = norm(x) @ w["inner"]
        x = x + (0.5 * inner * (1 + erf(inner / math.sqrt(2)))) @ w["inner_out"]
        logits = norm(x) @ w["logits"]
        picked = softmax(logits)[numpy.arange(LENGTH), row[1:]]
        total -= numpy.log(picked).sum()
    return float(total) / (ROWS * LENGTH)


def test_the_loss_is_what_an_independent_computation_gives() -> None:
    expected = reference_loss({k: v.numpy() for k, v in initial_weights().items()})
    assert golden_step().loss == pytest.approx(expected, rel=1e-5)
    assert expected > math.log(VOCABULARY) - 0.5  # an untrained model knows nothing


def test_gradients_are_the_slope_of_the_independent_loss() -> None:
    # along one random direction through all weights at once
    weights = initial_weights()
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    gradients = torch.autograd.grad(loss_of(leaves, token_rows()), list(leaves.values()))
    draw = numpy.random.default_rng(5)
    along = {name: draw.standard_normal(shape) for name, shape in SHAPES.items()}
    step, moved = 1e-5, []
    for sign in (1, -1):
        there = {k: w.double().numpy() + sign * step * along[k] for k, w in weights.items()}
        moved.append(reference_loss(there))
    slope = sum(
        float((gradient.double().numpy() * along[name]).sum())
        for name, gradient in zip(SHAPES, gradients, strict=True)
    )
    assert slope == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-4)


def test_two_processes_and_this_one_agree_to_the_bit() -> None:
    here = golden_step()
    # nor do the threads that the environment asks for change it, or the hash seed
    assert in_a_process(OMP_NUM_THREADS="1", PYTHONHASHSEED="7") == [here.loss, here.digest]


def test_one_flipped_bit_in_one_weight_changes_the_digest() -> None:
    good = golden_step()
    for name in SHAPES:
        weights = initial_weights()
        bits = weights[name].view(torch.int32)
        bits[3, 5] ^= 1 << 12
        assert golden_step("cpu", weights).digest != good.digest, name
    assert golden_step("cpu", initial_weights()) == good


def test_weights_are_the_same_bits_everywhere() -> None:
    weights = initial_weights()
    assert {name: tuple(w.shape) for name, w in weights.items()} == SHAPES
    assert SHAPES["inner"] == (WIDTH, INNER)
    # Python's documented generator, drawn in order, rounded to fp32
    draw = random.Random(1_618_033)
    bound = math.sqrt(3.0 / VOCABULARY)
    first = [draw.uniform(-bound, bound) for _ in range(4)]
    assert weights["tokens"].flatten()[:4].tolist() == pytest.approx(first, rel=1e-7)


def test_nothing_of_the_callers_is_moved() -> None:
    state, plain = torch.random.get_rng_state(), random.getstate()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    weights = initial_weights()
    kept = {name: weight.clone() for name, weight in weights.items()}
    with torch.no_grad():  # a caller in another mode gets the same answer
        inside = golden_step("cpu", weights)
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert golden_step("cpu", weights) == inside
    assert inside == golden_step()
    assert all(torch.equal(kept[name], weights[name]) for name in kept)
    assert all(weight.grad is None and not weight.requires_grad for weight in weights.values())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert random.getstate() == plain
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, precision)


def test_the_measurement_runs_it_twice_and_says_when_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {r.name: r for r in run_one(probes()["golden_step"], Context(device="cpu"))}
    digest = made["golden.gradient_digest"]
    assert isinstance(digest, Measurement)
    assert digest.suspect == ""
    assert digest.value == golden_step().digest == digest.detail["again"]
    steps = iter([GoldenStep(5.0, "aa"), GoldenStep(5.0, "ab")])
    monkeypatch.setattr(module, "golden_step", lambda _: next(steps))
    bad = {r.name: r for r in run_one(probes()["golden_step"], Context(device="cpu"))}
    assert "disagree" in bad["golden.gradient_digest"].suspect  # type: ignore[union-attr]
