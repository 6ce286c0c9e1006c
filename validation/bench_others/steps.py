"""The step functions that every tool is given, and the counting of what it does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pichak_core.testing import MIB, FakeDevice, affine_memory

#: The device of the made-up memory: bytes held by no row, bytes of a row, allocator's granule.
BASE, PER_ROW, GRANULE = 400 * MIB, 50 * MIB, 2 * MIB
#: The real model and what it may allocate.
MODEL, SEQ_LEN, CAP_BYTES = "builtin:gpt-1m", 128, 160 * MIB


@dataclass
class Counted:
    """`train(rows)`, counted. A refusal becomes torch's own error with the text that CUDA's
    allocator gives it, since Lightning and accelerate know a lack of memory by that text."""

    train: Callable[[int], object]
    sizes: list[int] = field(default_factory=list)
    refusals: int = 0

    def __call__(self, rows: int) -> None:
        self.sizes.append(rows)
        try:
            self.train(rows)
            return
        except RuntimeError as error:
            if "OutOfMemoryError" not in type(error).__name__:
                raise
            said = str(error)
        # Raised out here, it holds nothing of the failed step alive.
        self.refusals += 1
        raise torch.OutOfMemoryError(f"CUDA out of memory. {said}")

    def counts(self) -> dict[str, int]:
        return {
            "calls": len(self.sizes),
            "sizes": len(set(self.sizes)),
            "rows": sum(self.sizes),
            "refusals": self.refusals,
        }


def device_for(edge: int, **options: Any) -> FakeDevice:
    """A device on which `edge` rows fit and one more does not."""
    return FakeDevice(
        BASE + PER_ROW * edge + PER_ROW // 2,
        affine_memory(BASE, PER_ROW),
        held_bytes=BASE // 2,
        rounding_bytes=GRANULE,
        **options,
    )


class FakeTorch:
    """The part of torch that the earlier `pichak` reads memory with, over a `FakeDevice`.

    It takes such a namespace as its argument `torch_mod`.
    """

    class _Cuda:
        def __init__(self, fake: FakeDevice) -> None:
            self._fake = fake

        def mem_get_info(self, _: object) -> tuple[int, int]:
            return self._fake.capacity_bytes - self._fake.held_bytes, self._fake.capacity_bytes

        def memory_reserved(self, _: object) -> int:
            return self._fake.held_bytes

        def max_memory_reserved(self, _: object) -> int:
            memory = self._fake.process_memory()
            return memory.reserved if memory else 0

        def reset_peak_memory_stats(self, _: object) -> None:
            self._fake.release()

        def empty_cache(self) -> None:
            """Nothing is cached between steps."""

        def synchronize(self, _: object) -> None:
            """Nothing is queued."""

    def __init__(self, fake: FakeDevice) -> None:
        self.cuda = self._Cuda(fake)
        self.device = torch.device


def real_parts() -> tuple[Any, Any]:
    """(a training step of the real model, the CPU as a device of `CAP_BYTES`)."""
    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.tune import TrainingStep
    from pichak_core.workload import Settings, open_workload

    torch.set_num_threads(1)
    workload = open_workload(Settings(model=MODEL, device="cpu", method="full", seq_len=SEQ_LEN))
    backend = backend_for("cpu", cap_bytes=CAP_BYTES)
    return TrainingStep(workload.loss_of, workload.optimizer), backend


def under_cap(step: Callable[[int], object], backend: Any) -> Callable[[int], None]:
    """`step` with its memory counted and refused past the cap, for tools that do not count."""

    def train(rows: int) -> None:
        with backend.watch():
            step(rows)

    return train
