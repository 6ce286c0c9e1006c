"""All-reduce: its arithmetic from closed forms, and two real ranks over the loopback."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest

from pichak_core.measure import Context, probes, run_one
from pichak_core.measure._collective_math import (
    FARTHEST,
    Point,
    bus_factor,
    predicted_seconds,
    sizes_up_to,
    step_seconds,
)
from pichak_core.measure._collective_run import Reduced, Ring, use_interface
from pichak_core.measure.collective import readings
from pichak_core.measurement import Measurement, Reason, Unmeasured


def point(size: int, latency: float = 0.002, bytes_per_second: float = 1e8) -> Point:
    """A line: latency + size / rate."""
    return Point(size, latency + size / bytes_per_second, None, 5)


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75), (1000, 1.998)])
def test_bus_factor(ranks: int, factor: float) -> None:
    assert bus_factor(ranks) == pytest.approx(factor)


def test_one_rank_reduces_nothing() -> None:
    with pytest.raises(ValueError, match="two ranks"):
        bus_factor(1)


def test_bus_bandwidth_of_a_ring_is_its_links_speed() -> None:
    """A ring over links of B bytes/s takes 2(n − 1)/n · S/B: its bus bandwidth is B, whatever n."""
    for ranks in (2, 3, 8, 64):
        link, size = 125e6, 100_000_000
        seconds = 2 * (ranks - 1) / ranks * size / link
        assert Point(size, seconds, None, 3).bus_mb_s(ranks) == pytest.approx(125.0)


@pytest.mark.parametrize("largest", [4, 100, 4096, 5000, 64 * 2**20, 10**9 + 3])
def test_sizes_rise_to_the_gradients_own(largest: int) -> None:
    sizes = sizes_up_to(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest - largest % 4
    assert all(size % 4 == 0 for size in sizes)
    assert len(sizes) < 12


def test_prediction_is_exact_on_a_line() -> None:
    measured = [point(size) for size in (4096, 65536, 2**20)]
    for size in (4096, 10_000, 500_000, 2**20, 5 * 2**20):
        seconds, _ = predicted_seconds(measured, size)
        assert seconds == pytest.approx(point(size).seconds)


def test_a_latency_is_not_taken_for_a_rate() -> None:
    """4 kB in 380 ms (delay and loss) say nothing about 8 MB; proportion would say 780 s."""
    with pytest.raises(ValueError, match="too far"):
        predicted_seconds([Point(4096, 0.38, None, 26)], 8 * 2**20)
    with pytest.raises(ValueError, match="too far"):
        predicted_seconds([point(4096), point(65536)], FARTHEST * 65536 + 4)
    with pytest.raises(ValueError, match="nothing"):
        predicted_seconds([], 4096)


def test_a_larger_size_is_never_predicted_to_be_quicker() -> None:
    noisy = [Point(4096, 0.004, None, 5), Point(65536, 0.003, None, 5)]
    assert predicted_seconds(noisy, 2 * 65536)[0] >= 0.003


def test_a_step_waits_for_its_slowest_node_and_the_gradients() -> None:
    assert step_seconds([1.0, 1.5, 0.9], 0.25) == pytest.approx(1.75)
    with pytest.raises(ValueError, match="no node"):
        step_seconds([], 0.25)


def ring(**changes: Any) -> Ring:
    parts: dict[str, Any] = {
        "rank": 0,
        "ranks": 2,
        "address": "127.0.0.1",
        "store_address": "127.0.0.1",
        "port": 0,
        "name": "n",
        "sizes": (4096,),
        "seconds": 1.0,
    }
    return Ring(**{**parts, **changes})


def test_readings_carry_formula_curve_and_suspicion() -> None:
    reduced = Reduced((Point(8_000_000, 0.1, 0.01, 5),), (9,), "eth0")
    bus, alg, ms = readings(ring(ranks=4), reduced)
    assert isinstance(bus, Measurement)
    assert isinstance(alg, Measurement)
    assert isinstance(ms, Measurement)
    assert (bus.value, alg.value, ms.value) == pytest.approx((120.0, 80.0, 100.0))
    assert bus.spread == pytest.approx(12.0)  # 10 % of the time is 10 % of the rate
    assert "2(n − 1)/n" in bus.source
    assert bus.detail["skipped_bytes"] == [9]
    wrong = readings(ring(), Reduced(reduced.points, (), "eth0", "wrong sums"))
    assert all(isinstance(r, Measurement) and r.suspect for r in wrong)


def test_one_machine_alone_is_told_what_would_close_the_gap() -> None:
    found = run_one(probes()["collective"], Context())
    assert all(isinstance(r, Unmeasured) and r.reason is Reason.NOT_ASKED for r in found)
    assert "pichak net" in found[0].describe()


@pytest.mark.parametrize(
    "changes",
    [{"ranks": 1}, {"rank": 2}, {"backend": "mpi"}, {"sizes": ()}, {"seconds": 0.0}],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rank|backend|sizes"):
        ring(**changes)


def test_an_address_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(OSError, match=r"192\.0\.2\.7 is on none of this machine's interfaces"):
        use_interface("192.0.2.7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert use_interface("127.0.0.1") == os.environ["GLOO_SOCKET_IFNAME"]


def _rank(rank: int, port: Any, results: Any, dies: bool) -> None:
    from pichak_core.measure._collective_run import all_reduce

    def tell(chosen: int) -> None:
        port.value = chosen

    def progress(text: str) -> None:
        if dies and text.startswith("all-reduce"):
            os._exit(9)

    mine = ring(
        rank=rank,
        port=port.value,
        sizes=(4096, 1 << 20),
        seconds=2.0,
        timeout_seconds=20.0,
        on_port=tell,
        progress=progress,
    )
    try:
        results.put((rank, all_reduce(mine)))
    except RuntimeError as error:
        results.put((rank, str(error)))


def _two_ranks(second_dies: bool) -> dict[int, Any]:
    context = multiprocessing.get_context("spawn")
    port, results = context.Value("i", 0), context.Queue()
    ranks = [context.Process(target=_rank, args=(0, port, results, False))]
    try:
        ranks[0].start()
        end = time.monotonic() + 60
        while not port.value and time.monotonic() < end:
            time.sleep(0.05)
        ranks.append(context.Process(target=_rank, args=(1, port, results, second_dies)))
        ranks[1].start()
        return dict(results.get(timeout=90) for _ in range(1 if second_dies else 2))
    finally:
        for process in ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def test_two_ranks_reduce_and_agree() -> None:
    pytest.importorskip("torch")
    found = _two_ranks(second_dies=False)
    assert found[0] == found[1]
    reduced = found[0]
    assert isinstance(reduced, Reduced)
    assert reduced.wrong == ""
    assert [p.size_bytes for p in reduced.points] == [4096, 1 << 20]
    assert all(p.seconds > 0 for p in reduced.points)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other_one_with_an_error() -> None:
    pytest.importorskip("torch")
    found = _two_ranks(second_dies=True)
    assert isinstance(found[0], str)
    assert found[0]
