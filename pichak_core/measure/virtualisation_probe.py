"""What stands between the training and the metal: host kind, GPU virtualisation, driver model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pichak_core.devices.gpus import read_gpus
from pichak_core.devices.host import HostKind, this_host
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_codes import DRIVER_MODELS, VIRTUALISATION
from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._readings import attempt, gap, host_of, is_cuda, nvml_gpu
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured

HOST_KIND = Metric("host.kind", "", "bare metal, vm, container or wsl2")
HYPERVISOR = Metric("host.hypervisor", "", "what virtualises the machine")
GPU_MODE = Metric("gpu.virtualisation_mode", "", "how the GPU is handed to this machine")
DRIVER_MODEL = Metric("gpu.driver_model", "", "Linux, WDDM, TCC or MCDM")
LICENSED = Metric("gpu.vgpu_licensed", "", "whether a vGPU holds its licence")


@dataclass(frozen=True)
class Virtualisation:
    """The machine's kind, and each GPU's name and virtualisation mode (None: not known)."""

    host_kind: str | None
    hypervisor: str | None
    evidence: tuple[str, ...]
    gpus: tuple[tuple[str, str | None], ...]
    note: str

    @property
    def virtualised(self) -> bool | None:
        """Whether a GPU is a virtual one (vGPU or vSGA); None when no GPU says."""
        modes = [mode for _, mode in self.gpus if mode is not None]
        return any("vGPU" in mode or "vSGA" in mode for mode in modes) if modes else None

    def describe(self) -> str:
        """A few lines for a page."""
        seen = f" ({'; '.join(self.evidence)})" if self.evidence else ""
        lines = [
            f"host {self.host_kind or 'of unknown kind'}, "
            f"hypervisor {self.hypervisor or 'unknown'}{seen}"
        ]
        lines += [f"{name}: {mode or 'virtualisation mode unknown'}" for name, mode in self.gpus]
        return "\n".join([*lines, self.note] if self.note else lines)


def virtualisation() -> Virtualisation:
    """What this machine and its GPUs are, from NVML's *value* of the mode and the host's marks."""
    report = read_gpus()
    kind: HostKind | None = None
    note = report.gap.describe() if report.gap else ""
    try:
        kind = this_host().kind()
    except (OSError, NotImplementedError) as error:
        note = f"{error}; {note}" if note else str(error)
    return Virtualisation(
        kind.kind if kind else None,
        kind.hypervisor if kind else None,
        kind.evidence if kind else (),
        tuple((gpu.text("name") or f"GPU {gpu.index}", mode_of(gpu)) for gpu in report.gpus),
        note,
    )


def mode_of(gpu: Gpu) -> str | None:
    """The mode's name from its number; a number that NVML's header does not have is shown."""
    value = gpu.values.get("virtualisation_mode")
    return None if value is None else VIRTUALISATION.get(int(value), f"unknown ({value})")


def mode_reading(gpu: Gpu | Unmeasured) -> Reading:
    """How the GPU is handed to this machine; absent is "not known", never "bare metal"."""
    answer = gpu if isinstance(gpu, Unmeasured) else gpu.get("virtualisation_mode")
    if isinstance(answer, Unmeasured):
        return Unmeasured(GPU_MODE.name, answer.reason, answer.detail)
    return Measurement(
        GPU_MODE.name,
        VIRTUALISATION.get(int(answer), f"unknown ({answer})"),
        "",
        "the value of NVML's virtualisation mode",
        detail={"nvml_value": int(answer)},
    )


def driver_model_reading(gpu: Gpu | Unmeasured) -> Measurement | None:
    """The driver model by NVML, which knows it on Windows only."""
    code = None if isinstance(gpu, Unmeasured) else gpu.number("driver_model")
    if code is None:
        return None
    name = DRIVER_MODELS.get(int(code), f"unknown ({code:g})")
    return Measurement(DRIVER_MODEL.name, name, "", "NVML")


def licence_reading(gpu: Gpu | Unmeasured) -> Reading:
    """Whether a vGPU holds its licence; no other GPU needs one."""
    if isinstance(gpu, Unmeasured):
        return Unmeasured(LICENSED.name, gpu.reason, gpu.detail)
    mode = mode_of(gpu)
    if mode != "vGPU":
        detail = f"only a vGPU needs a licence; this GPU is {mode or 'of unknown mode'}"
        return Unmeasured(LICENSED.name, Reason.NOT_SUPPORTED, detail)
    answer = gpu.get("vgpu_licensed")
    if isinstance(answer, Unmeasured):
        return Unmeasured(LICENSED.name, answer.reason, answer.detail)
    return Measurement(LICENSED.name, bool(answer), "", "NVML's list of licensable features")


def run(context: Context) -> Iterable[Reading]:
    try:
        kind = host_of(context).kind()
        source = "; ".join(kind.evidence) or "no mark of a virtual machine or a container"
        yield Measurement(HOST_KIND.name, kind.kind, "", source)
        yield Measurement(HYPERVISOR.name, kind.hypervisor, "", source)
    except (OSError, NotImplementedError) as error:
        yield gap(HOST_KIND, error)
        yield gap(HYPERVISOR, error)
    gpu = nvml_gpu(context)
    yield mode_reading(gpu)
    if not is_cuda(context):
        yield Unmeasured(DRIVER_MODEL.name, Reason.NO_DEVICE, "this is a fingerprint of the CPU")
    else:
        system = host_of(context).gpu_driver_model
        yield driver_model_reading(gpu) or attempt(DRIVER_MODEL, system, "the operating system")
    yield licence_reading(gpu)


register(
    Probe(
        "virtualisation",
        (HOST_KIND, HYPERVISOR, GPU_MODE, DRIVER_MODEL, LICENSED),
        run,
        {"quick": 3.0, "full": 3.0},
    )
)
