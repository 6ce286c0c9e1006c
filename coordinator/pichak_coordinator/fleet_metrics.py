"""What a watch knows, as families of Prometheus metrics. Pure: a view in, families out.

What was not measured has no sample: it is named in ``pichak_unmeasured`` with its reason. Readings
are those of the registry, ``pichak_measured_`` before their names, in which the unit stands; a
number that a node sends under another name is not shown. Text of nodes is cut and made printable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pichak_coordinator.jobs import FINAL
from pichak_coordinator.records import SEVERITIES, FindingState, NodeRecord, Row
from pichak_coordinator.schedule import DEPTHS
from pichak_coordinator.speed import plan_number
from pichak_coordinator.text import printable, shortened
from pichak_coordinator.watch_view import WatchView
from pichak_core.measure import probes
from pichak_core.measurement import Unmeasured

#: Longest value of a label, in characters.
MOST_LABEL = 120
#: Findings of a device that are shown one by one, the worst first; the counts hold all of them.
MOST_FINDINGS = 50
#: Numbers of a node's plan that are shown: what its training gives, with the unit in the name.
PLAN = {
    "micro_batch": ("micro_batch_rows", "rows of one micro-batch, from the ramp"),
    "seconds_per_step": ("seconds_per_step", "seconds of one training step at that micro-batch"),
    "tokens_per_second": ("tokens_per_second", "tokens a second through the model"),
    "scored_tokens_per_second": (
        "scored_tokens_per_second",
        "tokens a second that the loss scores",
    ),
}
_ENDS = ("measured", "busy", "failed")
_DEVICE = ("node", "host", "device", "simulated")
_NODE = ("node", "host", "simulated")

Labels = tuple[str, ...]


@dataclass
class Family:
    """One metric: its samples by the values of `labels`, each set of them once."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: Labels = ()
    samples: dict[Labels, float] = field(default_factory=dict)

    def add(self, value: float, *values: object) -> None:
        """A sample; one with the same labels is replaced."""
        self.samples[tuple(label(each) for each in values)] = float(value)


def label(value: object) -> str:
    """A label's value from whatever a node called itself."""
    return shortened(printable(str(value)), MOST_LABEL)


def metric_name(metric: str) -> str:
    """``gpu.h2d_pinned_mb_s`` as Prometheus may call it."""
    return "pichak_measured_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def families(view: WatchView) -> Iterator[Family]:
    """Every family that there is, also those without a sample now."""
    yield from _measured(view)
    yield from _nodes(view)
    yield from _schedule(view)
    yield from _loop(view)


def exported_names() -> set[str]:
    """Every name of a sample that can be scraped."""
    return {
        f"{each.name}_total" if each.kind == "counter" else each.name
        for each in families(WatchView(0.0, 0.0))
    }


def _device(node: NodeRecord) -> Labels:
    name = label(node.alias or node.host)
    return label(node.node), name, label(node.device), _mark(node.simulated)


def _mark(simulated: bool) -> str:
    return "yes" if simulated else ""


def _measured(view: WatchView) -> Iterator[Family]:
    rows = list(view.rows.values())
    unmeasured = Family(
        *("pichak_unmeasured", "gauge", "1 for what the last probe that tried it did not measure"),
        (*_DEVICE, "metric", "reason"),
    )
    suspect = Family(
        *("pichak_suspect", "gauge", "1 for a reading that cannot be true, and is not shown"),
        (*_DEVICE, "metric"),
    )
    known = {
        metric.name: Family(
            metric_name(metric.name),
            "gauge",
            f"{metric.meaning} ({metric.unit})" if metric.unit else metric.meaning,
            _DEVICE,
        )
        for probe in probes().values()
        for metric in probe.metrics
    }
    for row in rows:
        place = _device(row.node)
        for name, reading in row.fingerprint.items():
            if name not in known:
                continue
            if isinstance(reading, Unmeasured):
                unmeasured.add(1, *place, name, reading.reason.value)
            elif reading.suspect:
                suspect.add(1, *place, name)
            elif not isinstance(reading.value, str):
                known[name].samples[place] = float(reading.value)
    yield from known.values()
    yield from _plans(rows)
    yield unmeasured
    yield suspect
    info = Family(
        *("pichak_device_info", "gauge", "1 for each device that was probed"),
        (*_DEVICE, "model", "gpu_uuid"),
    )
    for row in {row.key: row for row in rows}.values():
        info.add(1, *_device(row.node), row.node.device_name or row.node.model, row.node.gpu_uuid)
    yield info


def _plans(rows: Iterable[Row]) -> Iterator[Family]:
    for name, (shown, meaning) in PLAN.items():
        family = Family(metric_name(f"plan.{shown}"), "gauge", meaning, _DEVICE)
        for row in rows:
            number = plan_number(row.plan, name)
            if number is not None:
                family.add(number, *_device(row.node))
        yield family


