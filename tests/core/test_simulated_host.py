"""A simulated host reads what its file says, its faults start on time, and it hides nothing."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from pichak_core.measurement import Measurement, Reason, Unmeasured
from pichak_core.plan import CONSTANT
from pichak_core.simulated_host import SIMULATED, SimulatedHost

FAULT_UNIX = 1_796_126_400.0  # 2026-12-01T12:00:00Z
FILE = """
host = "sim-a"
gpu = "NVIDIA H100 80GB HBM3"
gpus = 2
noise = 0.01

[metrics]
"gpu.kernel_launch_us" = 4.2
"gpu.h2d_pinned_mb_s" = 25000
"gpu.ecc_mode" = true
"disk.read_mb_s" = 3000
"cpu.model" = "Some CPU"

[training]
capacity_mib = 80000
base_mib = 900
row_mib = 480
step_seconds = 0.02
row_seconds = 0.004
seq_len = 1024
scored_tokens_per_row = 400

[[fault]]
metric = "gpu.h2d_pinned_mb_s"
starts = 2026-12-01T12:00:00Z
factor = 0.4

[[fault]]
metric = "gpu.kernel_launch_us"
starts = 2026-12-01T12:00:00Z
unmeasured = "lost"

[[fault]]
metric = "training.row_seconds"
starts = 2026-12-01T12:00:00Z
factor = 2
"""


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    path = tmp_path / "host.toml"
    path.write_text(FILE, encoding="utf-8")
    return SimulatedHost.load(path)


def test_readings_are_the_files_with_its_noise_and_say_so(host: SimulatedHost) -> None:
    copies = [
        host.fingerprint("cuda:0", FAULT_UNIX - n).number("gpu.h2d_pinned_mb_s")
        for n in range(1, 201)
    ]
    known = [value for value in copies if value is not None]
    assert len(set(known)) == 200
    # The standard error of a median of 9 is about 1.25 σ / 3; of 200 of them, 14 times less.
    assert statistics.mean(known) == pytest.approx(25000, rel=0.002)
    assert statistics.stdev(known) == pytest.approx(25000 * 0.01 * 1.25 / 3, rel=0.3)
    fingerprint = host.fingerprint("cuda:1", 0.0)
    assert all(SIMULATED in r.source for r in fingerprint.values() if isinstance(r, Measurement))
    assert len(fingerprint) == 5 + 2
    assert fingerprint.text("gpu.name") == "NVIDIA H100 80GB HBM3"
    assert fingerprint.text("gpu.uuid") == host.hello()["gpu_uuids"][1]
    assert host.fingerprint("cuda:1", 0.0).to_dict() == fingerprint.to_dict()


def test_a_fault_starts_at_its_time(host: SimulatedHost) -> None:
    before = host.fingerprint("cuda:0", FAULT_UNIX - 1)
    after = host.fingerprint("cuda:0", FAULT_UNIX)
    assert before.number("gpu.h2d_pinned_mb_s") == pytest.approx(25000, rel=0.03)
    assert after.number("gpu.h2d_pinned_mb_s") == pytest.approx(10000, rel=0.03)
    assert after.number("disk.read_mb_s") == pytest.approx(3000, rel=0.03)
    assert before.number("gpu.kernel_launch_us") == pytest.approx(4.2, rel=0.03)
    lost = dict(after.items())["gpu.kernel_launch_us"]
    assert isinstance(lost, Unmeasured)
    assert lost.reason is Reason.LOST


def test_the_ramp_is_the_real_one(host: SimulatedHost) -> None:
    task = host.task("cuda:0")
    made = host.ramp(task, "cuda:0", FAULT_UNIX - 1, headroom=0.12)
    values = made["plan"]["values"]
    # The largest b with 900 + 480 b ≤ 0.88 · 80,000 MiB.
    assert values["micro_batch_max"]["value"] == 144
    batch = values["micro_batch"]["value"]
    seconds = 0.02 + 0.004 * batch
    assert values["tokens_per_second"]["value"] == pytest.approx(batch * 1024 / seconds, rel=0.05)
    for name, value in values.items():
        assert SIMULATED in value["source"] or value["source"].startswith(CONSTANT), name
    later = host.ramp(task, "cuda:0", FAULT_UNIX, headroom=0.12)["plan"]["values"]
    slower = 0.02 + 0.008 * batch
    assert later["micro_batch_max"]["value"] == 144
    assert later["seconds_per_step"]["value"] / later["micro_batch"]["value"] == pytest.approx(
        slower / batch, rel=0.05
    )


def test_where_not_one_row_fits_the_plan_says_so() -> None:
    small = {"host": "a", "training": {"capacity_mib": 100, "base_mib": 500}}
    host = SimulatedHost.from_dict(small)
    made = host.ramp(host.task("cpu"), "cpu", 0.0)
    assert "ramp" not in made
    assert "micro_batch" not in made["plan"]["values"]
    assert made["plan"]["notes"]


def test_a_host_without_a_gpu_and_two_hosts_are_not_one(host: SimulatedHost) -> None:
    plain = SimulatedHost.from_dict({"host": "b", "metrics": {"gpu.kernel_launch_us": 4.0}})
    assert plain.devices == ["cpu"]
    assert not list(plain.fingerprint("cpu", 0.0))
    assert host.devices == ["cuda:0", "cuda:1"]
    hellos = [host.hello(), plain.hello()]
    assert len({hello["machine_id"] for hello in hellos}) == 2
    assert len({*hellos[0]["gpu_uuids"]}) == 2
    assert all(hello["simulated"] for hello in hellos)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": ""}, "host"),
        ({"hots": "a"}, "no key 'hots'"),
        ({"gpus": 2}, "gpu and gpus"),
        ({"gpu": "H100", "gpus": -1}, "gpus"),
        ({"noise": "much"}, "noise"),
        ({"host": 3}, "host: 3 is not one line of at most 100 characters in quotes"),
        ({"host": "a\x1b[2J"}, "host: .* is not one line"),
        ({"host": "a" * 101}, "host: .*… is not one line"),
        ({"gpu": 3}, "gpu: 3 is not one line"),
        ({"gpu": "H100", "gpus": 1.5}, "gpus: 1.5 is not a whole number"),
        ({"gpu": "H100", "gpus": "2"}, "gpus: '2' is not a number within 0 to 1024"),
        ({"seed": 0.5}, "seed: 0.5 is not a whole number"),
        ({"seed": True}, "seed: True is not a number"),
        ({"metrics": {"disk.read_mb_s": "3 GB/s"}}, r"a number, in MB/s\): '3 GB/s' is not"),
        ({"metrics": {"disk.read_mb_s": True}}, r"in MB/s\): True is not"),
        ({"metrics": {"disk.read_mb_s": -1}}, r"in MB/s\): -1 is not a number within 0"),
        ({"metrics": {"disk.read_mb": 5}}, "is it .*disk.read_mb_s"),
        ({"metrics": {"disk": {"read_mb_s": 5}}}, "no metric 'disk'; .* stands in quotes"),
        ({"metrics": {"gpu.ecc_corrected": float("nan")}}, "nan is neither"),
        ({"training": {"seq_len": 0.5}}, "training.seq_len: 0.5 is not a number within 1 to"),
        ({"training": {"seq_len": 100.5}}, "training.seq_len: 100.5 is not a whole number"),
        ({"training": {"scored_tokens_per_row": 2000}}, "2000 is more than the 1024 tokens"),
        ({"training": [1]}, r"training: \[1\] is no table"),
        ({"metrics": {"gpu.speed": 5}}, "gpu.speed"),
        ({"metrics": {"disk.read_mb_s": []}}, "disk.read_mb_s"),
        ({"metrics": 5}, "metrics"),
        ({"training": {"capacity_gib": 80}}, "capacity_gib"),
        ({"training": {"row_mib": 0}}, "training.row_mib"),
        ({"training": {"row_mib": float("nan")}}, "training.row_mib"),
        ({"fault": {}}, r"\[\[fault\]\]"),
        ({"fault": [{"metric": "disk.read_mb_s"}]}, "no metric 'disk.read_mb_s' here"),
        ({"fault": [{"metric": "training.row_mib", "factor": 2}]}, "starts"),
    ],
)
def test_a_mistake_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SimulatedHost.from_dict({"host": "a", **changes})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('starts = 2026-12-01T12:00:00Z\nfactor = 2\nunmeasured = "lost"', "one of them"),
        ("starts = 2026-12-01T12:00:00Z", "one of them"),
        ("starts = 2026-12-01T12:00:00Z\nfactor = -1", "factor"),
        ('starts = "soon"\nfactor = 2', "starts"),
        ('starts = "-5m"\nfactor = 2', "starts: '-5m' is no time: write 2026"),
        ("starts = -5\nfactor = 2", "starts: -5 is no time"),
        ("starts = 2026-12-01\nfactor = 2", "starts: .* is no time"),
        ('starts = "+1m"\nunmeasured = [1]', "unmeasured is one of"),
        ('starts = "+1m"\nfactor = 2\nwhen = 3', "no key 'when'; there are metric, starts"),
        ('starts = 2026-12-01T12:00:00Z\nunmeasured = "gone"', "no such device"),
    ],
)
def test_a_mistake_in_a_fault_is_told_with_its_file(tmp_path: Path, fault: str, said: str) -> None:
    path = tmp_path / "h.toml"
    text = 'host = "a"\n[metrics]\n"disk.read_mb_s" = 1\n[[fault]]\nmetric = "disk.read_mb_s"\n'
    path.write_text(f"{text}{fault}\n")
    with pytest.raises(ValueError, match=said) as caught:
        SimulatedHost.load(path)
    assert str(path) in str(caught.value)
    path.write_text("host = ")
    with pytest.raises(ValueError, match=r"h\.toml: it is no TOML: Invalid value"):
        SimulatedHost.load(path)
    path.write_bytes(b"host = '\xff'")
    with pytest.raises(ValueError, match=r"h\.toml: it holds bytes that are no text"):
        SimulatedHost.load(path)


def test_a_text_has_no_factor() -> None:
    fault = {"metric": "cpu.model", "starts": "+1m", "factor": 2}
    with pytest.raises(ValueError, match="a text has no factor"):
        SimulatedHost.from_dict({"host": "a", "metrics": {"cpu.model": "x"}, "fault": [fault]})


def test_a_fault_may_start_some_time_after_its_host() -> None:
    record = {
        "host": "a",
        "noise": 0,
        "metrics": {"disk.read_mb_s": 3000.0},
        "fault": [{"metric": "disk.read_mb_s", "starts": "+1.5h", "factor": 0.5}],
    }
    host = SimulatedHost.from_dict(record, 1000.0)
    assert host.fingerprint("cpu", 1000.0 + 5399).number("disk.read_mb_s") == 3000
    assert host.fingerprint("cpu", 1000.0 + 5400).number("disk.read_mb_s") == 1500
    for wrong in ("+10", "10m", "+-1m", "+1w", "soon", 600):
        with pytest.raises(ValueError, match="from its start"):
            SimulatedHost.from_dict({**record, "fault": [{**record["fault"][0], "starts": wrong}]})
