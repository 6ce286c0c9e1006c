"""An honest training step for a ramp to run: what training allocates, and no trace of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pichak_core.tune.untouched import Untouched, own_randomness

if TYPE_CHECKING:
    import torch


class TrainingStep:
    """``step(b)`` runs one training step of `b` rows with the memory of a real one.

    `loss_of(b)` is the forward pass of `b` rows at the run's longest length and returns the scalar
    loss. Each call runs two backward passes (one with ``accumulate=False``), so that the second
    runs on top of full gradient buffers, and a real optimizer step at learning rate 0 on zeroed
    gradients, so that its temporaries are in the peak and no weight moves, not even by a gradient
    that is not finite. The first call allocates the optimizer's state before that, from one row.

    After each call the random generators are where they were; after `close()` (or the ``with``
    block) the optimizer is fresh, and gradients, buffers and train/eval modes are what they were.
    A later call starts again. Left out of a step, each of these cleared a batch that then ran out
    of memory in training: rows shorter than the run's longest; no gradient buffers.

    `phase` is what it does or died in: "idle", "state", "forward", "backward", "optimizer".
    `steps_run` counts the optimizer steps that ended, `passes` the backward passes of each.

    Raises, at the first call: `ValueError` for an optimizer that already has state, that has no
    learning rate, or whose step does not scale with it; `TypeError` for a loss that is not a
    scalar with a graph.
    """

    def __init__(
        self,
        loss_of: Callable[[int], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: bool = True,
    ) -> None:
        self._loss_of = loss_of
        self._optimizer = optimizer
        self.passes = 2 if accumulate else 1
        self._before: Untouched | None = None
        self._has_state = False
        self.phase = "idle"
        self.steps_run = 0
        #: Whether the first loss was a finite number; None before the first call.
        self.loss_is_finite: bool | None = None
        _check_optimizer(optimizer)

    def __call__(self, b: int) -> None:
        if self._before is None:
            _check_optimizer(self._optimizer)
            self._before = Untouched(self._optimizer)
        with own_randomness(self._parameters()):
            try:
                if not self._has_state:
                    self._allocate_state()
                for _ in range(self.passes):
                    self._accumulate(b)
                self.phase = "optimizer"
                self._step_in_place()
                self.steps_run += 1
                self.phase = "idle"
            except (TypeError, ValueError):
                if not self._has_state:  # refused before it began
                    self.close()
                raise
            finally:
                if self._before is not None:
                    self._drop_gradients()

    def close(self) -> None:
        """Hand back a fresh optimizer and everything else as it was."""
        if self._before is not None:
            self._before.restore()
            self._before = None
        self._has_state = False

    def __enter__(self) -> TrainingStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accumulate(self, b: int) -> None:
        self.phase = "forward"
        loss = self._loss_of(b)
        _check_loss(loss)
        if self.loss_is_finite is None:
            self.loss_is_finite = bool(loss.detach().isfinite())
        self.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]

    def _allocate_state(self) -> None:
        import torch

        self._accumulate(1)
        self.phase = "state"
        dense = [p for p in self._parameters() if p.grad is not None and not p.grad.is_sparse]
        if all(parameter.grad is None for parameter in self._parameters()):
            raise ValueError(
                "backward gave a gradient to none of the optimizer's parameters: the optimizer "
                "was built for another model, or they are frozen"
            )
        # The values are of no use, and beside the check they would be more than training needs.
        sparse = [
            (p, p.grad) for p in self._parameters() if p.grad is not None and p.grad.is_sparse
        ]
        self._drop_gradients()
        self._check_scaling(_probes(self._optimizer, dense))
        for parameter in dense:
            parameter.grad = torch.zeros_like(parameter)
        for parameter, gradient in sparse:
            parameter.grad = gradient
        self._step_in_place()
        self._has_state = True
        self._drop_gradients()

    def _check_scaling(self, probes: list[torch.Tensor]) -> None:
        """Step `probes` alone, at learning rate 0 with gradients of ones: they must not move."""
        import torch

        name = type(self._optimizer).__name__
        copies = [parameter.detach().to("cpu", copy=True) for parameter in probes]
        for parameter in probes:
            parameter.grad = torch.ones_like(parameter)
        try:
            with _zero_learning_rate(self._optimizer):
                self._optimizer.step()
        except TypeError as error:
            raise ValueError(
                f"{name}.step() cannot be called without arguments ({error}): a ramp needs an "
                "optimizer that steps without a closure"
            ) from error
        self._drop_gradients()
        if all(_same_bits(parameter, copy) for parameter, copy in zip(probes, copies, strict=True)):
            return
        with torch.no_grad():
            for parameter, copy in zip(probes, copies, strict=True):
                parameter.copy_(copy)
        raise ValueError(
            f"{name} moves weights at learning rate 0: its step does not scale with the learning "
            "rate, so its memory cannot be measured without training the model; measure with "
            "AdamW or SGD of the same state size"
        )

    def _step_in_place(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self._parameters():
                gradient = parameter.grad
                if gradient is not None:
                    (gradient._values() if gradient.is_sparse else gradient).zero_()
        with _zero_learning_rate(self._optimizer):
            self._optimizer.step()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ValueError(
            f"this {name} already has state: a ramp clears it at the end, which would lose a run's "
            "moments; build a new optimizer for the ramp (Adagrad has state from the start and "
            "cannot be measured)"
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("lr") is None:
            raise ValueError(
                f"parameter group {index} of this {name} has no learning rate, so a step cannot be "
                "made harmless; give it an explicit lr"
            )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(f"this {name} has no parameters")


def _check_loss(loss: Any) -> None:
    import torch

    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return
        graph = "a" if loss.requires_grad else "no"
        given = f"a tensor of shape {tuple(loss.shape)} with {graph} graph"
    else:
        given = f"a {type(loss).__name__}"
    raise TypeError(f"loss_of must return the scalar loss with its graph, and gave {given}")


def _probes(optimizer: torch.optim.Optimizer, trained: list[torch.Tensor]) -> list[torch.Tensor]:
    """The smallest of the `trained` parameters of each group and number of dimensions. One that is
    all zeros (LoRA's B) does not show a decay, so it is taken only where there is no other."""
    wanted = {id(parameter) for parameter in trained}
    found: dict[tuple[int, int], torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in sorted(group["params"], key=lambda p: p.numel()):
            key = (index, parameter.dim())
            if id(parameter) not in wanted:
                continue
            if key not in found or not bool(found[key].detach().any()):
                found[key] = parameter
    return list(found.values())


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    import torch

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8)

    return bool(torch.equal(bits(left), bits(right)))


@contextlib.contextmanager
def _zero_learning_rate(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    import torch

    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = rate
