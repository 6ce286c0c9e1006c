"""Which nodes are worse than they should be: readings in, findings out. Pure.

Peers are devices of the same model. With at least `MIN_PEERS` of them a reading is held against
theirs by the rule of `verdict`. With fewer it is held against the node's own history, and absolute
rules are left (`absolute`): both say that their confidence is low. So two machines that differ
accuse neither. A finding is suspected when seen once and confirmed when a second, separate probe
sees it again; its evidence holds the arithmetic. What is suspect or was not measured judges nothing
and is not judged; a suspicion about it waits for the next reading. A reading taken while other
programs used the machine's cores explains itself: it is told, and neither confirms nor counts.

Judged are rates ("…/s") and times (us, ms) by their unit. Left out: high percentiles, whose noise
no median tames; the cost of starting an operation, which matters as a share of a training step
only (24 µs was 2.5 % of one step and hours of another); and a network's readings, which belong to a
link and not to a node.

By simulation (tests/coordinator/test_judge.py), a probe reading twelve metrics, nine samples each
with lognormal noise of 1 to 3 %, 1 % between machines of a model and 0.5 % between probes: of
healthy nodes in fleets of 2 to 200 about 0.02 % are confirmed by two probes (at most 0.1 % is
asked), and of nodes that are 10 % slow in one metric among 8 about 99 % are (95 % is asked). Where
readings carry no spread and vary by 2 % or more from probe to probe, one metric of 7 peers does not
hold enough to confirm 10 % that often at that rate of false alarms: the limits then keep the rate,
and a slow node is found by being slow in several metrics.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pichak_coordinator.absolute import absolute_findings
from pichak_coordinator.disturbance import disturbed
from pichak_coordinator.records import Finding, Row, Severity
from pichak_coordinator.speed import processed_speed, scored_speed
from pichak_coordinator.verdict import FLOOR, SIGMAS, Group, Sample, Verdict
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number

MIN_PEERS = 5
#: How many earlier readings a node needs to be held against itself.
MIN_HISTORY = 5
#: Worse than its peers by this share, a node is called failed and not only slow.
FAIL_SHARE = 0.25
#: The kept deviations of consecutive suspicions.
_KEPT = 10

Key = tuple[str, str]
#: (node, device, metric) -> earlier values, the oldest first.
History = Mapping[tuple[str, str, str], Sequence[float]]

_TIMES = ("us", "µs", "ms")
_NOT_JUDGED = ("p95", "p99", "kernel_launch", "op_dispatch", "network.")
_DIGEST = "golden.gradient_digest"


def judge(
    rows: Sequence[Row],
    *,
    history: History | None = None,
    earlier: Mapping[Key, Sequence[Finding]] | None = None,
    only: Collection[Key] | None = None,
) -> dict[Key, list[Finding]]:
    """(node, device) -> what is wrong with it, the worst first; devices without findings too.

    `rows` are one probe of a fleet. `history` holds earlier values of the same devices;
    `earlier` the findings that the probe before this one gave each device, for the second look.
    `only` names the devices that are judged; the others are there as their peers.
    """
    kinds = _Kinds()
    readings = {row.key: _readings(row, kinds) for row in rows}
    found: dict[Key, list[Finding]] = {}
    for row in rows if only is None else [row for row in rows if row.key in only]:
        before = {f.key: f for f in (earlier or {}).get(row.key, ())}
        judged = len(readings[row.key])
        mine: list[Finding] = []
        for reading in readings[row.key].values():
            if reading.speaker in reading.kind.fine:
                continue
            basis = _basis(row, reading, history or {})
            if basis is not None:
                finding = _finding(reading, *basis, judged, before)
                mine += [finding] if finding else []
        mine += [_again(finding, before) for finding in absolute_findings(row)]
        mine += _waiting(before, readings[row.key])
        found[row.key] = mine
    for key, finding in _wrong_digests(rows).items():
        if key not in found:
            continue
        before = {f.key: f for f in (earlier or {}).get(key, ())}
        found[key].append(_again(finding, before))
    return {key: sorted(some, key=lambda f: f.order) for key, some in found.items()}


class _Reading:
    """One judged number of one row. `speaker` is who it is a reading of among its kind: a node's
    own parts (disk, CPU, memory) are one reading however many GPUs it has."""

    __slots__ = ("kind", "metric", "noise", "row", "speaker", "unit", "value")

    def __init__(
        self,
        row: Row,
        metric: str,
        unit: str,
        value: float,
        noise: float | None,
        kind: _Kind,
        speaker: str,
    ) -> None:
        self.row, self.metric, self.unit = row, metric, unit
        self.value, self.noise, self.kind, self.speaker = value, noise, kind, speaker

    @property
    def disturbed(self) -> str:
        """Which others used the machine meanwhile, "" when nobody did."""
        return disturbed(_conditions(self.row, self.metric))


def _conditions(row: Row, metric: str) -> Mapping[str, Any]:
    """What was true of the machine while the metric was read."""
    if metric.startswith("plan."):
        found = (row.ramp or {}).get("conditions")
        return found if isinstance(found, Mapping) else {}
    reading = row.fingerprint.get(metric)
    return reading.conditions if isinstance(reading, Measurement) else {}


class _Kind:
    """Readings that should be alike. A device of unknown model is nobody's peer: `known`."""

    def __init__(self, unit: str, *, known: bool) -> None:
        self.higher_is_better = _rises(unit)
        self.members: dict[str, _Reading] = {}
        self._known = known

    def add(self, reading: _Reading) -> None:
        """The first reading of each speaker counts; all are added before one is judged."""
        if self._known:
            self.members.setdefault(reading.speaker, reading)

    @functools.cached_property
    def group(self) -> Group | None:
        """The values, where there are enough of them to judge one another."""
        if len(self.members) <= MIN_PEERS:
            return None
        return Group(self.members.values(), higher_is_better=self.higher_is_better)

    @functools.cached_property
    def fine(self) -> frozenset[str]:
        """Speakers of whom it is sure that they are not suspicious."""
        group = self.group
        if group is None:
            return frozenset()
        return frozenset(name for name, one in self.members.items() if group.is_fine(one.value))


