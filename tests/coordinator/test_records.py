"""Records, identities, and text from nodes."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_coordinator.identity import node_identities, node_identity, node_record
from pichak_coordinator.records import Finding, NodeRecord, Row
from pichak_coordinator.text import csv_cell, markdown_cell, printable, shortened
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import CONSTANT, Plan


def test_a_finding_comes_back_as_it_was() -> None:
    finding = Finding("slow", "warn", "slow", {"value": 1.5, "n": 7}, "confirmed", "low", "m")
    assert Finding.from_dict(json.loads(json.dumps(finding.as_dict()))) == finding
    assert Finding.from_dict({"code": "a", "severity": "info", "sentence": "b"}).state == (
        "suspected"
    )


@pytest.mark.parametrize(
    "record",
    [
        None,
        "text",
        {},
        {"code": "a", "severity": "info", "sentence": " "},
        {"code": "", "severity": "info", "sentence": "b"},
        {"code": "a", "severity": "bad", "sentence": "b"},
        {"code": "a", "severity": "info", "sentence": "b", "state": "sure"},
        {"code": "a", "severity": "info", "sentence": "b", "evidence": [1]},
        {"code": "a", "severity": ["info"], "sentence": "b"},
    ],
)
def test_what_is_no_finding_is_refused(record: object) -> None:
    with pytest.raises(ValueError, match="finding"):
        Finding.from_dict(record)


def test_the_worst_finding_sorts_first() -> None:
    def make(severity, state, code="c"):
        return Finding(code, severity, "s", state=state)

    worst_first = [
        make("fail", "confirmed"),
        make("fail", "suspected"),
        make("warn", "confirmed"),
        make("warn", "suspected", "a"),
        make("warn", "suspected", "b"),
        make("info", "confirmed"),
    ]
    backwards = list(reversed(worst_first))
    assert sorted(backwards, key=lambda f: f.order) == worst_first
    assert [f.fault for f in worst_first] == [True, False, False, False, False, False]


def test_a_row_is_the_json_of_the_contract() -> None:
    fingerprint = Fingerprint()
    fingerprint.add(Measurement("disk.read_mb_s", 900.0, "MB/s", "O_DIRECT", samples=3))
    fingerprint.add(Unmeasured("network.rtt_ms", Reason.NOT_ASKED))
    plan = Plan().set("micro_batch", 7, "a ramp").note("said")
    row = Row(NodeRecord("n-1", "alpha", device="cuda:0", gpu_model="L4"), fingerprint, plan)
    record = json.loads(json.dumps(row.as_dict(), allow_nan=False))
    assert {"node", "host", "gpus", "fingerprint", "plan", "findings", "error"} <= set(record)
    assert (record["node"], record["host"], record["gpus"]) == ("n-1", "alpha", ["L4"])
    assert record["fingerprint"]["network.rtt_ms"] == {"unmeasured": "not asked for"}
    assert record["plan"]["values"]["micro_batch"]["source"] == "a ramp"
    assert record["plan"]["notes"] == ["said"]
    assert (record["error"], record["findings"]) == (None, [])


def test_json_of_a_row_is_json_whatever_a_node_measured() -> None:
    """Conditions and details are a node's own: NaN, infinities and bytes are not JSON."""
    fingerprint = Fingerprint()
    fingerprint.add(
        Measurement(
            "a_mb_s",
            1.0,
            "MB/s",
            "s",
            conditions={"temp": float("nan")},
            detail={"curve": [1.0, float("inf")], "raw": b"\x00\xff", "deep": {"x": -float("inf")}},
        )
    )
    text = json.dumps(Row(NodeRecord("n"), fingerprint).as_dict(), allow_nan=False)
    reading = json.loads(text)["fingerprint"]["a_mb_s"]
    assert reading["conditions"] == {"temp": "nan"}
    assert reading["detail"] == {"curve": [1.0, "inf"], "raw": "00ff", "deep": {"x": "-inf"}}


def test_measured_means_a_number_somebody_measured() -> None:
    node = NodeRecord("n")
    absent = Fingerprint()
    absent.add(Unmeasured("a_mb_s", Reason.FAILED))
    assert not Row(node).measured
    assert not Row(node, absent).measured
    assert not Row(node, plan=Plan().set("lr", 1.0, CONSTANT)).measured
    assert Row(node, plan=Plan().set("lr", 1.0, "measured")).measured
    present = Fingerprint()
    present.add(Measurement("a_mb_s", 0.0, "MB/s", "it really is zero"))
    assert Row(node, present).measured


def test_peers_share_a_gpu_model_or_a_cpu_model() -> None:
    gpu = NodeRecord("n", "h", device="cuda:1", gpu_model="L4", cpu_model="EPYC")
    assert (gpu.model, gpu.label) == ("L4", "h cuda:1")
    cpu = NodeRecord("n", "", device="cpu", gpu_model="L4", cpu_model="EPYC")
    assert (cpu.model, cpu.label) == ("EPYC", "n")
    assert NodeRecord("n-0a-2", "h", alias="h (10.0.0.1)").label == "h (10.0.0.1) #2"


