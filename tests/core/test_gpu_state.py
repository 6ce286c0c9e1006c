"""The state of a GPU: verdicts from figures written by hand, and the measurement on a fake card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpus import Report
from pichak_core.devices.nvml import Gpu, Peer
from pichak_core.devices.nvml_codes import throttle_names
from pichak_core.measure import Context, gpu_state, probes
from pichak_core.measure._gpu_facts import METRICS, peer_reading, state_readings
from pichak_core.measure._gpu_load import Loaded, busy, under_load
from pichak_core.measure._gpu_verdict import Card, gpu_verdicts, sister_verdicts
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

GIB = 2**30
#: A healthy card at rest: an idle link at generation 1 of 4, "idle" as the reason of its clocks.
HEALTHY: dict[str, Any] = {
    "uuid": "GPU-1",
    "name": "NVIDIA GeForce RTX 3090",
    "compute_capability": "8.6",
    "memory_total_bytes": 24 * GIB,
    "memory_used_bytes": 3 * 2**20,
    "memory_reserved_bytes": GIB // 4,
    "memory_query_version": 2,
    "throttle_bitmask": 1,
    "sm_clock_mhz": 210,
    "sm_clock_max_mhz": 2100,
    "power_watts": 20.0,
    "power_limit_watts": 350.0,
    "power_limit_default_watts": 350.0,
    "pcie_generation": 1,
    "pcie_width": 16,
    "pcie_generation_max": 4,
    "pcie_width_max": 16,
    "throttled_power_seconds": 100.0,
    "throttled_thermal_seconds": 5.0,
    "ecc_uncorrected": 0,
}
#: The same card under load: at its power cap, the link trained up.
AT_WORK: dict[str, Any] = {
    "throttle_bitmask": 4,
    "sm_clock_mhz": 1700,
    "power_watts": 345.0,
    "pcie_generation": 4,
    "pcie_width": 16,
    "temperature_celsius": 70,
    "throttled_power_seconds": 101.0,
    "throttled_thermal_seconds": 5.0,
}


def card(**values: Any) -> Gpu:
    return Gpu(0, {**HEALTHY, **values})


def load(*changes: dict[str, Any], seconds: float = 2.0) -> Loaded:
    return Loaded(tuple(Gpu(0, {**AT_WORK, **each}) for each in changes or ({},) * 3), seconds)


def codes(gpu: Gpu, loaded: Loaded | None = None, **more: Any) -> list[str]:
    return [each.code for each in gpu_verdicts(gpu, loaded, **more)]


def test_a_healthy_card_at_rest_and_at_its_power_cap_has_no_verdict() -> None:
    # field cases 25 and 100: an idle link, "idle" and a power cap are how a healthy card works
    assert codes(card()) == []
    assert codes(card(), load()) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"power_limit_watts": 150.0}, ["gpu_power_limit"]),
        ({"power_limit_watts": 349.5}, []),  # rounding
        ({"power_limit_watts": 366.0}, []),  # raised
        ({"throttle_bitmask": 0x8}, ["gpu_slowed"]),
        ({"throttle_bitmask": 0x20}, ["gpu_slowed"]),
        ({"throttle_bitmask": 0x40}, ["gpu_slowed"]),
        ({"throttle_bitmask": 0x80}, ["gpu_slowed"]),
        ({"throttle_bitmask": 0x1 | 0x2 | 0x4 | 0x10 | 0x100}, []),
        ({"ecc_uncorrected": 2}, ["gpu_ecc"]),
        ({"ecc_uncorrected_lifetime": 7}, ["gpu_ecc_history"]),
        ({"ecc_corrected": 900}, []),  # corrected is corrected
        ({"remapped_rows_pending": True}, ["gpu_repair_pending"]),
        ({"retired_pages_pending": True}, ["gpu_repair_pending"]),
        ({"remapped_rows_failed": True}, ["gpu_repair_failed"]),
        ({"virtualisation_mode": 2, "vgpu_licensed": False}, ["gpu_unlicensed"]),
        ({"virtualisation_mode": 2, "vgpu_licensed": True}, []),
        ({"virtualisation_mode": 1, "vgpu_licensed": False}, []),
        ({"memory_used_bytes": 3 * GIB}, ["gpu_shared_memory"]),
        ({"compute_capability": "7.5"}, ["gpu_identity"]),
    ],
)
def test_verdicts_at_rest(values: dict[str, Any], found: list[str]) -> None:
    assert codes(card(**values)) == found


def test_own_memory_and_an_untold_reserve_accuse_nobody() -> None:
    # field cases 12 and 29
    assert codes(card(memory_used_bytes=9 * GIB), own_bytes=9 * GIB - 400 * 2**20) == []
    old = {k: v for k, v in HEALTHY.items() if k != "memory_reserved_bytes"}
    assert codes(Gpu(0, {**old, "memory_used_bytes": int(1.9 * GIB)})) == []
    assert codes(Gpu(0, {**old, "memory_used_bytes": 3 * GIB})) == ["gpu_shared_memory"]
    unified = TorchGpu(0, "NVIDIA GeForce RTX 3090", "", "", 121 * GIB, True)
    assert codes(card(memory_used_bytes=20 * GIB), by_torch=unified) == []  # field case 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([{}, {"throttle_bitmask": 0x44}], ["gpu_slowed"]),  # seen once in the load is seen
        ([{}, {"throttled_thermal_seconds": 5.5}], ["gpu_slowed"]),  # 0.5 of 2 s
        ([{}, {"throttled_thermal_seconds": 5.05}], []),  # 0.05 of 2 s
        ([{}, {"throttled_thermal_seconds": 0.0}], []),  # the counter was set back
        ([{"pcie_width": 8}] * 2, ["gpu_link"]),
        ([{"pcie_generation": 1}] * 2, ["gpu_link"]),
        ([{"pcie_generation": 1}, {}], []),  # still training up at first
        ([{"sm_clock_mhz": 900, "power_watts": 150.0}] * 3, ["gpu_held_back"]),
        ([{"sm_clock_mhz": 900, "power_watts": 340.0}] * 3, []),  # at its power cap
        ([{"sm_clock_mhz": 1900, "power_watts": 150.0}] * 3, []),  # fast, and frugal
    ],
)
def test_verdicts_under_load(changes: list[dict[str, Any]], found: list[str]) -> None:
    assert codes(card(), load(*changes)) == found


def test_what_was_not_read_judges_nothing() -> None:
    # field cases 15 and 21
    silent = Gpu(0, {"name": "NVIDIA A16-8Q", "utilisation_percent": 0})
    assert codes(silent) == []
    assert codes(silent, Loaded((Gpu(0, {}), Gpu(0, {})), 2.0)) == []


def test_a_lost_card_is_lost_and_nothing_else() -> None:
    lost = Gpu(1, {"throttle_bitmask": 8}, lost=Unmeasured("gpu", Reason.LOST, "NVML code 15"))
    (verdict,) = gpu_verdicts(lost)
    assert (verdict.code, verdict.severity) == ("gpu_lost", "fail")
    assert "NVML code 15" in verdict.sentence


def test_a_card_that_is_lost_under_load() -> None:
    gone = Gpu(0, lost=Unmeasured("gpu", Reason.LOST, "NVML code 15"))
    (verdict,) = gpu_verdicts(card(), Loaded((Gpu(0, AT_WORK), gone), 2.0))
    assert verdict.code == "gpu_lost"
    assert "under load" in verdict.sentence


def test_the_card_of_four_that_is_held_to_half_its_power() -> None:
    # field case 100: limits 300 W on all, a power cap told by all, 295, 296, 150, 294 W drawn
    draws, clocks = (295.0, 296.0, 150.0, 294.0), (1695.0, 1710.0, 960.0, 1680.0)
    cards = [
        Card(f"cuda:{i}", clock, draw)
        for i, (clock, draw) in enumerate(zip(clocks, draws, strict=True))
    ]
    (verdict,) = sister_verdicts(cards)
    assert verdict.sentence.startswith("cuda:2 ")
    assert verdict.evidence == {
        "clock_mhz": 960.0,
        "watts": 150.0,
        "sisters_clock_mhz": 1695.0,
        "sisters_watts": 295.0,
    }


@pytest.mark.parametrize(
    "cards",
    [
        [("a", 1700, 295), ("b", 900, 150)],  # two that differ accuse neither
        [("a", 1700, 295), ("b", 1690, 150), ("c", 1700, 296)],  # less power, the same speed
        [("a", 1700, 295), ("b", 1400, 294), ("c", 1700, 296)],  # slower at the same power: heat
        [("a", 1700, 295), ("b", 1650, 290), ("c", 1710, 296), ("d", 1690, 301)],
        [("a", None, None), ("b", 900, 150), ("c", 1700, 296)],
        [],
    ],
)
def test_sisters_that_are_not_accused(cards: list[tuple[str, float, float]]) -> None:
    assert sister_verdicts([Card(*each) for each in cards]) == []


def test_bits_by_their_names() -> None:
    assert throttle_names(0) == []
    assert throttle_names(0x24) == ["software power cap", "software thermal slowdown"]
    assert throttle_names(0x1 | 0x8000) == ["idle", "unknown bits 0x8000"]


# --- readings ---------------------------------------------------------------------------------


def readings(gpu: Gpu, loaded: Loaded | Unmeasured) -> Fingerprint:
    made = Fingerprint()
    for reading in state_readings(gpu, loaded):
        made.add(reading)
    return made


def test_readings_under_load() -> None:
    found = readings(
        card(),
        load(
            {"sm_clock_mhz": 1690, "throttled_power_seconds": 100.0},
            {"throttle_bitmask": 5},
            {"sm_clock_mhz": 1720, "temperature_celsius": 75, "throttled_power_seconds": 101.5},
        ),
    )
    assert found.number("gpu.sm_clock_load_mhz") == 1700
    assert found.number("gpu.power_load_watts") == 345
    assert found.number("gpu.temperature_load_celsius") == 75
    assert found.number("gpu.throttled_power_percent") == 75  # 1.5 of 2 s
    assert found.number("gpu.throttled_thermal_percent") == 0  # a measured zero
    assert found.text("gpu.throttle_reasons") == "software power cap"  # idle between two products
    assert found.number("gpu.power_limit_default_watts") == 350
    for name in ("gpu.throttled_sync_boost_percent", "gpu.ecc_mode", "gpu.retired_pages"):
        assert isinstance(found[name], Unmeasured)


def test_repairs_and_sums() -> None:
    found = readings(
        card(
            retired_pages_corrected=3, retired_pages_uncorrected=2, retired_pages_pending=True,
            remapped_rows_pending=False, remapped_rows_failed=False, ecc_mode=False,
        ),
        Unmeasured("gpu.load", Reason.NOT_ASKED, "no load"),
    )  # fmt: skip
    assert found.number("gpu.retired_pages") == 5
    assert found.text("gpu.repair_pending") == "retired pages pending"
    assert found.text("gpu.ecc_mode") == "off"
    clock = found["gpu.sm_clock_load_mhz"]
    assert isinstance(clock, Unmeasured)
    assert clock.detail == "no load"


def test_peers_by_the_drivers_word() -> None:
    peers = [Peer(0, 1, "ok"), Peer(0, 2, "chipset not supported"), Peer(1, 2, "ok")]
    reading = peer_reading(Gpu(0), peers, 3)
    assert isinstance(reading, Measurement)
    assert reading.value == "ok with 1; chipset not supported with 2"
    alone = peer_reading(Gpu(0), [], 1)
    assert isinstance(alone, Unmeasured)
    assert alone.reason is Reason.NO_DEVICE
    refused = Peer(0, 1, Unmeasured("peer_access", Reason.NOT_SUPPORTED, "NVML code 3"))
    assert isinstance(peer_reading(Gpu(0), [refused], 2), Unmeasured)


# --- the load and the measurement ----------------------------------------------------------


def test_only_readings_of_the_settled_load_count() -> None:
    seen: list[Gpu] = [card()]
    asked: list[float] = []

    def work(seconds: float) -> None:
        asked.append(seconds)
        seen.append(Gpu(0, {"sm_clock_mhz": 1000 * len(asked)}))

    found = under_load(work, 5.0, lambda: seen)
    assert isinstance(found, Loaded)
    assert asked == pytest.approx([2.0, 3.0])
    assert found.seconds == pytest.approx(3.0)
    assert found.values("sm_clock_mhz") == [2000]
    nothing = under_load(lambda _: None, 1.0, lambda: [])
    assert isinstance(nothing, Unmeasured)


def test_the_load_ends_when_its_time_is_over() -> None:
    ticks = iter(range(100))
    state = torch.get_rng_state()
    busy("cpu", 3.0, clock=lambda: float(next(ticks)))
    assert next(ticks) < 10
    assert torch.equal(torch.get_rng_state(), state)  # a probe leaves no trace


class Sampler:
    """What the conditions give: each look finds one more reading of the card at work."""

    def __init__(self) -> None:
        self.seen: list[Gpu] = []

    def gpu_readings(self) -> list[Gpu]:
        self.seen.append(Gpu(0, {**AT_WORK, "throttled_power_seconds": float(len(self.seen))}))
        return list(self.seen)


TORCH = TorchGpu(0, "NVIDIA GeForce RTX 3090", "1", "", 24 * GIB, False)


def measured(
    monkeypatch: pytest.MonkeyPatch, report: Report, **changes: Any
) -> dict[str, Measurement | Unmeasured]:
    monkeypatch.setattr(gpu_state, "busy", lambda device, seconds: None)
    context = Context(device="cuda:0", **changes)
    context.budget_seconds = 4.0
    context.cache.update({"nvml": report, "torch_gpu": TORCH, "conditions": Sampler()})
    return {reading.name: reading for reading in probes()["gpu_state"].run(context)}


def test_the_measurement_reads_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, Report(gpus=[card(power_limit_watts=200.0)]))
    assert set(found) == {metric.name for metric in METRICS}
    verdict = found["gpu.state_verdict"]
    assert isinstance(verdict, Measurement)
    assert verdict.value == "gpu_power_limit"
    clock = found["gpu.sm_clock_load_mhz"]
    assert isinstance(clock, Measurement)
    assert clock.value == 1700
    sisters = found["gpu.sister_cards"]
    assert isinstance(sisters, Unmeasured)
    assert "--depth full" in sisters.detail


def test_memory_is_that_of_the_moment_and_own_is_not_foreign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the report is older than what this process holds: 9 GiB in use now, 8 of them its own
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 8 * GIB)
    monkeypatch.setitem(AT_WORK, "memory_used_bytes", 9 * GIB)
    found = measured(monkeypatch, Report(gpus=[card()]))
    others, free = found["gpu.memory_others_mib"], found["gpu.memory_free_mib"]
    assert isinstance(others, Measurement)
    assert isinstance(free, Measurement)
    assert others.value == 1024
    assert free.value == (24 - 9 - 0.25) * 1024


def test_a_mig_device_does_not_get_its_parents_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 17: what is sampled meanwhile is the parent
    monkeypatch.setitem(AT_WORK, "memory_used_bytes", 9 * GIB)
    monkeypatch.setitem(AT_WORK, "memory_total_bytes", 40 * GIB)
    found = measured(monkeypatch, Report(gpus=[card(mig_index=0)]))
    total, others = found["gpu.memory_total_mib"], found["gpu.memory_others_mib"]
    assert isinstance(total, Measurement)
    assert isinstance(others, Measurement)
    assert (total.value, others.value) == (24 * 1024, 3)


def test_no_nvml_is_a_reason_for_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 7: torch's device is there, NVML is not
    gone = Report(gap=Unmeasured("nvml", Reason.NO_DEVICE, "NVML code 12"))
    found = measured(monkeypatch, gone)
    assert set(found) == {metric.name for metric in METRICS}
    assert {type(reading) for reading in found.values()} == {Unmeasured}
    assert {reading.detail for reading in found.values() if isinstance(reading, Unmeasured)} == {
        "NVML code 12"
    }


def test_sisters_in_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 100: alike and idle cards under the same load, one after another
    clocks = {0: 1700, 1: 1695, 2: 950, 3: 1705}
    draws = {0: 345.0, 1: 344.0, 2: 150.0, 3: 346.0}
    monkeypatch.setattr(
        gpu_state,
        "_sister_load",
        lambda device, index, seconds: load(
            {"sm_clock_mhz": clocks[index], "power_watts": draws[index]}
        ),
    )
    cards = [Gpu(i, {**HEALTHY, "uuid": f"GPU-{i + 1}"}) for i in range(4)]
    monkeypatch.setattr(gpu_state, "others_idle", lambda *_: ["cuda:1", "cuda:2", "cuda:3"])
    monkeypatch.setattr(
        gpu_state, "torch_gpu", lambda i: TorchGpu(i, "x", f"{i + 1}", "", GIB, False)
    )
    found = measured(monkeypatch, Report(gpus=cards), depth="full")
    sisters, verdict = found["gpu.sister_cards"], found["gpu.state_verdict"]
    assert isinstance(sisters, Measurement)
    assert sisters.value == "1 of 4 alike cards below the others"
    assert "cuda:2 950 MHz 150 W" in sisters.source
    assert isinstance(verdict, Measurement)
    assert verdict.value == "gpu_below_sisters"


def test_a_busy_sister_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_card = Unmeasured("gpu", Reason.BUSY, "cuda:1 has 9,000 MiB in use")
    monkeypatch.setattr(gpu_state, "others_idle", lambda *_: busy_card)
    found = measured(monkeypatch, Report(gpus=[card()]), depth="full")
    sisters = found["gpu.sister_cards"]
    assert isinstance(sisters, Unmeasured)
    assert sisters.reason is Reason.BUSY


def test_nvml_is_read_once_for_all_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    # field case 32: reading it costs seconds on a card without persistence
    from pichak_core.measure import _readings

    asked: list[int] = []

    def read() -> Report:
        asked.append(1)
        return Report(gpus=[card()])

    monkeypatch.setattr(_readings, "read_gpus", read)
    monkeypatch.setattr(gpu_state, "busy", lambda device, seconds: None)
    context = Context(device="cuda:0")
    context.cache.update({"torch_gpu": TORCH, "conditions": Sampler()})
    for name in ("software", "virtualisation", "gpu_state"):
        assert list(probes()[name].run(context))
    assert asked == [1]
