"""`derive` and the fleet's jobs: every argument unlocks its part, what is missing is said."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pichak_core import CONSTANT, Plan, derive
from pichak_core.testing import FakeDevice, FakeStep, affine_memory
from pichak_core.tune import parts
from pichak_core.tune.jobs import NoMicroBatchError, ramp_job, settings_of, task_job

MIB = 1024**2


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """300 rows of 40 prompt bytes and 20 completion bytes."""
    path = tmp_path / "train.jsonl"
    row = json.dumps({"prompt": "p" * 40, "completion": "c" * 20})
    path.write_text(f"{row}\n" * 300, encoding="utf-8")
    return path


def device(rows: int) -> FakeDevice:
    """Holds `rows` rows of 10 MiB beside 100 MiB, to the byte."""
    memory = affine_memory(100 * MIB, 10 * MIB)
    return FakeDevice(capacity_bytes=100 * MIB + rows * 10 * MIB, peak_of=memory)


def two_directions(i: int) -> tuple[list[float], int]:
    """G = (2, 0) with noise ±1 in the second coordinate; 10 scored tokens each."""
    return [2.0, 1.0 if i % 2 else -1.0], 10


def test_nothing_given_derives_nothing_and_says_what_would() -> None:
    plan = derive(device="cpu")
    assert not plan.values
    for argument in ("data", "step_fn", "grad_fn", "named_weights"):
        assert any(f"`{argument}`" in note for note in plan.notes)


def test_everything_given_holds_together(corpus: Path) -> None:
    torch = pytest.importorskip("torch")
    backend = device(12)
    plan = derive(
        data=corpus,
        tokenizer="bytes",
        step_fn=FakeStep(backend),
        grad_fn=two_directions,
        named_weights=[("w", torch.full((4, 4), 0.5)), ("b", torch.zeros(4))],
        adapter_shapes=[(64, 64)],
        device="cpu",
        model="mine",
        headroom=0.0,
        backend=backend,
    )
    # 40 + 20 bytes a row, rounded up to the first bucket; every completion byte is scored.
    assert plan.seq_len == 256
    assert plan.loss_policy == "completion_only"
    assert plan.supervised_per_row == 20
    assert plan.rows_total == 300
    assert plan.micro_batch_max == 12
    assert 1 <= plan.micro_batch <= 12
    # All that varies is ±1 in one direction: tr(Σ) = t·Var = 10, |G|² = 4.
    assert plan.noise_scale_tokens == pytest.approx(10 / 4, rel=0.2)
    assert plan.effective_batch_rows == plan.micro_batch * plan.grad_accum
    assert plan.effective_batch_tokens == plan.effective_batch_rows * 20
    # ‖W‖_F/√numel of a constant tensor is the constant; the zero bias has no size.
    factor = min(1.0, math.sqrt(plan.effective_batch_tokens / plan.noise_scale_tokens))
    assert plan.learning_rate == pytest.approx(0.5 / 32 * factor)
    # The noise scale asks for one row a step; so do 300 updates from 300 rows.
    assert plan.target_tokens == pytest.approx(plan.noise_scale_tokens)
    assert plan.grad_accum == 1
    assert plan.constants() == {"headroom": 0.0, "learning_rate_divisor": 32}
    rate = plan.micro_batch * 256 / plan.seconds_per_step
    assert plan.tokens_per_second == pytest.approx(rate)
    assert Plan.from_json(plan.to_json()) == plan


def test_without_a_noise_scale_the_target_is_a_listed_constant(corpus: Path) -> None:
    backend = device(12)
    plan = derive(data=corpus, step_fn=FakeStep(backend), device="cpu", backend=backend)
    assert plan.why("target_tokens").startswith(CONSTANT)
    # 65,536 tokens would be 3,277 rows; 300 updates from 300 rows allow one micro-batch.
    assert plan.constants()["min_updates"] == 300
    assert plan.grad_accum == 1


def test_a_device_that_holds_no_row_is_a_note_and_the_rest_is_derived(corpus: Path) -> None:
    backend = FakeDevice(capacity_bytes=50 * MIB, peak_of=affine_memory(100 * MIB, 10 * MIB))
    plan = derive(data=corpus, step_fn=FakeStep(backend), device="cpu", backend=backend)
    assert "micro_batch" not in plan
    assert plan.seq_len == 256
    assert any(note.startswith("no micro-batch: 1 row does not fit") for note in plan.notes)


def test_ctrl_c_returns_what_has_been_measured(corpus: Path) -> None:
    def interrupted(i: int) -> tuple[list[float], int]:
        if i == 3:
            raise KeyboardInterrupt
        return two_directions(i)

    backend = device(12)
    plan = derive(
        data=corpus,
        step_fn=FakeStep(backend),
        grad_fn=interrupted,
        named_weights=[],
        device="cpu",
        backend=backend,
    )
    # 12 % of 220 MiB are left free: ⌊(193.6 − 100) / 10⌋ rows.
    assert plan.micro_batch_max == 9
    assert "noise_scale_tokens" not in plan
    assert "learning_rate" not in plan
    assert any("interrupted" in note for note in plan.notes)


def test_gradients_that_say_nothing_are_a_note() -> None:
    plan = derive(grad_fn=lambda _i: ([0.0, 0.0], 10), device="cpu")
    assert "noise_scale_tokens" not in plan
    assert any("no noise scale" in note for note in plan.notes)


@pytest.mark.parametrize(("factor", "told"), [(1.0, False), (math.nan, True), (math.inf, True)])
def test_a_loss_that_is_no_number_is_told(factor: float, told: bool) -> None:
    torch = pytest.importorskip("torch")
    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.tune import TrainingStep

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainingStep(lambda b: model(torch.ones(b, 8)).square().mean() * factor, optimizer)
    backend = backend_for("cpu", cap_bytes=10 * MIB)
    plan = derive(step_fn=step, device="cpu", backend=backend, limit=2)
    assert plan.micro_batch_max == 2
    assert any("NaN or infinite" in note for note in plan.notes) is told


def test_the_rank_is_the_largest_that_fits_beside_the_kept_batch() -> None:
    """10 rows leave 20 MiB; 16 bytes a rank and unit of Σ(in + out) = 50,000 make rank 16 fit
    (12.8 MB) and 32 not (25.6 MB)."""
    backend = device(12)
    plan = derive(
        step_fn=FakeStep(backend),
        adapter_shapes=[(20_000, 5_000), (5_000, 20_000)],
        device="cpu",
        headroom=0.0,
        limit=10,
        backend=backend,
    )
    assert plan.micro_batch_max == 10
    assert plan.lora_rank == 16


def test_a_ramp_ends_at_the_rows_of_the_data(corpus: Path) -> None:
    backend = device(400)
    plan = derive(
        data=corpus,
        tokenizer="bytes",
        step_fn=FakeStep(backend),
        device="cpu",
        headroom=0.0,
        backend=backend,
    )
    assert plan.micro_batch_max == 300
    assert "no more rows" in plan.why("micro_batch_max")


def test_a_ramp_leaves_out_steps_that_take_too_long() -> None:
    backend = device(400)
    ran: list[int] = []

    def step(b: int) -> None:
        ran.append(b)
        FakeStep(backend)(b)
        time.sleep(0.02 * b)

    plan = derive(step_fn=step, device="cpu", headroom=0.0, step_seconds=0.11, backend=backend)
    # 6 rows sleep for 0.12 s at least.
    assert max(ran) <= 5
    assert plan.micro_batch_max <= 5
    assert "longer than allowed" in plan.why("micro_batch_max")
    assert "longer than the 0.11 s allowed" in plan.why("micro_batch")
    assert plan.constants()["step_seconds_limit"] == 0.11


# -- a fleet's jobs -------------------------------------------------------------------------------


def params(corpus: Path | None, **more: Any) -> dict[str, Any]:
    base = {"model": "builtin:gpt-1m", "device": "cpu", "method": "full", "noise_seconds": 20}
    return {**base, "data": str(corpus) if corpus else None, **more}


def run(job: Any, given: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    parts: list[dict[str, Any]] = []
    return job(given, progress=lambda _: None, partial=parts.append), parts


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_two_jobs_together_make_a_plan(corpus: Path, method: str) -> None:
    pytest.importorskip("torch")
    done, early = run(task_job, params(corpus, method=method))
    task = Plan.from_dict(done["task"])
    assert {"seq_len", "supervised_per_row", "noise_scale_tokens", "rewrite_scale"} <= set(task)
    assert "seq_len" in Plan.from_dict(early[0]["task"])

    given = params(corpus, method=method, task=done["task"], memory_cap_bytes=60 * MIB, limit=64)
    result, early = run(ramp_job, given)
    plan = Plan.from_dict(result["plan"])
    assert plan.seq_len == task.seq_len
    assert 1 <= plan.micro_batch <= plan.micro_batch_max < 64
    assert result["ramp"]["peak_bytes"] <= 60 * MIB * 0.88
    assert result["ramp"]["limited_by"] in ("memory", "headroom")
    assert plan.grad_accum >= 1
    divisor = {"full": 320, "lora": 32}[method]
    assert plan.constants()["learning_rate_divisor"] == divisor
    assert ("lora_rank" in plan) is (method == "lora")
    assert "plan" in early[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("value", None),
        ("upper_bound", "at most that, so the factor may be larger"),
        ("lower_bound", "at least that, so the factor may be smaller"),
    ],
)
def test_a_factor_made_of_a_bound_says_so(kind: str, said: str | None) -> None:
    plan = Plan().set("rewrite_scale", 0.32, "norms").set("effective_batch_tokens", 25.0, "ran")
    plan.set("noise_scale_tokens", 100.0, "gradients").set("noise_scale_kind", kind, "gradients")
    parts.learning_rate(plan, full_finetune=True)
    # 0.32 / 320 · √(25 / 100)
    assert float(plan.learning_rate) == pytest.approx(0.0005)
    why = plan.why("learning_rate")
    assert said in why if said else "that, so the factor" not in why


def test_no_scored_token_is_the_reason_and_not_missing_data() -> None:
    plan = Plan().set("micro_batch", 4, "ran").set("supervised_per_row", 0.0, "counted")
    parts.batch(plan)
    assert any("scores no token of a row at this length" in note for note in plan.notes)
    assert "grad_accum" not in plan


BREAKING = """
import torch
class Task:
    seq_len = 8
    def __init__(self):
        self.layer = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())
    def loss_of(self, b):
        if b > LIMIT:
            raise ValueError(f"boom at {b}")
        return self.layer(torch.ones(b, 8)).square().mean()
    def grad_fn(self, i):
        raise KeyError("no batch")
    def named_weights(self):
        return self.layer.named_parameters()
