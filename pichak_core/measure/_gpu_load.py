"""A GPU held busy for a while, and what it did meanwhile.

A card at rest says nothing of its clocks, its link or what slows it: an idle link trains down and
"idle" is then the reason for every low clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from pichak_core.devices.nvml import Gpu
from pichak_core.measure._torch import waiter
from pichak_core.measurement import Reason, Unmeasured

_SIZE = 4096
#: Clocks and power take this share of a load to settle.
_SETTLING = 0.4


@dataclass(frozen=True)
class Loaded:
    """A GPU's readings while it was busy for `seconds`, in their order."""

    readings: tuple[Gpu, ...]
    seconds: float

    def values(self, field: str) -> list[float]:
        return [v for v in (reading.number(field) for reading in self.readings) if v is not None]

    def middle(self, field: str) -> float | None:
        found = self.values(field)
        return median(found) if found else None

    def bits(self) -> int | None:
        """All throttle reasons that were seen, together."""
        found = self.values("throttle_bitmask")
        together = 0
        for value in found:
            together |= int(value)
        return together if found else None

    def always(self) -> int | None:
        """The throttle reasons that every reading showed: a bit seen once may be a blink."""
        found = self.values("throttle_bitmask")
        common = ~0
        for value in found:
            common &= int(value)
        return common if found else None

    def growth(self, field: str) -> float | None:
        """By how much a counter grew; None where it is not readable twice or was set back."""
        found = self.values(field)
        return found[-1] - found[0] if len(found) > 1 and found[-1] >= found[0] else None


def busy(device: str, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Matrix products of random numbers on `device` for `seconds`; what it allocated is given back
    to the device, and no random state moves. Raises what torch raises."""
    import torch

    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.float16 if device.startswith("cuda") else torch.float32
        size = _SIZE if device.startswith("cuda") else 128
        left = torch.randn(size, size, device=device, dtype=dtype, generator=generator)
        out = torch.empty_like(left)
        wait = waiter(device)
        started = clock()
        while clock() - started < seconds:
            for _ in range(4):
                torch.mm(left, left, out=out)
            wait()
    del left, out
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def under_load(
    work: Callable[[float], None], seconds: float, readings: Callable[[], Sequence[Gpu]]
) -> Loaded | Unmeasured:
    """Run `work` for `seconds`; keep the readings that came in once it had settled.

    `readings` gives all that has been read so far. The work's own error is raised.
    """
    work(_SETTLING * seconds)
    before = len(readings())
    work((1 - _SETTLING) * seconds)
    found = tuple(readings()[before:])
    if not found:
        detail = "NVML gave no reading while the GPU was busy"
        return Unmeasured("gpu.load", Reason.NOT_SUPPORTED, detail)
    return Loaded(found, (1 - _SETTLING) * seconds)
