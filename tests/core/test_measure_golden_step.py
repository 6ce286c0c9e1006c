"""The golden step: right by an independent computation, equal across processes, and sensitive to
a single bit."""

from __future__ import annotations

import ctypes
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from pichak_core.measure import Context, probes, run_one  # noqa: E402
from pichak_core.measure import golden_step as module  # noqa: E402
from pichak_core.measure.golden_step import (  # noqa: E402
    ANSWER_LOSS,
    ANSWER_NORMS,
    HEADS,
    INNER,
    LENGTH,
    ROWS,
    SHAPES,
    VOCABULARY,
    WIDTH,
    GoldenStep,
    disagreement,
    golden_step,
    initial_weights,
    loss_of,
    token_rows,
)
from pichak_core.measurement import Measurement, Unmeasured  # noqa: E402

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  # isort: skip

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
    digest, deviation = made["golden.gradient_digest"], made["golden.deviation_ratio"]
    assert isinstance(digest, Measurement)
    assert isinstance(deviation, Measurement)
    assert digest.suspect == deviation.suspect == ""
    right = golden_step()
    assert digest.value == right.digest == digest.detail["again"]
    assert 0 < float(deviation.value) < 0.2
    steps = iter([GoldenStep(5.0, "aa", right.norms), GoldenStep(5.0, "ab", right.norms)])
    monkeypatch.setattr(module, "golden_step", lambda _: next(steps))
    bad = {r.name: r for r in run_one(probes()["golden_step"], Context(device="cpu"))}
    assert "disagree" in bad["golden.gradient_digest"].suspect  # type: ignore[union-attr]


def test_a_machine_that_is_wrong_every_time_is_found_without_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for loss, norms in ((6.1, ANSWER_NORMS), (float("nan"), {**ANSWER_NORMS, "inner": math.nan})):
        wrong = GoldenStep(loss, "aa", tuple(norms.values()))
        monkeypatch.setattr(module, "golden_step", lambda _, wrong=wrong: wrong)
        made = {r.name: r for r in run_one(probes()["golden_step"], Context(device="cpu"))}
        digest = made["golden.gradient_digest"]
        assert isinstance(digest, Measurement)
        assert digest.suspect
        if math.isnan(loss):
            assert isinstance(made["golden.loss"], Unmeasured)
            assert isinstance(made["golden.deviation_ratio"], Unmeasured)


def test_the_answer_is_the_step_in_fp64() -> None:
    weights = {name: w.double().requires_grad_() for name, w in initial_weights().items()}
    assert reference_loss({k: w.detach().numpy() for k, w in weights.items()}) == pytest.approx(
        ANSWER_LOSS, rel=1e-9
    )
    gradients = torch.autograd.grad(loss_of(weights, token_rows()), list(weights.values()))
    for (name, norm), gradient in zip(ANSWER_NORMS.items(), gradients, strict=True):
        assert float(gradient.norm()) == pytest.approx(norm, rel=1e-9), name
    # and along the gradient itself the independent loss rises by the norm: it has no other part
    for name in ("tokens", "inner_out"):
        gradient = gradients[list(SHAPES).index(name)].numpy()
        along, step = gradient / ANSWER_NORMS[name], 1e-4
        moved = []
        for sign in (1, -1):
            there = {k: w.detach().numpy().copy() for k, w in weights.items()}
            there[name] += sign * step * along
            moved.append(reference_loss(there))
        assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(ANSWER_NORMS[name], rel=1e-5)


def test_every_weight_takes_part() -> None:
    assert sorted(i for row in token_rows() for i in row[:-1]) == list(range(VOCABULARY))
    leaves = {name: w.requires_grad_() for name, w in initial_weights().items()}
    for name, gradient in zip(
        SHAPES, torch.autograd.grad(loss_of(leaves, token_rows()), leaves.values()), strict=True
    ):
        assert int((gradient == 0).sum()) == 0, name


def test_one_class_agrees_to_the_bit_and_kinds_within_the_tolerance() -> None:
    norms = tuple(ANSWER_NORMS.values())
    one = GoldenStep(ANSWER_LOSS, "aa", norms)
    assert one.deviation == 0
    assert GoldenStep(ANSWER_LOSS * (1 + 1e-6), "aa", norms).deviation == pytest.approx(0.5, 1e-3)
    # another instruction set: 7e-8 of the loss, 5e-8 of a norm
    near = GoldenStep(ANSWER_LOSS * (1 + 7e-8), "bb", tuple(n * (1 - 5e-8) for n in norms))
    assert near.deviation < 0.1
    assert disagreement(one, near, same_class=True)
    assert disagreement(one, near, same_class=False) == ""
    assert disagreement(one, one, same_class=True) == ""
    far = GoldenStep(ANSWER_LOSS, "cc", (*norms[:4], norms[4] * (1 + 2e-5), *norms[5:]))
    assert far.deviation == pytest.approx(4.0, rel=1e-3)
    assert "inner" in disagreement(one, far, same_class=False)
    nan = GoldenStep(math.nan, "dd", norms)
    assert nan.deviation == math.inf
    assert "losses" in disagreement(one, nan, same_class=False)


