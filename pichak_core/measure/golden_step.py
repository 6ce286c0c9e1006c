"""One training step whose answer is known to every machine of its kind.

Machines with the same GPU (or CPU) model, driver and torch must agree on the loss and on every bit
of the gradient; a lone disagreement is a machine that computes wrong numbers.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._torch import settings
from pichak_core.measurement import Measurement, Reading

if TYPE_CHECKING:
    import torch

LOSS = Metric("golden.loss", "nats", "the fixed step's loss")
DIGEST = Metric("golden.gradient_digest", "", "a hash over every bit of the step's gradient")

#: Rows, tokens a row, width, heads, inner width, vocabulary.
ROWS, LENGTH, WIDTH, HEADS, INNER, VOCABULARY = 4, 32, 128, 4, 512, 256
_SEED = 1_618_033

#: The block's weights: attention and feed-forward of one decoder layer between two embeddings.
SHAPES = {
    "tokens": (VOCABULARY, WIDTH),
    "positions": (LENGTH, WIDTH),
    "query_key_value": (WIDTH, 3 * WIDTH),
    "attention_out": (WIDTH, WIDTH),
    "inner": (WIDTH, INNER),
    "inner_out": (INNER, WIDTH),
    "logits": (WIDTH, VOCABULARY),
}


@dataclass(frozen=True)
class GoldenStep:
    """The step's loss and the first 128 bits of SHA-256 over its gradients' bytes."""

    loss: float
    digest: str


def initial_weights() -> dict[str, torch.Tensor]:
    """fp32 weights on the CPU, the same bits everywhere: uniform in ±√(3/rows of the matrix).

    They come from Python's generator, whose sequence is fixed by its documentation; torch's own
    differs between vector instruction sets.
    """
    import torch

    draw = random.Random(_SEED)  # noqa: S311 - reproducible weights, not a secret
    weights = {}
    for name, (rows, columns) in SHAPES.items():
        bound = math.sqrt(3.0 / rows)
        numbers = array("f", (draw.uniform(-bound, bound) for _ in range(rows * columns)))
        weights[name] = torch.tensor(numbers, dtype=torch.float32).view(rows, columns)
    return weights


def token_rows() -> list[list[int]]:
    """ROWS rows of LENGTH + 1 token ids: each position predicts the next one."""
    draw = random.Random(_SEED + 1)  # noqa: S311
    return [[draw.randrange(VOCABULARY) for _ in range(LENGTH + 1)] for _ in range(ROWS)]


def loss_of(weights: Mapping[str, torch.Tensor], rows: list[list[int]]) -> torch.Tensor:
    """Mean cross-entropy of the next token through one pre-norm decoder layer.

    Lookups are products with one-hot rows: a CUDA gather's gradient adds in whatever order it
    comes, and its bits would differ from run to run.
    """
    import torch
    from torch.nn import functional

    device = weights["tokens"].device
    ids = torch.tensor(rows, device=device)
    seen = functional.one_hot(ids[:, :-1], VOCABULARY).float()
    x = seen @ weights["tokens"] + weights["positions"]
    mixed = functional.layer_norm(x, (WIDTH,)) @ weights["query_key_value"]
    parted = mixed.view(ROWS, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    query, key, value = parted.unbind(0)
    scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    attention = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
    joined = attention.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)
    x = x + joined @ weights["attention_out"]
    inner = functional.gelu(functional.layer_norm(x, (WIDTH,)) @ weights["inner"])
    x = x + inner @ weights["inner_out"]
    logits = functional.layer_norm(x, (WIDTH,)) @ weights["logits"]
    target = functional.one_hot(ids[:, 1:], VOCABULARY).float()
    return -(logits.log_softmax(dim=-1) * target).sum() / (ROWS * LENGTH)


def golden_step(
    device: str = "cpu", weights: Mapping[str, torch.Tensor] | None = None
) -> GoldenStep:
    """Run the step once on `device`, in fp32 without TF32 and on one CPU thread.

    `weights` replaces the fixed ones. The caller's generators, threads and precision are as they
    were afterwards. Raises `ImportError` without torch, `RuntimeError` without the device.
    """
    import torch

    kind = device.partition(":")[0]
    start = initial_weights() if weights is None else weights
    with settings(threads=1), torch.enable_grad(), torch.autocast(kind, enabled=False):
        leaves = {
            name: weight.detach().to(device, copy=True).requires_grad_()
            for name, weight in start.items()
        }
        loss = loss_of(leaves, token_rows())
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        digest = hashlib.sha256()
        for gradient in gradients:
            bits = gradient.detach().cpu().contiguous().view(torch.int32).flatten()
            digest.update(array("i", bits.tolist()).tobytes())
        return GoldenStep(float(loss.detach()), digest.hexdigest()[:32])


def run(context: Context) -> Iterable[Reading]:
    import torch

    first, second = golden_step(context.device), golden_step(context.device)
    suspect = ""
    if first != second:
        suspect = "two runs on this very machine disagree"
    source = (
        f"one seeded step of a {WIDTH}-wide decoder layer in fp32 on {context.device}, run twice; "
        "equal on machines with the same device model, driver and torch"
    )
    detail = {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}
    yield Measurement(LOSS.name, first.loss, LOSS.unit, source, suspect=suspect, detail=detail)
    yield Measurement(
        DIGEST.name,
        first.digest,
        "",
        source,
        suspect=suspect,
        detail={**detail, "again": second.digest},
    )


register(Probe("golden_step", (LOSS, DIGEST), run, {"quick": 1.0, "full": 1.0}, needs=("torch",)))
