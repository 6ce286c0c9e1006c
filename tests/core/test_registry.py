"""The registry runs every measurement, and a fault in one costs its own metrics alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from pichak_core import measure
from pichak_core.measure import Context, Metric, Probe, probes, register, run_one, run_probes
from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured

A = Metric("test.a_mb_s", "MB/s", "something")
B = Metric("test.b", "", "something else")

#: A unit and how a metric's name ends with it.
ENDINGS = {
    "us": "_us",
    "ms": "_ms",
    "MB/s": "_mb_s",
    "GFLOP/s": "_gflop_s",
    "TFLOP/s": "_tflop_s",
    "%": "_percent",
    "MiB": "_mib",
    "cores": "_cores",
}


def probe(run: Callable[[Context], Iterable[Reading]], **changes: object) -> Probe:
    parts = {
        "name": "test",
        "metrics": (A, B),
        "run": run,
        "budget_seconds": {"quick": 1.5, "full": 9.0},
    }
    return Probe(**{**parts, **changes})  # type: ignore[arg-type]


def repeated(value: float = 5.0, **changes: object) -> Measurement:
    return Measurement(A.name, value, A.unit, "a source", **{"samples": 9, **changes})  # type: ignore[arg-type]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Probe]]:
    registry: dict[str, Probe] = {}
    monkeypatch.setattr(measure, "_REGISTRY", registry)
    return registry


def test_every_module_registers_a_measurement_and_every_name_carries_its_unit() -> None:
    known = probes()
    folder = Path(measure.__file__).parent
    modules = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")}
    assert len(known) == len(modules)
    for found in known.values():
        for metric in found.metrics:
            assert metric.name.endswith(ENDINGS.get(metric.unit, "")), metric
            assert metric.meaning
        assert set(found.budget_seconds) == {"quick", "full"}
    names = [metric.name for found in known.values() for metric in found.metrics]
    assert len(names) == len(set(names))


def test_the_disk_goes_last_and_the_software_first() -> None:
    # field case 2: a disk measurement fills the page cache, which unified memory counts as used
    order = list(probes())
    assert order[0] == "software"
    assert order[-1] == "disk"
    assert order.index("kernel_launch") < order.index("matmul")


def test_quick_measurements_fit_in_their_share() -> None:
    apart = {"disk", "device_memory", "transfer", "peer_copy", "network", "collective", "gpu_state"}
    quick = [p.budget_seconds["quick"] for n, p in probes().items() if n not in apart]
    assert sum(quick) <= 14  # of the 20 s that a fingerprint may take


def test_names_are_taken_once(own_registry: dict[str, Probe]) -> None:
    register(probe(lambda _: []))
    with pytest.raises(ValueError, match="'test' is registered twice"):
        register(probe(lambda _: []))
    with pytest.raises(ValueError, match=r"test\.a_mb_s"):
        register(probe(lambda _: [], name="other", metrics=(A,)))
    assert list(own_registry) == ["test"]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no measurement 'nothing'; there are: software"):
        run_probes(Context(), only=["nothing"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("No module named 'torch'"), Reason.NOT_INSTALLED),
        (PermissionError(13, "Permission denied"), Reason.NO_PERMISSION),
        (RuntimeError("CUDA error"), Reason.FAILED),
        (MemoryError("no room"), Reason.FAILED),
        (AssertionError("a bug"), Reason.FAILED),
    ],
)
def test_a_measurement_that_raises_keeps_what_it_had(error: Exception, reason: Reason) -> None:
    def run(_: Context) -> Iterator[Reading]:
        yield repeated()
        raise error

    first, second = run_one(probe(run), Context())
    assert isinstance(first, Measurement)
    assert first.value == 5.0
    assert isinstance(second, Unmeasured)
    assert second.name == B.name
    assert second.reason is reason
    assert str(error) in second.detail


def test_a_metric_that_is_left_out_is_reported() -> None:
    readings = run_one(probe(lambda _: [repeated()]), Context())
    assert [reading.name for reading in readings] == [A.name, B.name]
    assert isinstance(readings[1], Unmeasured)
    assert "no reading" in readings[1].detail


def test_another_kind_of_device_is_named_as_the_reason() -> None:
    found = run_one(probe(lambda _: [repeated()], devices=("cuda",)), Context(device="cpu"))
    assert [reading.describe() for reading in found] == [
        "no such device: test is measured on cuda, not on cpu"
    ] * 2


def test_what_was_repeated_gets_its_conditions_and_what_was_not_does_not() -> None:
    def run(_: Context) -> Iterator[Reading]:
        yield repeated(conditions={"own": 1})
        yield Measurement(B.name, "a version", "", "a source")

    first, second = run_one(probe(run), Context())
    assert isinstance(first, Measurement)
    assert isinstance(second, Measurement)
    assert first.conditions["own"] == 1
    assert "cpu.load_average_1m" in first.conditions
    assert second.conditions == {}
    assert first.seconds > 0


def test_the_budget_follows_the_depth() -> None:
    seen = []

    def run(context: Context) -> Iterator[Reading]:
        seen.append(context.budget_seconds)
        yield repeated()

    run_one(probe(run), Context(depth="quick"))
    run_one(probe(run), Context(depth="full"))
    assert seen == [1.5, 9.0]


def test_readings_are_told_as_they_come(
    monkeypatch: pytest.MonkeyPatch, own_registry: dict[str, Probe]
) -> None:
    known = {
        "one": probe(lambda _: [repeated()], name="one", metrics=(A,)),
        "two": probe(lambda _: [], name="two", metrics=(B,)),
    }
    monkeypatch.setattr(measure, "probes", lambda: known)
    started: list[str] = []
    told: list[list[str]] = []

    def tell(so_far: Fingerprint) -> None:
        told.append(sorted(so_far))

    run_probes(Context(), on_progress=started.append, on_readings=tell)
    assert started == ["one", "two"]
    assert told == [[A.name], [A.name, B.name]]
    assert own_registry == {}


def test_public_functions_are_had_from_the_package() -> None:
    code = (
        "from pichak_core.measure import kernel_launch_us, virtualisation, disk_queue_depth;"
        "from pichak_core.measure import probes; probes();"
        "from pichak_core import measure;"
        "print(all(map(callable, (measure.kernel_launch_us, measure.virtualisation))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        measure.nothing  # noqa: B018
