"""What starting one operation costs, when the operation itself is next to nothing.

On a GPU that is a kernel launch, through driver and hypervisor. On the CPU there is no launch;
what is measured there is torch's dispatch of an operation, and it is named for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._readings import is_cuda
from pichak_core.measure._sampling import percentile
from pichak_core.measure._torch import flusher, waiter
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured, median_and_spread

LAUNCH = Metric("gpu.kernel_launch_us", "us", "a tiny kernel, from the call to its end")
DISPATCH = Metric("cpu.op_dispatch_us", "us", "a tiny torch operation on the CPU")

#: Launches between two looks at the clock. One wait for the GPU then costs each launch little, and
#: a block is short enough that a stall shows in the percentiles.
_BLOCK = 20
_WARM_UP_BLOCKS = 50
#: The quickest launches known take 1.5 us or more.
_IMPOSSIBLE_US = 0.5


@dataclass(frozen=True)
class LaunchTime:
    """Microseconds an operation: median and high percentiles over blocks of operations."""

    device: str
    samples_us: tuple[float, ...]
    operations: int
    suspect: str = ""

    @property
    def median_us(self) -> float:
        return median_and_spread(self.samples_us)[0]

    @property
    def spread_us(self) -> float | None:
        return median_and_spread(self.samples_us)[1]

    @property
    def p95_us(self) -> float:
        return percentile(self.samples_us, 0.95)

    @property
    def p99_us(self) -> float:
        return percentile(self.samples_us, 0.99)

    def __float__(self) -> float:
        return self.median_us

    def describe(self) -> str:
        """One line for a page."""
        what = "a kernel launch" if self.device.startswith("cuda") else "an operation dispatch"
        text = (
            f"{self.median_us:.2f} us {what} on {self.device} "
            f"(p95 {self.p95_us:.2f}, p99 {self.p99_us:.2f}, {self.operations} operations)"
        )
        return f"{text} SUSPECT: {self.suspect}" if self.suspect else text


def kernel_launch_us(device: str = "cuda:0", n: int = 3000) -> LaunchTime:
    """`n` tiny operations on `device`, each needing the last one's result, after a warm-up on the
    same path.

    The time between asking for a block of 20 and its end, over 20; each block is flushed, because
    Windows' driver model (WDDM) holds launches back to hand them over in batches. The cost of
    waiting for an idle device is measured apart and taken off. Judge it as a share of a training
    step, never alone.
    Raises `ValueError` for n < 1, `ImportError` without torch, `RuntimeError` without the device.
    """
    if n < 1:
        raise ValueError(f"n is {n}; at least one operation is needed")
    blocks = -(-n // _BLOCK)
    return _time_blocks(device, lambda done, _: done < blocks)


def _time_blocks(device: str, more: Callable[[int, float], bool]) -> LaunchTime:
    """Time blocks while ``more(blocks done, seconds spent)``."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(f"device {device!r}: torch {torch.__version__} sees no CUDA device")
    clock = time.perf_counter
    flush, finish = flusher(device), waiter(device)

    def wait() -> None:
        flush()
        finish()

    samples: list[float] = []
    with torch.no_grad():
        cell = torch.zeros(1, dtype=torch.float32, device=device)
        one = torch.ones(1, dtype=torch.float32, device=device)

        def block() -> float:
            begun = clock()
            for _ in range(_BLOCK):
                cell.add_(one)
            wait()
            return clock() - begun

        for _ in range(_WARM_UP_BLOCKS):
            block()
        idle = _idle_wait(wait, clock)
        started = clock()
        while more(len(samples), clock() - started):
            samples.append(1e6 * max(0.0, block() - idle) / _BLOCK)
        counted = int(cell.item())
    asked = (_WARM_UP_BLOCKS + len(samples)) * _BLOCK
    # Whole numbers are exact in fp32 up to 2^24; past it the count says nothing.
    suspect = ""
    if asked < 2**24 and counted != asked:
        suspect = f"{asked} operations were asked for and {counted} took effect"
    elif device.startswith("cuda") and median_and_spread(samples)[0] < _IMPOSSIBLE_US:
        suspect = "no launch is that quick"
    return LaunchTime(device, tuple(samples), len(samples) * _BLOCK, suspect)


def _idle_wait(wait: Callable[[], None], clock: Callable[[], float]) -> float:
    """What waiting costs when there is nothing to wait for."""
    costs = []
    for _ in range(50):
        begun = clock()
        wait()
        costs.append(clock() - begun)
    return median_and_spread(costs)[0]


def _reading(metric: Metric, time_of: LaunchTime) -> Measurement:
    what = "kernels" if metric is LAUNCH else "torch operations"
    return Measurement(
        metric.name,
        time_of.median_us,
        metric.unit,
        f"{time_of.operations} tiny dependent {what} in blocks of {_BLOCK}, after a warm-up on the "
        "same path; waiting for an idle device taken off; median of the blocks",
        samples=len(time_of.samples_us),
        spread=time_of.spread_us,
        suspect=time_of.suspect,
        detail={
            "p50_us": time_of.median_us,
            "p95_us": time_of.p95_us,
            "p99_us": time_of.p99_us,
            "operations": time_of.operations,
        },
    )


def run(context: Context) -> Iterable[Reading]:
    if not is_cuda(context):
        detail = "there is no kernel launch on the CPU; see cpu.op_dispatch_us"
        yield Unmeasured(LAUNCH.name, Reason.NO_DEVICE, detail)
    import torch  # noqa: F401 - its import is not part of what is timed

    share = 0.4 * context.budget_seconds

    def more(done: int, spent: float) -> bool:
        return done < 150 or (spent < share and done < 20_000)

    yield _reading(DISPATCH, _time_blocks("cpu", more))
    if is_cuda(context):
        yield _reading(LAUNCH, _time_blocks(context.device, more))


register(
    Probe(
        "kernel_launch",
        (DISPATCH, LAUNCH),
        run,
        {"quick": 0.6, "full": 2.5},
        needs=("torch",),
    )
)
