"""The judge against a slow one written straight from the rule: every reading against every other
that should be like it, one after another."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from pichak_coordinator.judge import judge
from pichak_coordinator.judged import unjudged
from pichak_coordinator.records import NodeRecord, Row
from pichak_coordinator.watch_peers import MOST_PEERS, Peers
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan

UNITS = {
    "gpu.h2d_pinned_mb_s": "MB/s",
    "gpu.copy_us": "us",
    "host.memory_copy_mb_s": "MB/s",
    "disk.read_mb_s": "MB/s",
}
LEFT_OUT = {"disk.read_p99_ms": "ms", "gpu.kernel_launch_us": "us", "cpu.usable_cores": ""}


def drawn(seed: int, size: int) -> list[Row]:
    """Nodes with no, one, two or four GPUs of several models; some readings are slow, missing,
    suspect or without a spread."""
    draw = random.Random(seed)
    rows = []
    for number in range(size):
        model, cpu = draw.choice(["H100", "A100", ""]), draw.choice(["EPYC", "EPYC", ""])
        cards = draw.choice([0, 1, 1, 2, 4])
        for card in range(max(1, cards)):
            found = Fingerprint()
            for name, unit in {**UNITS, **LEFT_OUT}.items():
                if draw.random() < 0.05:
                    found.add(Unmeasured(name, Reason.FAILED, "it would not"))
                    continue
                slow = draw.choice([0.6, 0.85, 1.3]) if draw.random() < 0.05 else 1.0
                found.add(
                    Measurement(
                        *(name, 100 * slow * math.exp(draw.gauss(0, 0.02)), unit, "drawn"),
                        samples=draw.choice([1, 9]),
                        spread=draw.choice([None, 1.0, 2.0]),
                        suspect="too fast" if draw.random() < 0.03 else "",
                    )
                )
            found.add(Measurement("cpu.usable_cores", draw.choice([8, 16]), "", "drawn"))
            plan = None
            if draw.random() < 0.7:
                plan = Plan("m", draw.choice(["d", "e"]))
                plan.set("scored_tokens_per_second", 100 * math.exp(draw.gauss(0, 0.05)), "timed")
            where = NodeRecord(
                f"n{number}",
                device=f"cuda:{card}" if cards else "cpu",
                gpu_model=model if cards else "",
                cpu_model=cpu,
            )
            rows.append(Row(where, found, plan))
    return rows


Number = tuple[str, float, float | None, tuple[object, ...], str, bool]


def numbers(row: Row) -> list[Number]:
    """(metric, value, noise, what peers agree in, who answers, larger is better) of a row."""
    node, made = row.node, list[Number]()
    device = f"{node.node}/{node.device}"
    for name, unit in UNITS.items():
        one = row.fingerprint.get(name)
        if not isinstance(one, Measurement) or one.suspect:
            continue
        noise = None
        if one.spread is not None and one.samples >= 3:
            noise = 1.2533 * one.spread / math.sqrt(one.samples) / float(one.value)
        alike: tuple[object, ...] = ("model", node.model) if node.model else ()
        if name.startswith("host."):
            cores = row.fingerprint.number("cpu.usable_cores")
            alike = ("host", node.cpu_model, cores) if node.cpu_model else ()
        who = device if name.startswith("gpu.") else node.node
        made.append((name, float(one.value), noise, alike, who, unit != "us"))
    if row.plan is not None:
        rate = float(row.plan["scored_tokens_per_second"].value)
        task = ("plan", node.model, row.plan.data) if node.model else ()
        made.append(("plan.scored_tokens_per_second", rate, None, task, device, True))
    return made


def accused(rows: Sequence[Row], others: Sequence[Row] = ()) -> dict[tuple[str, str, str], float]:
    """(node, device, metric) -> how far it is on the bad side, by the rule of SPEC 7 as `verdict`
    has it: peers only."""
    everything = [(row, one) for row in (*rows, *others) for one in numbers(row)]
    found = {}
    for row in rows:
        for name, _, _, alike, who, rises in numbers(row):
            said: dict[str, tuple[float, float | None]] = {}
            for _, other in everything:
                if alike and (other[0], other[3]) == (name, alike):
                    said.setdefault(other[4], (other[1], other[2]))
            if len(said) - 1 < 5:
                continue
            value, noise = said[who]
            used = [v for n, (v, _) in said.items() if n != who or len(said) >= 40]
            noises = [n for _, n in said.values() if n is not None]
            middle = statistics.median(used)
            sigma = 1.4826 * statistics.median([abs(v - middle) for v in used]) / middle
            expected = math.hypot(statistics.median(noises), 0.01) if noises else 0.025
            count = len(said) - 1
            scale = math.sqrt((count * sigma**2 + 8 * expected**2) / (count + 8))
            limit = max(0.05, 3 * max(scale, noise or 0.0))
            worse = (middle - value if rises else value - middle) / middle
            if worse > limit:
                found[(*row.key, name)] = worse
    return found


@pytest.mark.parametrize(("seed", "size"), [(1, 4), (2, 9), (3, 30), (4, 60), (5, 60), (6, 110)])
def test_the_judge_accuses_whom_the_rule_accuses(seed: int, size: int) -> None:
    rows = drawn(seed, size)
    found = {
        (*key, f.metric): f.evidence["deviations"][0]
        for key, some in judge(rows).items()
        for f in some
        if f.code == "slower_than_peers"
    }
    assert found == pytest.approx(accused(rows), rel=1e-12)
    assert found or size < 30


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_peers_are_the_latest_of_each_model_and_are_not_judged(seed: int) -> None:
    """A probe of a few nodes beside a fleet: the same as the rule over those few and the latest
    `MOST_PEERS` others of their models."""
    fleet = drawn(seed, 150)
    rows = [row for row in fleet if row.node.node in ("n3", "n70", "n71")]
    peers = Peers(fleet)
    others: list[Row] = []
    for model in {row.node.model for row in rows}:
        alike = [row for row in fleet if row.node.model == model and row not in rows]
        others += alike[-MOST_PEERS:]
    others.sort(key=fleet.index, reverse=True)
    found = judge(rows, peers=peers.beside(rows))
    assert set(found) == {row.key for row in rows}
    slow = {
        (*key, f.metric): f.evidence["deviations"][0]
        for key, some in found.items()
        for f in some
        if f.code == "slower_than_peers"
    }
    assert slow == pytest.approx(accused(rows, others), rel=1e-12)


def test_what_was_read_anew_replaces_what_was_read_before() -> None:
    fleet = [row for row in drawn(21, 60) if row.node.model == "H100"]
    peers = Peers(fleet)
    assert len(peers.beside(fleet[:1])) == len(fleet) - 1  # all are read
    new = Row(fleet[3].node, drawn(22, 1)[0].fingerprint)
    peers.put(new)
    latest = peers.beside(fleet[:1])[0]
    assert latest.row.fingerprint is new.fingerprint
    assert len(peers.beside(fleet[:1])) == len(fleet) - 1


def test_nodes_that_send_names_without_end_do_not_part_peers() -> None:
    """More names than are kept, between the readings of one metric."""
    rows = []
    for number in range(9):
        value = 50.0 if number == 4 else 100.0
        names = ["disk.read_mb_s", *(f"disk.read_{number}_{i}_mb_s" for i in range(700))]
        found = {name: Measurement(name, value, "MB/s", "timed") for name in names}
        rows.append(
            Row(NodeRecord(f"n{number}", gpu_model="L4", device="cuda:0"), Fingerprint(found))
        )
    slow = {key: [f.metric for f in some] for key, some in judge(rows).items() if some}
    assert slow == {("n4", "cuda:0"): ["disk.read_mb_s"]}


def test_it_is_said_where_there_are_too_few_to_judge() -> None:
    def alike(count: int, model: str, first: int = 0) -> list[Row]:
        reading = Measurement("disk.read_mb_s", 100.0, "MB/s", "timed")
        return [
            Row(
                NodeRecord(f"n{first + i}", device="cuda:0", gpu_model=model),
                Fingerprint({reading.name: reading}),
            )
            for i in range(count)
        ]

    assert unjudged(alike(5, "L4")) == ["L4: too few peers to judge: 4 of 5 needed"]
    assert unjudged(alike(6, "L4")) == []
    assert unjudged([*alike(6, "L4"), *alike(1, "T4", 6)]) == [
        "T4: too few peers to judge: 0 of 5 needed"
    ]
    assert unjudged(alike(9, "")) == [
        "devices of unknown model: too few peers to judge: 0 of 5 needed"
    ]
    assert unjudged([Row(NodeRecord("n", gpu_model="L4"), Fingerprint())]) == []
    # Held against its own past instead, the finding says why.
    rows = alike(3, "L4")
    history = {("n0", "cuda:0", "disk.read_mb_s"): [200.0] * 6}
    (finding,) = judge(rows, history=history)["n0", "cuda:0"]
    assert finding.sentence.endswith("; too few peers to judge: 2 of 5 needed")
    assert (finding.evidence["peers"], finding.evidence["peers_needed"]) == (2, 5)
