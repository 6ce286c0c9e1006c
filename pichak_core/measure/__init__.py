"""The registry of measurements: what can be read of a machine, and how to run it.

A measurement is one module in this package that calls `register` once. Tables, pages, the store
and the documentation follow from the registry; no list is kept by hand.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured
from pichak_core.plan import Scalar

if TYPE_CHECKING:
    from pichak_core.measure._conditions import Conditions
    from pichak_core.measure.disk import disk_queue_depth
    from pichak_core.measure.kernel_launch import kernel_launch_us
    from pichak_core.measure.transfer import transfer_bandwidth
    from pichak_core.measure.virtualisation_probe import virtualisation

__all__ = [
    "Context",
    "Depth",
    "Metric",
    "Probe",
    "disk_queue_depth",
    "kernel_launch_us",
    "probes",
    "register",
    "run_one",
    "run_probes",
    "transfer_bandwidth",
    "virtualisation",
]

Depth = Literal["quick", "full"]

#: Public functions that live beside their measurement, imported when they are asked for.
_EXPORTS = {
    "disk_queue_depth": "disk",
    "kernel_launch_us": "kernel_launch",
    "transfer_bandwidth": "transfer",
    "virtualisation": "virtualisation_probe",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class Metric:
    """A thing that is read: its name carries the unit; `meaning` is one line for a person."""

    name: str
    unit: str
    meaning: str


@dataclass
class Context:
    """What a measurement may use. Roots and clock are parameters so that tests can replace them.

    `device` is ``cpu`` or ``cuda:N``. `directory` is where a disk measurement may write; `paths`
    are the user's own files to read instead. `budget_seconds` is this measurement's own share.
    `cache` keeps within one run what several measurements need and is dear to ask for twice, and
    ``conditions``, what samples the machine while the present measurement runs.
    """

    device: str = "cpu"
    depth: Depth = "quick"
    directory: Path = field(default_factory=Path.cwd)
    paths: tuple[Path, ...] = ()
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    root: Path = Path("/")
    seed: int = 0
    budget_seconds: float = 5.0
    clock: Callable[[], float] = time.monotonic
    cache: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """One registered measurement.

    `run` yields a reading for each of `metrics`; what it leaves out is reported as failed.
    `needs` names what must be importable or present (``torch``, ``cuda``); `budget_seconds` gives
    the time it may take at each depth. `devices` says on which device kinds it applies.
    """

    name: str
    metrics: tuple[Metric, ...]
    run: Callable[[Context], Iterable[Reading]]
    budget_seconds: dict[Depth, float]
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")


_REGISTRY: dict[str, Probe] = {}


def register(probe: Probe) -> Probe:
    """Add a measurement; `ValueError` if its name or one of its metrics is taken."""
    if probe.name in _REGISTRY:
        raise ValueError(f"measurement {probe.name!r} is registered twice")
    taken = {m.name for p in _REGISTRY.values() for m in p.metrics}
    clash = taken & {m.name for m in probe.metrics}
    if clash:
        raise ValueError(f"metric {sorted(clash)[0]!r} is registered twice")
    _REGISTRY[probe.name] = probe
    return probe


def probes() -> dict[str, Probe]:
    """Every measurement of this package by name, in the order in which they run."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items(), key=lambda item: _ORDER.get(item[0], 50)))


# The disk goes last: it fills the page cache, which on unified-memory parts eats the very memory
# that the others measure. The matrix products go behind what their heat would slow.
_ORDER = {
    "software": 0,
    "virtualisation": 1,
    "cpu": 2,
    "host_memory": 3,
    "matmul": 80,
    "gpu_state": 85,
    "disk": 90,
}


