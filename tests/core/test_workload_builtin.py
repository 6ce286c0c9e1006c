"""``builtin:`` workloads: losses and gradients against a sum over single tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pichak_core.tune.examples import Example, ExampleStream
from pichak_core.tune.tokenizers import load_tokenizer
from pichak_core.workload import Settings, Workload, WorkloadError, open_workload
from pichak_core.workload.batches import longest_rows, pad_right
from pichak_core.workload.builtin import BuiltinModel
from pichak_core.workload.model_workload import ModelWorkload
from pichak_core.workload.transformer import SHAPES, Shape

torch = pytest.importorskip("torch")

SHAPE = Shape(vocabulary=256, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
SEQ_LEN = 40


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small lose by threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "gpt-tiny", SHAPE)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """200 rows of prompt and completion, of many lengths, some of them cut at `SEQ_LEN`."""
    path = tmp_path / "train.jsonl"
    rows = [
        {"prompt": f"{i} plus {i * 7}? " * (1 + i % 3), "completion": str(i * 8) * (1 + i % 5)}
        for i in range(200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def settings(**changes: Any) -> Settings:
    return replace(Settings(model="builtin:gpt-tiny", seq_len=SEQ_LEN, seed=5), **changes)


def opened(**changes: Any) -> Workload:
    return open_workload(settings(**changes))


def token_by_token(model: BuiltinModel, rows: list[Example]) -> tuple[Any, int]:
    """Summed loss and count over scored tokens, each row alone and unpadded."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        scores = torch.log_softmax(model.transformer.logits(ids)[0], dim=-1)
        for j in range(1, len(row.input_ids)):
            if row.scored[j]:
                total = total - scores[j - 1, row.input_ids[j]]
                count += 1
    return total, count


def test_loss_of_is_the_mean_over_every_token_of_full_rows() -> None:
    workload = opened()
    state = torch.get_rng_state()
    loss = workload.loss_of(3)
    assert loss.shape == ()
    assert loss.requires_grad
    assert torch.equal(workload.loss_of(3), loss)
    assert torch.equal(torch.get_rng_state(), state)
    model = BuiltinModel(SHAPE, settings())
    ids = longest_rows(3, SEQ_LEN, 256, seed=5, device="cpu").input_ids.tolist()
    rows = [Example(row, [True] * SEQ_LEN) for row in ids]
    total, count = token_by_token(model, rows)
    assert count == 3 * (SEQ_LEN - 1)
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-5)
    assert loss.item() == pytest.approx(math.log(256), rel=0.05)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_grad_fn_is_the_mean_over_single_tokens(data: str, method: Any) -> None:
    workload = opened(data=data, method=method)
    expected_model = BuiltinModel(SHAPE, settings(method=method))
    for model in (expected_model, workload._ready()):  # type: ignore[attr-defined]
        for _, b in model.transformer.adapters.values():
            torch.nn.init.normal_(b, std=0.1, generator=torch.Generator().manual_seed(1))
    stream = ExampleStream(data, load_tokenizer("bytes"), SEQ_LEN, 5)
    tensors = [tensor for _, tensor in expected_model.trained()]
    for i in range(3):
        rows: list[Example] = []
        while len(rows) < 8:
            rows += [row for row in stream.rows(1) if any(row.scored[1:])]
        total, count = token_by_token(expected_model, rows)
        expected = torch.autograd.grad(total / count, tensors)
        gradients, tokens = workload.grad_fn(i)
        assert tokens == count
        for got, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)


