"""The registry of measurements: what can be read of a machine, and how to run it.

A measurement is one module in this package that calls `register` once. Tables, pages, the store
and the documentation follow from the registry; no list is kept by hand.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured

Depth = Literal["quick", "full"]


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
    """

    device: str = "cpu"
    depth: Depth = "quick"
    directory: Path = field(default_factory=Path.cwd)
    paths: tuple[Path, ...] = ()
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    seed: int = 0
    budget_seconds: float = 5.0
    clock: Callable[[], float] = time.monotonic


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
# that the others measure (field case 2).
_ORDER = {"software": 0, "virtualisation": 1, "cpu": 2, "host_memory": 3, "disk": 90}


def run_probes(
    context: Context,
    *,
    only: Iterable[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Fingerprint:
    """Run the measurements that apply to `context.device` and return every reading.

    A measurement that raises costs its own metrics (`Reason.FAILED` with the error), never the
    others. `only` names measurements; an unknown name raises `ValueError`.
    """
    known = probes()
    wanted = list(known) if only is None else list(only)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no measurement {unknown[0]!r}; there are: {', '.join(known)}")
    fingerprint = Fingerprint()
    for name in known:
        if name not in wanted:
            continue
        if on_progress:
            on_progress(name)
        for reading in run_one(known[name], context):
            fingerprint.add(reading)
    return fingerprint


def run_one(probe: Probe, context: Context) -> list[Reading]:
    """One measurement's readings, one for each of its metrics, whatever happens inside it."""
    kind = context.device.split(":")[0]
    if kind not in probe.devices:
        return [
            _absent(m, Reason.NO_DEVICE, f"{probe.name} applies to {probe.devices}")
            for m in probe.metrics
        ]
    context.budget_seconds = probe.budget_seconds[context.depth]
    started = context.clock()
    readings: dict[str, Reading] = {}
    reason, why = Reason.FAILED, "the measurement gave no reading"
    try:
        for reading in probe.run(context):
            readings[reading.name] = reading
    except ImportError as error:
        reason, why = Reason.NOT_INSTALLED, f"{error}; pip install 'pichak-fleet[torch]'"
    except PermissionError as error:
        reason, why = Reason.NO_PERMISSION, str(error)
    except (OSError, RuntimeError, ValueError, ArithmeticError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    share = (context.clock() - started) / max(1, len(probe.metrics))
    done: list[Reading] = []
    for metric in probe.metrics:
        found = readings.pop(metric.name, None) or _absent(metric, reason, why)
        if isinstance(found, Measurement) and not found.seconds:
            found = _with_seconds(found, share)
        done.append(found)
    return done + list(readings.values())


def _absent(metric: Metric, reason: Reason, detail: str) -> Unmeasured:
    return Unmeasured(metric.name, reason, detail)


def _with_seconds(reading: Measurement, seconds: float) -> Measurement:
    return replace(reading, seconds=seconds)
