"""The noise scale of a small model on a small corpus, against the truth over the whole corpus."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from pichak_core.tune.noise import NoiseAccumulator, measure_noise_scale

VOCABULARY = 24
ROWS_PER_MICRO_BATCH = 8


class Task:
    """Rows of very different length, each on its own topic, and a model trained a little."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = [self._row(generator) for _ in range(200)]
        torch_state = torch.get_rng_state()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 16),
            torch.nn.Linear(16, 32),
            torch.nn.Tanh(),
            torch.nn.Linear(32, VOCABULARY),
        )
        torch.set_rng_state(torch_state)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        for step in range(10):
            self.gradient(range(step * 20, step * 20 + 20))
            optimizer.step()

    @staticmethod
    def _row(generator):
        length = int(torch.randint(4, 60, (1,), generator=generator))
        preferred = torch.randint(0, VOCABULARY, (6,), generator=generator)
        return preferred[torch.randint(0, 6, (length + 1,), generator=generator)]

    def gradient(self, indices):
        """One forward and backward over rows: (gradients of the mean loss, scored tokens)."""
        self.model.zero_grad()
        chosen = [self.rows[i] for i in indices]
        before = torch.cat([row[:-1] for row in chosen])
        after = torch.cat([row[1:] for row in chosen])
        cross_entropy(self.model(before), after).backward()
        return [p.grad for p in self.model.parameters()], len(after)


@pytest.fixture(scope="module")
def task():
    return Task()


@pytest.fixture(scope="module")
def per_row(task):
    """(scored tokens L, summed gradients R) of every row of the corpus, one pass for each."""
    tokens, sums = [], []
    for i in range(len(task.rows)):
        grads, n = task.gradient([i])
        tokens.append(n)
        sums.append(torch.cat([g.reshape(-1) for g in grads]).double().numpy() * n)
    return np.array(tokens, dtype=float), np.array(sums)


@pytest.fixture(scope="module")
def truth(per_row):
    """(S, |G|²) of independent draws of rows: S = E|R − L G|² / E[L], the limit of T·Var(Ĝ)."""
    tokens, sums = per_row
    mean = sums.sum(0) / tokens.sum()
    noise = sums - tokens[:, None] * mean
    return (noise**2).sum(1).mean() / tokens.mean(), mean @ mean


def test_backward_passes_on_random_rows_find_the_scale_of_the_corpus(task, truth):
    rng = np.random.default_rng(1)
    s, g2 = truth

    def grad_fn(_):
        return task.gradient(rng.integers(0, len(task.rows), ROWS_PER_MICRO_BATCH))

    got = measure_noise_scale(grad_fn, k=32)
    assert got.resolved
    assert got.low <= s / g2 <= got.high
    assert got.b_noise_tokens == pytest.approx(s / g2, rel=0.5)
    assert got.trace_sigma == pytest.approx(s, rel=0.25)


def test_estimates_are_unbiased_and_nine_intervals_in_ten_hold_the_truth(per_row, truth):
    # gradients add up over rows, so that micro-batches can be drawn without further passes
    rng = np.random.default_rng(2)
    tokens, sums = per_row
    s, g2 = truth
    k = max(16, round(4 * s / g2 / (tokens.mean() * ROWS_PER_MICRO_BATCH)))
    found = []
    for _ in range(100):
        kept = NoiseAccumulator()
        for _ in range(k):
            rows = rng.integers(0, len(tokens), ROWS_PER_MICRO_BATCH)
            t = tokens[rows].sum()
            kept.add(torch.from_numpy(sums[rows].sum(0) / t), t)
        found.append(kept.result())
    assert np.mean([f.trace_sigma for f in found]) == pytest.approx(s, rel=0.04)
    assert np.mean([f.g2 for f in found]) == pytest.approx(g2, rel=0.06)
    hits = sum(f.low <= s / g2 <= f.high for f in found)
    assert hits >= 83  # 100 draws at 90 %: 83 is 2.3 standard errors below


def test_a_lora_factor_without_gradient_is_said():
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    a, b = torch.randn(2, 12, requires_grad=True), torch.zeros(5, 2, requires_grad=True)
    x, y = torch.randn(200, 12), torch.randn(200, 5)
    torch.set_rng_state(torch_state)

    def grad_fn(i):
        rows = slice(10 * i, 10 * i + 10)
        a.grad = b.grad = None
        ((x[rows] @ a.t() @ b.t() - y[rows]) ** 2).mean().backward()
        return [a.grad, b.grad], 10

    got = measure_noise_scale(grad_fn, max_micro_batches=16, names=["lora_A", "lora_B"])
    assert any("lora_A" in note and "lora_B" not in note for note in got.notes)
