"""``hf:`` workloads, on small random models and a trained tokenizer saved to disk."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pichak_core.tune.examples import ExampleStream
from pichak_core.workload import Settings, Workload, WorkloadError, open_workload
from pichak_core.workload.batches import longest_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

SEQ_LEN = 32
VOCABULARY = 300
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small lose by threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows() -> list[dict[str, str]]:
    return [
        {"prompt": f"What is {i} plus {i * 3}? ", "completion": f"It is {i * 4}. " * (1 + i % 9)}
        for i in range(160)
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llama`, `gpt2` and `train.jsonl`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("hub")
    lines = [json.dumps(row) for row in rows()]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([row["prompt"] + row["completion"] for row in rows()], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=True,
                pad_token_id=2,
            )
        )
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=48
            )
        )
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def opened(home: Path, name: str = "llama", **changes: Any) -> Workload:
    settings = Settings(
        model=f"hf:{home / name}", data=str(home / "train.jsonl"), seq_len=SEQ_LEN, seed=7
    )
    return open_workload(replace(settings, **changes))


def loaded(home: Path, name: str = "llama") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(home / name)


def test_loss_of_is_the_mean_over_every_token_of_full_rows(home: Path) -> None:
    workload = opened(home)
    state = torch.get_rng_state()
    loss = workload.loss_of(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert loss.requires_grad
    ids = longest_rows(3, SEQ_LEN, VOCABULARY, seed=7, device="cpu").input_ids
    with torch.no_grad():
        scores = torch.log_softmax(loaded(home)(input_ids=ids).logits.double(), dim=-1)
    terms = [-scores[row, j - 1, ids[row, j]].item() for row in range(3) for j in range(1, SEQ_LEN)]
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_grad_fn_is_the_mean_over_single_tokens(home: Path) -> None:
    workload = opened(home)
    assert workload.tokenizer is not None
    stream = ExampleStream(home / "train.jsonl", workload.tokenizer, SEQ_LEN, 7)
    model = loaded(home)
    for i in range(2):
        total, count = torch.zeros(()), 0
        for row in stream.rows(8):
            scores = torch.log_softmax(model(torch.tensor([row.input_ids])).logits[0], dim=-1)
            for j in range(1, len(row.input_ids)):
                if row.scored[j]:
                    total = total - scores[j - 1, row.input_ids[j]]
                    count += 1
        expected = dict(
            zip(
                [name for name, _ in model.named_parameters()],
                torch.autograd.grad(total / count, list(model.parameters())),
                strict=True,
            )
        )
        gradients, tokens = workload.grad_fn(i)
        assert tokens == count
        names = [name for name, _ in workload.named_weights()]
        assert sorted(names) == sorted(expected)
        for name, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)
    assert all(weight.grad is None for _, weight in workload.named_weights())


def test_every_linear_but_the_output_has_a_shape(home: Path) -> None:
    block = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    assert sorted(opened(home).adapter_shapes()) == sorted(block * 2)
    # GPT-2 keeps its weights transposed: query, key and value in one; output; MLP up and down.
    assert opened(home, "gpt2").adapter_shapes() == [(96, 32), (32, 32), (128, 32), (32, 128)]


@needs_peft
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_trains_factors_of_exactly_those_shapes(home: Path, name: str) -> None:
    state = torch.get_rng_state()
    workload = opened(home, name, method="lora", lora_rank=3)
    weights = dict(workload.named_weights())
    shapes = workload.adapter_shapes()
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(w.numel() for w in weights.values()) == 3 * sum(a + b for a, b in shapes)
    firsts = {key: w for key, w in weights.items() if ".lora_A." in key}
    assert {tuple(w.shape) for w in firsts.values()} == {(3, into) for _, into in shapes}
    full = opened(home, name)
    assert shapes == full.adapter_shapes()
    # B starts at zero, so nothing has changed yet but what is trained.
    if name == "llama":
        assert workload.loss_of(2).item() == pytest.approx(full.loss_of(2).item(), rel=1e-6)
    again = dict(opened(home, name, method="lora", lora_rank=3).named_weights())
    other = dict(opened(home, name, method="lora", lora_rank=3, seed=8).named_weights())
    for key, weight in firsts.items():
        assert torch.equal(weight, again[key])
        assert not torch.equal(weight, other[key])
    gradients, _ = workload.grad_fn(0)
    for key, gradient in zip(weights, gradients, strict=True):
        assert bool(gradient.any()) == (".lora_B." in key)


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=needs_peft)])
def test_checkpointing_recomputes_the_layers_and_gives_the_same_gradients(
    home: Path, method: Any
) -> None:
    calls: list[int] = []
    gradients = []
    for checkpointing in (False, True):
        workload = opened(home, method=method, gradient_checkpointing=checkpointing)
        model = workload._ready()._model  # type: ignore[attr-defined]
        layers = [m for m in model.modules() if type(m).__name__ == "LlamaMLP"]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
        calls.clear()
        gradients.append(workload.grad_fn(0)[0])
        assert len(calls) == len(layers) * (2 if checkpointing else 1)
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=needs_peft)])
def test_bfloat16_computes_in_it_and_trains_in_float32(home: Path, method: Any) -> None:
    reference = opened(home, method=method).loss_of(2).item()
    workload = opened(home, method=method, dtype="bf16")
    assert {weight.dtype for _, weight in workload.named_weights()} == {torch.float32}
    loss = workload.loss_of(2)
    assert loss.dtype == torch.float32
    assert loss.item() != reference
    assert loss.item() == pytest.approx(reference, rel=1e-2)
    loss.backward()
    model = workload._ready()._model  # type: ignore[attr-defined]
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == (set() if method == "full" else {torch.bfloat16})
    # The rotary frequencies must not be rounded with the weights.
    buffers = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    assert {b.dtype for b in buffers} == {torch.float32}


def test_dropout_has_a_seed_for_each_micro_batch(home: Path) -> None:
    workload = opened(home, "gpt2")
    state = torch.get_rng_state()
    first, again = workload.grad_fn(0)[0], workload.grad_fn(0)[0]
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b)
    # Another seed, the same rows for both: dropout alone makes the difference.
    longest = workload.loss_of(2)
    assert longest.item() != workload.loss_of(2).item()


def test_rows_beyond_the_models_positions_are_refused(home: Path) -> None:
    with pytest.raises(WorkloadError, match=r"65 tokens.*64 positions; give seq_len=64"):
        opened(home, seq_len=65).loss_of(1)
    assert opened(home, seq_len=64).loss_of(1).item() > 0
    with pytest.raises(WorkloadError, match="48 positions"):
        opened(home, "gpt2", seq_len=49).grad_fn(0)


def test_ids_beyond_the_embedding_are_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "llama", tmp_path / "small")
    config = transformers.AutoConfig.from_pretrained(home / "llama")
    config.vocab_size = 50
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    workload = opened(tmp_path, "small", data=str(home / "train.jsonl"))
    with pytest.raises(WorkloadError, match=r"embedding has 50 rows.*another model"):
        workload.grad_fn(0)
    assert workload.loss_of(2).item() > 0


def test_an_id_is_found_in_the_users_cache_alone(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("socket.socket.connect", no_network)
    name = "somebody/small-llama"
    with pytest.raises(WorkloadError) as caught:
        open_workload(Settings(model=f"hf:{name}"))
    said = str(caught.value)
    assert "hf:somebody/small-llama" in said
    assert str(cache) in said
    assert "hf download somebody/small-llama" in said
    assert "\n" not in said
    with pytest.raises(WorkloadError, match="neither a folder on this machine nor a hub id"):
        open_workload(Settings(model="hf:no such/id here"))
    revision = "0" * 40
    entry = cache / "models--somebody--small-llama"
    shutil.copytree(home / "llama", entry / "snapshots" / revision)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(revision)
    workload = open_workload(Settings(model=f"hf:{name}", seq_len=SEQ_LEN, seed=7))
    assert workload.name == f"hf:{name}"
    assert workload.loss_of(1).item() == pytest.approx(opened(home).loss_of(1).item())
    assert workload.tokenizer is not None
    assert workload.tokenizer("1 plus")["input_ids"]


def no_network(*_: object, **__: object) -> None:
    pytest.fail("the network was asked")


def test_folders_that_hold_no_model_are_said(home: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no folder /nowhere/model"):
        open_workload(Settings(model="hf:/nowhere/model"))
    with pytest.raises(WorkloadError, match=r"config.json cannot be loaded"):
        open_workload(Settings(model=f"hf:{tmp_path}"))
    shutil.copy(home / "llama" / "config.json", tmp_path)
    workload = open_workload(Settings(model=f"hf:{tmp_path}", seq_len=8))
    with pytest.raises(WorkloadError, match="weights cannot be loaded"):
        workload.loss_of(1)
    with pytest.raises(WorkloadError, match="tokenizer"):
        _ = workload.tokenizer


@pytest.mark.parametrize("package", ["torch", "transformers", "peft"])
def test_an_absent_package_is_named(
    home: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(WorkloadError, match=rf"needs {package}.*pichak-fleet\[torch,hf\]"):
        opened(home, method="lora")
    if package == "peft" and find("peft") is not None:
        assert opened(home).adapter_shapes()
