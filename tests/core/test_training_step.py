"""A training step whose memory is that of training, and which leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pichak_core.devices.live_tensors import LiveTensors
from pichak_core.tune.training_step import TrainingStep

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    """Linear layers, and what keeps a state of its own: batch norm (buffers), dropout (random)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 4 * width)
        self.norm = torch.nn.BatchNorm1d(4 * width)
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(4 * width, width)
        self.width = width

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(self.norm(torch.relu(self.first(x)))))

    def loss_of(self, b: int) -> Any:
        return self(torch.randn(b + 1, self.width)).pow(2).mean()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam, amsgrad and L2": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": list(p)[:2], "lr": 0.3}, {"params": list(p)[2:], "lr": 0.2}]
    ),
}

if hasattr(torch.optim, "Adafactor"):  # from torch 2.5 on
    OPTIMIZERS["adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.1)


def bits(module: Any) -> list[bytes]:
    tensors = [*module.parameters(), *module.buffers()]
    return [t.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.first.weight[0, 0] = -0.0
        net.last.bias.zero_()
    return net


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [True, False])
def test_no_trace_is_left(net: Net, name: str, accumulate: bool) -> None:
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = bits(net)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, bool, float, str))}
    prior = torch.ones_like(net.first.weight)
    net.first.weight.grad = prior
    randomness = torch.get_rng_state(), random.getstate()
    net.drop.eval()

    step = TrainingStep(net.loss_of, optimizer, accumulate=accumulate)
    for rows in (3, 5, 3):
        step(rows)
    assert step.steps_run == 3
    assert step.passes == (2 if accumulate else 1)
    assert torch.equal(torch.get_rng_state(), randomness[0]), "also between the calls"
    assert random.getstate() == randomness[1]
    step.close()

    assert bits(net) == before
    assert not optimizer.state
    assert [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ] == groups
    assert {
        k: v for k, v in vars(optimizer).items() if isinstance(v, (int, bool, float, str))
    } == plain
    assert net.first.weight.grad is prior
    assert torch.equal(prior, torch.ones_like(prior))
    assert all(p.grad is None for p in list(net.parameters())[1:])
    assert not net.drop.training
    assert net.training
    assert not any(p._backward_hooks for p in net.parameters())
    del scheduler


def test_the_optimizer_that_comes_back_trains_like_a_fresh_one(net: Net) -> None:
    def train(probed: bool) -> list[bytes]:
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if probed:
            with TrainingStep(model.loss_of, optimizer) as step:
                step(4)
                step(7)
        for _ in range(3):
            optimizer.zero_grad()
            model.loss_of(4).backward()
            optimizer.step()
        return bits(model)

    assert train(probed=True) == train(probed=False)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("rows", [1, 500])
def test_the_peak_is_that_of_real_training(accumulate: bool, rows: int) -> None:
    def real() -> int:
        torch.manual_seed(0)
        model = Net(64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        peaks = []
        for _ in range(3):
            counter = LiveTensors()
            with counter.counting():
                for _ in range(2 if accumulate else 1):
                    model.loss_of(rows).backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(counter.peak_bytes)
        assert max(peaks) == peaks[-1], "the state is there from the second step on"
        return peaks[-1]

    def probed(call: int) -> int:
        torch.manual_seed(0)
        model = Net(64)
        with TrainingStep(
            model.loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), accumulate=accumulate
        ) as step:
            for _ in range(call):
                counter = LiveTensors()
                with counter.counting():
                    step(rows)
        return counter.peak_bytes

    truth = real()
    # What it keeps on top: the random generator's state and copies of the buffers.
    kept = 5056 + 4 * 2 * 4 * 64 + 64
    assert truth <= probed(2) <= truth + kept
    assert truth <= probed(1) <= truth + kept, "also at the first call"