def test_coarser_arithmetic_is_outside_the_tolerance() -> None:
    # weights rounded to bf16's 8 bits, as a machine that computes in it would read them
    rounded = {name: w.bfloat16().float() for name, w in initial_weights().items()}
    assert golden_step("cpu", rounded).deviation > 10
    assert golden_step().deviation < 0.2


#: Results of these are read in full by what follows.
_READ_IN_FULL = ("aten.mm", "aten.native_layer_norm", "aten.gelu")


class Flip(TorchDispatchMode):
    """Flips one bit in memory: of the output of operation number `at` of a phase."""

    def __init__(self, phase: str, at: int = -1, share: float = 0.0, bit: int = 0) -> None:
        super().__init__()
        self.phase, self.at, self.share, self.bit = phase, at, share, bit
        self.now, self.seen = "activation", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.now == self.phase and str(func).startswith(_READ_IN_FULL):
            first = out[0] if isinstance(out, tuple) else out
            if self.seen == self.at:
                place = int(self.share * first.numel())
                assert first.is_contiguous()
                word = ctypes.c_uint32.from_address(first.data_ptr() + 4 * place)
                word.value ^= 1 << self.bit
            self.seen += 1
        return out


def stepped(mode: Flip, monkeypatch: pytest.MonkeyPatch) -> GoldenStep:
    real = torch.autograd.grad

    def grad(*arguments: Any, **named: Any) -> Any:
        mode.now = "gradient"
        made = real(*arguments, **named)
        mode.now = "done"
        return made

    with monkeypatch.context() as patched, mode:
        patched.setattr(torch.autograd, "grad", grad)
        return golden_step("cpu", {name: w.clone() for name, w in _WEIGHTS.items()})


@pytest.fixture(scope="module", autouse=True)
def start_weights() -> Iterator[None]:
    """Not kept for longer than this file's tests: other tests count the tensors that are alive."""
    _WEIGHTS.update(initial_weights())
    yield
    _WEIGHTS.clear()


_WEIGHTS: dict[str, torch.Tensor] = {}
LOW, HIGH = range(12), range(12, 23)


@pytest.mark.parametrize("bits", [LOW, HIGH, range(23, 32)], ids=["low", "high", "exponent"])
def test_forty_flips_in_weights_are_all_found(bits: range) -> None:
    draw, good = random.Random(bits.start), golden_step("cpu", _WEIGHTS)
    for _ in range(40):
        weights = {name: w.clone() for name, w in _WEIGHTS.items()}
        name = draw.choice(list(SHAPES))
        words = weights[name].view(torch.int32).flatten()
        place, bit = draw.randrange(words.numel()), draw.choice(bits)
        words[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
        flipped = golden_step("cpu", weights)
        assert disagreement(good, flipped, same_class=True), (name, place, bit)


def test_a_flip_below_every_rounding_shows_in_the_weight_itself() -> None:
    weights = {name: w.clone() for name, w in _WEIGHTS.items()}
    flat = weights["logits"].flatten()
    flat.view(torch.int32)[int(flat.abs().argmin())] ^= 1
    weights["logits"] = flat.view(SHAPES["logits"])
    good, flipped = golden_step("cpu", _WEIGHTS), golden_step("cpu", weights)
    assert (flipped.loss, flipped.norms) == (good.loss, good.norms)  # nothing that it feeds moved
    assert flipped.digest != good.digest


@pytest.mark.parametrize("phase", ["activation", "gradient"])
def test_flips_in_the_step_are_found_but_where_rounding_hides_them(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = golden_step("cpu", _WEIGHTS)
    counting = Flip(phase)
    assert stepped(counting, monkeypatch) == good  # the mode itself changes nothing
    draw = random.Random(phase)
    found = {LOW: 0, HIGH: 0}
    for bits in found:
        for _ in range(40):
            mode = Flip(phase, draw.randrange(counting.seen), draw.random(), draw.choice(bits))
            found[bits] += bool(disagreement(good, stepped(mode, monkeypatch), same_class=True))
    # Upper and lower half: 40 and 38 of 40 activations, 40 and 39 of 40 gradients here. A flip that
    # is smaller than the rounding of every sum it enters cannot be found.
    assert found[HIGH] >= 39
    assert found[LOW] >= 32


def test_a_flip_in_a_weights_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    good, real, draw = golden_step("cpu", _WEIGHTS), torch.autograd.grad, random.Random(4)
    for _ in range(40):
        which, share, bit = draw.randrange(len(SHAPES)), draw.random(), draw.randrange(32)

        def grad(*arguments: Any, which: int = which, share: float = share, bit: int = bit) -> Any:
            made = real(*arguments)
            words = made[which].view(torch.int32).flatten()
            words[int(share * words.numel())] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            return made

        with monkeypatch.context() as patched:
            patched.setattr(torch.autograd, "grad", grad)
            assert golden_step("cpu", _WEIGHTS).digest != good.digest
