"""What runs here: versions of system, driver, Python and packages, and who machine and GPU are."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata

from pichak_core import __version__
from pichak_core.devices.cuda_visible import MASK, visible_devices
from pichak_core.devices.gpu_identity import identity_doubt
from pichak_core.devices.gpu_join import TorchGpu, physical
from pichak_core.devices.gpus import Report
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._readings import (
    attempt,
    gap,
    host_of,
    is_cuda,
    nvml_gpu,
    nvml_report,
    of_gpu,
    torch_device,
)
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured

OS = Metric("software.os", "", "distribution and version")
KERNEL = Metric("software.kernel", "", "the kernel's release")
PYTHON = Metric("software.python", "", "Python's version")
PICHAK = Metric("software.pichak", "", "this package's version")
DRIVER = Metric("software.driver", "", "the GPU driver's version")
CUDA_DRIVER = Metric("software.cuda_driver", "", "the newest CUDA that the driver supports")
CUDA = Metric("software.cuda", "", "the CUDA that torch was built with")
MACHINE = Metric("host.machine_id", "", "a hash that recognises the machine")
GPU_NAME = Metric("gpu.name", "", "the GPU's model")
GPU_UUID = Metric("gpu.uuid", "", "the GPU's own id")
GPU_PCI = Metric("gpu.pci_bus_id", "", "where the GPU is plugged in")
GPU_VBIOS = Metric("gpu.vbios", "", "the GPU's firmware")
VISIBLE = Metric("software.visible_gpus", "", "how many GPUs CUDA_VISIBLE_DEVICES leaves visible")
GPU_CAPABILITY = Metric("gpu.compute_capability", "", "the generation of the GPU's silicon")

#: metric -> (distribution, how to get it)
_PACKAGES = {
    Metric("software.torch", "", "torch's version"): ("torch", "pip install 'pichak-fleet[torch]'"),
    Metric("software.ray", "", "Ray's version"): ("ray", "pip install ray"),
    Metric("software.msgpack", "", "msgpack's version"): ("msgpack", "pip install msgpack"),
}


def _packages() -> Iterable[Reading]:
    for metric, (name, command) in _PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Unmeasured(metric.name, Reason.NOT_INSTALLED, f"{name} is missing; {command}")
            continue
        yield Measurement(metric.name, version, "", f"version of the installed package {name}")


def _cuda_of_torch(context: Context) -> Reading:
    if not is_cuda(context):
        return Unmeasured(CUDA.name, Reason.NO_DEVICE, "this is a fingerprint of the CPU")
    try:
        import torch
    except ImportError as error:
        return gap(CUDA, error)
    version = torch.version.cuda
    if version is None:
        return Unmeasured(CUDA.name, Reason.NOT_SUPPORTED, "this build of torch has no CUDA")
    return Measurement(CUDA.name, version, "", "torch.version.cuda")


def driver_readings(report: Report) -> Iterable[Reading]:
    """The driver's versions, by NVML."""
    for metric, field in ((DRIVER, "driver_version"), (CUDA_DRIVER, "cuda_driver_version")):
        if field in report.system:
            yield Measurement(metric.name, report.system[field], "", "NVML")
        elif report.gap is not None:
            yield Unmeasured(metric.name, report.gap.reason, report.gap.detail)
        else:
            yield Unmeasured(metric.name, Reason.NOT_SUPPORTED, "NVML does not say")


def visible_reading(report: Report, mask: str | None) -> Reading:
    """How many of NVML's GPUs the variable leaves visible, by CUDA's rules, and what is wrong with
    its value. CUDA's numbers of the GPUs are not NVML's: only the count is told."""
    if report.gap is not None:
        return Unmeasured(VISIBLE.name, report.gap.reason, report.gap.detail)
    gpus = [physical(gpu) for gpu in report.gpus if gpu.text("uuid")]
    found = visible_devices(mask, gpus)
    value = f"{len(found.uuids)} of {len(gpus)}"
    source = f"{MASK} is not set" if mask is None else f"{MASK}={mask!r}, by CUDA's rules"
    note = f"; {found.note}" if found.note else ""
    return Measurement(VISIBLE.name, value, "", source + note)


def identity_readings(
    gpu: Gpu | Unmeasured, by_torch: TorchGpu | Unmeasured, how: str
) -> Iterable[Reading]:
    """Who the GPU is; `how` says how NVML's GPU was found. A name that its silicon contradicts is
    suspect."""
    known_to_torch = None if isinstance(by_torch, Unmeasured) else by_torch
    doubt = "" if isinstance(gpu, Unmeasured) else identity_doubt(gpu, known_to_torch)
    for metric, field in (
        (GPU_NAME, "name"),
        (GPU_UUID, "uuid"),
        (GPU_PCI, "pci_bus_id"),
        (GPU_VBIOS, "vbios"),
        (GPU_CAPABILITY, "compute_capability"),
    ):
        reading = of_gpu(metric, gpu, field, f"NVML, {how}")
        # "No NVML" is not "no GPU": torch may drive one all the same.
        known = str(getattr(known_to_torch, field, "")) if known_to_torch else ""
        if isinstance(reading, Unmeasured) and known:
            reading = Measurement(metric.name, known, "", "torch's device properties")
        if metric is GPU_NAME and isinstance(reading, Measurement):
            reading = replace(reading, suspect=doubt)
        yield reading


def run(context: Context) -> Iterable[Reading]:
    host = host_of(context)
    yield attempt(OS, host.operating_system, "os-release, or what the system calls itself")
    yield attempt(KERNEL, host.kernel, "the running kernel")
    yield Measurement(PYTHON.name, platform.python_version(), "", "the interpreter that ran this")
    yield Measurement(PICHAK.name, __version__, "", "pichak_core.__version__")
    yield from _packages()
    try:
        identity = host.identity()
        yield Measurement(MACHINE.name, identity.hashed, "", identity.source)
    except OSError as error:
        yield gap(MACHINE, error)
    gpu, by_torch = nvml_gpu(context), torch_device(context)
    yield from driver_readings(nvml_report(context))
    yield visible_reading(nvml_report(context), os.environ.get(MASK))
    yield _cuda_of_torch(context)
    yield from identity_readings(gpu, by_torch, "joined with torch's device by its UUID")


register(
    Probe(
        "software",
        (
            OS,
            KERNEL,
            PYTHON,
            PICHAK,
            *_PACKAGES,
            MACHINE,
            DRIVER,
            CUDA_DRIVER,
            CUDA,
            VISIBLE,
            GPU_NAME,
            GPU_UUID,
            GPU_PCI,
            GPU_VBIOS,
            GPU_CAPABILITY,
        ),
        run,
        {"quick": 3.0, "full": 3.0},
    )
)
