"""Which nodes are worse than they should be: readings in, findings out. Pure.

Peers are devices of the same model. With at least `MIN_PEERS` of them a reading is held against
theirs by the rule of `verdict`. With fewer it is held against the node's own history, and absolute
rules are left (`absolute`): both say that their confidence is low. So two machines that differ
accuse neither. A finding is suspected when seen once and confirmed when a second, separate probe
sees it again; its evidence holds the arithmetic. What is suspect or was not measured judges nothing
and is not judged; a suspicion about it waits for the next reading. A reading taken while other
programs used the machine's cores explains itself: it is told, and neither confirms nor counts.

By simulation (tests/coordinator/test_judge.py), a probe reading twelve metrics, nine samples each
with lognormal noise of 1 to 3 %, 1 % between machines of a model and 0.5 % between probes: of
healthy nodes in fleets of 2 to 200 about 0.02 % are confirmed by two probes (at most 0.1 % is
asked), and of nodes that are 10 % slow in one metric among 8 about 99 % are (95 % is asked). Where
readings carry no spread and vary by 2 % or more from probe to probe, one metric of 7 peers does not
hold enough to confirm 10 % that often at that rate of false alarms: the limits then keep the rate,
and a slow node is found by being slow in several metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pichak_coordinator.absolute import absolute_findings
from pichak_coordinator.collector import paused
from pichak_coordinator.disturbance import disturbed
from pichak_coordinator.golden_digests import wrong_digests
from pichak_coordinator.judged import MIN_PEERS, Judged, Kind, Kinds, too_few
from pichak_coordinator.records import Finding, Row, Severity
from pichak_coordinator.verdict import FLOOR, SIGMAS, Group, Sample, Verdict
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number

#: How many earlier readings a node needs to be held against itself.
MIN_HISTORY = 5
#: Worse than its peers by this share, a node is called failed and not only slow.
FAIL_SHARE = 0.25
#: The kept deviations of consecutive suspicions.
_KEPT = 10

Key = tuple[str, str]
#: (node, device, metric) -> earlier values, the oldest first.
History = Mapping[tuple[str, str, str], Sequence[float]]


@paused()
def judge(
    rows: Sequence[Row],
    *,
    history: History | None = None,
    earlier: Mapping[Key, Sequence[Finding]] | None = None,
    peers: Iterable[Judged] = (),
) -> dict[Key, list[Finding]]:
    """(node, device) -> what is wrong with it, the worst first; devices without findings too.

    `rows` are one probe of a fleet. `history` holds earlier values of the same devices;
    `earlier` the findings that the probe before this one gave each device, for the second look.
    `peers` are others of the fleet, which are not judged themselves.
    """
    others = list(peers)
    each = Counter(row.node.node for row in rows)
    each.update(other.row.node.node for other in others)
    kinds = Kinds()
    counts: list[int] = []
    place = {row.key: at for at, row in enumerate(rows)}
    for at, row in enumerate(rows):
        read = Judged(row)
        counts.append(len(read))
        asked = at if place[row.key] == at else None
        kinds.add(read, asked, alone=each[row.node.node] == 1)
    for other in others:
        kinds.add(other, None, alone=each[other.row.node.node] == 1)
    slow: dict[int, list[Finding]] = {}
    for kind in kinds:
        for at, verdict, basis in _verdicts(kind, rows, history or {}):
            if verdict is not None and verdict.suspicious:
                row, before = rows[at], (earlier or {}).get(rows[at].key, ())
                made = _finding(row, kind, verdict, basis, counts[at], before)
                slow.setdefault(at, []).append(made)
    found: dict[Key, list[Finding]] = {}
    for key, at in place.items():
        known = {f.key: f for f in (earlier or {}).get(key, ())}
        found[key] = [
            *slow.get(at, ()),
            *(_again(finding, known) for finding in absolute_findings(rows[at])),
            *(_waiting(known, rows[at]) if known else ()),
        ]
    for key, finding in wrong_digests([*rows, *(other.row for other in others)]).items():
        if key in found:
            known = {f.key: f for f in (earlier or {}).get(key, ())}
            found[key].append(_again(finding, known))
    return {key: sorted(some, key=lambda f: f.order) for key, some in found.items()}


def _verdicts(
    kind: Kind, rows: Sequence[Row], history: History
) -> Iterable[tuple[int, Verdict | None, str]]:
    """(row, verdict, what it is held against): its peers, else its own past, else nothing."""
    group = kind.group
    if group is not None:
        for at, row in kind.doubtful(group):
            yield row, group.judge_member(kind.member(at)), "peers"
        return
    metric = kind.metric
    for at, number in enumerate(kind.asked if history else ()):
        past = () if number is None else history.get((*rows[number].key, metric.name), ())
        if number is not None and len(past) >= MIN_HISTORY:
            own = Sample(kind.values[at], kind.noises[at])
            samples = [Sample(value, own.noise) for value in past]
            earlier = Group(samples, higher_is_better=metric.higher_is_better)
            yield number, earlier.judge_stranger(own), "own history"


def _conditions(row: Row, metric: str) -> Mapping[str, Any]:
    """What was true of the machine while the metric was read."""
    if metric.startswith("plan."):
        found = (row.ramp or {}).get("conditions")
        return found if isinstance(found, Mapping) else {}
    reading = row.fingerprint.get(metric)
    return reading.conditions if isinstance(reading, Measurement) else {}


def _finding(
    row: Row,
    kind: Kind,
    verdict: Verdict,
    basis: str,
    judged: int,
    before: Sequence[Finding],
) -> Finding:
    metric, unit = kind.metric.name, kind.metric.unit
    busy = disturbed(_conditions(row, metric))
    code = "slower_than_peers" if basis == "peers" else "slower_than_before"
    earlier = {f.key: f for f in before}.get((code, metric))
    kept = earlier.evidence.get("deviations", []) if earlier else []
    seen = [d for d in kept if isinstance(d, (int, float))]
    if not busy:
        seen = [*seen, verdict.deviation][-_KEPT:]
    deviations = seen or [verdict.deviation]
    probes = len(deviations)
    mean, mean_limit = sum(deviations) / probes, verdict.mean_limit(probes, judged)
    confirmed = probes > 1 and mean > mean_limit and not busy
    what = "its peers" if basis == "peers" else "its earlier readings"
    sentence = (
        f"{metric} is {format_number(verdict.value)} {unit}, "
        f"{verdict.deviation:.1%} worse than the median {format_number(verdict.median)} of "
        f"{verdict.others} of {what} (limit {verdict.limit:.1%})"
    )
    if probes > 1:
        sentence += f"; mean of {probes} probes {mean:.1%} (limit {mean_limit:.1%})"
    if basis != "peers":
        sentence += f"; {too_few(kind.peers)}"
    if busy:
        sentence += f"; {busy}, so this probe accuses nobody"
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
        "disturbed": busy,
        "mean_deviation": mean,
        "mean_limit": mean_limit,
        "metrics_judged": judged,
        "peers": kind.peers,
        "peers_needed": MIN_PEERS,
    }
    severity: Severity = "fail" if mean >= FAIL_SHARE else "warn"
    return Finding(
        code,
        severity,
        sentence,
        evidence,
        "confirmed" if confirmed else "suspected",
        "normal" if basis == "peers" and not busy else "low",
        metric,
    )


def _again(finding: Finding, before: Mapping[tuple[str, str], Finding]) -> Finding:
    """A finding without noise is confirmed when the probe before this one had it too."""
    if finding.state == "confirmed" or finding.key not in before:
        return finding
    return Finding(**{**finding.__dict__, "state": "confirmed"})


def _waiting(before: Mapping[tuple[str, str], Finding], row: Row) -> list[Finding]:
    """Findings about readings that this probe did not get: neither confirmed nor cleared."""
    codes = ("slower_than_peers", "slower_than_before")
    waiting = [finding for finding in before.values() if finding.code in codes]
    read = Judged(row).names if waiting else ()
    return [finding for finding in waiting if finding.metric not in read]
