"""One training step whose answer is known.

Machines of one class (the same GPU or CPU model, driver and torch) must agree on the loss and on
every bit of the gradient; a lone disagreement is a machine that computes wrong numbers. Machines of
other kinds round otherwise: they are held, as is a machine without peers, against the answer in
fp64, within a tolerance.

Within a class every flipped bit of a weight or of a weight's gradient is found, for the digest
covers both. A flip in an intermediate result is found unless it is smaller than the rounding of
every sum that it enters: of 160 in the mantissa of activations and their gradients, 157. Between
kinds only what leaves the tolerance is found: exponent and sign bits, few of the mantissa's.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import random
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._torch import settings
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured

if TYPE_CHECKING:
    import torch

LOSS = Metric("golden.loss", "nats", "the fixed step's loss")
DIGEST = Metric("golden.gradient_digest", "", "a hash over every bit of the step's gradient")
DEVIATION = Metric("golden.deviation_ratio", "", "distance from the answer in fp64 over tolerance")

#: Rows, tokens a row, width, heads, inner width, vocabulary.
ROWS, LENGTH, WIDTH, HEADS, INNER, VOCABULARY = 8, 32, 128, 4, 512, 256
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


#: The answer: the same step in fp64. Loss in nats, and the 2-norm of each weight's gradient.
ANSWER_LOSS = 6.088071903568456
ANSWER_NORMS = {
    "tokens": 0.5061891905320839,
    "positions": 0.4946261202962472,
    "query_key_value": 0.9625158247732093,
    "attention_out": 0.6146006940468168,
    "inner": 0.5876417116373939,
    "inner_out": 1.0551166177804139,
    "logits": 0.6590533303665244,
}
#: Constants: how far fp32 in any order of summation may be from it, relative. Vector instruction
#: sets from SSE to AVX-512 stay within 7e-8 and 5e-8; products in TF32 or bf16 leave it.
LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 5e-6


@dataclass(frozen=True)
class GoldenStep:
    """The step's loss; the first 128 bits of SHA-256 over the bytes of its gradients and of the
    weights as the device held them; and the gradients' 2-norms in the order of `SHAPES`."""

    loss: float
    digest: str
    norms: tuple[float, ...] = ()

    @property
    def deviation(self) -> float:
        """The largest distance from the answer as a multiple of its tolerance: 1 is the limit.
        Infinite for what is not a number."""
        shares = [abs(self.loss / ANSWER_LOSS - 1) / LOSS_TOLERANCE]
        shares += [
            abs(norm / answer - 1) / NORM_TOLERANCE
            for norm, answer in zip(self.norms, ANSWER_NORMS.values(), strict=True)
        ]
        return max(share if math.isfinite(share) else math.inf for share in shares)


def disagreement(one: GoldenStep, other: GoldenStep, *, same_class: bool) -> str:
    """How two machines' steps disagree, "" when they do not.

    Of one class (device model, driver, torch; vector instructions on a CPU) every bit must be
    equal. Of two kinds, loss and norms must lie within twice the tolerance of each other: each may
    be one tolerance from the answer.
    """
    if same_class:
        return "" if one.digest == other.digest and one.loss == other.loss else "other bits"
    if not abs(one.loss - other.loss) <= 2 * LOSS_TOLERANCE * ANSWER_LOSS:
        return f"losses of {one.loss:.9g} and {other.loss:.9g} nats"
    for (name, answer), mine, theirs in zip(
        ANSWER_NORMS.items(), one.norms, other.norms, strict=True
    ):
        if not abs(mine - theirs) <= 2 * NORM_TOLERANCE * answer:
            return f"gradient norms of {name} of {mine:.9g} and {theirs:.9g}"
    return ""


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
    """ROWS rows of LENGTH + 1 token ids: each position predicts the next one. Every id is read
    exactly once, so that no weight is left out of the step."""
    draw = random.Random(_SEED + 1)  # noqa: S311
    ids = list(range(VOCABULARY))
    draw.shuffle(ids)
    rows = [ids[start : start + LENGTH] for start in range(0, VOCABULARY, LENGTH)]
    return [[*row, draw.randrange(VOCABULARY)] for row in rows]


def loss_of(weights: Mapping[str, torch.Tensor], rows: list[list[int]]) -> torch.Tensor:
    """Mean cross-entropy of the next token through one pre-norm decoder layer.

    Lookups are products with one-hot rows: a CUDA gather's gradient adds in whatever order it
    comes, and its bits would differ from run to run.
    """
    import torch
    from torch.nn import functional

    device = weights["tokens"].device
    ids = torch.tensor(rows, device=device)
    seen = functional.one_hot(ids[:, :-1], VOCABULARY).to(weights["tokens"].dtype)
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
    target = functional.one_hot(ids[:, 1:], VOCABULARY).to(logits.dtype)
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
        digest, norms = hashlib.sha256(), []
        for gradient, leaf in zip(gradients, leaves.values(), strict=True):
            kept = gradient.detach().cpu().contiguous().flatten()
            norms.append(float(kept.double().norm()))
            # A weight that changed by less than a gradient's rounding shows in itself alone.
            for tensor in (kept, leaf.detach().cpu().contiguous().flatten()):
                digest.update(ctypes.string_at(tensor.data_ptr(), 4 * tensor.numel()))
        return GoldenStep(float(loss.detach()), digest.hexdigest()[:32], tuple(norms))


def doubt(first: GoldenStep, second: GoldenStep) -> str:
    """Why a machine that ran the step twice computes wrong numbers; "" when nothing says so."""
    if disagreement(first, second, same_class=True):
        return "two runs on this very machine disagree"
    if first.deviation > 1:
        return (
            f"{first.deviation:.3g} times as far from the step's answer as rounding can be "
            f"(loss {first.loss:.9g}, the answer is {ANSWER_LOSS:.9g})"
        )
    return ""


def run(context: Context) -> Iterable[Reading]:
    import torch

    first, second = golden_step(context.device), golden_step(context.device)
    suspect = doubt(first, second)
    source = (
        f"one seeded step of a {WIDTH}-wide decoder layer in fp32 on {context.device}, run twice; "
        "equal on machines with the same device model, driver and torch"
    )
    detail = {
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gradient_norms": dict(zip(SHAPES, first.norms, strict=True)),
    }
    if math.isfinite(first.loss):
        yield Measurement(
            LOSS.name, first.loss, LOSS.unit, source, samples=2, suspect=suspect, detail=detail
        )
    else:
        yield Unmeasured(LOSS.name, Reason.FAILED, f"the step's loss is {first.loss}")
    yield Measurement(
        DIGEST.name,
        first.digest,
        "",
        source,
        samples=2,
        suspect=suspect,
        detail={**detail, "again": second.digest},
    )
    if math.isfinite(first.deviation):
        yield Measurement(
            DEVIATION.name,
            first.deviation,
            "",
            f"loss and gradient norms against the same step in fp64; 1 is {LOSS_TOLERANCE:g} of "
            f"the loss or {NORM_TOLERANCE:g} of a norm (constants)",
            samples=2,
            suspect=suspect,
        )
    else:
        yield Unmeasured(DEVIATION.name, Reason.FAILED, "loss or gradient is not a number")


register(
    Probe(
        "golden_step",
        (LOSS, DIGEST, DEVIATION),
        run,
        {"quick": 1.0, "full": 1.0},
        needs=("torch",),
    )
)
