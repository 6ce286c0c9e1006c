"""Moving bytes between host and device: the few calls that a transfer measurement needs.

`CudaMover` queues copies on two streams of its own, so that both directions can run at once.
`HostMover` does the same calls with plain host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

#: A word is an int32.
WORD = 4
#: Odd, so that multiplying by it visits every value; 2^32 over the golden ratio, as a signed word.
_SPREAD = -1_640_531_535
#: What every word grows by from one round to the next.
ROUND_STEP = 97_531


class Mover(Protocol):
    """One device. Buffers are tensors of int32; sizes are in words.

    `copy` and `mark` only ask, on one of two `lane`s; `wait` returns when all that was asked is
    done. `seconds` between two marks of a lane, by the device's own clock, is None where it has no
    such clock.
    """

    device: str

    def host(self, words: int, *, pinned: bool) -> torch.Tensor: ...

    def card(self, words: int) -> torch.Tensor: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, lane: int = 0) -> None: ...

    def mark(self, lane: int = 0) -> Any: ...

    def seconds(self, first: Any, second: Any) -> float | None: ...

    def wait(self) -> None: ...

    def release(self) -> None:
        """Give back what the buffers, which nothing refers to any more, still hold."""


class CudaMover:
    """A CUDA device. Raises `RuntimeError` where torch does not see it."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = device
        self._cuda: Any = torch.cuda
        self._streams = [self._cuda.Stream(device=device) for _ in range(2)]

    def host(self, words: int, *, pinned: bool) -> torch.Tensor:
        import torch

        return torch.zeros(words, dtype=torch.int32, pin_memory=pinned)

    def card(self, words: int) -> torch.Tensor:
        import torch

        return torch.zeros(words, dtype=torch.int32, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, lane: int = 0) -> None:
        with self._cuda.stream(self._streams[lane]):
            target.copy_(source, non_blocking=True)

    def mark(self, lane: int = 0) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._streams[lane])
        return event

    def seconds(self, first: Any, second: Any) -> float | None:
        return float(first.elapsed_time(second)) / 1e3

    def wait(self) -> None:
        self._cuda.synchronize(self.device)

    def release(self) -> None:
        import torch

        self._cuda.empty_cache()
        # Torch keeps pinned memory for later; older versions have no call that gives it back.
        give_back = getattr(torch._C, "_host_emptyCache", None)
        if give_back is not None:
            give_back()


class HostMover:
    """Host memory on both sides: no link, no queue, a device clock that is the wall clock."""

    device = "cpu"

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def host(self, words: int, *, pinned: bool) -> torch.Tensor:
        import torch

        del pinned  # without a device there is nothing to pin for
        return torch.zeros(words, dtype=torch.int32)

    def card(self, words: int) -> torch.Tensor:
        import torch

        return torch.zeros(words, dtype=torch.int32)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, lane: int = 0) -> None:
        del lane
        target.copy_(source)

    def mark(self, lane: int = 0) -> Any:
        del lane
        return self._clock()

    def seconds(self, first: Any, second: Any) -> float | None:
        return float(second - first)

    def wait(self) -> None:
        """Nothing is queued."""

    def release(self) -> None:
        """Nothing is kept."""


def fill(buffer: torch.Tensor, seed: int) -> None:
    """Write word i as i · 2,654,435,761 + seed modulo 2^32, the same on every device and without
    memory beside the buffer."""
    import torch

    torch.arange(buffer.numel(), dtype=torch.int32, device=buffer.device, out=buffer)
    buffer.mul_(_SPREAD).add_(seed)


def next_round(buffers: Sequence[torch.Tensor]) -> None:
    """Give every word of the buffers a new value."""
    for buffer in buffers:
        buffer.add_(ROUND_STEP)
