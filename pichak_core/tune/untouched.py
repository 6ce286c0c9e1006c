"""What a probe must leave as it was around a training step: optimizer, gradients, buffers, modes,
random generators."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pichak_core.devices.live_tensors import objects_of

if TYPE_CHECKING:
    import torch

#: Elements up to which an integer buffer is kept (counters are; packed weights are not).
_SMALL_BUFFER = 4096


@dataclass
class _Buffer:
    """One buffer of a module, and what it held."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    def restore(self) -> None:
        """Put the buffer back with its values."""
        import torch

        if self.module._buffers.get(self.name) is not self.tensor:
            self.module._buffers[self.name] = self.tensor
        # Not by its version: batch norm moves its statistics without raising theirs.
        if not torch.equal(self.tensor.detach().to("cpu"), self.copy):
            with torch.no_grad():
                self.tensor.copy_(self.copy)


class Untouched:
    """Remembers a fresh `optimizer` and the modules around its parameters, until `restore()`.

    Gradients that exist are put aside at once. The modules are those that Python can reach and
    that hold a parameter of the optimizer, with all their children. Buffers are copied to host
    memory: floating-point ones, and small ones of other types.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._plain = {k: v for k, v in vars(optimizer).items() if _is_plain(v)}
        modules = _modules_around(optimizer)
        self._modes = [(module, module.training) for module in modules]
        self._buffers = list(_copied_buffers(modules))
        parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        for module in modules:
            parameters.update({id(p): p for p in module.parameters(recurse=False)})
        self._gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        """Put everything back; the optimizer has no state afterwards."""
        self._optimizer.state.clear()
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in set(group) - set(kept):
                del group[key]
            group.update(kept)
        now = vars(self._optimizer)
        for name in [k for k, v in now.items() if _is_plain(v) and k not in self._plain]:
            del now[name]
        now.update(self._plain)
        for module, training in self._modes:
            module.training = training
        for buffer in self._buffers:
            buffer.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def own_randomness(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put the random generators back behind the block: Python's, numpy's where it is loaded,
    torch's on the CPU and on the parameters' CUDA devices."""
    import torch

    numpy: Any = sys.modules.get("numpy")
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    on_host, on_python = torch.get_rng_state(), random.getstate()
    on_numpy = numpy.random.get_state() if numpy else None
    on_devices = [(index, torch.cuda.get_rng_state(index)) for index in devices]
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        random.setstate(on_python)
        if on_numpy is not None:
            numpy.random.set_state(on_numpy)
        for index, state in on_devices:
            torch.cuda.set_rng_state(state, index)


def _modules_around(optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    import torch

    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, torch.nn.Module] = {}
    for module in objects_of(torch.nn.Module):
        if id(module) in found or "_parameters" not in vars(module):  # still under construction
            continue
        if any(id(p) in trained for p in module.parameters()):
            found.update({id(part): part for part in module.modules()})
    return list(found.values())


def _copied_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[_Buffer]:
    for module in modules:
        for name, tensor in module._buffers.items():
            if tensor is None or not (
                tensor.is_floating_point() or tensor.numel() <= _SMALL_BUFFER
            ):
                continue
            copy = tensor.detach().to("cpu", copy=True)
            yield _Buffer(module, name, tensor, copy)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
