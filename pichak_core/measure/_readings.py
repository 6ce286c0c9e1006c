"""One reading of what the system or the driver says, with every way of not saying it named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

from pichak_core.devices.cuda_visible import MASK
from pichak_core.devices.gpu_join import TorchGpu, join, torch_gpu
from pichak_core.devices.gpus import Report, read_gpus
from pichak_core.devices.host import Host, this_host
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context, Metric
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured
from pichak_core.plan import Scalar

_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.ENOENT)


Found = TypeVar("Found")
Refusal = OSError | NotImplementedError | ValueError


def tried(get: Callable[[], Found]) -> Found | Refusal:
    """`get()`, or the error with which the platform refuses."""
    try:
        return get()
    except (OSError, NotImplementedError, ValueError) as error:
        return error


def attempt(metric: Metric, get: Callable[[], Scalar], source: str, **more: Any) -> Reading:
    """`get()` as a measurement; an `OSError`, `NotImplementedError` or `ValueError` as a gap."""
    try:
        return Measurement(metric.name, get(), metric.unit, source, **more)
    except (OSError, NotImplementedError, ValueError, ImportError) as error:
        return gap(metric, error)


def gap(metric: Metric, error: BaseException) -> Unmeasured:
    """Why an attempt gave nothing."""
    if isinstance(error, PermissionError):
        reason = Reason.NO_PERMISSION
    elif isinstance(error, (NotImplementedError, FileNotFoundError)) or (
        getattr(error, "errno", None) in _NOT_HERE
    ):
        reason = Reason.NOT_SUPPORTED
    elif isinstance(error, ImportError):
        reason = Reason.NOT_INSTALLED
    else:
        reason = Reason.FAILED
    return Unmeasured(metric.name, reason, str(error) or type(error).__name__)


def host_of(context: Context) -> Host:
    """The machine under the context's roots."""
    return this_host(context.proc, context.sys, context.root)


def is_cuda(context: Context) -> bool:
    return context.device.startswith("cuda")


def nvml_report(context: Context) -> Report:
    """NVML's report, asked for once in a run: starting NVML can take seconds."""
    if "nvml" not in context.cache:
        context.cache["nvml"] = read_gpus()
    report: Report = context.cache["nvml"]
    return report


def torch_device(context: Context) -> TorchGpu | Unmeasured:
    """The context's CUDA device as torch shows it."""
    if not is_cuda(context):
        detail = "this is a fingerprint of the CPU"
        listed = [gpu.text("name") or "?" for gpu in nvml_report(context).gpus]
        if listed:
            detail += f"; NVML lists {', '.join(listed)}"
        return Unmeasured("gpu", Reason.NO_DEVICE, detail)
    try:
        if "torch_gpu" not in context.cache:
            context.cache["torch_gpu"] = torch_gpu(int(context.device.partition(":")[2] or 0))
        found: TorchGpu = context.cache["torch_gpu"]
        return found
    except ImportError as error:
        detail = f"{error}; pip install 'pichak-fleet[torch]'"
        return Unmeasured("gpu", Reason.NOT_INSTALLED, detail)
    except RuntimeError as error:
        return Unmeasured("gpu", Reason.NO_DEVICE, str(error))


def nvml_gpu(context: Context) -> Gpu | Unmeasured:
    """NVML's view of the context's CUDA device, or why there is none."""
    device = torch_device(context)
    if isinstance(device, Unmeasured):
        return device
    report = nvml_report(context)
    return report.gap or join(device, report.gpus, os.environ.get(MASK))


def loaded_gpu(context: Context) -> list[Gpu]:
    """NVML's readings of the GPU since the running measurement began; none where it has none."""
    conditions = context.cache.get("conditions")
    return [] if conditions is None else list(conditions.gpu_readings())


def of_gpu(metric: Metric, gpu: Gpu | Unmeasured, field: str, source: str) -> Reading:
    """One NVML field as the reading of a metric."""
    answer = gpu if isinstance(gpu, Unmeasured) else gpu.get(field)
    if isinstance(answer, Unmeasured):
        return Unmeasured(metric.name, answer.reason, answer.detail)
    return Measurement(metric.name, answer, metric.unit, source)
