"""An all-reduce between machines, timed: this rank's part of it.

The ranks meet at a store on rank 0's address, whose port the system chooses. Every wait ends: at
the store and inside the all-reduce by `timeout_seconds`, and at once when a rank's process goes
away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pichak_core.measure._collective_math import Point, on_line
from pichak_core.measure._net_interfaces import interface_of
from pichak_core.measurement import median_and_spread

if TYPE_CHECKING:
    import torch

#: Elements whose sum every rank can work out by itself, to hold the result against.
_CHECKED = 4096
_WARM_UP = 1
_MOST = 30
_LEAST = 2


@dataclass(frozen=True)
class Ring:
    """One rank's view of the ranks that take part.

    `address` is this machine's, by which training would use it. `port` is where rank 0's store
    listens; rank 0 itself has 0 and tells the port to `on_port`. `name` keeps two runs apart.
    """

    rank: int
    ranks: int
    address: str
    store_address: str
    port: int
    name: str
    sizes: tuple[int, ...]
    seconds: float
    backend: str = "gloo"
    device: str = "cpu"
    timeout_seconds: float = 60.0
    on_port: Callable[[int], None] = lambda _: None
    progress: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks or self.ranks < 2:
            raise ValueError(f"rank {self.rank} of {self.ranks}: an all-reduce needs two ranks")
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {self.backend!r} is neither 'gloo' nor 'nccl'")
        if not self.sizes or self.seconds <= 0:
            raise ValueError("no sizes or no time to measure in")


@dataclass(frozen=True)
class Reduced:
    """What came of it: a point for each size that was run, the sizes that time did not allow, and
    what was wrong with the sums ("" when they were right)."""

    points: tuple[Point, ...]
    skipped: tuple[int, ...]
    interface: str
    wrong: str = ""


def all_reduce(ring: Ring) -> Reduced:
    """Take part as one rank. `RuntimeError` (of torch too) when the ranks cannot meet or one goes
    away, `OSError` when the address is none of this machine's, `ImportError` without torch."""
    interface = use_interface(ring.address)
    import torch.distributed as dist

    if ring.device != "cpu":
        import torch

        torch.cuda.set_device(ring.device)
    timeout = timedelta(seconds=ring.timeout_seconds)
    ring.progress("meeting the other ranks")
    stores: Any = dist  # torch's own annotations leave them out
    store = stores.TCPStore(
        ring.store_address,
        ring.port,
        None,
        ring.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    if ring.rank == 0:
        ring.on_port(int(store.port))
    dist.init_process_group(
        ring.backend,
        store=stores.PrefixStore(ring.name, store),
        rank=ring.rank,
        world_size=ring.ranks,
        timeout=timeout,
    )
    try:
        points, skipped, wrong = _every_size(ring)
        # Rank 0's process keeps the store; it leaves last.
        dist.barrier()
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
    return Reduced(tuple(points), tuple(skipped), interface, wrong)


def use_interface(address: str) -> str:
    """Have Gloo and NCCL use the interface of `address`, and return its name: by themselves they
    take the one of the host's name, which on many machines is the loopback."""
    found = interface_of(address)
    if found is None:
        raise OSError(
            f"{address} is on none of this machine's interfaces (a NAT?): training cannot use it"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = found.name
    os.environ["NCCL_SOCKET_IFNAME"] = f"={found.name}"
    return found.name


def _every_size(ring: Ring) -> tuple[list[Point], list[int], str]:
    import torch

    started = time.monotonic()
    points: list[Point] = []
    wrong = ""
    for index, size in enumerate(ring.sizes):
        ring.progress(f"all-reduce of {size:,} bytes")
        left = ring.seconds - (time.monotonic() - started)
        # The larger sizes get the most of the time: they say the most, and take the longest.
        more = len(ring.sizes) - index - 1
        share = left / (2 * more) if more else left
        # Rank 0 decides for all; a size whose few runs would not end in time is left out.
        go = _agreed(ring, float((_WARM_UP + _LEAST) * _guess(points, size) < left))
        if not go:
            return points, list(ring.sizes[index:]), wrong
        own, work = _data(ring, size)
        warm = []
        for _ in range(_WARM_UP):
            warm.append(_timed(ring, work, own))
        wrong = wrong or _check(ring, work)
        count = int(_agreed(ring, float(max(_LEAST, min(_MOST, share // max(warm[-1], 1e-6))))))
        times = torch.tensor([_timed(ring, work, own) for _ in range(count)], dtype=torch.float64)
        wrong = wrong or _check(ring, work)
        seconds = _slowest(ring, times)
        middle, spread = median_and_spread(seconds)
        points.append(Point(size, middle, spread, count))
    return points, [], wrong


def _guess(points: list[Point], size: int) -> float:
    """About how long one of `size` bytes takes: on the line through the last two sizes; with one
    size so far, twice its time, since small ones cost a latency and little else."""
    if len(points) < 2:
        return 2 * points[0].seconds if points else 0.0
    return on_line(points[-2], points[-1], size)


def _timed(ring: Ring, work: torch.Tensor, own: torch.Tensor) -> float:
    import torch
    import torch.distributed as dist

    work.copy_(own)
    dist.barrier()
    if ring.device != "cpu":
        torch.cuda.synchronize(ring.device)
    begun = time.perf_counter()
    dist.all_reduce(work)
    if ring.device != "cpu":
        torch.cuda.synchronize(ring.device)
    return time.perf_counter() - begun


def _data(ring: Ring, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's numbers, random so that nothing can compress them, and a buffer for the sum."""
    import torch

    count = max(1, size // 4)
    own = torch.cat([_known(ring.rank), torch.rand(max(0, count - _CHECKED))])[:count]
    own = own.to(ring.device)
    return own, torch.empty_like(own)


def _known(rank: int) -> torch.Tensor:
    import torch

    return torch.rand(_CHECKED, generator=torch.Generator().manual_seed(rank))


def _check(ring: Ring, work: torch.Tensor) -> str:
    import torch

    right = torch.stack([_known(rank).double() for rank in range(ring.ranks)]).sum(0)
    count = min(_CHECKED, work.numel())
    off = float((work[:count].cpu().double() - right[:count]).abs().max())
    # Each of n − 1 additions of numbers below n rounds to half a unit of 2^-24.
    if off <= ring.ranks**2 * 2.0**-24:
        return ""
    return f"an all-reduce of {work.numel() * 4:,} bytes gave wrong sums (off by {off:.3g})"


def _agreed(ring: Ring, value: float) -> float:
    import torch
    import torch.distributed as dist

    said = torch.tensor([value], dtype=torch.float64, device=ring.device)
    dist.broadcast(said, 0)
    return float(said.item())


def _slowest(ring: Ring, times: torch.Tensor) -> list[float]:
    """Of each repetition the time of the slowest rank: the one that training waits for."""
    import torch.distributed as dist

    shared = times.to(ring.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    made: list[Any] = shared.cpu().tolist()
    return [float(value) for value in made]
