"""The judge: its arithmetic by hand and by brute force, its promises by simulation."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_coordinator.absolute import absolute_findings
from pichak_coordinator.judge import judge
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.verdict import WHOLE_GROUP, Group, Sample
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan

READ = "disk.read_mb_s"


def node(name: str, device: str = "cuda:0", model: str = "L4", cpu: str = "EPYC") -> NodeRecord:
    return NodeRecord(name, f"host-{name}", device=device, gpu_model=model, cpu_model=cpu)


def reading(name: str, value, unit: str = "MB/s", **more) -> Measurement:
    return Measurement(name, value, unit, "a source", **more)


def row(name: str, *readings, **where) -> Row:
    fingerprint = Fingerprint()
    for each in readings:
        fingerprint.add(each)
    return Row(node(name, **where), fingerprint)


def fleet(values: Sequence[float], metric: str = READ, unit: str = "MB/s") -> list[Row]:
    return [row(f"n{i}", reading(metric, v, unit)) for i, v in enumerate(values)]


def accused(found: Mapping[tuple[str, str], list[Finding]]) -> dict[str, list[Finding]]:
    return {key[0]: some for key, some in found.items() if some}


PEERS = [100.0, 101.0, 99.0, 100.0, 102.0]


def test_the_arithmetic_of_a_verdict() -> None:
    """By hand: median 100, MAD 1, so 1.4826 %; no spreads, so e = 2.5 %;
    s² = (5 · 1.4826² + 8 · 2.5²) / 13; limit 3 s."""
    rows = fleet([80.0, *PEERS])
    (finding,) = judge(rows)["n0", "cuda:0"]
    scale = math.sqrt((5 * 0.014826**2 + 8 * 0.025**2) / 13)
    evidence = finding.evidence
    assert (finding.code, finding.metric) == ("slower_than_peers", READ)
    assert (finding.state, finding.severity, finding.confidence) == ("suspected", "warn", "normal")
    assert (evidence["value"], evidence["median"], evidence["others"]) == (80.0, 100.0, 5)
    assert evidence["deviations"] == [pytest.approx(0.2)]
    assert evidence["mad_sigma"] == pytest.approx(0.014826)
    assert evidence["scale"] == pytest.approx(scale)
    assert evidence["limit"] == pytest.approx(3 * scale)
    for figure in ("80", "100", "20.0%", f"{3 * scale:.1%}", "5 of its peers"):
        assert figure in finding.sentence
    # Seen again: the mean limit is z √(s²/2 + 0.01²/2 + π/2 s²/5), z at 1e-4 for one metric.
    (again,) = judge(rows, earlier={("n0", "cuda:0"): [finding]})["n0", "cuda:0"]
    z = statistics.NormalDist().inv_cdf(1 - 1e-4)
    noise = math.sqrt(scale**2 / 2 + 0.01**2 / 2 + math.pi / 2 * scale**2 / 5)
    assert again.state == "confirmed"
    assert again.evidence["mean_limit"] == pytest.approx(z * noise)
    assert again.evidence["mean_deviation"] == pytest.approx(0.2)
    assert "mean of 2 probes 20.0%" in again.sentence


def test_within_the_limit_is_not_accused() -> None:
    limit = 3 * math.sqrt((5 * 0.014826**2 + 8 * 0.025**2) / 13)
    assert not accused(judge(fleet([100.0 * (1 - limit) + 0.01, *PEERS])))
    assert accused(judge(fleet([100.0 * (1 - limit) - 0.01, *PEERS])))
    # Better than the others is no fault.
    assert not accused(judge(fleet([150.0, *PEERS])))


def test_five_percent_is_the_least() -> None:
    exact = [100.0] * 30
    quiet = [row(f"n{i}", reading(READ, v, spread=0.0, samples=9)) for i, v in enumerate(exact)]
    for value, expected in ((95.1, set()), (94.9, {"slow"})):
        slow = row("slow", reading(READ, value, spread=0.0, samples=9))
        assert set(accused(judge([slow, *quiet]))) == expected


def test_a_time_is_worse_when_it_is_longer() -> None:
    rows = fleet([120.0, *PEERS], "network_free.copy_us", "us")
    (finding,) = judge(rows)["n0", "cuda:0"]
    assert finding.evidence["deviations"] == [pytest.approx(0.2)]
    assert not accused(judge(fleet([80.0, *PEERS], "network_free.copy_us", "us")))


def test_a_quarter_slower_is_a_failure() -> None:
    ((finding,),) = accused(judge(fleet([70.0, *PEERS]))).values()
    assert finding.severity == "fail"
    assert not finding.fault  # not before it repeats


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("gpu.kernel_launch_us", "us"),  # judged as a share of a step only
        ("cpu.op_dispatch_us", "us"),
        ("disk.read_p99_ms", "ms"),
        ("network.rtt_ms", "ms"),
        ("cpu.usable_cores", ""),
        ("host.memory_total_mib", "MiB"),
        ("cpu.steal_percent", "%"),
    ],
)
def test_what_is_not_judged(metric: str, unit: str) -> None:
    for odd in (1.0, 3.0):
        assert not accused(judge(fleet([odd, *[2.0] * 9], metric, unit)))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_few_machines_accuse_nobody(size: int) -> None:
    # field case 103
    assert not accused(judge(fleet([80.0, *[100.0] * (size - 1)])))


@pytest.mark.parametrize("size", [6, 8, 60])
def test_a_slow_one_among_enough_is_found(size: int) -> None:
    # field case 103
    found = accused(judge(fleet([80.0, *[100.0 + i % 3 for i in range(size - 1)]])))
    assert set(found) == {"n0"}


def test_peers_are_of_the_same_model() -> None:
    slow_kind = [row(f"t{i}", reading("gpu.copy_mb_s", 50.0), model="T4") for i in range(6)]
    fast_kind = [row(f"l{i}", reading("gpu.copy_mb_s", 100.0)) for i in range(6)]
    assert not accused(judge([*slow_kind, *fast_kind]))
    unknown = [
        row(f"u{i}", reading("gpu.copy_mb_s", 9.0 if i else 1.0), model="") for i in range(9)
    ]
    assert not accused(judge(unknown))


def test_cores_make_cpu_peers() -> None:
    def machine(name: str, rate: float, cores: int) -> Row:
        return row(
            name,
            reading("cpu.all_core_deflate_mb_s", rate),
            reading("cpu.usable_cores", cores, ""),
            device="cpu",
        )

    whole = [machine(f"w{i}", 100.0, 8) for i in range(6)]
    assert not accused(judge([machine("half", 50.0, 4), *whole]))
    assert set(accused(judge([machine("slow", 50.0, 8), *whole]))) == {"slow"}


def test_a_node_with_eight_gpus_has_one_disk() -> None:
    """Its eight rows are one reading of the disk: not eight peers, and no peer of itself."""
    eight = [row("big", reading(READ, 50.0), device=f"cuda:{i}") for i in range(8)]
    single = [row(f"n{i}", reading(READ, 100.0)) for i in range(5)]
    found = judge([*eight, *single])
    assert {key[0] for key, some in found.items() if some} == {"big"}
    for i in range(8):
        assert found["big", f"cuda:{i}"][0].evidence["others"] == 5
    assert not accused(judge([*eight, *single[:4]]))


def test_sister_cards_are_peers() -> None:
    # field case 96: per-card rows, not a node's mean
    cards = [
        row("box", reading("gpu.h2d_mb_s", 800.0 if i == 3 else 12800.0), device=f"cuda:{i}")
        for i in range(8)
    ]
    found = judge(cards)
    assert [key[1] for key, some in found.items() if some] == ["cuda:3"]


def test_suspect_and_unmeasured_values_judge_nothing_and_nobody() -> None:
    cached = [row(f"c{i}", reading(READ, 9000.0, suspect="page cache")) for i in range(6)]
    absent = [row(f"a{i}", Unmeasured(READ, Reason.TIMED_OUT)) for i in range(6)]
    true = [row(f"t{i}", reading(READ, 100.0)) for i in range(3)]
    assert not accused(judge([*cached, *absent, *true]))
    liar = row("liar", reading(READ, 1.0, suspect="clock went backwards"))
    assert not accused(judge([liar, *fleet(PEERS * 2)]))


def test_a_noisy_node_is_judged_by_its_own_noise() -> None:
    def measured(name: str, value: float, spread: float) -> Row:
        return row(name, reading(READ, value, spread=spread, samples=9))

    peers = [measured(f"p{i}", 100.0 + i % 2, 0.5) for i in range(9)]
    assert accused(judge([measured("slow", 90.0, 0.5), *peers]))
    # ± 12 in 9 samples: a standard error of 1.2533 · 12 / 3 = 5 of 90, so 10 % is within 3 of it.
    assert not accused(judge([measured("noisy", 90.0, 12.0), *peers]))


def test_confirmation_needs_a_second_probe_that_sees_it() -> None:
    slow, well = fleet([80.0, *PEERS]), fleet([100.0, *PEERS])
    first = judge(slow)
    assert first["n0", "cuda:0"][0].state == "suspected"
    assert not accused(judge(well, earlier=first))
    second = judge(slow, earlier=first)
    assert second["n0", "cuda:0"][0].state == "confirmed"
    third = judge(slow, earlier=second)
    assert third["n0", "cuda:0"][0].evidence["deviations"] == [pytest.approx(0.2)] * 3
    # Another metric's suspicion does not confirm this one.
    other = {key: [replace(f, metric="x_mb_s") for f in some] for key, some in first.items()}
    states = {f.metric: f.state for f in judge(slow, earlier=other)["n0", "cuda:0"]}
    assert states[READ] == "suspected"


def test_a_reading_that_is_missing_neither_confirms_nor_clears() -> None:
    first = judge(fleet([80.0, *PEERS]))
    lost = [row("n0", Unmeasured(READ, Reason.TIMED_OUT)), *fleet([80.0, *PEERS])[1:]]
    (kept,) = judge(lost, earlier=first)["n0", "cuda:0"]
    assert kept == first["n0", "cuda:0"][0]
    then = judge(fleet([80.0, *PEERS]), earlier=judge(lost, earlier=first))
    assert then["n0", "cuda:0"][0].state == "confirmed"


def test_with_few_peers_a_node_is_held_against_its_own_past() -> None:
    rows = fleet([80.0, 100.0])
    past = {("n0", "cuda:0", READ): PEERS, ("n1", "cuda:0", READ): PEERS}
    found = accused(judge(rows, history=past))
    ((finding,),) = found.values()
    assert set(found) == {"n0"}
    assert (finding.code, finding.confidence) == ("slower_than_before", "low")
    assert "earlier readings" in finding.sentence
    assert finding.evidence["limit"] == pytest.approx(
        3 * math.sqrt((5 * 0.014826**2 + 8 * 0.025**2) / 13)
    )
    again = judge(rows, history=past, earlier={("n0", "cuda:0"): [finding]})
    assert again["n0", "cuda:0"][0].state == "confirmed"
    short = {("n0", "cuda:0", READ): PEERS[:4]}
    assert not accused(judge(rows, history=short))


def test_training_speed_is_judged_between_equal_tasks() -> None:
    def trained(name: str, rate: float, seq_len: int = 512) -> Row:
        plan = Plan("m", "d").set("scored_tokens_per_second", rate, "timed", unit="scored tokens/s")
        plan.set("seq_len", seq_len, "rows")
        return Row(node(name), plan=plan)

    same = [trained(f"n{i}", 1000.0) for i in range(6)]
    assert set(accused(judge([trained("slow", 800.0), *same]))) == {"slow"}
    assert not accused(judge([trained("longer", 800.0, 1024), *same]))


def digest(name: str, bits: str, torch: str = "2.13.0", **where) -> Row:
    return row(
        name,
        reading("golden.gradient_digest", bits, ""),
        reading("software.torch", torch, ""),
        reading("software.driver", "550.90", ""),
        **where,
    )


def test_a_lone_disagreement_computes_wrong_numbers() -> None:
    rows = [digest(f"n{i}", "aa") for i in range(3)]
    found = judge([*rows, digest("bad", "bb")])
    (finding,) = found["bad", "cuda:0"]
    assert (finding.code, finding.severity, finding.state) == (
        "computes_differently",
        "fail",
        "suspected",
    )
    assert len(accused(found)) == 1
    again = judge([*rows, digest("bad", "bb")], earlier=found)
    assert again["bad", "cuda:0"][0].fault


def test_a_step_that_is_wrong_by_itself_needs_no_peers_and_is_nobodys_peer() -> None:
    wrong = reading("golden.gradient_digest", "zz", "", suspect="two runs disagree")
    rows = [digest("a", "aa"), digest("b", "bb"), row("bad", wrong)]
    ((where, (finding,)),) = accused(judge(rows)).items()
    assert where == "bad"
    assert finding.code == "computes_differently"
    assert "two runs disagree" in finding.sentence
    # three wrong ones that agree do not make the right one the odd one out
    rows = [row(f"w{i}", wrong) for i in range(3)]
    assert set(accused(judge([*rows, digest("good", "aa")]))) == {"w0", "w1", "w2"}


@pytest.mark.parametrize(
    "rows",
    [
        [digest("a", "aa"), digest("b", "bb")],  # two that differ accuse neither
        [digest("a", "aa"), digest("b", "bb"), digest("c", "cc")],
        [digest("a", "aa"), digest("b", "aa"), digest("c", "bb"), digest("d", "bb")],
        [digest("a", "aa"), digest("b", "aa"), digest("c", "bb", torch="2.12.0")],
        [digest("a", "aa"), digest("b", "aa"), digest("c", "bb", model="T4")],
        [digest("a", "aa"), digest("b", "aa"), row("c")],
    ],
)
def test_digests_that_accuse_nobody(rows: list[Row]) -> None:
    assert not accused(judge(rows))


@pytest.mark.parametrize(
    ("readings", "code", "severity", "state"),
    [
        ([reading("cpu.steal_percent", 9.0, "%")], "cpu_steal", "warn", "suspected"),
        ([reading("host.shm_mib", 64.0, "MiB")], "small_shm", "warn", "confirmed"),
        (
            [reading("cpu.usable_cores", 24, ""), reading("cpu.logical_cores", 192, "")],
            "cpu_limited",
            "info",
            "confirmed",
        ),
        (
            [reading("gpu.h2d_pinned_mb_s", 25e3), reading("gpu.d2h_pinned_mb_s", 11e3)],
            "lopsided_copies",  # field case 97: a note, not a fault
            "info",
            "suspected",
        ),
        ([reading("gpu.virtualisation_mode", "vGPU", "")], "shared_gpu", "info", "confirmed"),
        ([reading("gpu.driver_model", "WDDM", "")], "wddm_driver", "info", "confirmed"),
    ],
)
def test_absolute_rules(readings, code: str, severity: str, state: str) -> None:
    (finding,) = absolute_findings(row("n", *readings))
    assert (finding.code, finding.severity, finding.state) == (code, severity, state)
    one = row("n", *readings)
    again = judge([one], earlier=judge([one]))["n", "cuda:0"][0]
    assert again.state == "confirmed"


def test_absolute_rules_on_a_sound_machine() -> None:
    sound = row(
        "n",
        reading("cpu.steal_percent", 0.4, "%"),
        reading("host.shm_mib", 32000.0, "MiB"),
        reading("cpu.usable_cores", 8, ""),
        reading("cpu.logical_cores", 8, ""),
        reading("gpu.h2d_pinned_mb_s", 25e3),
        reading("gpu.d2h_pinned_mb_s", 22e3),
        reading("gpu.virtualisation_mode", "passthrough", ""),
        Unmeasured("gpu.driver_model", Reason.NOT_SUPPORTED),
    )
    assert absolute_findings(sound) == []
    assert absolute_findings(row("nothing")) == []


values = st.floats(1.0, 1000.0)


@given(st.lists(values, min_size=2, max_size=WHOLE_GROUP + 10), st.data())
def test_a_group_against_brute_force(numbers: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(numbers) - 1))
    group = Group([Sample(v) for v in numbers], higher_is_better=True)
    verdict = group.judge_member(Sample(numbers[at]))
    others = numbers[:at] + numbers[at + 1 :]
    used = others if len(numbers) < WHOLE_GROUP else numbers
    middle = statistics.median(used)
    mad = statistics.median([abs(v - middle) for v in used])
    assert verdict is not None
    assert verdict.others == len(others)
    assert verdict.median == middle
    assert verdict.deviation == pytest.approx(1 - numbers[at] / middle)
    assert verdict.mad_sigma == pytest.approx(1.4826 * mad / middle)


def test_a_group_that_gives_no_share() -> None:
    assert Group([Sample(1.0)], higher_is_better=True).judge_member(Sample(1.0)) is None
    zeros = Group([Sample(0.0)] * 6, higher_is_better=True)
    assert zeros.judge_member(Sample(0.0)) is None


class Simulated:
    """Nodes whose metrics have a constant part of their own (1 %), a part for each probe (0.5 %),
    and nine samples of lognormal noise (1 to 3 %, by metric) of which a probe keeps the median."""

    def __init__(self, seed: int, size: int, metrics: int, slow: Sequence[int] = ()) -> None:
        self.rng = random.Random(seed)
        self.size, self.slow = size, set(slow)
        self.sigma = [self.rng.uniform(0.01, 0.03) for _ in range(metrics)]
        self.own = [[self.rng.gauss(0, 0.01) for _ in self.sigma] for _ in range(size)]

    def row_of(self, index: int) -> Row:
        rng, readings = self.rng, []
        for m, sigma in enumerate(self.sigma):
            centre = self.own[index][m] + rng.gauss(0, 0.005)
            # The first metric alone is slow: the hardest case to tell.
            centre += math.log(0.9) if index in self.slow and m == 0 else 0.0
            samples = [100 * math.exp(centre + rng.gauss(0, sigma)) for _ in range(9)]
            middle = statistics.median(samples)
            spread = 1.4826 * statistics.median([abs(s - middle) for s in samples])
            readings.append(reading(f"gpu.m{m}_mb_s", middle, spread=spread, samples=9))
        return row(f"n{index}", *readings)

    def probe(self) -> list[Row]:
        return [self.row_of(i) for i in range(self.size)]


def confirmed_within_two(fleet: Simulated, history=None) -> set[str]:
    """Probe the fleet, then the suspected nodes once more."""
    rows = fleet.probe()
    first = judge(rows, history=history)
    again = [fleet.row_of(i) if first[one.key] else one for i, one in enumerate(rows)]
    second = judge(again, history=history, earlier=first)
    return {
        key[0]
        for key, some in second.items()
        if first[key] and any(f.state == "confirmed" for f in some)
    }


def simulate_healthy(sizes: Sequence[int], fleets: int, seed: int) -> float:
    """The share of healthy nodes that are confirmed."""
    accused_nodes = nodes = 0
    for size in sizes:
        for number in range(max(1, fleets * 8 // size)):
            accused_nodes += len(confirmed_within_two(Simulated(seed + number, size, 12)))
            nodes += size
    return accused_nodes / nodes


def simulate_slow(fleets: int, seed: int) -> float:
    """How often one node of 8, slow by 10 % in one of 12 metrics, is confirmed in two probes."""
    found = 0
    for number in range(fleets):
        found += "n3" in confirmed_within_two(Simulated(seed + number, 8, 12, slow=[3]))
    return found / fleets


def test_healthy_nodes_are_left_alone_and_a_slow_one_is_found() -> None:
    assert simulate_healthy([2, 8, 50], 40, seed=100) <= 0.001
    assert simulate_slow(60, seed=200) >= 0.95


@pytest.mark.slow
def test_the_promised_rates_over_many_fleets() -> None:
    assert simulate_healthy([2, 5, 6, 7, 8, 12, 20, 50, 100, 200], 400, seed=1000) <= 0.001
    assert simulate_slow(1500, seed=5000) >= 0.95


@pytest.mark.slow
def test_a_nodes_own_past_accuses_as_rarely() -> None:
    accused_nodes = nodes = found = 0
    for seed in range(400):
        small = Simulated(seed, 3, 12)
        past: dict[tuple[str, str, str], list[float]] = {}
        for _ in range(8):
            for one in small.probe():
                for name in one.fingerprint:
                    past.setdefault((*one.key, name), []).append(one.fingerprint.number(name) or 0)
        accused_nodes += len(confirmed_within_two(small, past))
        nodes += 3
        small.slow = {1}
        found += "n1" in confirmed_within_two(small, past)
    assert accused_nodes / nodes <= 0.001
    assert found / 400 >= 0.95


def test_a_busy_machine_is_told_and_not_accused() -> None:
    """A slow probe while others worked never confirms; the next quiet one does."""
    quiet = [row(f"n{i}", reading(READ, v)) for i, v in enumerate(PEERS)]
    busy = row("slow", reading(READ, 60.0, conditions={"cpu.load_others_cores": 1.5}))
    alone = row("slow", reading(READ, 60.0, conditions={"cpu.load_others_cores": 0.1}))
    key = ("slow", "cuda:0")
    (first,) = judge([busy, *quiet])[key]
    (second,) = judge([busy, *quiet], earlier={key: [first]})[key]
    for finding in (first, second):
        assert (finding.state, finding.confidence) == ("suspected", "low")
        assert "other programs used 1.50 cores meanwhile" in finding.sentence
        assert finding.evidence["deviations"] == []
    (third,) = judge([alone, *quiet], earlier={key: [second]})[key]
    assert (third.state, third.confidence) == ("suspected", "normal")
    (fourth,) = judge([alone, *quiet], earlier={key: [third]})[key]
    assert fourth.state == "confirmed"


def test_a_ramp_beside_other_programs_is_not_accused() -> None:
    def trained(name: str, speed: float, cores: float) -> Row:
        plan = Plan("m", "d").set("scored_tokens_per_second", speed, "timed")
        return replace(row(name), plan=plan, ramp={"conditions": {"cpu.load_others_cores": cores}})

    fleet = [trained(f"n{i}", v, 0.0) for i, v in enumerate(PEERS)]
    earlier: dict[tuple[str, str], list[Finding]] = {}
    for _ in range(3):
        earlier = judge([trained("slow", 50.0, 2.0), *fleet], earlier=earlier)
        assert [f.state for f in earlier["slow", "cuda:0"]] == ["suspected"]
