"""A host that does not exist: chosen readings, noise, and faults that start at a given time.

For trying and showing a fleet without GPUs. The ramp is the real one, on a fake device with a
memory of its own; every source says that no machine was measured.

```toml
host = "sim-a"
gpu = "NVIDIA H100 80GB HBM3"   # leave out for a host without a GPU
gpus = 1
noise = 0.01                    # relative standard deviation of each sample
seed = 0

[metrics]                       # what a healthy host reads, in each metric's own unit
"gpu.kernel_launch_us" = 4.2
"gpu.h2d_pinned_mb_s" = 25000

[training]                      # peak = base + rows · row, seconds = step + rows · row
capacity_mib = 80000
base_mib = 900
row_mib = 480
step_seconds = 0.02
row_seconds = 0.004
seq_len = 1024
scored_tokens_per_row = 400

[[fault]]                       # from then on
metric = "gpu.h2d_pinned_mb_s"  # or training.row_seconds and its like
starts = 2026-12-01T12:00:00Z   # or "+10m", from when the host is started (s, m, h, d)
factor = 0.4                    # or: unmeasured = "lost"
```
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import math
import random
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from pichak_core.measure import probes
from pichak_core.measurement import (
    Fingerprint,
    Measurement,
    Reading,
    Reason,
    Unmeasured,
    median_and_spread,
)
from pichak_core.plan import Plan, Scalar, Value
from pichak_core.small_file import read_small
from pichak_core.testing import MIB, FakeDevice, FakeStep, affine_memory, step_seconds

SIMULATED = "simulated, no machine was measured"
_SAMPLES = 9
_MOST_NAME, _MOST_SHOWN = 100, 60
_RELATIVE = re.compile(r"\+([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TRAINING = {
    "capacity_mib": 16000.0,
    "base_mib": 500.0,
    "row_mib": 100.0,
    "step_seconds": 0.05,
    "row_seconds": 0.01,
    "seq_len": 1024.0,
    "scored_tokens_per_row": 256.0,
}


@dataclass(frozen=True)
class Fault:
    """From `starts_unix` on, `metric` is `factor` times what it was, or there is none: `reason`."""

    metric: str
    starts_unix: float
    factor: float = 1.0
    reason: Reason | None = None


@dataclass(frozen=True)
class SimulatedHost:
    """What the file says; see the module. `training` holds every key of its table."""

    host: str
    gpu: str = ""
    gpus: int = 0
    noise: float = 0.01
    seed: int = 0
    metrics: Mapping[str, Scalar] = field(default_factory=dict)
    training: Mapping[str, float] = field(default_factory=lambda: dict(_TRAINING))
    faults: tuple[Fault, ...] = ()

    @classmethod
    def load(cls, path: Path, started_unix: float | None = None) -> SimulatedHost:
        """The host in a TOML file, whose relative times count from `started_unix` (now without it);
        `ValueError` says what is wrong with it, `OSError` why it cannot be read."""
        tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            record = tomllib.loads(read_small(path, regular=True).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: it holds bytes that are no text") from error
        except ValueError as error:
            raise ValueError(f"{path}: it is no TOML: {error}") from error
        try:
            return cls.from_dict(record, started_unix)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(
        cls, record: Mapping[str, Any], started_unix: float | None = None
    ) -> SimulatedHost:
        """The host in the plain form of the file; `ValueError` says what is wrong."""
        began = time.time() if started_unix is None else started_unix
        _only(
            "the file",
            record,
            ("host", "gpu", "gpus", "noise", "seed", "metrics", "training", "fault"),
        )
        host = record.get("host")
        if host is None or (isinstance(host, str) and not host.strip()):
            raise ValueError('host: a name is needed, as in host = "sim-a"')
        host = _text("host", host)
        gpu = _text("gpu", record.get("gpu", ""))
        gpus = _whole("gpus", record.get("gpus", 1 if gpu else 0), 0, 1024)
        if bool(gpu) != bool(gpus):
            raise ValueError("gpu and gpus: a host with GPUs needs the name of one, and a number")
        metrics = _table("metrics", record.get("metrics", {}))
        for name, value in metrics.items():
            _check_metric(name, value)
        given = _table("training", record.get("training", {}))
        _only("training", given, tuple(_TRAINING))
        numbers = {k: _number(f"training.{k}", v, 1e-9, 1e12) for k, v in given.items()}
        training = {**_TRAINING, **numbers}
        length = _whole("training.seq_len", training["seq_len"], 1, 2**20)
        if training["scored_tokens_per_row"] > length:
            raise ValueError(
                f"training.scored_tokens_per_row: {training['scored_tokens_per_row']:g} is more "
                f"than the {length} tokens of a row (training.seq_len)"
            )
        faults = record.get("fault", [])
        if not isinstance(faults, list):
            raise ValueError("fault: write [[fault]] for each")
        return cls(
            host,
            gpu,
            gpus,
            _number("noise", record.get("noise", 0.01), 0, 1),
            _whole("seed", record.get("seed", 0), 0, 2**32 - 1),
            metrics,
            training,
            tuple(_fault(entry, metrics, began) for entry in faults),
        )

    @property
    def devices(self) -> list[str]:
        """What can be trained on."""
        return [f"cuda:{i}" for i in range(self.gpus)] or ["cpu"]

    def hello(self) -> dict[str, Any]:
        """What its agent would say of itself. Its identity is that of no real machine."""
        gpus = [
            {"index": i, "uuid": self._uuid(f"cuda:{i}"), "name": self.gpu}
            for i in range(self.gpus)
        ]
        return {
            "host": self.host,
            "machine_id": f"simulated-{_digest(self.host)}",
            "cpu_model": str(self.metrics.get("cpu.model", "")),
            "gpus": gpus,
            "gpu_uuids": [gpu["uuid"] for gpu in gpus],
            "simulated": True,
        }

    def fingerprint(self, device: str, at_unix: float) -> Fingerprint:
        """Every chosen metric that the device has, with noise and with the faults of that time."""
        units = _units()
        told: dict[str, Scalar] = dict(self.metrics)
        if device != "cpu":
            told |= {"gpu.name": self.gpu, "gpu.uuid": self._uuid(device)}
        made = Fingerprint()
        for name, value in told.items():
            if device != "cpu" or not name.startswith("gpu."):
                made.add(self._reading(device, name, value, units[name], at_unix))
        return made

    def task(self, device: str) -> Plan:
        """The task's numbers, as the file has them."""
        plan = Plan("simulated", "", device)
        source = f"{SIMULATED}: what the file of {self.host} says"
        length, scored = self.training["seq_len"], self.training["scored_tokens_per_row"]
        plan.set("seq_len", Value(int(length), source, unit="tokens"))
        plan.set("supervised_per_row", Value(scored, source, unit="scored tokens"))
        return plan

    def ramp(
        self,
        task: Plan,
        device: str,
        at_unix: float,
        *,
        headroom: float = 0.12,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """``{"plan": plan, "ramp": rungs}`` of the real ramp on a fake device."""
        from pichak_core.tune import parts

        is_now = {k: v * self._factor(f"training.{k}", at_unix) for k, v in self.training.items()}
        fake = _Device(
            int(is_now["capacity_mib"] * MIB),
            affine_memory(int(is_now["base_mib"] * MIB), int(is_now["row_mib"] * MIB)),
            step_seconds(
                is_now["step_seconds"],
                is_now["row_seconds"],
                jitter=self.noise,
                seed=self._seed(device, "ramp", at_unix),
            ),
            device=device,
            named=self.gpu or str(self.metrics.get("cpu.model", "CPU")),
        )
        plan = replace(task, device=f"{device}, {fake.describe()}", values=dict(task.values))
        known = set(plan)
        found = parts.ramp(
            plan,
            FakeStep(fake),
            tokens_per_row=int(self.training["seq_len"]),
            backend=fake,
            clock=fake.clock,
            headroom=headroom,
            limit=limit or 512,
        )
        for name, value in list(plan.values.items()):
            if name not in known and value.measured:
                plan.values[name] = replace(value, source=f"{SIMULATED}: {value.source}")
        made: dict[str, Any] = {"plan": plan.to_dict()}
        return made if found is None else {**made, "ramp": found.as_dict()}

    def _reading(self, device: str, name: str, value: Scalar, unit: str, at_unix: float) -> Reading:
        for fault in self.faults:
            if fault.metric == name and fault.reason and at_unix >= fault.starts_unix:
                return Unmeasured(name, fault.reason, SIMULATED)
        source = f"{SIMULATED}: what the file of {self.host} says"
        if isinstance(value, (bool, str)):
            return Measurement(name, value, unit, source)
        noise = random.Random(self._seed(device, name, at_unix))  # noqa: S311
        base = value * self._factor(name, at_unix)
        drawn = [base * max(0.01, 1 + self.noise * noise.gauss(0, 1)) for _ in range(_SAMPLES)]
        middle, spread = median_and_spread(drawn)
        source += f", {self.noise:.1%} of noise a sample"
        return Measurement(name, middle, unit, source, samples=_SAMPLES, spread=spread)

    def _factor(self, metric: str, at_unix: float) -> float:
        return math.prod(
            f.factor for f in self.faults if f.metric == metric and at_unix >= f.starts_unix
        )

    def _uuid(self, device: str) -> str:
        return f"GPU-simulated-{_digest(self.host, device)}"

    def _seed(self, *parts: object) -> int:
        return int(_digest(self.seed, self.host, *parts), 16)


@dataclass
class _Device(FakeDevice):
    named: str = ""

    def describe(self) -> str:
        return f"{self.named} (simulated)"


@cache
def _units() -> dict[str, str]:
    """Every metric's unit."""
    return {m.name: m.unit for probe in probes().values() for m in probe.metrics}


def _digest(*parts: object) -> str:
    return hashlib.sha256("\x00".join(map(str, parts)).encode()).hexdigest()[:12]


def _only(where: str, record: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for name in record:
        if name not in allowed:
            raise ValueError(f"{where}: no key {_shown(name)}; there are {', '.join(allowed)}")


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {_shown(value)} is no table; write [{name}] and its keys below")
    return dict(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_NAME or not (value + "x").isprintable():
        raise ValueError(
            f"{name}: {_shown(value)} is not one line of at most {_MOST_NAME} characters in quotes"
        )
    return value


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name}: {_shown(value)} is not a number within {least:g} to {most:g}")
    return value


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if int(_number(name, value, least, most)) != value:
        raise ValueError(f"{name}: {value!r} is not a whole number")
    return int(value)


def _check_metric(name: str, value: Any) -> None:
    units = _units()
    if name not in units:
        near = difflib.get_close_matches(name, units, 3) or sorted(units)[:3]
        raise ValueError(
            f"metrics: no metric {_shown(name)}; is it {' or '.join(near)}? (a name with a dot "
            "stands in quotes)"
        )
    if units[name]:
        _number(f"metrics: {name} (a number, in {units[name]})", value, 0, 1e18)
    elif not isinstance(value, (bool, int, float, str)) or not _finite(value):
        raise ValueError(f"metrics: {name}: {_shown(value)} is neither a number nor a text")


def _finite(value: Scalar) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _fault(entry: Any, metrics: Mapping[str, Any], began_unix: float) -> Fault:
    if not isinstance(entry, Mapping):
        raise ValueError("fault: write [[fault]] for each")
    _only("fault", entry, ("metric", "starts", "factor", "unmeasured"))
    metric, starts = entry.get("metric"), entry.get("starts")
    known = [*metrics, *(f"training.{name}" for name in _TRAINING)]
    if metric not in known:
        raise ValueError(f"fault: no metric {_shown(metric)} here; there are {', '.join(known)}")
    starts_unix = _starts(f"fault of {metric}", starts, began_unix)
    if ("factor" in entry) == ("unmeasured" in entry):
        raise ValueError(f"fault of {metric}: it needs factor or unmeasured, one of them")
    if "factor" in entry:
        factor = _number(f"fault of {metric}: factor", entry["factor"], 1e-6, 1e6)
        if isinstance(metrics.get(metric), (bool, str)):
            raise ValueError(f"fault of {metric}: a text has no factor; write unmeasured for it")
        return Fault(metric, starts_unix, factor)
    if metric.startswith("training."):
        raise ValueError(f"fault of {metric}: it can only have a factor")
    try:
        return Fault(metric, starts_unix, reason=Reason(entry["unmeasured"]))
    except (ValueError, TypeError) as error:
        reasons = ", ".join(reason.value for reason in Reason)
        raise ValueError(f"fault of {metric}: unmeasured is one of {reasons}") from error


def _starts(where: str, starts: Any, began_unix: float) -> float:
    if isinstance(starts, datetime):
        return (starts if starts.tzinfo else starts.replace(tzinfo=timezone.utc)).timestamp()
    relative = _RELATIVE.fullmatch(starts) if isinstance(starts, str) else None
    if relative is None:
        raise ValueError(
            f"{where}: starts: {_shown(starts)} is no time: write 2026-12-01T12:00:00Z, or "
            '"+10m" from its start on (s, m, h or d)'
        )
    return began_unix + float(relative[1]) * _SECONDS[relative[2]]
