"""A watch's metrics: the right samples, none of what was not measured, text that stays text."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pichak_coordinator.fleet_metrics import (
    MOST_FINDINGS,
    MOST_LABEL,
    exported_names,
    families,
    metric_name,
)
from pichak_coordinator.metrics_server import HANGS_SECONDS, MetricsError, MetricsServer
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.schedule import Entry
from pichak_coordinator.watch_view import GONE_SECONDS, NodeView, Seen, WatchView
from pichak_core.measure import probes
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import CONSTANT, Plan

COPY, READ, PINNED = "host.memory_copy_mb_s", "disk.read_mb_s", "gpu.h2d_pinned_mb_s"
NOW = 1_700_000_000.0


def row(node: str, *readings: Measurement | Unmeasured, **place: object) -> Row:
    fingerprint = Fingerprint()
    for reading in readings:
        fingerprint.add(reading)
    record = NodeRecord(node, **{"host": f"host-{node}", "cpu_model": "Xeon", **place})  # type: ignore[arg-type]
    return Row(record, fingerprint)


def view(*rows: Row, findings: Sequence[Finding] = (), **more: object) -> WatchView:
    keyed = {(r.node.node, r.node.gpu_uuid or r.node.device): r for r in rows}
    nodes = tuple(
        NodeView(r.node.node, r.node.host, "10.0.0.1", True, r.node.simulated) for r in rows
    )
    return WatchView(
        NOW, NOW - 100, nodes, keyed,
        findings={key: tuple(findings) for key in keyed} if findings else {},
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def scraped(shown: WatchView, accept: str = "text/plain") -> dict[str, list[Sample]]:
    """Through the server and Prometheus' own parser."""
    with MetricsServer(0) as server:
        server.show(shown)
        asked = urllib.request.Request(server.url, headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            text = answer.read().decode()
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def test_what_was_measured_is_there_and_nothing_else() -> None:
    found = scraped(
        view(
            row(
                "a",
                Measurement(COPY, 12345.5, "MB/s", "timed"),
                Measurement(READ, 0, "MB/s", "an idle zero is a value"),
                Unmeasured(PINNED, Reason.NO_DEVICE, "no GPU"),
                Measurement("cpu.model", "Xeon", "", "read"),
                Measurement("host.shm_mib", 64.0, "MiB", "read", suspect="cannot be"),
            ),
            row("b", Unmeasured(COPY, Reason.TIMED_OUT)),
        )
    )
    (copy,) = found["pichak_measured_host_memory_copy_mb_s"]
    assert copy.value == 12345.5
    assert copy.labels == {"node": "a", "host": "host-a", "device": "cpu", "simulated": ""}
    (read,) = found["pichak_measured_disk_read_mb_s"]
    assert read.value == 0
    for absent in ("gpu_h2d_pinned_mb_s", "cpu_model", "host_shm_mib", "cpu_usable_cores"):
        assert f"pichak_measured_{absent}" not in found
    gaps = [(s.labels["node"], s.labels["metric"], s.labels["reason"])
            for s in found["pichak_unmeasured"]]  # fmt: skip
    assert sorted(gaps) == [("a", PINNED, "no such device"), ("b", COPY, "timed out")]
    (odd,) = found["pichak_suspect"]
    assert odd.labels["metric"] == "host.shm_mib"


def test_text_of_a_node_stays_in_its_label_and_is_cut() -> None:
    hostile = 'x"} 1\npichak_evil{a="\\\x1b[31m' + "\ud800" + "h" * 500
    made = row(hostile, Measurement(COPY, 1.0, "MB/s", "timed"), host=hostile)
    made.fingerprint.add(Measurement("evil.metric_mb_s", 1.0, "MB/s", "unheard of"))
    bad = Finding(hostile, "fail", "s", state="confirmed", metric=hostile)
    found = scraped(view(made, findings=[bad]))
    assert not [name for name in found if "evil" in name]
    (copy,) = found["pichak_measured_host_memory_copy_mb_s"]
    assert copy.labels["host"].startswith('x"} 1 pichak_evil{a="\\\\x1b[31m\\ud800h')
    for samples in found.values():
        for sample in samples:
            assert all(len(value) <= MOST_LABEL for value in sample.labels.values())
    assert found["pichak_fleet_finding"][0].labels["code"] == copy.labels["host"]


def test_a_card_that_was_swapped_gives_one_sample_and_the_newer_one() -> None:
    one = row("a", Measurement(PINNED, 1.0, "MB/s", "t"), device="cuda:0", gpu_uuid="GPU-1")
    two = row("a", Measurement(PINNED, 2.0, "MB/s", "t"), device="cuda:0", gpu_uuid="GPU-2")
    found = scraped(view(one, two))
    assert [s.value for s in found["pichak_measured_gpu_h2d_pinned_mb_s"]] == [2.0]
    (info,) = found["pichak_device_info"]
    assert info.labels["gpu_uuid"] == "GPU-2"


def test_findings_schedule_budget_and_ends() -> None:
    faults = [
        Finding("gpu_lost", "fail", "gone", state="confirmed"),
        Finding("slower_than_peers", "warn", "slow", metric=COPY),
    ]
    entry = Entry("a", {"light": NOW + 60, "full": NOW + 900}, since={"light": NOW - 30})
    again = Entry("b", {"light": NOW + 70}, again="light", failing=True)
    shown = view(
        row("a"), row("b", simulated=True), findings=faults,
        entries={"a": entry, "b": again}, measured_unix={("a", "light"): NOW - 20},
        budget_seconds=600.0, charged_seconds=610.0, probe_seconds=77.5, running=1,
        waiting_for_budget=3, probes={("light", "busy"): 2}, jobs={("ramp", "failed"): 4},
    )  # fmt: skip
    found = scraped(shown)
    assert {
        (s.labels["node"], s.labels["code"], s.labels["severity"], s.labels["state"])
        for s in found["pichak_fleet_finding"]
    } == {
        (node, *which)
        for node in "ab"
        for which in [
            ("gpu_lost", "fail", "confirmed"), ("slower_than_peers", "warn", "suspected")
        ]
    }  # fmt: skip
    counts = {(s.labels["severity"], s.labels["state"], s.labels["simulated"]): s.value
              for s in found["pichak_fleet_findings"]}  # fmt: skip
    assert counts == {
        ("fail", "confirmed", ""): 1, ("warn", "suspected", ""): 1, ("fail", "suspected", ""): 0,
        ("warn", "confirmed", ""): 0, ("info", "suspected", ""): 0, ("info", "confirmed", ""): 0,
        ("fail", "confirmed", "yes"): 1, ("warn", "suspected", "yes"): 1,
    }  # fmt: skip
    marks = {(s.labels["node"], s.labels.get("simulated"))
             for some in found.values() for s in some if "node" in s.labels}  # fmt: skip
    assert marks == {("a", ""), ("b", "yes")}
    due = {(s.labels["node"], s.labels["depth"]): s.value - NOW
           for s in found["pichak_next_probe_due_timestamp_seconds"]}  # fmt: skip
    assert due == {("a", "light"): 60, ("a", "full"): 900, ("b", "light"): 0}
    (last,) = found["pichak_last_probe_timestamp_seconds"]
    assert (last.labels["node"], last.value) == ("a", NOW - 20)
    assert {s.labels["node"]: s.value for s in found["pichak_node_failing"]} == {"a": 0, "b": 1}
    assert {s.labels["simulated"] for s in found["pichak_device_info"]} == {"", "yes"}
    one = {name: some[0].value for name, some in found.items() if len(some) == 1}
    assert one["pichak_watch_budget_seconds"] == 600
    assert one["pichak_watch_budget_left_seconds"] == 0
    assert one["pichak_watch_probe_seconds_total"] == 77.5
    assert one["pichak_watch_probes_running"] == 1
    assert one["pichak_watch_probes_waiting_for_budget"] == 3
    assert one["pichak_watch_loop_timestamp_seconds"] == NOW
    ends = {
        (s.labels["depth"], s.labels["end"]): s.value for s in found["pichak_watch_probes_total"]
    }
    assert ends["light", "busy"] == 2
    assert ends["full", "failed"] == 0
    jobs = {
        (s.labels["kind"], s.labels["state"]): s.value for s in found["pichak_watch_jobs_total"]
    }
    assert jobs["ramp", "failed"] == 4
    # Without a budget there is none to be left.
    assert "pichak_watch_budget_left_seconds" not in scraped(view(row("a")))


def test_a_device_with_countless_findings_shows_its_worst() -> None:
    some = [Finding(f"code_{i}", "info", "s") for i in range(500)]
    some.append(Finding("gpu_lost", "fail", "gone", state="confirmed"))
    found = scraped(view(row("a"), findings=some))
    codes = [s.labels["code"] for s in found["pichak_fleet_finding"]]
    assert len(codes) == MOST_FINDINGS
    assert "gpu_lost" in codes
    counts = {s.labels["severity"]: s.value for s in found["pichak_fleet_findings"]
              if s.labels["state"] == "suspected"}  # fmt: skip
    assert counts["info"] == 500


def test_constants_of_a_plan_are_no_measurements() -> None:
    plan = Plan()
    plan.set("micro_batch", 16, "ramped")
    plan.set("seconds_per_step", 2.5, CONSTANT)
    made = Row(NodeRecord("a", host="h"), plan=plan)
    found = scraped(view(made))
    assert [s.value for s in found["pichak_measured_plan_micro_batch_rows"]] == [16]
    assert "pichak_measured_plan_seconds_per_step" not in found


def test_every_metric_of_the_registry_has_a_name_of_its_own() -> None:
    metrics = [metric.name for probe in probes().values() for metric in probe.metrics]
    names = [metric_name(metric) for metric in metrics]
    assert len(set(names)) == len(names)
    assert set(names) <= exported_names()
    made = [family.name for family in families(WatchView(0.0, 0.0))]
    assert len(set(made)) == len(made)


def test_openmetrics_where_it_is_asked_for() -> None:
    with MetricsServer(0) as server:
        server.show(view(row("a")))
        asked = urllib.request.Request(
            server.url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert "openmetrics" in answer.headers["Content-Type"]
            assert answer.read().endswith(b"# EOF\n")


def test_health_follows_the_loop_and_other_paths_are_told() -> None:
    at = [0.0]
    with MetricsServer(0, steady=lambda: at[0]) as server:
        healthz = server.url.replace("/metrics", "/healthz")
        server.show(view())
        at[0] += HANGS_SECONDS - 1
        assert urllib.request.urlopen(healthz, timeout=10).status == 200
        at[0] += 2
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(healthz, timeout=10)
        server.show(view())
        assert urllib.request.urlopen(healthz, timeout=10).status == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("metrics", "etc"), timeout=10)


def test_without_prometheus_client_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from pichak_coordinator.cli import main\n"
        "sys.argv = ['pichak', 'fleet', 'watch', '--metrics-port', '0']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "pichak: --metrics-port needs the package prometheus-client: "
        "pip install 'pichak-fleet[metrics]'\n"
    )


def test_a_port_that_is_taken() -> None:
    with MetricsServer(0) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(MetricsError, match=f"{port}.*another port"):
            MetricsServer(port)


def test_who_left_is_shown_for_a_day_and_who_came_back_once() -> None:
    seen = Seen()
    node = NodeView("a", "h", "10.0.0.1", True)
    seen.left(node, NOW)
    assert [n.reachable for n in seen.nodes([], NOW + 60)] == [False]
    assert [n.reachable for n in seen.nodes([node], NOW + 120)] == [True]
    assert not seen.nodes([], NOW + 180)
    seen.left(node, NOW)
    assert not seen.nodes([], NOW + GONE_SECONDS)
