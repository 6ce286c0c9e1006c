"""Dispatch of tiny operations: counted exactly, timed against a clock of known steps."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pichak_core.measure import Context, kernel_launch, kernel_launch_us, probes, run_one  # noqa: E402
from pichak_core.measure._torch import flusher, waiter  # noqa: E402
from pichak_core.measure.kernel_launch import LaunchTime  # noqa: E402
from pichak_core.measurement import Measurement, Reason, Unmeasured  # noqa: E402


def test_percentiles_and_median_of_known_samples() -> None:
    samples = tuple(float(n) for n in range(1, 101))
    made = LaunchTime("cuda:0", samples, 2000)
    assert made.median_us == statistics.median(samples)
    assert (made.p95_us, made.p99_us) == (95.0, 99.0)
    assert float(made) == made.median_us
    assert made.describe() == (
        "50.50 us a kernel launch on cuda:0 (p95 95.00, p99 99.00, 2000 operations)"
    )


@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (20, 1), (21, 2), (3000, 150)])
def test_at_least_as_many_operations_as_asked_for(n: int, blocks: int) -> None:
    made = kernel_launch_us("cpu", n)
    assert len(made.samples_us) == blocks
    assert made.operations == 20 * blocks >= n
    assert made.suspect == ""
    assert "operation dispatch on cpu" in made.describe()


def test_time_of_an_operation_is_the_blocks_over_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A clock that moves 30 us from one reading to the next: a block of 20 lies between two
    # readings, and so does waiting for an idle device, which is taken off.
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 30e-6
        return now

    monkeypatch.setattr(kernel_launch.time, "perf_counter", clock)
    assert kernel_launch_us("cpu", 200).samples_us == pytest.approx([0.0] * 10, abs=1e-9)
    monkeypatch.setattr(kernel_launch, "_idle_wait", lambda *_: 10e-6)
    assert kernel_launch_us("cpu", 200).samples_us == pytest.approx([1.0] * 10)


def test_operations_that_take_no_effect_are_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.add_
    calls = 0

    def lazy(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(self, other) if calls % 2 else self

    monkeypatch.setattr(torch.Tensor, "add_", lazy)
    made = kernel_launch_us("cpu", 100)
    assert "took effect" in made.suspect
    assert "SUSPECT" in made.describe()


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        kernel_launch_us("cpu", 0)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            kernel_launch_us("cuda:0", 1)


def test_on_the_cpu_it_is_named_for_what_it_is() -> None:
    state = torch.random.get_rng_state()
    plain = random.getstate()
    made = {r.name: r for r in run_one(probes()["kernel_launch"], Context(device="cpu"))}
    dispatch, launch = made["cpu.op_dispatch_us"], made["gpu.kernel_launch_us"]
    assert isinstance(dispatch, Measurement)
    assert dispatch.detail["p50_us"] <= dispatch.detail["p95_us"] <= dispatch.detail["p99_us"]
    assert dispatch.value == dispatch.detail["p50_us"]
    assert dispatch.samples >= 150
    assert isinstance(launch, Unmeasured)
    assert launch.reason is Reason.NO_DEVICE
    assert torch.equal(torch.random.get_rng_state(), state)
    assert random.getstate() == plain


def test_each_block_is_flushed_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 42: WDDM keeps launches back until somebody asks after the stream
    asked: list[str] = []
    stream = SimpleNamespace(query=lambda: asked.append("flush") or False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append("wait"))
    flush, wait = flusher("cuda:0"), waiter("cuda:0")
    flush()
    wait()
    assert asked == ["flush", "wait"]
    assert flusher("cpu")() is None
    asked.clear()
    monkeypatch.setattr(kernel_launch, "flusher", lambda _: stream.query)
    monkeypatch.setattr(kernel_launch, "waiter", lambda _: lambda: asked.append("wait"))
    kernel_launch_us("cpu", 40)
    assert asked == ["flush", "wait"] * (len(asked) // 2)
    assert len(asked) // 2 == 50 + 50 + 2  # the warm-up, waits for an idle device, two blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"'cuda:0': torch .* sees no CUDA device"):
        kernel_launch_us()
