"""A recording of NVML as fingerprints of its GPUs: what can be said without the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pichak_core.devices.cuda_visible import MASK
from pichak_core.devices.gpu_changes import gone
from pichak_core.devices.gpu_join import TorchGpu, join
from pichak_core.devices.gpus import Report
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_recording import Recording
from pichak_core.measure import Metric
from pichak_core.measure._gpu_facts import (
    METRICS,
    memory_readings,
    peer_reading,
    state_readings,
    verdict_reading,
)
from pichak_core.measure._gpu_verdict import Verdict, gpu_verdicts
from pichak_core.measure.software import (
    KERNEL,
    OS,
    PYTHON,
    driver_readings,
    identity_readings,
    visible_reading,
)
from pichak_core.measure.virtualisation_probe import (
    DRIVER_MODEL,
    HOST_KIND,
    HYPERVISOR,
    driver_model_reading,
    licence_reading,
    mode_reading,
)
from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured

_FACTS: dict[Metric, str] = {
    OS: "os",
    KERNEL: "kernel",
    PYTHON: "python",
    HOST_KIND: "host_kind",
    HYPERVISOR: "hypervisor",
}
_NO_LOAD = Unmeasured(
    "gpu.load", Reason.NOT_ASKED, "a recording holds what NVML said, and no measurement"
)


@dataclass(frozen=True)
class Replay:
    """`devices` maps a label (``cuda:0``, or ``NVML 1`` where torch had no such device) to what the
    recording says of it; `notes` is what concerns the recording as a whole."""

    devices: dict[str, Fingerprint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def replay(recording: Recording) -> Replay:
    """Every device of a recording. Nothing of the machine that plays it is looked at."""
    reports = recording.reports()
    first, last = reports[0], reports[-1]
    notes = [f"the recording ended too early: {recording.ended}"] if recording.ended else []
    if first.gap is not None:
        notes.append(f"NVML: {first.gap.describe()}")
    if recording.torch_gap:
        notes.append(f"torch: {recording.torch_gap}")
    devices: dict[str, Fingerprint] = {}
    for label, by_torch, gpu in _devices(recording, first):
        made = Fingerprint()
        for reading in _readings(recording, first, last, by_torch, gpu):
            made.add(reading)
        devices[label] = made
    if not devices:
        devices["none"] = _without_device(recording, first)
    return Replay(devices, notes)


def _devices(
    recording: Recording, report: Report
) -> Iterator[tuple[str, TorchGpu | None, Gpu | Unmeasured]]:
    """Torch's devices first, each with NVML's view of it, then what NVML alone lists."""
    joined: list[Gpu] = []
    for device in recording.torch:
        found = report.gap or join(device, report.gpus, recording.text(MASK))
        if isinstance(found, Gpu):
            joined.append(found)
        yield f"cuda:{device.index}", device, found
    for gpu in report.gpus:
        for each in gpu.slices or (gpu,):
            if each not in joined:
                place = f".{each.values['mig_index']}" if "mig_index" in each.values else ""
                yield f"NVML {gpu.index}{place}", None, each


def _readings(
    recording: Recording,
    first: Report,
    last: Report,
    by_torch: TorchGpu | None,
    gpu: Gpu | Unmeasured,
) -> Iterator[Reading]:
    how = "joined with torch's device by its UUID" if by_torch else "which torch did not show"
    yield from _host(recording, first)
    nothing = Unmeasured("gpu", Reason.NO_DEVICE, "torch did not show it")
    yield from identity_readings(gpu, by_torch or nothing, how)
    yield mode_reading(gpu)
    model = recording.text("driver_model")
    yield driver_model_reading(gpu) or (
        Measurement(DRIVER_MODEL.name, model, "", "the operating system")
        if model
        else Unmeasured(DRIVER_MODEL.name, Reason.NOT_SUPPORTED, "neither NVML nor the system says")
    )
    yield licence_reading(gpu)
    available = recording.number("memory_available_bytes")
    memory = list(memory_readings(gpu, by_torch, available, None))
    yield from memory
    if isinstance(gpu, Unmeasured):
        known = {reading.name for reading in memory}
        yield from (
            Unmeasured(m.name, gpu.reason, gpu.detail) for m in METRICS if m.name not in known
        )
        return
    yield from state_readings(gpu, _NO_LOAD)
    yield from _at_rest(gpu)
    yield peer_reading(gpu, first.peers, len(first.gpus))
    looked = f"in {len(recording.rounds)} readings at rest"
    yield verdict_reading([*_lost(first, last, gpu), *gpu_verdicts(gpu, None, by_torch)], looked)


def _at_rest(gpu: Gpu) -> Iterator[Reading]:
    """What the moment of the recording was like; a measurement keeps it as its conditions."""
    shown = {
        "performance_state": "P{:.0f}",
        "sm_clock_mhz": "{:.0f} MHz",
        "power_watts": "{:.1f} W",
        "temperature_celsius": "{:.0f} °C",
        "utilisation_percent": "utilisation {:.0f} %",
    }
    parts = [
        form.format(value)
        for name, form in shown.items()
        if (value := gpu.number(name)) is not None
    ]
    if parts:
        yield Measurement("gpu.at_rest", ", ".join(parts), "", "NVML, one reading")
    generation, width = gpu.number("pcie_generation"), gpu.number("pcie_width")
    if generation is not None and width is not None:
        top, widest = gpu.number("pcie_generation_max"), gpu.number("pcie_width_max")
        most = "" if top is None or widest is None else f" of generation {top:.0f} x{widest:.0f}"
        link = f"generation {generation:.0f} x{width:.0f}{most}"
        yield Measurement("gpu.link_at_rest", link, "", "NVML; an idle link trains down")
    counts = {kind: gpu.number(f"{kind}_processes") for kind in ("compute", "graphics")}
    known = {kind: count for kind, count in counts.items() if count is not None}
    if known:
        dropped = sum(gpu.number(f"{kind}_processes_dropped") or 0 for kind in known)
        rows = ", ".join(f"{count:.0f} {kind}" for kind, count in known.items())
        source = f"NVML's lists; impossible rows dropped: {dropped:.0f}" if dropped else "NVML"
        yield Measurement("gpu.processes", rows, "", source)


def _lost(first: Report, last: Report, gpu: Gpu) -> Iterator[Verdict]:
    parent = gpu.text("parent_uuid") or gpu.text("uuid")
    for each in gone(first, last):
        if each.uuid == parent:
            yield Verdict(
                "gpu_lost",
                "fail",
                "the GPU was lost between two readings, what follows is from the first: "
                f"{each.why.detail}",
                {"uuid": each.uuid},
            )


def _host(recording: Recording, report: Report) -> Iterator[Reading]:
    for metric, fact in _FACTS.items():
        value = recording.text(fact)
        if value is not None:
            yield Measurement(metric.name, value, "", "the recording")
    torch = recording.text("torch")
    if torch is not None:
        yield Measurement("software.torch", torch, "", "the recording")
    yield from driver_readings(report)
    yield visible_reading(report, recording.text(MASK))


def _without_device(recording: Recording, report: Report) -> Fingerprint:
    made = Fingerprint()
    for reading in _host(recording, report):
        made.add(reading)
    gap = report.gap or Unmeasured("gpu", Reason.NO_DEVICE, "the recording lists no GPU")
    for metric in METRICS:
        made.add(Unmeasured(metric.name, gap.reason, gap.detail))
    return made
