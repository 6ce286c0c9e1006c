"""The built-in transformer: sizes by closed form, causality, and another program's logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from pichak_core.workload.batches import UNSCORED, mean_token_loss
from pichak_core.workload.transformer import (
    SHAPES,
    Shape,
    Transformer,
    build_transformer,
    rotary_angles,
    rotate,
)

torch = pytest.importorskip("torch")

SMALL = Shape(vocabulary=97, width=48, layers=3, heads=6, kv_heads=2, hidden=80)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small lose by threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(shape: Shape = SMALL, seed: int = 3, **options: Any) -> Transformer:
    return build_transformer(
        shape, seed=seed, device="cpu", dtype=options.pop("dtype", torch.float32), **options
    )


def some_ids(rows: int, tokens: int, seed: int = 0) -> Any:
    return torch.randint(97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def named_size(name: str) -> float:
    number = name.removeprefix("gpt-")
    return float(number[:-1]) * {"m": 1e6, "b": 1e9}[number[-1]]


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_counts_are_near_their_names(name: str) -> None:
    s = SHAPES[name]
    keys = s.width * s.kv_heads // s.heads
    block = 2 * s.width**2 + 2 * s.width * keys + 3 * s.width * s.hidden + 2 * s.width
    closed_form = s.vocabulary * s.width * (1 if s.tied else 2) + s.layers * block + s.width
    assert s.parameter_count() == closed_form
    assert closed_form == pytest.approx(named_size(name), rel=0.15)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt-135m", 134_515_008),  # HuggingFaceTB/SmolLM2-135M
        ("gpt-360m", 361_821_120),  # HuggingFaceTB/SmolLM2-360M
        ("gpt-1.1b", 1_100_048_384),  # TinyLlama/TinyLlama-1.1B
    ],
)
def test_published_shapes_have_the_published_counts(name: str, published: int) -> None:
    assert SHAPES[name].parameter_count() == published


def test_the_built_model_has_the_counted_weights_all_trained() -> None:
    for shape in (SMALL, dataclasses.replace(SMALL, tied=False), SHAPES["gpt-1m"]):
        model = small(shape)
        trained = dict(model.trained())
        assert sum(weight.numel() for weight in trained.values()) == shape.parameter_count()
        assert trained.keys() == model.weights.keys()
        assert {name: tuple(weight.shape) for name, weight in trained.items()} == shape.tensors()


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = small()
    ids = some_ids(2, 20)
    before = model.logits(ids)
    for position in (1, 7, 19):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % 97
        after = model.logits(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
        assert not torch.equal(after[:, position], before[:, position])


def test_padding_behind_a_row_changes_nothing() -> None:
    model = small()
    short, long = some_ids(1, 9, seed=1), some_ids(1, 23, seed=2)
    padded = torch.zeros(2, 23, dtype=torch.int64)
    padded[0, :9], padded[1] = short[0], long[0]
    together = model.logits(padded)
    torch.testing.assert_close(together[0, :9], model.logits(short)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[1], model.logits(long)[0], rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    cosine, sine = (part.double() for part in rotary_angles(40, 8, torch.device("cpu")))

    def score(i: int, j: int) -> float:
        return float(rotate(query, (cosine[i], sine[i])) @ rotate(key, (cosine[j], sine[j])))

    for distance in (0, 1, 13):
        scores = [score(start + distance, start) for start in (0, 4, 25)]
        assert scores == pytest.approx([scores[0]] * 3, rel=1e-5)
    assert score(3, 0) != pytest.approx(score(4, 0), rel=1e-3)
    # Position 0 is not turned: the plain inner product.
    assert score(0, 0) == pytest.approx(float(query @ key), rel=1e-12)


def test_shared_keys_are_keys_repeated_for_each_of_their_heads() -> None:
    shared = small()
    full = small(dataclasses.replace(SMALL, kv_heads=SMALL.heads))
    for name, weight in shared.weights.items():
        full.weights[name] = weight.detach()
        if name.endswith((".key", ".value")):
            by_head = weight.detach().view(SMALL.kv_heads, SMALL.head_width, SMALL.width)
            repeated = by_head.repeat_interleave(3, dim=0).reshape(SMALL.width, SMALL.width)
            full.weights[name] = repeated
    ids = some_ids(2, 11)
    torch.testing.assert_close(full.logits(ids), shared.logits(ids), rtol=1e-5, atol=1e-6)


def test_a_seed_is_a_model_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = small(seed=3), small(seed=3), small(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in one.weights.items():
        assert torch.equal(weight, same.weights[name])
    assert not torch.equal(one.weights["layer0.query"], other.weights["layer0.query"])


def test_weights_start_with_their_deviations() -> None:
    model = small(SHAPES["gpt-1m"])
    assert float(model.weights["layer2.up"].detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float(model.weights["layer2.down"].detach().std()) == pytest.approx(
        0.02 / 10**0.5, rel=0.02
    )
    assert torch.equal(model.weights["layer2.mlp_norm"], torch.ones(128))


def test_an_untrained_model_knows_nothing() -> None:
    ids = some_ids(4, 64)
    loss = mean_token_loss(small().logits(ids), ids)
    assert loss.item() == pytest.approx(math.log(97), rel=0.02)


def test_checkpointing_recomputes_each_block_and_changes_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    plain_block = Transformer._block

    def counted(self: Transformer, layer: int, *rest: Any) -> Any:
        calls.append(layer)
        return plain_block(self, layer, *rest)

    monkeypatch.setattr(Transformer, "_block", counted)
    ids = some_ids(2, 12)
    gradients = []
    for checkpointing in (False, True):
        calls.clear()
        model = small(checkpointing=checkpointing)
        mean_token_loss(model.logits(ids), ids).backward()
        assert len(calls) == SMALL.layers * (2 if checkpointing else 1)
        gradients.append([weight.grad for _, weight in model.trained()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_the_loss_is_the_mean_over_scored_targets() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 1, 2, 3]])
    labels = ids.clone()
    labels[0, 0], labels[0, 3], labels[1, 2:] = 1, UNSCORED, UNSCORED
    terms = [
        -float(torch.log_softmax(logits[row, j - 1].double(), -1)[ids[row, j]])
        for row, j in [(0, 1), (0, 2), (0, 4), (1, 1)]
    ]
    assert float(mean_token_loss(logits, labels)) == pytest.approx(sum(terms) / 4, rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_llama_computes(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    shape = dataclasses.replace(SMALL, tied=tied)
    ours = small(shape)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=80,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            attention_bias=False,
        )
    )
    names = {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    theirs = {
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "output": "lm_head",
    } | {
        f"layer{layer}.{part}": f"model.layers.{layer}.{name}"
        for layer in range(3)
        for part, name in names.items()
    }
    state = {f"{theirs[name]}.weight": weight.detach() for name, weight in ours.weights.items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state)
    ids = some_ids(2, 50)
    labels = ids.clone()
    labels[0, :20] = UNSCORED
    reference = llama(input_ids=ids, labels=labels)
    logits = ours.logits(ids)
    torch.testing.assert_close(logits, reference.logits, rtol=1e-4, atol=1e-5)
    ours_loss = mean_token_loss(logits, labels).item()
    assert ours_loss == pytest.approx(reference.loss.item(), rel=1e-5)