def make(settings):
    return Task()
"""


def test_a_grad_fn_that_raises_costs_the_noise_scale_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "task.py"
    path.write_text(BREAKING.replace("LIMIT", "100"), encoding="utf-8")
    given = params(None, model=f"{path}:make", limit=2)
    done, _ = run(task_job, given)
    task = Plan.from_dict(done["task"])
    assert "rewrite_scale" in task
    assert any("grad_fn raised KeyError: 'no batch'" in note for note in task.notes)
    result, _ = run(ramp_job, {**given, "task": done["task"]})
    assert Plan.from_dict(result["plan"]).micro_batch_max == 2


def test_a_ramp_that_breaks_off_says_what_ran(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "task.py"
    path.write_text(BREAKING.replace("LIMIT", "1"), encoding="utf-8")
    given = params(None, model=f"{path}:make", limit=8)
    done, _ = run(task_job, given)
    seen: list[dict[str, Any]] = []
    with pytest.raises(ValueError, match="boom"):
        ramp_job({**given, "task": done["task"]}, progress=lambda _: None, partial=seen.append)
    kept = Plan.from_dict(seen[-1]["plan"])
    assert any("did not come to its end; it ran 1 row: ok" in note for note in kept.notes)
    assert float(kept.learning_rate) == pytest.approx(float(kept.rewrite_scale) / 320)


def test_a_length_that_the_user_insists_on_is_a_constant(corpus: Path) -> None:
    pytest.importorskip("torch")
    done, _ = run(task_job, params(corpus, seq_len=50))
    task = Plan.from_dict(done["task"])
    assert task.seq_len == 50
    assert task.constants()["seq_len"] == 50
    # 40 prompt bytes leave 10 of the 20 scored ones.
    assert task.supervised_per_row == 10


def test_a_cap_below_one_row_fails_with_the_rest_kept(corpus: Path) -> None:
    pytest.importorskip("torch")
    done, _ = run(task_job, params(corpus))
    parts: list[dict[str, Any]] = []
    given = params(corpus, task=done["task"], memory_cap_bytes=12 * MIB)
    with pytest.raises(NoMicroBatchError, match="1 row does not fit"):
        ramp_job(given, progress=lambda _: None, partial=parts.append)
    assert Plan.from_dict(parts[-1]["plan"]).seq_len == 256


def test_a_shipped_file_is_joined_with_its_factory() -> None:
    made = settings_of({"model": "/tmp/x/train.py", "factory": "make", "device": "cpu"})
    assert made.model == "/tmp/x/train.py:make"
    assert settings_of({"model": "builtin:gpt-1m"}).seq_len is None


@pytest.mark.parametrize(
    "options",
    [
        {"target_tokens": 0},
        {"seq_quantile": 2},
        {"seq_quantile": 0},
        {"headroom": -1},
        {"headroom": 1.0},
    ],
)
def test_arguments_that_make_no_sense_are_refused_also_where_nothing_needs_them(options) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        derive(**options)


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="check the path") as caught:
        derive(data=str(tmp_path / "nope"))
    assert str(tmp_path / "nope") in str(caught.value)


def test_weights_may_be_a_dict_and_bare_tensors_are_refused() -> None:
    weights = {"w": torch.full((2, 2), 0.5)}
    plan = derive(named_weights=weights)
    assert plan.rewrite_scale == 0.5
    with pytest.raises(TypeError, match="named_parameters"):
        derive(named_weights=list(weights.values()))


def test_a_step_that_is_no_function_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match="step_fn is 3; give a function"):
        derive(step_fn=3, device="cpu")  # type: ignore[arg-type]
