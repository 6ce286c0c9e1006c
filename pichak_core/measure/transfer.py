"""How fast bytes get to the GPU and back, and what that says of the way between.

Each path is timed by the GPU's clock and by the wall clock, with content that is new in every round
and checked where it arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context, Probe, register
from pichak_core.measure._conditions import Conditions
from pichak_core.measure._copies import (
    NAMES,
    PATHS,
    Buffers,
    Copies,
    Together,
    time_both_ways,
    time_path,
    time_together,
)
from pichak_core.measure._mover import CudaMover, Mover
from pichak_core.measure._readings import host_of, loaded_gpu, nvml_gpu, torch_device, tried
from pichak_core.measure._sisters import others_idle
from pichak_core.measure._transfer_metrics import METRICS, Measured, doubt, picture_of, readings
from pichak_core.measure._transfer_verdict import Link, link_of, sentences
from pichak_core.measurement import Reading, Unmeasured
from pichak_core.plan import format_number

MIB = 2**20

#: About one hidden state: 512 tokens x 5,120 numbers of 2 bytes.
SMALL_BYTES = 5_000_000
#: The large size by depth, where the memory allows it.
LARGE_BYTES = {"quick": 64 * MIB, "full": 512 * MIB}
_SMALLEST_LARGE = 16 * MIB
#: How long the link is kept busy so that NVML's sampler, ten times a second, sees it so.
_LOADED_SECONDS = 0.35


@dataclass(frozen=True)
class TransferBandwidth:
    """Copies of one size by path (`_copies.PATHS`), and the link that carried them."""

    device: str
    copies: Mapping[str, Copies]
    link: Link

    def mb_s(self, path: str) -> float:
        """The median rate of a path in MB/s (10^6 bytes); `KeyError` for an unknown one."""
        return self.copies[path].mb_s

    def suspect(self, path: str) -> str:
        """Why a path's rate counts for nothing; "" when it counts."""
        return doubt(self.copies[path], self.link)

    @property
    def notes(self) -> list[str]:
        """What the rates that count say of the way between host and GPU."""
        sound = {p: c for p, c in self.copies.items() if not doubt(c, self.link)}
        return sentences(picture_of(sound, self.link))

    def describe(self) -> str:
        """A line a path, then what they say."""
        size = next(iter(self.copies.values())).size_bytes
        lines = [f"copies of {format_number(size / 1e6)} MB, {self.device}: {self.link.describe()}"]
        for path, copies in self.copies.items():
            spread = "" if copies.spread is None else f" ± {format_number(copies.spread)}"
            event = copies.event_mb_s
            by_gpu = "" if event is None else f"; {format_number(event)} by the GPU's clock"
            why = self.suspect(path)
            lines.append(
                f"  {NAMES[path]:<24}{format_number(copies.mb_s):>8} MB/s{spread} "
                f"(n = {len(copies.wall_seconds)}{by_gpu})" + (f" SUSPECT: {why}" if why else "")
            )
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def transfer_bandwidth(
    device: str = "cuda:0", mb: float = 5.0, n: int = 20, *, mover: Mover | None = None
) -> TransferBandwidth:
    """`n` copies of `mb` MB (10^6 bytes) along each path between host and `device`.

    To the GPU and from it, pinned and pageable, and within it; content is new each time and
    checked. Raises `ValueError` for sizes or counts below one word or one copy and for a device
    that is no GPU, `ImportError` without torch, `RuntimeError` without the device or the memory.
    `mover` replaces the device.
    """
    if n < 1 or not mb * 1e6 >= 4:
        raise ValueError(f"mb={mb:g}, n={n}: at least one copy of at least 4 bytes is needed")
    if mover is None and not device.startswith("cuda"):
        raise ValueError(f"device {device!r}: copies go between the host and a GPU; give 'cuda:N'")
    context = Context(device=device)
    mover = mover or _cuda_mover(device)
    sampler = Conditions.of(context)
    try:
        with sampler.during():
            buffers = Buffers.of(mover, int(mb * 1e6))
            made = {p: time_path(mover, buffers, p, budget_seconds=0, samples=n) for p in PATHS}
            _keep_busy(mover, buffers, time.perf_counter)
            loaded = sampler.gpu_readings()
            del buffers
    finally:
        sampler.close()
        mover.release()
    return TransferBandwidth(device, made, _link(context, loaded))