def _nodes(view: WatchView) -> Iterator[Family]:
    reachable = Family(
        *(
            "pichak_node_reachable",
            "gauge",
            "1 where the node's agent answers; left nodes for 24 h",
        ),
        (*_NODE, "address"),
    )
    for each in view.nodes:
        mark = _mark(each.simulated)
        reachable.add(each.reachable, each.node, each.host, mark, each.address)
    yield reachable
    places = _places(view)
    findings = Family(
        *("pichak_fleet_finding", "gauge", "1 for each open finding (docs/FINDINGS.md)"),
        (*_DEVICE, "code", "severity", "state", "metric"),
    )
    # Zero where nothing is open, so that a watch that does not run looks different.
    counts = Family(
        *("pichak_fleet_findings", "gauge", "how many findings are open"),
        ("severity", "state", "simulated"),
        {(how, state, ""): 0.0 for how in SEVERITIES for state in get_args(FindingState)},
    )
    for (node, key), some in view.findings.items():
        row = view.rows.get((node, key))
        host, mark = places.get(node, ("", ""))
        place = _device(row.node) if row else (node, host, "", mark)
        for found in some:
            of = (found.severity, found.state, place[-1])
            counts.samples[of] = counts.samples.get(of, 0.0) + 1
        for found in sorted(some, key=lambda each: each.order)[:MOST_FINDINGS]:
            findings.add(1, *place, found.code, found.severity, found.state, found.metric)
    yield findings
    yield counts


def _schedule(view: WatchView) -> Iterator[Family]:
    places, labels = _places(view), (*_NODE, "depth")
    measured = Family(
        *("pichak_last_probe_timestamp_seconds", "gauge", "when a probe last gave a reading"),
        labels,
    )
    begun = Family(
        *("pichak_last_probe_begun_timestamp_seconds", "gauge", "when a probe was last begun"),
        labels,
    )
    due = Family(
        *("pichak_next_probe_due_timestamp_seconds", "gauge", "when the next probe is due"),
        labels,
    )
    failing = Family(
        *("pichak_node_failing", "gauge", "1 where its last probe gave nothing at all"),
        _NODE,
    )
    for (node, depth), at in view.measured_unix.items():
        if node in view.entries:
            measured.add(at, node, *places.get(node, ("", "")), depth)
    for node, entry in view.entries.items():
        place = (node, *places.get(node, ("", "")))
        failing.add(entry.failing, *place)
        for depth, at in entry.since.items():
            begun.add(at, *place, depth)
        for depth, at in entry.due.items():
            # A second look is due at once.
            due.add(view.turned_unix if entry.again == depth else at, *place, depth)
    yield from (measured, begun, due, failing)


def _loop(view: WatchView) -> Iterator[Family]:
    for name, kind, text, value in (
        (
            "pichak_watch_loop_timestamp_seconds",
            "gauge",
            "when its loop last turned",
            view.turned_unix,
        ),
        ("pichak_watch_start_timestamp_seconds", "gauge", "when it began", view.began_unix),
        ("pichak_watch_probes_running", "gauge", "probes under way", view.running),
        (
            "pichak_watch_probes_waiting_for_budget",
            *("gauge", "probes that are due and wait for the budget", view.waiting_for_budget),
        ),
        (
            "pichak_watch_probe_seconds",
            *("counter", "probe-seconds spent since the watch began", view.probe_seconds),
        ),
        (
            "pichak_watch_charged_seconds",
            *("gauge", "probe-seconds that the last hour holds", view.charged_seconds),
        ),
    ):
        yield Family(
            name, "counter" if kind == "counter" else "gauge", text, (), {(): float(value)}
        )
    limit = Family("pichak_watch_budget_seconds", "gauge", "probe-seconds that an hour may hold")
    left = Family("pichak_watch_budget_left_seconds", "gauge", "what is left of them now")
    if view.budget_seconds is not None:
        limit.add(view.budget_seconds)
        left.add(max(0.0, view.budget_seconds - view.charged_seconds))
    yield from (limit, left)
    yield _counted(
        "pichak_watch_probes",
        "probes that ended since the watch began",
        ("depth", "end"),
        {**{(depth, end): 0 for depth in DEPTHS for end in _ENDS}, **view.probes},
    )
    yield _counted(
        "pichak_watch_jobs",
        "jobs that ended since the watch began, by final state",
        ("kind", "state"),
        {**{("fingerprint", state): 0 for state in sorted(FINAL)}, **view.jobs},
    )


def _counted(name: str, text: str, labels: Labels, counts: Mapping[tuple[str, str], int]) -> Family:
    family = Family(name, "counter", text, labels)
    for values, count in counts.items():
        family.add(count, *values)
    return family


def _places(view: WatchView) -> dict[str, tuple[str, str]]:
    """node -> (host, mark of the simulated)."""
    return {node.node: (node.host, _mark(node.simulated)) for node in view.nodes}
