"""The size of a gradient, counted by hand."""

from __future__ import annotations

import pytest

from pichak_core.tune.gradient_size import gradient_bytes


def test_trained_tensors_in_their_own_types() -> None:
    torch = pytest.importorskip("torch")
    wide = torch.nn.Parameter(torch.ones(3, 5))  # 60 bytes
    half = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))  # 14 bytes
    frozen = torch.nn.Parameter(torch.ones(100), requires_grad=False)
    zero = torch.nn.Parameter(torch.zeros(2, 2))  # LoRA's B at its start has a gradient: 16 bytes
    found = gradient_bytes([("a", wide), ("b", half), ("c", frozen), ("d", zero)])
    assert found is not None
    assert found == 90
    assert "26 trained numbers in 3 tensors" in found.source
    assert found.measured


def test_without_torch_and_without_weights() -> None:
    class Weight:
        def numel(self) -> int:
            return 10

    found = gradient_bytes([("a", Weight())])
    assert found == 40
    assert gradient_bytes([]) is None


def test_a_plan_gets_it() -> None:
    torch = pytest.importorskip("torch")
    from pichak_core import derive

    model = torch.nn.Linear(8, 4)
    plan = derive(named_weights=model.named_parameters(), device="cpu")
    assert plan.gradient_bytes == (8 * 4 + 4) * 4