def run_probes(
    context: Context,
    *,
    only: Iterable[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
    on_readings: Callable[[Fingerprint], None] | None = None,
) -> Fingerprint:
    """Run the measurements that apply to `context.device` and return every reading.

    A measurement that raises costs its own metrics (`Reason.FAILED` with the error), never the
    others. `only` names measurements; an unknown name raises `ValueError`. `on_progress` is told
    each measurement's name before it runs, `on_readings` all that was read so far after it.
    """
    known = probes()
    wanted = list(known) if only is None else list(only)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no measurement {unknown[0]!r}; there are: {', '.join(known)}")
    fingerprint = Fingerprint()
    with _sampling_of(context) as conditions:
        for name in known:
            if name not in wanted:
                continue
            if on_progress:
                on_progress(name)
            for reading in run_one(known[name], context, conditions):
                fingerprint.add(reading)
            if on_readings:
                on_readings(fingerprint)
    return fingerprint


@contextmanager
def _sampling_of(context: Context) -> Iterator[Conditions]:
    from pichak_core.measure._conditions import Conditions

    sampler = Conditions.of(context)
    try:
        yield sampler
    finally:
        sampler.close()


@contextmanager
def watched_conditions(device: str) -> Iterator[dict[str, Scalar]]:
    """What was true of the machine (and the GPU `device`) during the block.

    The yielded dict is filled when the block ends: condition name, with its unit, to value.
    """
    found: dict[str, Scalar] = {}
    with _sampling_of(Context(device=device)) as sampler, sampler.during() as window:
        yield found
    found.update(window.found)


@contextmanager
def counted_conditions() -> Iterator[dict[str, Scalar]]:
    """`watched_conditions` from the system's counters alone, for what a sampling thread would
    disturb: the round trip of a packet."""
    from pichak_core.devices.host import this_host
    from pichak_core.measure._conditions import counted

    found: dict[str, Scalar] = {}
    with counted(this_host(), found):
        yield found


def run_one(probe: Probe, context: Context, conditions: Conditions | None = None) -> list[Reading]:
    """One measurement's readings, one for each of its metrics, whatever happens inside it.

    What was true while it ran is joined to every reading that was repeated. `conditions` samples
    it; without one, it is sampled for this measurement alone.
    """
    kind = context.device.split(":")[0]
    if kind not in probe.devices:
        where = " or ".join(probe.devices)
        return [
            _absent(m, Reason.NO_DEVICE, f"{probe.name} is measured on {where}, not on {kind}")
            for m in probe.metrics
        ]
    if conditions is None:
        with _sampling_of(context) as own:
            return run_one(probe, context, own)
    context.budget_seconds = probe.budget_seconds[context.depth]
    context.cache["conditions"] = conditions
    started = context.clock()
    readings: dict[str, Reading] = {}
    reason, why = Reason.FAILED, "the measurement gave no reading"
    with conditions.during() as window:
        try:
            for reading in probe.run(context):
                readings[reading.name] = reading
        except ImportError as error:
            reason, why = Reason.NOT_INSTALLED, f"{error}; pip install 'pichak-fleet[torch]'"
        except PermissionError as error:
            reason, why = Reason.NO_PERMISSION, str(error)
        except Exception as error:  # noqa: BLE001 - a fault costs its own metrics, never others
            why = f"{type(error).__name__}: {error}"
    share = (context.clock() - started) / max(1, len(probe.metrics))
    every: dict[str, Reading] = {m.name: _absent(m, reason, why) for m in probe.metrics}
    every.update(readings)
    return [_completed(reading, share, window.found) for reading in every.values()]


def _absent(metric: Metric, reason: Reason, detail: str) -> Unmeasured:
    return Unmeasured(metric.name, reason, detail)


def _completed(reading: Reading, seconds: float, conditions: Mapping[str, Scalar]) -> Reading:
    """The reading with its cost, and with the run's conditions where they could have moved it: a
    version or a size does not vary, and its conditions would explain nothing."""
    if not isinstance(reading, Measurement):
        return reading
    varies = reading.samples > 1 or reading.spread is not None
    return replace(
        reading,
        seconds=reading.seconds or seconds,
        conditions={**conditions, **reading.conditions} if varies else reading.conditions,
    )