def test_identity_is_the_machine_and_its_gpus() -> None:
    base = {"machine_id": "m", "gpu_uuids": ["B", "A"], "address": "1.1.1.1", "host": "x"}
    assert node_identity(base) == node_identity(
        {"machine_id": "m", "gpus": [{"uuid": "A"}, {"uuid": "B"}], "address": "2.2.2.2"}
    )
    others = [
        {**base, "machine_id": "m2"},
        {**base, "gpu_uuids": ["A"]},
        {**base, "gpu_uuids": ["A", "C"]},
        {**base, "gpu_uuids": []},
        {**base, "machine_id": "mA", "gpu_uuids": ["B"]},
    ]
    assert len({node_identity(h) for h in [base, *others]}) == 6
    # A container without a machine id still has a host name; an address is the last resort.
    assert node_identity({"host": "x", "address": "1"}) == node_identity({"host": "x"})
    assert node_identity({"address": "x"}) != node_identity({"host": "x"})
    with pytest.raises(ValueError, match="names no machine"):
        node_identity({"gpu_uuids": ["A"]})


@given(st.permutations(range(5)))
def test_agents_on_one_machine_are_told_apart_in_a_stable_order(order: list[int]) -> None:
    hellos = [
        {"machine_id": "m", "address": "10.0.0.1", "agent_id": "a"},
        {"machine_id": "m", "address": "10.0.0.1", "agent_id": "b"},
        {"machine_id": "m", "address": "10.0.0.2", "agent_id": "a"},
        {"machine_id": "m", "address": "10.0.0.3", "gpu_uuids": ["G"]},
        {"machine_id": "k", "address": "10.0.0.0"},
    ]
    base = node_identity(hellos[0])
    want = [base, f"{base}-2", f"{base}-3", node_identity(hellos[3]), node_identity(hellos[4])]
    assert node_identities([hellos[i] for i in order]) == [want[i] for i in order]


def test_who_is_at_the_same_place_keeps_its_identity_where_others_are_missing() -> None:
    hellos = [{"machine_id": "m", "host": f"c{n}", "address": f"10.0.0.{n}"} for n in range(4)]
    names = node_identities(hellos[:3])
    known = dict(zip(names, hellos, strict=False))
    assert node_identities(hellos[1:3], known) == names[1:3]
    # One that is new gets a number that nobody has, also where a lower one is away.
    assert node_identities([hellos[3], hellos[2]], known) == [f"{names[0]}-4", names[2]]
    assert node_identities(hellos[1:3]) == names[:2]  # in a run of their own


def test_agents_at_one_place_keep_their_identities_too() -> None:
    same = {"machine_id": "m", "host": "h", "address": "10.0.0.1"}
    hellos = [{**same, "node_id": name} for name in "abc"]
    names = node_identities(hellos)
    known = dict(zip(names, hellos, strict=True))
    assert node_identities(hellos[::-1], known) == names[::-1]
    assert node_identities(hellos[2:], known) == names[2:]
    # Another Ray node id after a restart: one of those that are away.
    again = [{**same, "node_id": "x"}, hellos[0]]
    assert node_identities(again, known) == [names[1], names[0]]


def test_a_hello_becomes_a_record_of_each_device() -> None:
    hello = {
        "host": "h",
        "address": "a",
        "cpu_model": "EPYC",
        "gpus": [{"name": "T4"}, {"name": "T4"}],
        "versions": {"ray": "2.60.0"},
    }
    assert node_record("n", hello, "cuda:1") == NodeRecord(
        "n", "h", "a", "cuda:1", "T4", "T4", "EPYC", versions={"ray": "2.60.0"}
    )
    assert node_record("n", hello, "cpu").device_name == "EPYC"
    # NVML's order is not CUDA's (field case 19): only an entry's own device name may decide.
    mixed = {"gpus": [{"name": "T4"}, {"name": "L4"}]}
    assert node_record("n", mixed, "cuda:0").gpu_model == ""
    swapped = {"gpus": [{"name": "T4", "device": "cuda:1"}, {"name": "L4", "device": "cuda:0"}]}
    assert node_record("n", swapped, "cuda:0").gpu_model == "L4"
    empty = node_record("n", {"gpus": "none", "versions": None}, "cuda:0")
    assert (empty.model, empty.versions) == ("", {})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("NVIDIA L4", "NVIDIA L4"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J", "\\x9b2J"),
        ("a\tb\r\nc", "a b  c"),
        ("a\x00b\x7f", "a\\x00b\\x7f"),
        ("abc\u202egpj.exe", "abc\\u202egpj.exe"),
        ("\ud83d", "\\ud83d"),
        ("a\u2028b", "a\\u2028b"),
        ("پیچک می\u200cخواهد µs × σ 🚀", "پیچک می\u200cخواهد µs × σ 🚀"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    safe = printable(text, keep_newlines=True)
    assert not [c for c in safe if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"]
    assert printable(safe, keep_newlines=True) == safe
    safe.encode("utf-8")
    assert "\n" not in printable(text)


@given(st.text())
def test_a_markdown_cell_stays_one_cell(text: str) -> None:
    cell = markdown_cell(text)
    assert "\n" not in cell
    assert "<" not in cell
    plain = cell.replace("\\\\", "").replace("\\|", "")
    assert "|" not in plain


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", " =1", "\t=1"])
def test_a_csv_cell_is_no_formula(text: str) -> None:
    assert csv_cell(text).startswith("'")


def test_shortened() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"