def test_a_gradient_that_is_not_finite_spoils_nothing(net: Net) -> None:
    before = bits(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with TrainingStep(lambda b: net.loss_of(b) * float("nan"), optimizer) as step:
        step(2)
    assert bits(net) == before


def test_sparse_gradients_are_stepped_too() -> None:
    table = torch.nn.Embedding(50, 4, sparse=True)
    before = bits(table)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    with TrainingStep(lambda b: table(torch.arange(b)).sum(), optimizer) as step:
        step(10)
    assert bits(table) == before
    assert not optimizer.state


def test_weights_outside_the_optimizer_keep_their_gradients(net: Net) -> None:
    optimizer = torch.optim.SGD(net.last.parameters(), lr=0.1)
    prior = torch.full_like(net.first.bias, 7.0)
    net.first.bias.grad = prior
    with TrainingStep(net.loss_of, optimizer) as step:
        step(2)
    assert net.first.bias.grad is prior
    assert float(prior.sum()) == 7.0 * prior.numel()
    assert net.first.weight.grad is None


def test_modes_and_buffers_that_the_loss_changes_come_back(net: Net) -> None:
    def loss_of(b: int) -> Any:
        net.eval()
        net.norm.running_mean = torch.full((64,), 9.0)
        return net.loss_of(b)

    before, buffer = bits(net), net.norm.running_mean
    with TrainingStep(loss_of, torch.optim.SGD(net.parameters(), lr=0.1)) as step:
        step(2)
    assert net.training
    assert net.norm.training
    assert net.norm.running_mean is buffer
    assert bits(net) == before


class FailsBackward(torch.autograd.Function):
    """Raises in backward from its third call on (the first allocates the state)."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        FailsBackward.calls += 1
        if FailsBackward.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grad


def test_the_phase_it_died_in_is_kept_and_the_state_is_restored(net: Net) -> None:
    before = bits(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    fail = {"forward": False}

    def loss_of(b: int) -> Any:
        if fail["forward"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return FailsBackward.apply(net.loss_of(b))

    FailsBackward.calls = 0
    step = TrainingStep(loss_of, optimizer)
    with pytest.raises(torch.OutOfMemoryError):
        step(2)
    assert step.phase == "backward"
    assert step.steps_run == 0
    assert all(p.grad is None for p in net.parameters())

    step(2)
    assert step.phase == "idle"
    assert step.steps_run == 1

    fail["forward"] = True
    with pytest.raises(torch.OutOfMemoryError):
        step(2)
    assert step.phase == "forward"
    fail["forward"] = False

    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        step(2)
    assert step.phase == "optimizer"
    assert optimizer.param_groups[0]["lr"] == 0.1
    handle.remove()
    step.close()
    assert bits(net) == before
    assert not optimizer.state


def test_a_closed_step_starts_again(net: Net) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step = TrainingStep(net.loss_of, optimizer)
    step(2)
    step.close()
    step.close()
    step(2)
    assert optimizer.state
    step.close()
    assert not optimizer.state
    assert step.steps_run == 2


def test_an_optimizer_with_state_is_refused(net: Net) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.loss_of(2).backward()
    optimizer.step()
    moments = optimizer.state[net.first.weight]["exp_avg"].clone()
    with pytest.raises(ValueError, match="already has state"):
        TrainingStep(net.loss_of, optimizer)
    assert torch.equal(optimizer.state[net.first.weight]["exp_avg"], moments)


class SignDescent(torch.optim.Optimizer):
    """Moves by a step that knows no learning rate; with `decay`, only by a decay of its own."""

    def __init__(self, params: Any, decay: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.999) if self.decay else p.sub_(1e-3 * p.grad.sign())
                    self.state[p]["seen"] = True


@pytest.mark.parametrize(
    "build",
    [
        lambda p: SignDescent(p, decay=False),
        lambda p: SignDescent(p, decay=True),
        lambda p: torch.optim.Rprop(p, lr=0.1),
    ],
)
def test_a_step_that_does_not_scale_with_its_learning_rate_is_refused(
    net: Net, build: Callable[[Any], Any]
) -> None:
    before = bits(net.first) + bits(net.last)
    optimizer = build(net.parameters())
    step = TrainingStep(net.loss_of, optimizer)
    with pytest.raises(ValueError, match="does not scale with the learning rate"):
        step(2)
    assert bits(net.first) + bits(net.last) == before
    assert not optimizer.state
    assert all(p.grad is None for p in net.parameters())


def test_an_optimizer_that_needs_a_closure_is_refused(net: Net) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="without a closure"):
        TrainingStep(net.loss_of, optimizer)(2)


def test_an_optimizer_without_a_learning_rate_is_refused(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match=r"group 0 .* has no learning rate"):
        TrainingStep(net.loss_of, optimizer)


def test_an_optimizer_of_another_model_is_refused(net: Net) -> None:
    other = Net()
    prior = other.last.bias.grad = torch.ones_like(other.last.bias)
    with pytest.raises(ValueError, match="another model"):
        TrainingStep(net.loss_of, torch.optim.SGD(other.parameters(), lr=0.1))(2)
    assert other.last.bias.grad is prior, "refused without a trace"


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda net: 3.5, "gave a float"),
        (lambda net: net.loss_of(2).detach(), "with no graph"),
        (lambda net: net(torch.randn(2, 16)), r"shape \(2, 16\)"),
        (lambda net: None, "gave a NoneType"),
    ],
)
def test_a_loss_that_is_none_is_refused(net: Net, loss: Callable[[Net], Any], match: str) -> None:
    step = TrainingStep(lambda b: loss(net), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=match):
        step(2)