def test_gradients_belong_to_the_caller(data: str) -> None:
    workload = opened(data=data)
    state = torch.get_rng_state()
    first, _ = workload.grad_fn(0)
    kept = [gradient.clone() for gradient in first]
    workload.grad_fn(1)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert all(weight.grad is None for _, weight in workload.named_weights())
    again, _ = workload.grad_fn(0)
    for a, b in zip(again, kept, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(torch.get_rng_state(), state)
    shapes = [weight.shape for _, weight in workload.named_weights()]
    assert [gradient.shape for gradient in first] == shapes


def test_leftover_gradients_are_not_added(data: str) -> None:
    clean, dirty = opened(data=data), opened(data=data)
    dirty.loss_of(2).backward()
    for a, b in zip(clean.grad_fn(0)[0], dirty.grad_fn(0)[0], strict=True):
        torch.testing.assert_close(a, b)


def test_the_whole_file_is_used_once(data: str) -> None:
    workload = opened(data=data)
    scored = 0
    with pytest.raises(StopIteration):
        for i in range(1000):
            scored += workload.grad_fn(i)[1]
    expected = 0
    for line in Path(data).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        expected += max(0, min(len(row["completion"]), SEQ_LEN - len(row["prompt"])))
    assert scored == expected


def test_lora_trains_factors_over_a_frozen_base(data: str) -> None:
    workload = opened(data=data, method="lora", lora_rank=4)
    weights = list(workload.named_weights())
    shapes = workload.adapter_shapes()
    assert shapes == opened().adapter_shapes() == list(SHAPE.linears().values())
    assert sum(w.numel() for _, w in weights) == 4 * sum(out + into for out, into in shapes)
    gradients, _ = workload.grad_fn(0)
    for (name, weight), gradient in zip(weights, gradients, strict=True):
        assert gradient.shape == weight.shape
        assert bool(gradient.any()) == name.endswith("lora_b")


def test_each_optimizer_is_fresh_and_holds_what_is_trained() -> None:
    workload = opened()
    optimizer = workload.optimizer
    workload.loss_of(1).backward()
    optimizer.step()
    assert optimizer.state
    assert workload.optimizer is not optimizer
    assert not workload.optimizer.state
    held = {id(p) for group in workload.optimizer.param_groups for p in group["params"]}
    assert held == {id(weight) for _, weight in workload.named_weights()}


def test_close_frees_and_a_later_use_begins_anew() -> None:
    workload = opened()
    before = {name: weight.detach().clone() for name, weight in workload.named_weights()}
    with torch.no_grad():
        for _, weight in workload.named_weights():
            weight.add_(1.0)
    workload.close()
    for name, weight in workload.named_weights():
        assert torch.equal(weight, before[name])


def test_seeds_change_model_and_rows() -> None:
    losses = {opened(seed=seed).loss_of(1).item() for seed in range(3)}
    assert len(losses) == 3


@pytest.mark.parametrize("method", ["full", "lora"])
def test_bfloat16_computes_in_it_and_trains_in_float32(method: Any) -> None:
    workload = opened(dtype="bf16", method=method)
    assert {weight.dtype for _, weight in workload.named_weights()} == {torch.float32}
    reference = opened(method=method).loss_of(2).item()
    loss = workload.loss_of(2)
    assert loss.dtype == torch.float32
    assert loss.item() != reference
    assert loss.item() == pytest.approx(reference, rel=1e-2)
    loss.backward()
    base = workload._ready().transformer.weights  # type: ignore[attr-defined]
    expected = torch.float32 if method == "full" else torch.bfloat16
    assert {weight.dtype for weight in base.values()} == {expected}


def test_checkpointing_gives_the_same_gradients(data: str) -> None:
    plain, saved = opened(data=data), opened(data=data, gradient_checkpointing=True)
    for a, b in zip(plain.grad_fn(0)[0], saved.grad_fn(0)[0], strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_missing_is_named() -> None:
    workload = opened()
    assert workload.missing.keys() == {"data", "grad_fn"}
    assert workload.tokenizer is not None
    assert workload.tokenizer("é")["input_ids"] == [0xC3, 0xA9]
    with pytest.raises(WorkloadError, match="no data file"):
        workload.grad_fn(0)


def test_a_complete_workload_misses_nothing(data: str) -> None:
    assert opened(data=data).missing == {}


def test_before_the_corpus_is_profiled_only_rows_are_unknown() -> None:
    workload = opened(seq_len=None)
    assert workload.seq_len is None
    assert workload.adapter_shapes()
    with pytest.raises(WorkloadError, match="row length is not known"):
        workload.loss_of(1)


def test_ids_of_another_tokenizer_are_refused_before_the_embedding(data: str) -> None:
    workload = ModelWorkload(
        "builtin:gpt-tiny",
        settings(data=data),
        build=lambda given: BuiltinModel(SHAPE, given),
        load_tokenizer=lambda: lambda text: {"input_ids": [300] * len(text)},
    )
    with pytest.raises(WorkloadError, match=r"gives id 300.*256 rows"):
        workload.grad_fn(0)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("builtin:gpt-9t", "gpt-1.1b, gpt-135m, gpt-1m"),
        ("gpt-1m", "not of the form"),
        ("builtin:", "not of the form"),
        ("train.py", "not of the form"),
        ("train.py:", "not of the form"),
        ("", "not of the form"),
    ],
)
def test_other_names_are_refused_with_what_there_is(model: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        open_workload(Settings(model=model))


def test_an_unknown_dtype_and_an_absent_gpu_are_said() -> None:
    with pytest.raises(WorkloadError, match="auto, bf16, fp32"):
        opened(dtype="fp8").loss_of(1)
    if not torch.cuda.is_available():
        with pytest.raises(WorkloadError, match="sees no CUDA device"):
            opened(device="cuda:0").loss_of(1)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WorkloadError, match=r"pichak-fleet\[torch\]"):
        open_workload(Settings())


def rows_of(path: str) -> Iterator[Example]:
    return iter(ExampleStream(path, load_tokenizer("bytes"), SEQ_LEN, 5))


def test_padded_rows_have_the_loss_they_have_alone(data: str) -> None:
    model = BuiltinModel(SHAPE, settings())
    rows = [row for row in rows_of(data) if any(row.scored[1:])][:6]
    total, count = token_by_token(model, rows)
    batch = pad_right(rows)
    assert batch.scored_tokens == count
    assert model.loss(batch).item() == pytest.approx(total.item() / count, rel=1e-5)