def _cuda_mover(device: str) -> CudaMover:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"device {device!r}: torch {torch.__version__} sees no CUDA device")
    return CudaMover(device)


def large_bytes(wanted: int, card_free: int, host_usable: int) -> int:
    """The large size: two buffers on the card in a quarter of what is free, three on the host in an
    eighth of what it can have; a multiple of 1 MiB and at least 1."""
    return max(MIB, min(wanted, card_free // 8, host_usable // 24) // MIB * MIB)


def measure(
    mover: Mover,
    large: int,
    budget_seconds: float,
    *,
    loaded: Callable[[], list[Gpu]] = list,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """All paths at both sizes and both directions at once. `loaded` gives the GPU's readings since
    the measurement began; those that came while large copies ran are kept."""
    share = budget_seconds / 14
    buffers = Buffers.of(mover, SMALL_BYTES)
    small = {p: time_path(mover, buffers, p, budget_seconds=share, clock=clock) for p in PATHS}
    buffers = Buffers.of(mover, large)
    before = len(loaded())
    made = {
        path: time_path(mover, buffers, path, budget_seconds=share, clock=clock)
        for path in PATHS
        if path != "d2d"
    }
    both = time_both_ways(mover, buffers, clock=clock)
    _keep_busy(mover, buffers, clock)
    during = loaded()[before:]
    del buffers
    mover.release()
    return Measured(small, {**made, **{c.path: c for c in both}}, during)


def _keep_busy(mover: Mover, buffers: Buffers, clock: Callable[[], float]) -> None:
    """Copies back to back, so that the link is read under load."""
    source, target, _ = buffers.ends("h2d_pinned")
    begun = clock()
    while clock() - begun < _LOADED_SECONDS:
        mover.copy(target, source)
        mover.wait()


def _link(context: Context, loaded: list[Gpu]) -> Link:
    device, gpu = torch_device(context), nvml_gpu(context)
    unified = not isinstance(device, Unmeasured) and device.integrated
    return link_of(loaded, gpu if isinstance(gpu, Gpu) else None, unified=unified)


def _together(context: Context, mover: Mover, size: int) -> list[Together] | Unmeasured:
    import torch

    own = int(context.device.partition(":")[2] or 0)
    others = others_idle(context, own, torch.cuda.device_count())
    if isinstance(others, Unmeasured):
        return others
    movers = [mover, *(CudaMover(name) for name in others)]
    each = max(MIB, size // len(movers) // MIB * MIB)
    every = [Buffers.of(one, each) for one in movers]
    try:
        return [time_together(movers, every, way) for way in ("h2d", "d2h")]
    finally:
        del every
        for one in movers:
            one.release()


def run(context: Context) -> Iterable[Reading]:
    import torch

    free, _ = torch.cuda.mem_get_info(context.device)
    usable = tried(host_of(context).usable_memory_bytes)
    host = usable[0] if isinstance(usable, tuple) else 24 * _SMALLEST_LARGE
    size = large_bytes(LARGE_BYTES[context.depth], int(free), host)
    mover = CudaMover(context.device)
    found = measure(mover, size, context.budget_seconds, loaded=lambda: loaded_gpu(context))
    together = _together(context, mover, size)
    yield from readings(found, _link(context, found.loaded), together)


register(
    Probe(
        "transfer",
        METRICS,
        run,
        {"quick": 4.0, "full": 20.0},
        needs=("torch",),
        devices=("cuda",),
    )
)