class _Kinds:
    """Every kind of reading there is, found by what must agree between peers."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], dict[tuple[str, str], _Kind]] = {}

    def of(self, *alike: Any) -> dict[tuple[str, str], _Kind]:
        """The kinds by metric and unit of devices that agree in `alike`; an empty first part is
        not known."""
        return self._made.setdefault(alike, {})


def _kind(kinds: dict[tuple[str, str], _Kind], name: tuple[str, str], *, known: bool) -> _Kind:
    made = kinds.get(name)
    if made is None:
        made = kinds[name] = _Kind(name[1], known=known)
    return made


def _readings(row: Row, kinds: _Kinds) -> dict[str, _Reading]:
    """What is judged of a row, each reading added to its kind."""
    made: dict[str, _Reading] = {}
    node, model = row.node, row.node.model
    device = f"{node.node}/{node.device}"
    of_model = kinds.of("model", model)
    # A container with half the cores is slower for that reason, and says so itself.
    of_host = kinds.of("host", node.cpu_model, row.fingerprint.number("cpu.usable_cores"))
    for metric, reading in row.fingerprint.items():
        if not isinstance(reading, Measurement):
            continue
        name = (metric, reading.unit)
        whose = _whose(*name)
        if not whose or reading.suspect or isinstance(reading.value, (str, bool)):
            continue
        if whose == "host":
            kind = of_host.get(name) or _kind(of_host, name, known=bool(node.cpu_model))
        else:
            kind = of_model.get(name) or _kind(of_model, name, known=bool(model))
        speaker = device if whose == "gpu" else node.node
        value = float(reading.value)
        one = _Reading(row, metric, reading.unit, value, _noise(reading), kind, speaker)
        made[metric] = one
        kind.add(one)
    speed = scored_speed(row) or processed_speed(row)
    if speed is not None and row.plan is not None:
        metric = "plan.scored_tokens_per_second" if speed.scored else "plan.tokens_per_second"
        length = row.plan["seq_len"].value if "seq_len" in row.plan else None
        task = kinds.of("plan", model, row.plan.model, row.plan.data, length)
        kind = _kind(task, (metric, speed.unit), known=bool(model))
        rate = speed.tokens_per_second
        made[metric] = _Reading(row, metric, speed.unit, rate, speed.noise, kind, device)
        kind.add(made[metric])
    return made


@functools.lru_cache(maxsize=4096)
def _whose(metric: str, unit: str) -> str:
    """Who answers for a reading of this name and unit, a rate or a time: the "gpu", the "host"
    (peers have its CPU model and cores) or the "node"; "" where nobody does."""
    if not (unit.endswith("/s") or unit in _TIMES) or any(part in metric for part in _NOT_JUDGED):
        return ""
    if metric.startswith("gpu."):
        return "gpu"
    return "host" if metric.startswith(("cpu.", "host.")) else "node"


def _noise(reading: Measurement) -> float | None:
    """The relative standard error of a median of `samples`: 1.2533 · spread / √samples."""
    if reading.spread is None or reading.samples < 3 or isinstance(reading.value, str):
        return None
    return 1.2533 * reading.spread / math.sqrt(reading.samples) / abs(reading.value or 1.0)


def _rises(unit: str) -> bool:
    """Whether more of this unit is better: of a rate, not of a time."""
    return unit not in _TIMES


def _basis(row: Row, reading: _Reading, history: History) -> tuple[Verdict, str] | None:
    """What the reading is held against: its peers, else its own past, else nothing."""
    group = reading.kind.group
    if group is not None:
        verdict = group.judge_member(reading.kind.members[reading.speaker])
        return (verdict, "peers") if verdict else None
    past = history.get((*row.key, reading.metric), ())
    if len(past) < MIN_HISTORY:
        return None
    samples = [Sample(value, reading.noise) for value in past]
    own = Group(samples, higher_is_better=_rises(reading.unit))
    verdict = own.judge_stranger(reading)
    return (verdict, "own history") if verdict else None


def _finding(
    reading: _Reading,
    verdict: Verdict,
    basis: str,
    judged: int,
    before: Mapping[tuple[str, str], Finding],
) -> Finding | None:
    if not verdict.suspicious:
        return None
    code = "slower_than_peers" if basis == "peers" else "slower_than_before"
    earlier = before.get((code, reading.metric))
    kept = earlier.evidence.get("deviations", []) if earlier else []
    seen = [d for d in kept if isinstance(d, (int, float))]
    if not reading.disturbed:
        seen = [*seen, verdict.deviation][-_KEPT:]
    deviations = seen or [verdict.deviation]
    probes = len(deviations)
    mean, mean_limit = sum(deviations) / probes, verdict.mean_limit(probes, judged)
    confirmed = probes > 1 and mean > mean_limit and not reading.disturbed
    what = "its peers" if basis == "peers" else "its earlier readings"
    unit = reading.unit
    sentence = (
        f"{reading.metric} is {format_number(verdict.value)} {unit}, "
        f"{verdict.deviation:.1%} worse than the median {format_number(verdict.median)} of "
        f"{verdict.others} of {what} (limit {verdict.limit:.1%})"
    )
    if probes > 1:
        sentence += f"; mean of {probes} probes {mean:.1%} (limit {mean_limit:.1%})"
    if reading.disturbed:
        sentence += f"; {reading.disturbed}, so this probe accuses nobody"
    evidence: dict[str, Any] = {
        "value": verdict.value,
        "unit": unit,
        "basis": basis,
        "median": verdict.median,
        "others": verdict.others,
        "mad_sigma": verdict.mad_sigma,
        "expected_noise": verdict.expected,
        "scale": verdict.scale,
        "limit": verdict.limit,
        "rule": f"more than max({FLOOR:.0%}, {SIGMAS:g} × {verdict.scale:.2%})",
        "deviations": seen,
        "disturbed": reading.disturbed,
        "mean_deviation": mean,
        "mean_limit": mean_limit,
        "metrics_judged": judged,
    }
    severity: Severity = "fail" if mean >= FAIL_SHARE else "warn"
    return Finding(
        code,
        severity,
        sentence,
        evidence,
        "confirmed" if confirmed else "suspected",
        "normal" if basis == "peers" and not reading.disturbed else "low",
        reading.metric,
    )


def _again(finding: Finding, before: Mapping[tuple[str, str], Finding]) -> Finding:
    """A finding without noise is confirmed when the probe before this one had it too."""
    if finding.state == "confirmed" or finding.key not in before:
        return finding
    return Finding(**{**finding.__dict__, "state": "confirmed"})


def _waiting(
    before: Mapping[tuple[str, str], Finding], readings: Mapping[str, _Reading]
) -> list[Finding]:
    """Findings about readings that this probe did not get: neither confirmed nor cleared."""
    codes = ("slower_than_peers", "slower_than_before")
    return [
        finding
        for finding in before.values()
        if finding.code in codes and finding.metric not in readings
    ]


def _wrong_digests(rows: Sequence[Row]) -> dict[Key, Finding]:
    """Devices whose golden step is wrong in itself, or differs where nearly all of a kind agree.

    Kind: the same model, driver and torch (and vector instructions, on a CPU). At least two others
    must agree, and three quarters of all; two machines that differ accuse neither.
    """
    kinds: dict[tuple[str, ...], list[tuple[Row, str]]] = {}
    found: dict[Key, Finding] = {}
    for row in rows:
        reading = row.fingerprint.get(_DIGEST)
        if not isinstance(reading, Measurement):
            continue
        if reading.suspect:  # compared with nobody's: it says itself what is wrong
            found[row.key] = Finding(
                "computes_differently",
                "fail",
                f"its fixed training step is wrong: {reading.suspect}",
                {"digest": str(reading.value), "why": reading.suspect},
                metric=_DIGEST,
            )
            continue
        if not row.node.model:
            continue
        versions = [row.fingerprint.text(n) or "" for n in ("software.driver", "software.torch")]
        vector = "" if row.node.gpu_model else str(reading.detail.get("cpu", ""))
        kind = (row.node.model, *versions, vector)
        kinds.setdefault(kind, []).append((row, str(reading.value)))
    for kind, members in kinds.items():
        ((common, count),) = Counter(digest for _, digest in members).most_common(1)
        if count < 2 or count < 0.75 * len(members) or len(members) < 3:
            continue
        for row, digest in members:
            if digest != common:
                found[row.key] = Finding(
                    "computes_differently",
                    "fail",
                    f"its fixed training step gave other bits than {count} of the {len(members)} "
                    f"devices of its kind ({kind[0]})",
                    {"digest": digest, "common": common, "agree": count, "of": len(members)},
                    metric=_DIGEST,
                )
    return found
